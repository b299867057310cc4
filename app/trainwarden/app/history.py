"""The closed steps of the last attempts, in memory: what a new attempt is measured by.

One writer (the line), readers in any thread. A closed step is never changed, so it is shared with readers, not copied;
its micro-batches, the largest part of it, are not kept. Nothing is written down: after a restart of the supervisor the
past is unknown, and what would need it says so.
"""

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, JobId, StepMatrix
from trainwarden.core.records import attempt_of
from trainwarden.detectors.ownwork import OwnWork
from trainwarden.detectors.robust import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """How much is kept."""

    steps: int = 512
    """Newest closed steps of each attempt: a usual distance between two checkpoints."""

    attempts: int = 3
    """The running attempt, the one before, and one more for when that one died before its first step."""

    max_bytes: int = 1 << 30
    """Of all attempts together; large jobs keep fewer steps (100,000 ranks: about 50 of each attempt)."""

    def __post_init__(self) -> None:
        for name in ("steps", "attempts", "max_bytes"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"history.{name}: need at least 1, got {value}")


@dataclass(slots=True)
class _Kept:
    steps: deque[StepMatrix] = field(default_factory=deque)
    held_bytes: int = 0
    from_start: bool = True


class History:
    """One job's closed steps (core.ports.History).

    missed: the newest attempt that had begun before we watched, so that its first steps may not be here.
    """

    def __init__(self, config: HistoryConfig | None = None, *, missed: int = -1) -> None:
        self._config = config or HistoryConfig()
        self._missed = missed
        self._kept: dict[int, _Kept] = {}
        self._lock = threading.Lock()

    def add(self, matrix: StepMatrix) -> None:
        """Take the next closed step; the oldest step, or the oldest attempt, may go."""
        attempt = attempt_of(matrix.topology.epoch)
        with self._lock:
            kept = self._kept.get(attempt)
            if kept is None:
                kept = self._kept[attempt] = _Kept(from_start=attempt > self._missed)
                while len(self._kept) > self._config.attempts:
                    del self._kept[min(self._kept)]
            kept.steps.append(replace(matrix, micro_MKR=None))
            kept.held_bytes += _bytes(matrix)
            while len(kept.steps) > 1 and self._is_full(kept):
                kept.held_bytes -= _bytes(kept.steps.popleft())
                kept.from_start = False

    def steps(self, job: JobId, epoch: Epoch, first: int, last: int) -> Sequence[StepMatrix]:
        """Closed steps first to last (inclusive) of one epoch, as far as they are kept."""
        return [
            matrix
            for matrix in self.of_attempt(attempt_of(epoch))
            if matrix.topology.job == job and matrix.topology.epoch == epoch and first <= matrix.step <= last
        ]

    def of_attempt(self, attempt: int) -> Sequence[StepMatrix]:
        """What is kept of an attempt, in the order in which the steps closed."""
        with self._lock:
            kept = self._kept.get(attempt)
            return () if kept is None else tuple(kept.steps)

    def before(self, attempt: int) -> Sequence[StepMatrix]:
        """What is kept of all older attempts, oldest first."""
        with self._lock:
            return [matrix for number in sorted(self._kept) if number < attempt for matrix in self._kept[number].steps]

    def from_start(self, attempt: int) -> bool:
        """Whether the first step kept of an attempt is the first that it closed."""
        with self._lock:
            kept = self._kept.get(attempt)
            return kept is not None and kept.from_start

    def _is_full(self, kept: _Kept) -> bool:
        config = self._config
        return len(kept.steps) > config.steps or kept.held_bytes > config.max_bytes // config.attempts


def own_work_ratio_R(steps: Sequence[StepMatrix], blind: Collection[int] = ()) -> Floats:
    """Each rank's own work against its peers' over these steps, as the straggler detector has it; NaN: cannot be told.

    Steps of another numbering of the ranks than the newest step's are left out. blind: ranks whose collector cannot
    tell its own work.
    """
    topology = steps[-1].topology
    alike = [matrix for matrix in steps if matrix.topology.device_R == topology.device_R]
    work = OwnWork(len(alike))
    work.adopt(topology, np.full(len(topology.device_R), -1, np.int32))
    work.tell_blind(blind)
    for matrix in alike:
        work.keep(matrix)
    return work.ratio_R()


def _bytes(matrix: StepMatrix) -> int:
    return matrix.values_FR.nbytes + matrix.seen_R.nbytes + matrix.flags_R.nbytes
