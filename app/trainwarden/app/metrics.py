"""/metrics of one job: core.signals.METRICS, filled from what the supervisor sees and decides.

The main loop only notes references and small sums; what is asked of all ranks (the rollups of the newest step) is
computed when somebody asks, in the thread that answers. What is not known has no series: it is never zero. Zero is said
of what is known to be zero, so that the first event of a counter is seen by `increase`.

Counters go on where a supervisor that ended left them. A counter that came back a little lower would count for
Prometheus as one that began anew, its whole value as an increase; so what is shown is on the disk before it is shown
(not forced to it: it must survive us, not the host, whose end is also the job's).
"""

import contextlib
import json
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from prometheus_client import Metric as Family

from trainwarden.app.effective import TimeSplit, working_s
from trainwarden.app.exposition import BUCKETS_S, PHASES, Key, families, quantiles
from trainwarden.app.outage import KIND
from trainwarden.app.publisher import Saves
from trainwarden.app.sources_seen import SourcesSeen
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Event, Frame, Incident, JobId, Outcome, Plan, StepMatrix, Tick, Tier
from trainwarden.core.printable import printable
from trainwarden.core.records import GRAD_NONFINITE, LOCAL_NONFINITE, LOSS_NONFINITE, attempt_of
from trainwarden.core.signals import SIGNALS
from trainwarden.core.topology import tokens_of
from trainwarden.core.version import __version__
from trainwarden.detectors.straggler import OwnWorkSeen
from trainwarden.remediation.guards import GUARDS

if TYPE_CHECKING:
    from trainwarden.app.endpoint import MetricsConfig
    from trainwarden.app.server import Server

WINDOW_STEPS: Final = 100
EXPECTED_STEPS: Final = 64
"""Of `step_window_seconds` and `step_expected_seconds`, as their rows in METRICS say."""

SLOWEST: Final = 5
DEVICE_CHARS: Final = 80
"""Of a device's name, which the job's tenant writes; a GPU's UUID has 40."""

ENDED_NS: Final = 15 * 60 * 10**9
"""What an attempt's steps were like is shown for so long after its end (architecture, section 10)."""

RESULTS: Final = ("reached", "already", "failed", "refused", "expired")
_STATES: Final = ("suspected", "confirmed", "mitigating", "recovering", "reopened")
_NONFINITE: Final = {"loss": LOSS_NONFINITE, "grad_norm": GRAD_NONFINITE, "local": LOCAL_NONFINITE}
_FATES: Final = ("rows", "copies", "late", "late_spans", "old_epoch", "garbage")
"""Of StepCounters, those that count rows."""
_RESTORED: Final = ("rows_total", "plan_refusals_total")
"""Of Vitals.counts, those that go on by themselves after a restart: what they begin with was counted before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What other parts of the supervisor know of themselves, at one turn; replaced as a whole."""

    incidents: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By tier and state."""
    plans_running: int = 0
    journal_writable: bool = True
    undelivered: int = 0
    saves: Saves = field(default_factory=Saves)
    own_work: OwnWorkSeen | None = None
    """None: not looked at yet."""
    counts: Mapping[Key, int] = field(default_factory=dict)
    """Counters that others keep, since whenever they began."""


def vitals(server: "Server", saves: Saves | None) -> Vitals:
    """As of now; the main thread's. saves: None where checkpoints are not seen, so that nothing is said of them."""
    parts = server.parts
    rows, refusals = parts.assembler.counters, parts.repairs.refusals
    return Vitals(
        incidents=Counter((one.tier.name, one.state) for one in server.incidents.values()),
        plans_running=len(server.plans),
        journal_writable=not server.engine.degraded,
        undelivered=len(server.undelivered),
        saves=saves or Saves(),
        own_work=parts.straggler.own_work,
        counts={
            **{("rows_total", fate): getattr(rows, fate) for fate in _FATES},
            **{("plan_refusals_total", guard): refusals[guard] for guard in GUARDS | refusals.keys()},
            **{("notices_total", *told): count for told, count in server.tries.counts().items()},
            **({} if saves is None else _saved(saves)),
            ("recording_lost_items_total",): parts.recorder.lost_items,
        },
    )


