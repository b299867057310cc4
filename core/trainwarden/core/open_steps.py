"""The open steps of one epoch: rows go in, closed steps come out, in order, each once.

docs/architecture.md, From frames to steps, rules 2 and 4 to 8. Rows that waited together are joined, sorted once by
(step, rank) and scattered a step at a time. Time is the receiver's (`seen_ns`), never a rank's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.arrivals import Arrivals, Grace, Members
from trainwarden.core.durations import format_duration
from trainwarden.core.errors import ConfigError
from trainwarden.core.micro import MicroBatches
from trainwarden.core.model import Frame, StepMatrix, Topology
from trainwarden.core.records import FEATURES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsConfig:
    """When a step closes. Figures without a source here: docs/architecture.md, From frames to steps."""

    window_steps: int = 64
    """Steps that can be open; a row beyond closes the oldest."""

    garbage_windows: int = 10
    """A step number this many windows ahead is garbage and refused."""

    grace_factor: float = 4.0
    """A step waits this many times the usual (last - half) once half of its ranks are in."""

    grace_floor: timedelta = timedelta(milliseconds=500)
    """Shortest such wait."""

    grace_ceiling: timedelta = timedelta(seconds=10)
    """Longest such wait, and the wait before the first complete step."""

    topology_wait: timedelta = timedelta(seconds=60)
    """After this the topology stands without the ranks that said no hello."""

    micro_batches: int = 1024
    """Span rows of a micro-batch beyond are garbage: bounds the memory of one step."""

    ranks: int = 131_072
    """Largest world size believed: bounds the memory of one step (100,000 ranks are a goal)."""

    waiting_rows: int = 1_000_000
    """So many rows (88 MB) make the topology stand before its time: bounds the memory before the first step."""

    def __post_init__(self) -> None:
        for name in ("window_steps", "garbage_windows", "micro_batches", "ranks", "waiting_rows"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}: need at least 1, got {value}")
        if self.grace_factor <= 0:
            raise ConfigError(f"grace_factor: need more than 0, got {self.grace_factor:g}")
        if not timedelta(0) <= self.grace_floor <= self.grace_ceiling:
            floor, ceiling = format_duration(self.grace_floor), format_duration(self.grace_ceiling)
            raise ConfigError(f"grace_floor: need 0 s to grace_ceiling ({ceiling}), got {floor}")


class OpenStep:
    """The rows of one step until it closes."""

    __slots__ = ("arrivals", "batch_R", "flags_R", "values_RF")

    def __init__(self, world_size: int) -> None:
        self.arrivals = Arrivals(np.zeros(world_size, np.bool_))
        self.values_RF = np.full((world_size, len(FEATURES)), np.nan, np.float32)
        self.flags_R = np.zeros(world_size, np.uint32)
        self.batch_R = np.full(world_size, -1, np.int32)

    def put(self, ranks: NDArray[np.int32], rows: NDArray[np.void], index: NDArray[np.intp]) -> None:
        """Scatter the rows at `index`, of ranks that were not in yet."""
        self.values_RF[ranks] = rows["values"][index]
        self.flags_R[ranks] = rows["flags"][index]
        self.batch_R[ranks] = rows["batch"][index]


class OpenSteps:
    """Closes the steps of one epoch.

    `closed` is the newest step that left; everything up to it is past. It is None until the first rows came.
    """

    def __init__(self, topology: Topology, config: StepsConfig, grace: Grace, counts: Counter[str]) -> None:
        self.topology = topology
        self.world_size = len(topology.device_R)
        self.closed: int | None = None
        self._config = config
        self._grace = grace
        self._counts = counts
        self._members = Members.everyone(self.world_size)
        self._open: dict[int, OpenStep] = {}
        self._past: dict[int, Arrivals] = {}  # of the last window of closed steps: tells copies from late rows
        self._micro = MicroBatches(self.world_size, config.micro_batches)
        self._refused_R = np.full(self.world_size, -1, np.int32)  # newest garbage step of each rank since its last good
        self._moved_R = np.zeros(self.world_size, np.bool_)

    @property
    def oldest(self) -> int | None:
        """The open step that closes next."""
        return min(self._open, default=None)

    @property
    def missing(self) -> int:
        """How many rows it takes at least to complete the oldest open step."""
        return self._members.count - (self._oldest.arrivals.inside if self._open else 0)

    @property
    def due_ns(self) -> int | None:
        """When the oldest open step closes without its last members; None: it still lacks half of them."""
        half_ns = self._oldest.arrivals.half_ns if self._open else None
        return None if half_ns is None else half_ns + self._grace.ns

    @property
    def _oldest(self) -> OpenStep:
        return self._open[min(self._open)]

    @property
    def _end(self) -> int | None:
        """The first step number that is garbage."""
        if self.closed is None:
            return None
        return min(self._open, default=self.closed + 1) + self._config.window_steps * self._config.garbage_windows

    def set_members(self, ranks: Sequence[int], now_ns: int) -> list[StepMatrix]:
        """From now on these ranks make a step complete; a list without any of ours changes nothing."""
        member_R = np.zeros(self.world_size, np.bool_)
        member_R[[rank for rank in ranks if 0 <= rank < self.world_size]] = True
        if not member_R.any():
            self._counts["bad_events"] += 1
            return []
        self._members = Members(member_R)
        for arrivals in (*self._past.values(), *(step.arrivals for step in self._open.values())):
            arrivals.recount(self._members, now_ns)
        return self.close_ready(now_ns)

    def hold_spans(self, frames: Sequence[Frame]) -> None:
        """Keep the span rows of steps to come."""
        late, garbage = self._micro.add(frames, None if self.closed is None else self.closed + 1, self._end)
        self._counts.update(late_spans=late, garbage=garbage)

    def add(self, rows: NDArray[np.void], at_ns: NDArray[np.int64], now_ns: int) -> list[StepMatrix]:
        """Take in step rows that waited together, in the order they came; `at_ns`: when each was seen."""
        sound = (rows["rank"] >= 0) & (rows["rank"] < self.world_size) & (rows["step"] >= 0)
        if not sound.all():
            self._counts["garbage"] += int((~sound).sum())
            rows, at_ns = rows[sound], at_ns[sound]
        closed: list[StepMatrix] = []
        for index in self._joined(rows):
            step, ranks = int(rows["step"][index[0]]), rows["rank"][index]
            if self.closed is None:
                self.closed = step - 1
            if step <= self.closed:
                self._note_past(step, ranks, at_ns[index])
                continue
            if self._end is not None and step >= self._end:
                if not self._moved_on(step, ranks):
                    continue
                closed += self.flush(now_ns)
                self.closed = step - 1
            while self._open and step >= min(self._open) + self._config.window_steps:
                closed.append(self._close(now_ns))
            self._put(step, rows, index, at_ns)
            closed += self.close_ready(now_ns)
        return closed

    def close_ready(self, now_ns: int) -> list[StepMatrix]:
        """Close from the oldest on what is complete."""
        closed = []
        while self._open and self.missing <= 0:
            closed.append(self._close(now_ns))
        return closed

    def close_due(self, now_ns: int) -> list[StepMatrix]:
        """Close from the oldest on what is complete or whose grace is over."""
        closed = []
        while self._open and (self.missing <= 0 or ((due_ns := self.due_ns) is not None and due_ns <= now_ns)):
            closed.append(self._close(now_ns))
        return closed

    def flush(self, now_ns: int) -> list[StepMatrix]:
        """Close all: the epoch or the job ends."""
        return [self._close(now_ns) for _ in range(len(self._open))]

    def snapshot(self) -> dict[str, Any]:
        """Everything but topology, config and what is shared (grace, counts)."""
        arrivals = [*self._past.values(), *(step.arrivals for step in self._open.values())]
        R, F = self.world_size, len(FEATURES)
        return {
            "closed": self.closed,
            "past_steps": list(self._past),
            "open_steps": list(self._open),
            "member_R": self._members.member_R,
            "refused_R": self._refused_R.copy(),
            "moved_R": self._moved_R.copy(),
            "seen_AR": np.array([one.seen_R for one in arrivals], np.bool_).reshape(-1, R),
            "arrivals_A3": np.array([one.times() for one in arrivals], np.int64).reshape(-1, 3),
            "values_SRF": np.array([step.values_RF for step in self._open.values()], np.float32).reshape(-1, R, F),
            "flags_SR": np.array([step.flags_R for step in self._open.values()], np.uint32).reshape(-1, R),
            "batch_SR": np.array([step.batch_R for step in self._open.values()], np.int32).reshape(-1, R),
            "spans": self._micro.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `snapshot` gave."""
        self.closed = state["closed"]
        self._members = Members(state["member_R"])
        self._refused_R, self._moved_R = state["refused_R"].copy(), state["moved_R"].copy()
        arrivals = [
            Arrivals.of(seen_R.copy(), times.tolist())
            for seen_R, times in zip(state["seen_AR"], state["arrivals_A3"], strict=True)
        ]
        past = len(state["past_steps"])
        self._past = dict(zip(state["past_steps"], arrivals[:past], strict=True))
        self._open = {}
        for at, step in enumerate(state["open_steps"]):
            opened = self._open[step] = OpenStep(self.world_size)
            opened.arrivals = arrivals[past + at]
            opened.values_RF[:] = state["values_SRF"][at]
            opened.flags_R[:] = state["flags_SR"][at]
            opened.batch_R[:] = state["batch_SR"][at]
        self._micro.restore(state["spans"])

    def _joined(self, rows: NDArray[np.void]) -> Iterable[NDArray[np.intp]]:
        """Indices of the first row of each (step, rank), one array a step, ascending; copies are counted."""
        key = rows["step"].astype(np.int64) * self.world_size + rows["rank"]
        order = np.argsort(key, kind="stable")
        key = key[order]
        first = np.ones(len(key), np.bool_)
        first[1:] = key[1:] != key[:-1]
        self._counts["copies"] += len(key) - int(first.sum())
        order = order[first]
        cuts = np.flatnonzero(np.diff(rows["step"][order])) + 1
        return np.split(order, cuts) if len(order) else ()

    def _put(self, step: int, rows: NDArray[np.void], index: NDArray[np.intp], at_ns: NDArray[np.int64]) -> None:
        """Scatter the rows at `index` into their step."""
        at = self._open.get(step)
        if at is None:
            at = self._open[step] = OpenStep(self.world_size)
        ranks = rows["rank"][index]
        fresh = self._mark(at.arrivals, ranks, at_ns[index])
        at.put(ranks[fresh], rows, index[fresh])
        self._counts.update(rows=int(fresh.sum()), copies=int((~fresh).sum()))
        self._refused_R[ranks] = -1
        self._moved_R[ranks] = False

    def _note_past(self, step: int, ranks: NDArray[np.int32], at_ns: NDArray[np.int64]) -> None:
        """Rows of a step that is past: copies of what was in, or late."""
        arrivals = self._past.get(step)
        late = len(ranks) if arrivals is None else int(self._mark(arrivals, ranks, at_ns).sum())
        self._counts.update(late=late, copies=len(ranks) - late)

    def _mark(self, arrivals: Arrivals, ranks: NDArray[np.int32], at_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        before = arrivals.inside
        fresh = arrivals.mark(ranks, at_ns, self._members)
        if before < arrivals.inside >= self._members.count and arrivals.half_ns is not None:
            self._grace.learn(arrivals.last_ns - arrivals.half_ns)
        return fresh

    def _moved_on(self, step: int, ranks: NDArray[np.int32]) -> bool:
        """Whether rows far ahead are a jump of the job; else they are counted as garbage.

        One wild number is garbage. When most members go on counting out there the job has moved, and refusing them
        would make us deaf until the next epoch.
        """
        ahead = step - self._refused_R[ranks].astype(np.int64)
        self._moved_R[ranks] = (self._refused_R[ranks] >= 0) & (ahead > 0) & (ahead <= self._config.window_steps)
        self._refused_R[ranks] = step
        moved = 2 * int((self._moved_R & self._members.member_R).sum()) > self._members.count
        self._counts["garbage"] += 0 if moved else len(ranks)
        return moved

    def _close(self, now_ns: int) -> StepMatrix:
        step = min(self._open)
        at = self._open.pop(step)
        arrivals = at.arrivals
        partial = arrivals.inside < self._members.count
        assert self.closed is not None
        self._counts.update(closed=1, partial=int(partial), skipped=step - self.closed - 1)
        self.closed = step
        self._past[step] = arrivals
        while len(self._past) > self._config.window_steps:
            del self._past[next(iter(self._past))]
        return StepMatrix(
            topology=self.topology,
            step=step,
            batch=int(at.batch_R[int(arrivals.seen_R.argmax())]),
            seen_ns=now_ns,
            partial=partial,
            values_FR=np.ascontiguousarray(at.values_RF.T),
            seen_R=arrivals.seen_R.copy(),
            flags_R=at.flags_R,
            micro_MKR=self._micro.take(step, arrivals.seen_R),
        )
