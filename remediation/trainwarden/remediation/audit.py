"""Resume audit: does an attempt go on where its checkpoint stopped? Names the first field that differs.

Frameworks ignore missing state without a word, and the loss shows it late or never: a schedule that began anew
(pytorch-lightning#18780), data that is read again, a step that is lost (DeepSpeed's optimizer step). What can be
compared exactly is compared at the first step; what one side does not tell is not compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from trainwarden.core.model import Checkpoint, StepMatrix
from trainwarden.core.records import FEATURES

SAME = 1e-5
"""Relative difference of learning rates that are the same: a float32 keeps 7 digits, and schedules that multiply their
way forward lose one or two."""

Skip = Sequence[tuple[int, int]]
"""Ranges of batches, inclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands at a step; None: not told. Compared in this order."""

    step: int | None = None
    batch: int | None = None
    ranks: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first field that differs."""

    field: str
    got: str
    expected: str


def audit(expected: Standing, seen: Standing) -> Difference | None:
    """The first difference; None where all that both sides tell agrees.

    >>> audit(Standing(step=41, batch=41), Standing(step=41, batch=40, ranks=4))
    Difference(field='batch', got='40', expected='41')
    """
    for name in (field.name for field in fields(Standing)):
        want, got = getattr(expected, name), getattr(seen, name)
        if want is not None and got is not None and not math.isclose(want, got, rel_tol=_tolerance(name)):
            return Difference(field=name, got=_say(got), expected=_say(want))
    return None


def compared(expected: Standing, seen: Standing) -> tuple[str, ...]:
    """Fields that both sides tell."""
    names = [field.name for field in fields(Standing)]
    return tuple(n for n in names if getattr(expected, n) is not None and getattr(seen, n) is not None)


def standing(matrix: StepMatrix) -> Standing:
    """Where a closed step shows its run to be."""
    rate = told(matrix, "learning_rate")
    return Standing(
        step=matrix.step,
        batch=matrix.batch if matrix.batch >= 0 else None,
        ranks=len(matrix.topology.device_R),
        learning_rate=None if math.isnan(rate) else rate,
    )


def expected(
    checkpoint: Checkpoint | None, recorded: Mapping[int, StepMatrix], skip: Skip, ranks: int | None, step: int
) -> Standing:
    """Where an attempt must begin.

    recorded: by step, what earlier attempts showed. ranks: how many the attempt was given, None: as many as saved the
    checkpoint. step: where it did begin, which is all there is to go by without a checkpoint.
    """
    at = step if checkpoint is None else checkpoint.step + 1
    position = None if checkpoint is None else _whole(checkpoint.data_position)
    if position is None and at in recorded:
        position = recorded[at].batch
    if position is None and at - 1 in recorded:
        position = recorded[at - 1].batch + 1
    if ranks is None and checkpoint is not None:
        ranks = _saved_by(checkpoint)
    # scripts may scale the rate with the number of ranks
    comparable = at in recorded and ranks in (None, len(recorded[at].topology.device_R))
    rate = told(recorded[at], "learning_rate") if comparable else math.nan
    return Standing(
        step=at,
        batch=None if position is None else beyond(position, skip),
        ranks=ranks,
        learning_rate=None if math.isnan(rate) else rate,
    )


def beyond(batch: int, skip: Skip) -> int:
    """The batch itself, or the first one behind the ranges that it is in.

    >>> beyond(45, [(47, 48), (45, 46)]), beyond(44, [(45, 46)])
    (49, 44)
    """
    for first, last in sorted(skip):
        if first <= batch <= last:
            batch = last + 1
    return batch


def told(matrix: StepMatrix, feature: str) -> float:
    """A value that all ranks agree on: that of the lowest rank that told it; NaN: none did."""
    value_R = matrix.values_FR[FEATURES.index(feature)]
    known_R = ~np.isnan(value_R)
    return float(value_R[int(known_R.argmax())]) if known_R.any() else math.nan


def _saved_by(checkpoint: Checkpoint) -> int | None:
    """How many ranks saved it; other layouts of as many ranks are the framework's business (DCP reshards)."""
    topology = checkpoint.topology
    said = _whole(topology.get("world_size")) if isinstance(topology, Mapping) else _whole(topology)
    return said if said is not None else len(checkpoint.rank_steps) or None


def _say(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def _tolerance(field: str) -> float:
    return SAME if field == "learning_rate" else 0.0


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
