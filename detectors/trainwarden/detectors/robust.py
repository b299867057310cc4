"""Robust statistics over ranks and steps: the one home of medians, deviations, quantiles, streaks and CUSUMs.

Medians instead of means, so that what is looked for does not raise the bar it is measured by; each rank against its
peers *without itself*, since in a group of two to four a slow rank would be half of its own reference. Everything works
on arrays over ranks. NaN is "not seen" and is left out.

Sources. 0.6745 (the 75th percentile of the normal distribution, which makes a MAD comparable to a deviation): Iglewicz
and Hoaglin, How to Detect and Handle Outliers, 1993. CUSUM, and the last moment it was zero as the estimate of the
onset: Page, Continuous Inspection Schemes, Biometrika 41, 1954. Reference value of half the shift: Lorden, Procedures
for Reacting to a Change in Distribution, Annals of Mathematical Statistics 42, 1971.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import State

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NORMAL_QUARTILE = 0.6745
"""See the module's sources."""

NO_GROUP = -1
"""Group of a rank that is compared with nobody."""


def median_over(values_SR: NDArray[Any], *, least: int = 1) -> Floats:
    """Median of each column over its rows that are not NaN; NaN where fewer than `least` are.

    >>> median_over(np.array([[1.0, np.nan], [3.0, 4.0], [9.0, np.nan]]), least=2)
    array([ 3., nan])
    """
    ordered = np.sort(np.asarray(values_SR, np.float64), axis=0)
    count = np.count_nonzero(~np.isnan(ordered), axis=0)
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(ordered) - 1)
    middle = 0.5 * (_pick(ordered, low) + _pick(ordered, high))
    return np.where(count >= max(least, 1), middle, np.nan)


def mean_over(values_SR: NDArray[Any]) -> Floats:
    """Mean of each column over its rows that are not NaN; NaN where none is."""
    known = ~np.isnan(values_SR)
    count = np.count_nonzero(known, axis=0)
    total = np.where(known, values_SR, 0.0).sum(axis=0)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan), np.float64)


def group_median(values_R: NDArray[Any], group_R: NDArray[Any]) -> Floats:
    """For each rank, the median of its group, itself included; NaN for what is not seen or in no group.

    >>> group_median(np.array([1.0, 2.0, 9.0, 5.0]), np.array([0, 0, 0, 1]))
    array([2., 2., 2., 5.])
    """
    groups = _Groups(values_R, group_R)
    low, high = (groups.count - 1) // 2, groups.count // 2
    return groups.scatter(0.5 * (groups.at(low) + groups.at(high)))


def peer_median(values_R: NDArray[Any], group_R: NDArray[Any]) -> Floats:
    """For each rank, the median of the *others* in its group; NaN where there are none.

    >>> peer_median(np.array([1.0, 2.0, 9.0, 5.0]), np.array([0, 0, 0, 1]))
    array([5.5, 5. , 1.5, nan])
    """
    groups = _Groups(values_R, group_R)
    others = groups.count - 1
    low, high = np.maximum(others - 1, 0) // 2, others // 2
    # without itself, all that sorts at or behind its own place moves up by one
    low, high = low + (low >= groups.place), np.minimum(high + (high >= groups.place), groups.count - 1)
    middle = 0.5 * (groups.at(np.minimum(low, groups.count - 1)) + groups.at(high))
    return groups.scatter(np.where(others > 0, middle, np.nan))


def robust_z(values_R: NDArray[Any], group_R: NDArray[Any], *, floor: float = 0.0) -> Floats:
    """How many robust deviations each rank lies above its group's median: 0.6745 (x - median) / max(MAD, floor).

    `floor` (same unit as the values) keeps a group without any spread from turning rounding into alarms.
    """
    away_R = np.asarray(values_R, np.float64) - group_median(values_R, group_R)
    spread_R = np.maximum(group_median(np.abs(away_R), group_R), floor)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(away_R == 0.0, 0.0, NORMAL_QUARTILE * away_R / spread_R)


class RollingQuantile:
    """Quantiles of the newest values of one series, in a ring of fixed size.

    >>> recent = RollingQuantile(4)
    >>> recent.push([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> recent.count, recent.value(0.5)
    (4, 3.5)
    """

    def __init__(self, window: int) -> None:
        self._ring: Floats = np.empty(window)
        self._pushed = 0
        self._known: dict[float, float] = {}

    @property
    def count(self) -> int:
        """Values in the window."""
        return min(self._pushed, len(self._ring))

    def push(self, values: Sequence[float]) -> None:
        """Add values in their order; the oldest fall out."""
        for value in values:
            self._ring[self._pushed % len(self._ring)] = value
            self._pushed += 1
        self._known.clear()

    def value(self, quantile: float) -> float:
        """The quantile (0 to 1), interpolated; NaN if there is nothing."""
        if self.count == 0:
            return float("nan")
        if quantile not in self._known:
            self._known[quantile] = float(np.quantile(self._ring[: self.count], quantile))
        return self._known[quantile]

    def snapshot(self) -> Floats:
        """The values, oldest first."""
        if self._pushed <= len(self._ring):
            return self._ring[: self._pushed].copy()
        return np.roll(self._ring, -(self._pushed % len(self._ring)))

    @classmethod
    def of(cls, window: int, values: NDArray[Any]) -> "RollingQuantile":
        """As it was when snapshot() gave these values."""
        made = cls(window)
        made.push(np.asarray(values, np.float64).tolist())
        return made


