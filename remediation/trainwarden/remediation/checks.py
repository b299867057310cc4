"""What the first steps of a new attempt must show, each as a small pure function over arrays.

Values. A loss (or a gradient norm) agrees with a recorded one within a band that comes from the recorded differences
between neighbouring steps: two readings of one quantity with independent noise differ by as much as two neighbours do,
and a slow trend hardly adds to it. Its unit, the spread, is their median absolute deviation, so that a recorded spike
does not widen it; what is held against it is the median over the new steps, so that a single odd batch does not fail a
good resume. Source of 0.6745 and 3.5: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993. Simulated with 64
recorded steps on other data: good resumes fail in 0 of 5000 (normal noise) to 4 in 5000 (Student's t with 3 degrees of
freedom, neighbours correlated by 0.5), against the single value of a checkpoint in 0 to 54.

Times. A busy machine can slow one window of steps down, so a time that is out of bounds is `not yet` right until
`settled`: the newest window is looked at again.

What cannot be told is said (`cannot tell`), never passed in silence.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Json

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Result = Literal["holds", "not yet", "cannot tell", "fails"]

NORMAL_QUARTILE = 0.6745
LIMIT = 3.5
"""Spreads by which values may lie away on other data: the modified z-score of an outlier; see the module's source."""

SAME_DATA = 1.0
"""Spreads by which they may lie away on the same data: sums in another order and dropout make less than the 0.67 that
other data would make; what makes more is another state."""

LEAST = 8
"""Differences from which on a spread is told: as many as a window of the detectors has."""

FLOOR = 2.0**-8
"""Least spread, relative to the level: the rounding of bfloat16, or a flat past would turn rounding into failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at."""

    name: str
    result: Result
    got: str
    expected: str = ""

    def __str__(self) -> str:
        return f"{self.name}: got {self.got}, expected {self.expected}" if self.expected else f"{self.name}: {self.got}"

    def told(self) -> Json:
        """As it stands in an outcome."""
        return {"result": self.result, "got": self.got, "expected": self.expected}


def step_time(new_S: Floats, recorded_S: Floats, *, bar: float, settled: bool) -> Check:
    """Median wall time of the new steps, at most `bar` times that of the recorded ones. Own times are required."""
    got_s, was_s = median(new_S), median(recorded_S)
    if math.isnan(got_s):
        return Check(name="step_time", result=_unless(settled), got="no step time", expected="measured steps")
    if math.isnan(was_s):
        return Check(name="step_time", result="cannot tell", got=f"{got_s:.4g} s, none recorded before the onset")
    return Check(
        name="step_time",
        result="holds" if got_s <= bar * was_s else _unless(settled),
        got=f"{got_s:.4g} s ({got_s / was_s:.2f} times the recorded)",
        expected=f"at most {bar:.2f} times the recorded {was_s:.4g} s",
    )


def present(seen_SR: Bools, *, settled: bool) -> Check:
    """Every rank was seen in at least one of the steps."""
    absent = np.flatnonzero(~seen_SR.any(axis=0)).tolist()
    if not absent:
        return Check(name="ranks", result="holds", got=f"all {seen_SR.shape[1]} seen")
    got = f"nothing of {len(absent)} (first: rank {absent[0]})"
    return Check(name="ranks", result=_unless(settled), got=got, expected=f"steps of all {seen_SR.shape[1]} ranks")


def as_fast_as_peers(ratio_R: Floats, *, bar: float, settled: bool) -> Check:
    """No rank's own work is `bar` times its peers' or more."""
    if np.isnan(ratio_R).all():
        return Check(name="own_work", result="cannot tell", got="own work cannot be told")
    worst = int(np.nanargmax(ratio_R))
    return Check(
        name="own_work",
        result="holds" if ratio_R[worst] < bar else _unless(settled),
        got=f"rank {worst} at {ratio_R[worst]:.2f} times its peers",
        expected=f"every rank below {bar:.2f} times its peers",
    )


def finite(step_S: NDArray[np.int64], flagged_S: Bools) -> Check:
    """No value of any step is NaN or infinite."""
    if not flagged_S.any():
        return Check(name="finite", result="holds", got=f"{len(step_S)} steps")
    got = f"NaN or infinity at step {int(step_S[int(flagged_S.argmax())])}"
    return Check(name="finite", result="fails", got=got, expected="finite values")


def same_steps(name: str, new_S: Floats, was_S: Floats, same_S: Bools, *, spread: float, exact: bool) -> Check:
    """Values against those recorded at the same steps.

    same_S: steps reached from the same state by the same data on as many ranks; there the bits may agree, and if the
    training is `exact` they must.
    """
    known_S = ~np.isnan(new_S) & ~np.isnan(was_S)
    if not known_S.any():
        return Check(name=name, result="cannot tell", got="nothing recorded at the same steps")
    differ_S, alike_S = known_S & (new_S != was_S), known_S & same_S
    steps = int(np.count_nonzero(known_S))
    words = f"{steps - int(np.count_nonzero(differ_S))} of {steps} steps equal to the last bit"
    if not differ_S.any():
        return Check(name=name, result="holds", got=words)
    if exact and (differ_S & alike_S).any():
        at = int((differ_S & alike_S).argmax())
        return Check(name=name, result="fails", got=f"{new_S[at]:.9g}", expected=f"{was_S[at]:.9g} to the last bit")
    away_S = new_S - was_S
    on_same = _within(name, median(np.abs(away_S[alike_S])), SAME_DATA, spread, f"{words}; on the same data")
    on_other = _within(name, abs(median(away_S[known_S & ~same_S])), LIMIT, spread, f"{words}; on other data")
    return on_same if on_same.result == "fails" or not (known_S & ~same_S).any() else on_other


def no_rise(name: str, new_S: Floats, level: float | None, *, spread: float) -> Check:
    """Values against the one the checkpoint recorded: a lower one is what training is for, a jump is lost state."""
    if level is None or np.isnan(new_S).all():
        return Check(name=name, result="cannot tell", got="not recorded with the checkpoint, or not told now")
    now = median(new_S)
    return _within(name, now - level, LIMIT, spread, f"{now:.6g} after {level:.6g};")


def spread_of(step_S: NDArray[np.int64], value_S: Floats) -> float:
    """How much neighbouring steps differ (a robust deviation); NaN where too few were recorded."""
    known_S = ~np.isnan(value_S)
    step_S, value_S = step_S[known_S], value_S[known_S]
    difference_S = np.diff(value_S)[np.diff(step_S) == 1]
    if len(difference_S) < LEAST:
        return math.nan
    deviation = median(np.abs(difference_S - median(difference_S))) / NORMAL_QUARTILE
    return max(deviation, FLOOR * abs(median(value_S)))


def median(value_S: NDArray[np.floating[Any]]) -> float:
    """Of the values that are not NaN; NaN where none is."""
    known_S = value_S[~np.isnan(value_S)]
    return float(np.median(known_S)) if len(known_S) else math.nan


def _within(name: str, away: float, limit: float, spread: float, words: str) -> Check:
    """away: NaN where there is nothing to compare."""
    if math.isnan(spread):
        return Check(name=name, result="cannot tell", got=f"{words} nothing to measure by: too few steps recorded")
    return Check(
        name=name,
        result="fails" if away > limit * spread else "holds",
        got=f"{words} {away:.4g} away",
        expected=f"at most {limit:g} times the recorded spread of {spread:.4g}",
    )


def _unless(settled: bool) -> Result:
    return "fails" if settled else "not yet"
