"""Traces of steps: what three ranks did in one step of many, as spans. Pure; app/otlp.py makes the spans.

    step                      from the first begin to the last end of the ranks that are shown
      rank N                  the slowest, the median (both by their own work) and the one that the settings name
        data, forward, ...    how long each phase took in all

A step is told if its number is a multiple of `traces.steps`, or if it holds or neighbours the first abnormal sign of an
incident. Times are those of the ranks' own clocks, as their rows have them: two nodes' may differ. A row has the sums
of its phases, not their places: they are laid end to end, from the step's begin, in the order in which a plain step
goes through them. In a step of one micro-batch that is where they were, but for time that no phase has, which is left
at the end.

Ids are made from job, epoch and step, and from where rank 0 runs: jobs of different hosts have the same names.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.app.traces import SpanPlan, named
from trainwarden.core.model import Event, Frame, StepMatrix
from trainwarden.core.records import FEATURES, attempt_of, restart_of

WORK: Final = ("data_s", "forward_s", "backward_s", "optimizer_s")
"""What a rank does by itself; the rest is waiting, for others or for a disk."""
LAID: Final = ("eval_s", "checkpoint_s", "data_s", "forward_s", "backward_s", "wait_s", "optimizer_s")
"""In the order of a plain step; what was done between two steps comes first."""
SPANS_MAX: Final = 1 + 3 * (1 + len(LAID))

KEPT_STEPS: Final = 64
"""Closed steps that an incident can still ask for: as many as a detector's window has."""
ROWS_MAX, STEPS_MAX = 1_000_000, 1024
"""Ends of rows that are held for open steps; whose numbers are what the job's tenant says. 12 MB."""
DAY_NS: Final = 86_400 * 10**9
"""A row that ended so far from now, or took so long, has no time that could be shown."""
ONSETS_KEPT: Final = 64

_STEP: Final = FEATURES.index("step_s")
_WORK: Final = [FEATURES.index(name) for name in WORK]
_LAID: Final = [FEATURES.index(name) for name in LAID]
_PAUSES: Final = 2
"""How many of LAID may lie before the step's begin."""
_DEVICE_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class _Rank:
    """One that is shown."""

    why: str
    rank: int
    device: str
    start_ns: int
    end_ns: int
    spent_ns: Sequence[int]
    """As LAID."""


@dataclass(slots=True)
class _Step:
    """A closed step, in what could be told of it."""

    key: str
    attributes: Mapping[str, object]
    ranks: Sequence[_Rank]
    start_ns: int
    end_ns: int
    told: bool = False

    def is_near(self, t_ns: int) -> bool:
        """Whether a moment lies in this step or in one beside it (of the same length)."""
        length_ns = self.end_ns - self.start_ns
        return self.start_ns - length_ns <= t_ns <= self.end_ns + length_ns


@dataclass(slots=True)
class _Held:
    """Ends of the rows of one step that has not closed."""

    rows: int = 0
    parts: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = field(default_factory=list)


