"""Closed steps as a table: a row a step, or a row a step and rank."""

import math

import numpy as np
from tests.detectors.world import topology

from trainwarden.core.model import StepMatrix
from trainwarden.core.recording import step_table
from trainwarden.core.records import FEATURES, GRAD_NONFINITE, LOSS_NONFINITE


def matrix(step: int, seen: list[bool], **rows: list[float]) -> StepMatrix:
    """Of three ranks; rows: a feature and its value on each."""
    values_FR = np.full((len(FEATURES), 3), np.nan, np.float32)
    for name, values in rows.items():
        values_FR[FEATURES.index(name)] = values
    flags_R = np.array([LOSS_NONFINITE, 0, GRAD_NONFINITE], np.uint32) * (step == 2)
    return StepMatrix(
        topology=topology(3),
        step=step,
        batch=10 * step,
        seen_ns=step,
        partial=not all(seen),
        values_FR=values_FR,
        seen_R=np.array(seen),
        flags_R=flags_R.astype(np.uint32),
    )


STEPS = [
    matrix(1, [True] * 3, step_s=[1.0, 3.0, 2.0], loss=[0.5, 0.5, 0.5], tokens=[10, 10, 12]),
    matrix(2, [False, True, True], step_s=[math.nan, 1.0, 2.0], loss=[math.nan, 0.25, 0.75]),
]


def test_a_row_a_step_has_the_slowest_time_all_tokens_and_the_lowest_ranks_word() -> None:
    table = step_table(STEPS)
    assert table.step.tolist() == [1, 2]
    assert table.batch.tolist() == [10, 20]
    assert table.step_s.tolist() == [3.0, 2.0]
    assert table.loss.tolist() == [0.5, 0.25]
    assert table.tokens[0] == 32
    assert math.isnan(table.tokens[1]), "nobody told: not 0"
    assert table.partial.tolist() == [False, True]
    assert table["flags"].tolist() == [0, LOSS_NONFINITE | GRAD_NONFINITE]


def test_a_row_a_step_and_rank_has_each_ranks_own_values_and_no_row_for_one_that_was_not_seen() -> None:
    table = step_table(STEPS, by_rank=True)
    assert list(zip(table["step"], table["rank"], strict=True)) == [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]
    assert table.step_s.tolist() == [1.0, 3.0, 2.0, 1.0, 2.0]
    assert table["flags"].tolist() == [0, 0, 0, 0, GRAD_NONFINITE]


def test_no_step_gives_a_table_with_all_columns_and_no_row() -> None:
    for by_rank in (False, True):
        table = step_table([], by_rank=by_rank)
        assert table.empty
        assert {"epoch", "step", *FEATURES} <= set(table.columns)
        assert ("rank" in table.columns) == by_rank