class JobMetrics:
    """A prometheus_client collector. All methods but collect() and save() are the main thread's."""

    def __init__(
        self,
        job: JobId,
        config: "MetricsConfig",
        file: Path,
        *,
        started_ns: int,
        fresh_ns: int,
        sources: Iterable[str] = (),
        peers: Callable[[], Mapping[str, bool]] = dict,
        exported: Callable[[], Mapping[Key, int]] = dict,
    ) -> None:
        """file: where counters are kept. started_ns: the attempt's that runs. fresh_ns: how long a rank that was heard
        of counts as heard of just now. sources: those that can be read unless they say that they are blind. peers:
        Alertmanager's. exported: counters of what goes to receivers of OTLP, of this process's life."""
        self._job, self._config, self._file, self._fresh_ns, self._peers = job, config, file, fresh_ns, peers
        self._exported = exported
        self.since_ns = started_ns
        """Since when counters count, in whatever process (Unix time)."""
        self._lock = threading.Lock()
        """Guards what is changed in place."""
        self._saving = threading.Lock()
        self._split = TimeSplit()
        self._counts: dict[Key, float] = dict.fromkeys(_zeros(), 0.0)
        self._seen: Mapping[Key, int] | None = None
        """Vitals.counts of the turn before."""
        self._window: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._best_s = math.inf
        self._start_ns, self._turn_ns = started_ns, 0
        self._ended_ns = self._new_ns = self._world_size = self._attempt = -1
        self._last: StepMatrix | None = None
        self._live: tuple[Frame, ...] = ()
        """Live frames of the newest poll."""
        self._lag_ns: int | None = None
        self._sources = SourcesSeen(sources)
        self._vitals = Vitals()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            self._restore(json.loads(file.read_text()))

    # what the main loop tells

    def step(self, matrix: StepMatrix) -> None:
        """A step has closed."""
        slowest, tokens, flags = working_s(matrix), tokens_of(matrix), int(np.bitwise_or.reduce(matrix.flags_R))
        with self._lock:
            highest = self._split.highest_step
            if not self._split.feed(matrix):
                return
            self._last = matrix
            if matrix.step > highest:
                self._new_ns = matrix.seen_ns
            if 0 < tokens < math.inf:
                self._count("tokens_total", by=tokens)
            for signal, bit in _NONFINITE.items():
                self._count("nonfinite_steps_total", signal, by=bool(flags & bit))
            if slowest is not None and attempt_of(matrix.topology.epoch) == self._attempt:
                self._window.append(slowest)
                if len(self._window) >= EXPECTED_STEPS:
                    self._best_s = min(self._best_s, median([*self._window][-EXPECTED_STEPS:]))

    def take(self, item: Frame | Event | Tick) -> None:
        """An item as it was recorded."""
        with self._lock:
            self._split.feed(item)
        if not isinstance(item, Tick):
            self._sources.heard(item)
        if isinstance(item, Frame):
            self._lag_ns = item.seen_ns - item.sent_ns
            mine = item.epoch is not None and attempt_of(item.epoch) == self._attempt
            if item.schema == "live" and mine and len(item.rows):
                same = self._live and self._live[0].seen_ns == item.seen_ns
                self._live = (*self._live, item) if same else (item,)
        elif isinstance(item, Event):
            self._hear(item)

    def opened(self, incident: Incident) -> None:
        """An incident that was not known before."""
        self._add("incidents_opened_total", incident.kind)

    def started(self, plan: Plan) -> None:
        """A plan began: how it may end is zero until then."""
        for result in RESULTS:
            self._add("plans_total", plan.rule, plan.mode, result, by=0)

    def ended(self, plan: Plan, end: Outcome) -> None:
        """How a plan ended."""
        self._add("plans_total", plan.rule, plan.mode, end.result)

    def recovered(self, lost_s: Mapping[str, float]) -> None:
        """A recovery was verified, and this is where its time went."""
        for phase, seconds in lost_s.items():
            bound = next((str(one) for one in BUCKETS_S if seconds <= one), "+Inf")
            self._add("incident_phase_seconds", phase, bound)
            self._add("incident_phase_seconds", phase, "sum", by=seconds)

    def turned(self, began_ns: int, ended_ns: int, now: Vitals) -> None:
        """A turn of the main loop is over."""
        self._turn_ns, self._vitals = began_ns, now
        if self._seen is None:
            self._seen = {key: count for key, count in now.counts.items() if key[0] in _RESTORED}
        before, self._seen = self._seen, {**now.counts, **self._exported()}
        with self._lock:
            for (name, *labels), count in self._seen.items():
                self._count(name, *labels, by=max(0, count - before.get((name, *labels), 0)))
            self._count("turns_total")
            self._count("turn_seconds_total", by=max(0, ended_ns - began_ns) / 1e9)

    # what is asked

    def collect(self) -> Iterator[Family]:
        """Every metric that has a value now."""
        yield from families(self._values(*self.save()), job=(self._job,))

    def save(self) -> tuple[Mapping[Key, float], Sequence[float]]:
        """Write down what must go on after us; the counters and the window of steps as they stand there.

        A disk that does not take it is no reason to say nothing. One thread at a time, so that the newest stays.
        """
        with self._saving:
            with self._lock:
                shown, window, state = self._shown(), [*self._window], json.dumps(self._state())
            with contextlib.suppress(OSError):
                draft = self._file.with_suffix(".new")
                draft.write_text(state)
                draft.rename(self._file)
        return shown, window

    def _shown(self) -> Mapping[Key, float]:
        spent = self._split.seconds()
        return {
            **self._counts,
            ("steps_total", "new"): self._split.steps_new,
            ("steps_total", "repeated"): self._split.steps_repeated,
            ("job_wall_seconds_total",): sum(spent.values()),
            **{("job_activity_seconds_total", activity): seconds for activity, seconds in spent.items()},
        }

    def _values(self, counts: Mapping[Key, float], window: Sequence[float]) -> Iterator[tuple[Key, float | None]]:
        yield from counts.items()
        yield ("build_info", __version__), 1
        yield from self._of_job()
        if self._ended_ns < 0 or self._turn_ns - self._ended_ns < ENDED_NS:
            yield from self._of_steps(window)
        yield from self._of_checkpoints(self._vitals.saves)
        yield from self._of_us(self._vitals)

    def _of_job(self) -> Iterator[tuple[Key, float | None]]:
        last, live = self._last, self._live
        yield ("heartbeat_timestamp_seconds",), _s(self._turn_ns)
        yield ("job_start_timestamp_seconds",), _s(self._start_ns)
        yield ("attempt",), _known(self._attempt)
        yield ("ranks", "expected"), _known(self._world_size)
        if live:
            fresh = self._turn_ns - live[0].seen_ns <= self._fresh_ns
            rank_N = np.concatenate([frame.rows["rank"] for frame in live])
            since_ns = max(int(frame.rows["since_ns"].max()) for frame in live)
            yield ("ranks", "fresh"), len(np.unique(rank_N)) if fresh else 0
            yield ("last_progress_timestamp_seconds",), _s(min(since_ns, live[0].seen_ns))
        if last is not None:
            yield ("last_step",), last.step
            yield ("last_step_timestamp_seconds",), _s(last.seen_ns)
        yield ("last_new_step_timestamp_seconds",), _s(self._new_ns)

    def _of_steps(self, window: Sequence[float]) -> Iterator[tuple[Key, float | None]]:
        last, expected = self._last, self._config.expected_step
        yield ("step_expected_seconds",), self._best_s if expected is None else expected.total_seconds()
        yield from quantiles("step_window_seconds", np.array(window))
        if last is not None and attempt_of(last.topology.epoch) == self._attempt:
            for signal in SIGNALS.values():
                yield from quantiles(signal.metric.removeprefix("trainwarden_"), last.values_FR[signal.id])
        if (seen := self._vitals.own_work) is not None:
            for rank in np.argsort(-seen.ratio_R)[:SLOWEST].tolist():  # NaN (blind) sorts last, and is no value
                device = printable(seen.device_R[rank])[:DEVICE_CHARS]
                yield ("rank_own_work_ratio", str(rank), device), float(seen.ratio_R[rank])

    def _of_checkpoints(self, saves: Saves) -> Iterator[tuple[Key, float | None]]:
        interval, times_ns = self._config.checkpoint_interval, saves.times_ns
        yield ("checkpoint_last_step",), saves.last_step
        yield ("checkpoint_pending_saves",), saves.pending
        if times_ns:
            yield ("checkpoint_last_timestamp_seconds",), _s(times_ns[-1])
        if interval is not None:
            yield ("checkpoint_interval_seconds",), interval.total_seconds()
        elif len(times_ns) > 1:
            yield ("checkpoint_interval_seconds",), float(np.median(np.diff(times_ns))) / 1e9

    def _of_us(self, now: Vitals) -> Iterator[tuple[Key, float | None]]:
        for tier in Tier:
            for state in _STATES:
                yield ("incidents", tier.name, state), now.incidents.get((tier.name, state), 0)
        yield ("plans_running",), now.plans_running
        yield ("journal_writable",), now.journal_writable
        yield ("notices_undelivered",), now.undelivered
        yield ("frame_lag_seconds",), None if self._lag_ns is None else self._lag_ns / 1e9
        yield from ((("source_up", source), up) for source, up in self._sources.shown(self._turn_ns))
        if now.own_work is not None:
            yield ("source_up", "own_work"), not now.own_work.blind
        yield from ((("alertmanager_peer_up", printable(peer)), up) for peer, up in self._peers().items())

    # what is kept

    def _hear(self, event: Event) -> None:
        attempt = event.data.get("attempt")
        match event.kind:
            case "attempt.started" if isinstance(attempt, int) and attempt > self._attempt:
                self._attempt, self._ended_ns, self._world_size, self._live = attempt, -1, -1, ()
                self._sources.anew(event.seen_ns)
                if event.data.get("by") == "run":  # by a person, a day later perhaps: what was before is no measure
                    self._start_ns, self._new_ns = event.t_ns, -1
                with self._lock:
                    self._window.clear()
            case "attempt.ended" if attempt == self._attempt:
                self._ended_ns = event.seen_ns
            case "hello" if attempt == self._attempt and isinstance(size := event.data["world_size"], int):
                self._world_size = self._sources.ranks = size
            case "source.blind" | "source.up" | "source.started":
                self._sources.say(event.subject.id, up=event.kind != "source.blind")
            case kind if kind.startswith("command."):  # one that is understood, after one that was not
                self._sources.say(event.source, up=True)

    def _add(self, name: str, *labels: str, by: float = 1) -> None:
        with self._lock:
            self._count(name, *labels, by=by)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        """The lock is held."""
        self._counts[name, *labels] = self._counts.get((name, *labels), 0) + by

    def _state(self) -> Mapping[str, Any]:
        return {
            "counts": [[*key, value] for key, value in self._counts.items()],
            "split": self._split.snapshot(),
            "best_s": None if math.isinf(self._best_s) else self._best_s,
            "times_ns": [self._start_ns, self._new_ns],
            "since_ns": self.since_ns,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        counts = {tuple(key): float(value) for *key, value in state["counts"]}
        split = TimeSplit()
        split.restore(state["split"])
        start_ns, new_ns = (int(time_ns) for time_ns in state["times_ns"])
        best_s = math.inf if state["best_s"] is None else float(state["best_s"])
        since_ns = int(state.get("since_ns", start_ns))
        self._counts, self._split, self._best_s, self.since_ns = {**self._counts, **counts}, split, best_s, since_ns
        self._start_ns, self._new_ns = min(self._start_ns, start_ns), new_ns


def _saved(saves: Saves) -> Mapping[Key, int]:
    return {("checkpoints_total", "published"): saves.published, ("checkpoints_total", "refused"): saves.refused}


def _zeros() -> Iterator[Key]:
    """Counters that are known to be zero before anything happened."""
    yield from (("nonfinite_steps_total", signal) for signal in _NONFINITE)
    yield from (("incidents_opened_total", kind.name) for kind in KINDS.values() if kind.of == "finding")
    yield "incidents_opened_total", KIND
    yield from (("incident_phase_seconds", phase, "sum") for phase in PHASES)


def _s(time_ns: int) -> float | None:
    """Unix seconds; None: not known."""
    return time_ns / 1e9 if time_ns > 0 else None


def _known(number: int) -> int | None:
    return number if number >= 0 else None