class StepTraces:
    """hear() everything, closed() for each step; what is to be told comes back."""

    def __init__(self, every: int, rank: int) -> None:
        """every: one of so many. rank: that is always shown."""
        self._every, self._rank = every, rank
        self._held: dict[tuple[int, int], _Held] = {}
        """By epoch and step."""
        self._rows = 0
        self._kept: deque[_Step] = deque(maxlen=KEPT_STEPS)
        self._onsets: dict[str, int] = {}
        """First abnormal signs, by incident."""

    def hear(self, items: Iterable[Frame | Event]) -> None:
        """Note when ranks ended their steps."""
        for item in items:
            if isinstance(item, Frame) and item.schema == "step" and item.epoch is not None and len(item.rows):
                step_N = item.rows["step"]
                steps = step_N[:1] if (step_N == step_N[0]).all() else np.unique(step_N)
                for step in steps.tolist():
                    self._hold((item.epoch, step), item.rows if len(steps) == 1 else item.rows[step_N == step])

    def closed(self, matrix: StepMatrix) -> list[SpanPlan]:
        """A step is complete; what is to be told of it now."""
        step = self._look(matrix)
        if step is None:
            return []
        self._kept.append(step)
        about = next((name for name, onset_ns in self._onsets.items() if step.is_near(onset_ns)), "")
        return _told(step, about) if about or matrix.step % self._every == 0 else []

    def around(self, incident: str, onset_ns: int) -> list[SpanPlan]:
        """An incident is open; the steps around its first sign that are past and were not told."""
        if incident in self._onsets:
            return []
        self._onsets[incident] = onset_ns
        while len(self._onsets) > ONSETS_KEPT:
            del self._onsets[next(iter(self._onsets))]
        return [span for step in self._kept if step.is_near(onset_ns) for span in _told(step, incident)]

    def _hold(self, key: tuple[int, int], rows: NDArray[Any]) -> None:
        held = self._held.setdefault(key, _Held())
        held.parts.append((rows["rank"].copy(), rows["end_ns"].copy()))
        held.rows += len(rows)
        self._rows += len(rows)
        while self._rows > ROWS_MAX or len(self._held) > STEPS_MAX:
            self._forget(next(iter(self._held)))

    def _forget(self, key: tuple[int, int]) -> None:
        self._rows -= self._held.pop(key).rows

    def _look(self, matrix: StepMatrix) -> _Step | None:
        """The ranks to be shown; None: none has a time that can be shown."""
        where, world_size = matrix.topology, len(matrix.seen_R)
        now = where.epoch, matrix.step
        end_R = np.zeros(world_size, np.int64)
        for rank_N, end_N in reversed(self._held.get(now, _Held()).parts):  # of copies the first stays
            sound_N = (rank_N >= 0) & (rank_N < world_size)
            end_R[rank_N[sound_N]] = end_N[sound_N]
        for key in [key for key in self._held if key <= now]:
            self._forget(key)
        step_s_R = matrix.values_FR[_STEP].astype(np.float64)
        near_R = (end_R > matrix.seen_ns - DAY_NS) & (end_R < matrix.seen_ns + DAY_NS)
        fits_R = matrix.seen_R & near_R & (step_s_R >= 0) & (step_s_R * 1e9 < DAY_NS)
        ranks = [
            _rank(why, rank, where.device_R[rank], int(end_R[rank]), matrix.values_FR[:, rank])
            for rank, why in self._chosen(matrix.values_FR, fits_R).items()
        ]
        if not ranks:
            return None
        said = {
            "job_id": where.job,
            "step": matrix.step,
            "batch": matrix.batch,
            "attempt": attempt_of(where.epoch),
            "restart": restart_of(where.epoch),
            "epoch": where.epoch,
            "ranks": int(matrix.seen_R.sum()),
            "partial": matrix.partial,
            "clock": "of each rank",
        }
        start_ns, end_ns = min(one.start_ns for one in ranks), max(one.end_ns for one in ranks)
        return _Step(f"{where.job} {where.device_R[0]} {where.epoch} {matrix.step}", said, ranks, start_ns, end_ns)

    def _chosen(self, values_FR: NDArray[np.float32], fits_R: NDArray[np.bool_]) -> Mapping[int, str]:
        """Ranks, each with why."""
        work_R = np.fmax(values_FR[_WORK], 0).sum(axis=0)  # NaN, not measured, is nothing
        worked = np.flatnonzero(fits_R & np.isfinite(work_R) & (work_R > 0))
        chosen: dict[int, str] = {}
        if len(worked):
            middle = (len(worked) - 1) // 2
            chosen[int(worked[np.argmax(work_R[worked])])] = "slowest"
            chosen.setdefault(int(worked[np.argpartition(work_R[worked], middle)[middle]]), "median")
        if self._rank < len(fits_R) and fits_R[self._rank]:
            chosen.setdefault(self._rank, "chosen")
        return chosen


def _rank(why: str, rank: int, device: str, end_ns: int, values_F: NDArray[np.float32]) -> _Rank:
    step_ns = int(float(values_F[_STEP]) * 1e9)
    spent_ns = [int(s * 1e9) if 0 < s * 1e9 < DAY_NS else 0 for s in values_F[_LAID].tolist()]  # NaN is neither
    # what does not fit into the step was done before it began, as app/effective.py counts it
    before_ns = min(max(sum(spent_ns) - step_ns, 0), sum(spent_ns[:_PAUSES]))
    return _Rank(why, rank, device, end_ns - step_ns - before_ns, end_ns, spent_ns)


def _told(step: _Step, incident: str) -> list[SpanPlan]:
    """All spans of a step, the root first; none if they were told already."""
    if step.told:
        return []
    step.told = True
    said = named(**step.attributes, incident_id=incident)
    root = SpanPlan(name="step", path=(step.key,), start_ns=step.start_ns, end_ns=step.end_ns, attributes=said)
    return [root, *(span for one in step.ranks for span in _of_rank(root, one))]


def _of_rank(root: SpanPlan, one: _Rank) -> Iterator[SpanPlan]:
    said = named(rank=one.rank, device=one.device[:_DEVICE_CHARS], why=one.why)
    rank = root.child(f"rank {one.rank}", f"rank-{one.rank}", one.start_ns, one.end_ns, said)
    yield rank
    begin_ns = rank.start_ns
    for name, spent_ns in zip(LAID, one.spent_ns, strict=True):
        if spent_ns:
            phase = name.removesuffix("_s")
            yield rank.child(phase, phase, begin_ns, begin_ns + spent_ns)
            begin_ns += spent_ns