class Streak:
    """How many times in a row each rank was above the upper and below the lower bar; NaN is no news.

    Two bars, so that a rank that stays near one of them does not flap.
    """

    def __init__(self, *, above: float, below: float) -> None:
        self._above, self._below = above, below
        self.high_R: NDArray[np.int32] = np.zeros(0, np.int32)
        self.low_R: NDArray[np.int32] = np.zeros(0, np.int32)

    def update(self, values_R: Floats) -> None:
        """Count one more reading of each rank."""
        known_R = ~np.isnan(values_R)
        self.high_R = _count(self.high_R, values_R >= self._above, known_R)
        self.low_R = _count(self.low_R, values_R < self._below, known_R)

    def carry(self, row_R: NDArray[np.int32]) -> None:
        """Renumber the ranks: row_R holds the old row of each new rank, -1 for a new one."""
        self.high_R, self.low_R = carry(self.high_R, row_R, 0), carry(self.low_R, row_R, 0)

    def snapshot(self) -> State:
        return {"high": self.high_R.copy(), "low": self.low_R.copy()}

    def restore(self, state: State) -> None:
        self.high_R, self.low_R = state["high"].copy(), state["low"].copy()


class CusumBank:
    """One-sided CUSUMs of every rank at several sizes of shift at once.

    Each sums what exceeds half its shift and never falls below zero; the number of readings since it last was zero
    estimates when the shift began.
    """

    def __init__(self, shifts: Sequence[float]) -> None:
        self._shift_K1 = np.asarray(shifts, np.float64)[:, None]
        self.sum_KR: Floats = np.zeros((len(shifts), 0))
        self.age_KR: NDArray[np.int64] = np.zeros((len(shifts), 0), np.int64)
        """Readings since the sum was last zero."""

    def update(self, values_R: Floats) -> None:
        """Add one reading of each rank; NaN adds none."""
        known_R = ~np.isnan(values_R)
        risen_KR = np.maximum(self.sum_KR + np.where(known_R, values_R, 0.0) - self._shift_K1 / 2, 0.0)
        self.sum_KR = np.where(known_R, risen_KR, self.sum_KR)
        self.age_KR = np.where(self.sum_KR > 0, self.age_KR + 1, 0)

    def carry(self, row_R: NDArray[np.int32]) -> None:
        """Renumber the ranks as Streak.carry does."""
        self.sum_KR, self.age_KR = carry(self.sum_KR, row_R, 0.0), carry(self.age_KR, row_R, 0)

    def snapshot(self) -> State:
        return {"sum": self.sum_KR.copy(), "age": self.age_KR.copy()}

    def restore(self, state: State) -> None:
        self.sum_KR, self.age_KR = state["sum"].copy(), state["age"].copy()


def carry(values: NDArray[Any], row_R: NDArray[np.int32], missing: float) -> NDArray[Any]:
    """Renumber the last axis: row_R holds the old row of each new rank, -1 where there was none.

    >>> carry(np.array([5, 6, 7]), np.array([2, -1], np.int32), 0)
    array([7, 0])
    """
    if values.shape[-1] == 0:
        return np.full((*values.shape[:-1], len(row_R)), missing, values.dtype)
    return np.where(row_R >= 0, values[..., np.maximum(row_R, 0)], np.asarray(missing, values.dtype))


def _count(count_R: NDArray[np.int32], hit_R: Bools, known_R: Bools) -> NDArray[np.int32]:
    return np.where(known_R, np.where(hit_R, count_R + 1, 0), count_R).astype(np.int32)


def _pick(ordered: Floats, row: NDArray[np.intp]) -> Floats:
    return np.asarray(np.take_along_axis(ordered, row[None], axis=0)[0])


class _Groups:
    """The seen values sorted by group and size: a segment a group, so that a median is an index."""

    def __init__(self, values_R: NDArray[Any], group_R: NDArray[Any]) -> None:
        values = np.asarray(values_R, np.float64)
        self._ranks = len(values)
        kept = np.flatnonzero(~np.isnan(values) & (group_R != NO_GROUP))
        self._order = kept[np.lexsort((values[kept], group_R[kept]))]
        self._sorted = values[self._order]
        group = group_R[self._order]
        first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]][: len(group)])
        size = np.diff(np.r_[first, len(group)])
        self._start = np.repeat(first, size)
        self.count = np.repeat(size, size)
        """Size of each kept value's group."""
        self.place = np.arange(len(group)) - self._start
        """Each kept value's place in its group."""

    def at(self, place: NDArray[Any]) -> Floats:
        """The value at this place of each kept value's own group."""
        return self._sorted[self._start + place] if len(self._sorted) else self._sorted

    def scatter(self, result: Floats) -> Floats:
        """Back into the order of ranks."""
        out = np.full(self._ranks, np.nan)
        out[self._order] = result
        return out
