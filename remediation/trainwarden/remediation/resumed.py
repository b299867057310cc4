"""A new attempt beside what was recorded before it: closed steps in, arrays over steps out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Checkpoint, StepMatrix
from trainwarden.core.records import FEATURES, NONFINITE, attempt_of
from trainwarden.remediation.audit import Skip, told
from trainwarden.remediation.checks import Bools, Floats, median

_STEP_S = FEATURES.index("step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Why an attempt was started, and from what."""

    kind: str
    """Of the plan's incident: rank.slow, loss.nonfinite, ..."""
    onset_ns: int
    """First abnormal sign: steps that closed later do not tell how long a step should take."""
    before_ns: int | None = None
    """As in the arguments of rung `running`: values recorded from then on are not trusted; None: the trouble does not
    touch values."""
    checkpoint: Checkpoint | None = None
    """The chosen one; None: started afresh."""
    skip: Skip = ()
    ranks: int | None = None
    """How many ranks the attempt was given; None: as many as saved the checkpoint."""
    ended: bool = False
    """The attempt ended in order: the steps there are have to do."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """One look at an attempt."""

    origin: Origin
    steps: Sequence[StepMatrix]
    """Its closed steps, at least one."""
    from_start: bool
    """The first of them is its first."""
    older: Sequence[StepMatrix]
    """Closed steps of attempts before it, oldest first."""
    needed: int
    """Steps that are enough to judge."""
    recorded_steps: int
    """Steps to compare with."""

    @property
    def enough(self) -> bool:
        """Whether there are steps enough."""
        return len(self.steps) >= self.needed or self.origin.ended

    @cached_property
    def recorded(self) -> Mapping[int, StepMatrix]:
        """By step, what may be compared with: finite and trusted. The checkpoint's own attempt goes before others:
        what it did after the save is the direct continuation."""
        before_ns, point = self.origin.before_ns, self.origin.checkpoint
        own = attempt_of(point.epoch) if point is not None else None
        trusted = [m for m in self.older if (before_ns is None or m.seen_ns < before_ns) and not _flagged(m)]
        return {m.step: m for m in sorted(trusted, key=lambda m: attempt_of(m.topology.epoch) == own)}

    @cached_property
    def around(self) -> Sequence[StepMatrix]:
        """Recorded steps nearest to where the attempt began, in their order."""
        first = self.steps[0].step
        near = sorted(self.recorded, key=lambda step: abs(step - first))[: self.recorded_steps]
        return [self.recorded[step] for step in sorted(near)]

    @cached_property
    def healthy(self) -> Sequence[StepMatrix]:
        """Last whole steps before the onset, without the first of an attempt, which warms up."""
        onset_ns = self.origin.onset_ns
        later = [m for last, m in pairwise(self.older) if last.topology.epoch == m.topology.epoch]
        return [m for m in later if m.seen_ns < onset_ns and not m.partial][-self.recorded_steps :]

    @property
    def newest(self) -> Sequence[StepMatrix]:
        """The newest steps that are enough to judge, all of one numbering of the ranks."""
        return [m for m in self.steps[-self.needed :] if m.topology.device_R == self.steps[-1].topology.device_R]

    @property
    def timed(self) -> Sequence[StepMatrix]:
        """The same without the attempt's very first."""
        return [m for m in self.newest if m is not self.steps[0]]

    def pairs(self, name: str) -> tuple[Floats, Floats, Bools]:
        """A signal at the first steps, now and as recorded, and whether data and ranks were the same all the way."""
        first = self.steps[: self.needed]
        past = [self.recorded.get(m.step) for m in first]
        was_S = np.array([np.nan if m is None else told(m, name) for m in past])
        same_S = np.array([m is not None and _alike(m, now) for m, now in zip(past, first, strict=True)], np.bool_)
        return told_S(first, name), was_S, self.from_start & np.logical_and.accumulate(same_S)

    def begun_ns(self) -> int | None:
        """When its first step began; None: not seen."""
        if not self.from_start:
            return None
        (took_s,) = step_time_S(self.steps[:1])
        return self.steps[0].seen_ns - (0 if np.isnan(took_s) else int(took_s * 1e9))

    def normal_ns(self, bar: float) -> int | None:
        """When it first closed a step in at most `bar` times the recorded time; None: not yet, or none is recorded."""
        fast_S = step_time_S(self.steps) <= bar * median(step_time_S(self.healthy))  # False where either is NaN
        return self.steps[int(fast_S.argmax())].seen_ns if fast_S.any() else None


def told_S(steps: Sequence[StepMatrix], name: str) -> Floats:
    """A signal that all ranks agree on, step by step."""
    return np.array([told(m, name) for m in steps], np.float64)


def step_time_S(steps: Sequence[StepMatrix]) -> Floats:
    """Wall time of each step: the median over the ranks that told it."""
    return np.array([median(m.values_FR[_STEP_S]) for m in steps], np.float64)


def step_S(steps: Sequence[StepMatrix]) -> NDArray[np.int64]:
    """Step numbers."""
    return np.array([m.step for m in steps], np.int64)


def flagged_S(steps: Sequence[StepMatrix]) -> Bools:
    """Where a value was not finite."""
    return np.array([_flagged(m) for m in steps], np.bool_)


def ranks_of(steps: Sequence[StepMatrix]) -> int:
    """How many ranks there were last; 0: no step tells."""
    return len(steps[-1].topology.device_R) if steps else 0


def _flagged(matrix: StepMatrix) -> bool:
    return bool((matrix.flags_R & NONFINITE).any())


def _alike(one: StepMatrix, other: StepMatrix) -> bool:
    """Same data on the same layout: the bits may be the same."""
    return one.batch == other.batch and np.array_equal(one.topology.coords_RP, other.topology.coords_RP)
