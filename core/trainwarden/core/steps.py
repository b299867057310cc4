"""From frames to steps, once for all: the items of one job go in, topologies and closed steps come out.

docs/architecture.md, From frames to steps, is the rule book; open_steps.py holds rules 2 and 4 to 8, this file time and
epochs (1, 3, 5c, 10). What comes out is a function of what was seen *when*, never of how it was cut into frames:

- All items with one `seen_ns` are one instant. It is acted on when the first item with a later one comes (so output is
  at most one item late), in a fixed order: epochs upward; hellos, spans, steps, members; then grace, then ends.
- Rows may wait over several instants, to be joined and scattered once: until a Tick, until they could complete the
  oldest open step, or until its grace could be over.
- A `seen_ns` that falls back counts as the newest seen before.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.arrivals import Grace
from trainwarden.core.codec import dumps
from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, State, StepMatrix, Tick, Topology
from trainwarden.core.open_steps import OpenSteps, StepsConfig
from trainwarden.core.records import attempt_of, epoch_of
from trainwarden.core.topology import Domains, make_topology
from trainwarden.core.waiting import Waiting, hellos_of, whole

__all__ = ["StepAssembler", "StepCounters", "StepsConfig"]

Output: TypeAlias = Topology | StepMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounters:
    """What became of all that was fed, since the beginning. Rows are step rows unless said otherwise."""

    rows: int = 0
    """Rows in steps."""

    copies: int = 0
    """Rows of a (step, rank) that was in already."""

    late: int = 0
    """Rows of a step that had closed without them (or so long ago that it cannot be told)."""

    late_spans: int = 0
    """Span rows of a step that had closed."""

    old_epoch: int = 0
    """Rows of an epoch below the current."""

    garbage: int = 0
    """Rows and span rows with an impossible step, rank or micro-batch, or without an epoch."""

    bad_events: int = 0
    """Hellos, memberships and fault domains that could not be used."""

    late_hellos: int = 0
    """Hellos of unknown ranks after the topology stood without them."""

    late_domains: int = 0
    """Changes of a node's fault domains after the topology stood: the next one has them."""

    closed: int = 0
    """Steps that closed."""

    partial: int = 0
    """Of these, steps that lacked a member."""

    skipped: int = 0
    """Step numbers that nobody used."""


class StepAssembler:
    """Joins the frames of one job to closed steps.

    Feed it in the order of arrival; give it all frames, events and ticks, it takes what it needs.

    >>> assembler = StepAssembler(JobId("demo"), StepsConfig())
    >>> assembler.feed(Tick(seen_ns=1)), assembler.finish()
    ([], [])
    """

    def __init__(self, job: JobId, config: StepsConfig) -> None:
        self._job = job
        self._config = config
        self.domains = Domains()
        """Those that were told; a topology has what was told before it stood, and keeps it."""
        self._topology_wait_ns, self._grace_floor_ns = _ns(config.topology_wait), _ns(config.grace_floor)
        self._grace = self._new_grace()
        self._counts: Counter[str] = Counter()
        self._now_ns = 0
        self._stirred = False  # by an item that may not wait
        self._epoch: Epoch | None = None
        self._hellos: dict[int, Event] = {}  # of the topology that stands
        self._steps: OpenSteps | None = None  # None: the topology of the current epoch does not stand yet
        self._waiting: dict[Epoch, Waiting] = {}
        self._ended: set[int] = set()  # attempts that ended in this instant

    @property
    def counters(self) -> StepCounters:
        """A snapshot. Rows still waiting are in none of the counts."""
        return StepCounters(**self._counts)

    def feed(self, item: Frame | Event | Tick) -> list[Output]:
        """Take the next item; returns what the instants before it brought."""
        seen_ns = max(item.seen_ns, self._now_ns)
        out = self._act() if seen_ns > self._now_ns and self._pressing() else []
        self._now_ns = seen_ns
        if isinstance(item, Frame):
            self._take_frame(item)
        elif isinstance(item, Tick):
            self._stirred = True
        elif item.job == self._job:
            self._take_event(item)
        return out

    def finish(self) -> list[Output]:
        """The job ends: everything still open closes."""
        return [*self._act(), *self._flush()]

    # Taking in

    def _take_frame(self, frame: Frame) -> None:
        if frame.job != self._job or (frame.epoch == self._epoch and frame.schema not in ("step", "span")):
            return
        rows = len(frame.rows) if frame.schema == "step" else 0
        if frame.epoch is None:
            self._counts["garbage"] += rows
        elif self._epoch is not None and frame.epoch < self._epoch:
            self._counts["old_epoch"] += rows
        else:
            waiting = self._waiting_of(frame.epoch)
            waiting.rows += rows
            if frame.schema in ("step", "span"):
                (waiting.steps if frame.schema == "step" else waiting.spans).append((self._now_ns, frame))

    def _take_event(self, event: Event) -> None:
        if event.kind == "hello":
            self._take_hello(event)
        elif event.kind == "membership":
            self._take_membership(event)
        elif event.kind == "node.domains":
            self._take_domains(event)
        elif event.kind == "attempt.ended" and isinstance(attempt := event.data.get("attempt"), int):
            self._ended.add(attempt)
            self._stirred = True

    def _take_hello(self, event: Event) -> None:
        epoch = event.epoch if event.epoch is not None else _epoch_told(event.data)
        rank, world_size = whole(event.data.get("rank")), whole(event.data.get("world_size"))
        if epoch is None or not 0 <= rank < world_size <= self._config.ranks:
            self._counts["bad_events"] += 1
        elif epoch == self._epoch and self._steps is not None:
            self._counts["late_hellos"] += rank not in self._hellos
        elif self._epoch is None or epoch >= self._epoch:
            self._waiting_of(epoch).hellos.setdefault(rank, event)
            self._stirred = True

    def _take_domains(self, event: Event) -> None:
        node = event.subject.id
        before = self.domains.of(node)
        if not self.domains.hear(event):
            self._counts["bad_events"] += 1
        elif self._steps is not None and node in self._steps.topology.domains and self.domains.of(node) != before:
            self._counts["late_domains"] += 1

    def _take_membership(self, event: Event) -> None:
        epoch, ranks = event.epoch if event.epoch is not None else self._epoch, event.data.get("ranks")
        members = [whole(rank) for rank in ranks] if isinstance(ranks, Sequence) and not isinstance(ranks, str) else []
        if epoch is None or not any(0 <= rank < self._config.ranks for rank in members):
            self._counts["bad_events"] += 1
        elif self._epoch is None or epoch >= self._epoch:
            self._waiting_of(epoch).members = members
            self._stirred = True

    def _waiting_of(self, epoch: Epoch) -> Waiting:
        waiting = self._waiting.get(epoch)
        if waiting is None:
            waiting = self._waiting[epoch] = Waiting(self._now_ns)
        return waiting

    # Acting on the instants that are over

    def _pressing(self) -> bool:
        """Whether what waits may not wait longer: something stirred, an epoch began, or a step could close."""
        waiting = None if self._epoch is None else self._waiting.get(self._epoch)
        if self._stirred or len(self._waiting) > (waiting is not None):
            return True
        if self._steps is None:
            return waiting is not None and self._overdue(waiting)
        due_ns = self._steps.due_ns
        if waiting is None:
            return due_ns is not None and due_ns <= self._now_ns
        if due_ns is None:  # half could be in since the first row that waits
            due_ns = waiting.since_ns + self._grace_floor_ns
        return due_ns <= self._now_ns or self._could_close(waiting, self._steps)

    def _could_close(self, waiting: Waiting, steps: OpenSteps) -> bool:
        """Whether there are rows enough to complete the oldest open step."""
        if waiting.rows < steps.missing or steps.oldest is None:
            return waiting.rows >= steps.missing
        return waiting.rows_of(steps.oldest) >= steps.missing

    def _act(self) -> list[Output]:
        """Act on everything up to now; nothing of this instant is still to come."""
        out: list[Output] = []
        for epoch in sorted(self._waiting):
            if self._epoch is None or epoch > self._epoch:
                out += self._turn_to(epoch)
            waiting = self._waiting[epoch]
            if self._steps is not None or self._stands(waiting):
                out += self._join(waiting)
        if self._steps is not None:
            out += self._steps.close_due(self._now_ns)
        if self._epoch is not None and attempt_of(self._epoch) in self._ended:
            out += self._flush()
        self._ended.clear()
        self._stirred = False
        return out

    def _turn_to(self, epoch: Epoch) -> list[Output]:
        """A higher epoch: the steps of the old one close as they are."""
        out = self._flush()
        if self._epoch is not None:
            self._waiting.pop(self._epoch, None)
        self._epoch, self._steps, self._hellos = epoch, None, {}
        return out

    def _flush(self) -> list[Output]:
        """Close what is open; rows that waited for a topology get one of the ranks known so far."""
        waiting = None if self._epoch is None else self._waiting.get(self._epoch)
        out = self._join(waiting) if waiting is not None and waiting.rows else []
        return out if self._steps is None else [*out, *self._steps.flush(self._now_ns)]

    def _stands(self, waiting: Waiting) -> bool:
        """Whether the topology need not wait longer."""
        world_size = waiting.world_size()
        return 0 < world_size <= len(waiting.hellos) or self._overdue(waiting)

    def _overdue(self, waiting: Waiting) -> bool:
        late = self._now_ns >= waiting.since_ns + self._topology_wait_ns
        return late or waiting.rows >= self._config.waiting_rows

    def _join(self, waiting: Waiting) -> list[Output]:
        """Take what waits into the current epoch, as if it had come at once."""
        assert self._epoch is not None
        del self._waiting[self._epoch]
        rows, at_ns = waiting.joined()
        out: list[Output] = []
        began, members = self._steps is None, waiting.members
        if self._steps is None:
            world_size = waiting.world_size() or self._ranks_in(rows)
            if world_size == 0:
                return out
            self._hellos = waiting.hellos
            self._steps = self._new_steps(world_size, self.domains.of)
            out.append(self._steps.topology)
        if members is not None and began:
            self._steps.set_members(members, self._now_ns)
        if waiting.spans:
            self._steps.hold_spans(waiting.span_frames())
        if len(rows):
            out += self._steps.add(rows, at_ns, self._now_ns)
        if members is not None and not began:  # the rows that waited came under the old ones
            out += self._steps.set_members(members, self._now_ns)
        return out

    def snapshot(self) -> State:
        """Where it stands between two items; what waits goes along as it came."""
        frames = [body for waiting in self._waiting.values() for body in waiting.bodies()]
        steps = {} if self._steps is None else self._steps.snapshot()
        return {
            **{f"steps_{name}": value for name, value in steps.items()},
            "world_size": None if self._steps is None else self._steps.world_size,
            "counts": dict(self._counts),
            "spreads_ns": list(self._grace.spreads_ns),
            "now_ns": self._now_ns,
            "stirred": self._stirred,
            "epoch": self._epoch,
            "ended": sorted(self._ended),
            "hellos": [dumps(hello) for hello in self._hellos.values()],
            "domains": self.domains.to_json(),
            "stood_domains": {} if self._steps is None else self._steps.topology.domains,
            "waiting": [waiting.to_json(epoch) for epoch, waiting in self._waiting.items()],
            "frame_bytes": [len(body) for body in frames],
            "frames": np.frombuffer(b"".join(frames), np.uint8),
        }

    def restore(self, state: State) -> None:
        """Take up what `snapshot` of an assembler of the same job and config gave."""
        self._counts = Counter(state["counts"])
        self._grace = self._new_grace()
        self._grace.learn(*state["spreads_ns"])
        self._now_ns, self._stirred, self._epoch = state["now_ns"], state["stirred"], state["epoch"]
        self._ended = set(state["ended"])
        self._hellos = hellos_of(state["hellos"])
        self.domains = Domains(state.get("domains"))
        self._steps = None
        if state["world_size"] is not None:
            stood = state.get("stood_domains", {})
            self._steps = self._new_steps(state["world_size"], lambda node: stood.get(node, {}))
            prefix = "steps_"
            self._steps.restore({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        ends = np.cumsum(state["frame_bytes"], dtype=np.int64)
        bodies = (part.tobytes() for part in np.split(state["frames"], ends[:-1]))
        self._waiting = {one["epoch"]: Waiting.from_json(one, bodies) for one in state["waiting"]}

    def _ranks_in(self, rows: NDArray[np.void]) -> int:
        """The world size as far as rows tell it: nobody said hello."""
        ranks = rows["rank"][(rows["rank"] >= 0) & (rows["rank"] < self._config.ranks)]
        return int(ranks.max()) + 1 if len(ranks) else 0

    def _new_steps(self, world_size: int, domains: Callable[[str], Mapping[str, str]]) -> OpenSteps:
        assert self._epoch is not None
        topology = make_topology(self._job, self._epoch, self._hellos, world_size, domains)
        return OpenSteps(topology, self._config, self._grace, self._counts)

    def _new_grace(self) -> Grace:
        config = self._config
        return Grace(config.grace_factor, _ns(config.grace_floor), _ns(config.grace_ceiling))


def _ns(span: timedelta) -> int:
    return span // timedelta(microseconds=1) * 1000


def _epoch_told(data: Mapping[str, Json]) -> Epoch | None:
    parts = [whole(data.get(name)) for name in ("attempt", "restart", "lap")]
    return Epoch(epoch_of(*parts)) if min(parts) >= 0 else None
