"""The resume audit: the first field that differs, and nothing that one side does not tell."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.core.model import Checkpoint, Epoch, JobId, Json, StepMatrix, Topology
from trainwarden.core.records import FEATURES
from trainwarden.remediation.audit import Difference, Standing, audit, beyond, compared, expected, standing

FULL = Standing(step=41, batch=41, ranks=4, learning_rate=2e-3)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        pytest.param(FULL, None, id="all the same"),
        pytest.param(replace(FULL, step=42), ("step", "42", "41"), id="a step late"),
        pytest.param(replace(FULL, step=42, batch=40), ("step", "42", "41"), id="the first of several"),
        pytest.param(replace(FULL, batch=40), ("batch", "40", "41"), id="a batch again"),
        pytest.param(replace(FULL, ranks=3), ("ranks", "3", "4"), id="fewer ranks"),
        pytest.param(replace(FULL, learning_rate=2e-4), ("learning_rate", "0.0002", "0.002"), id="schedule restarted"),
        pytest.param(replace(FULL, learning_rate=float(np.float32(2e-3))), None, id="rounded to float32"),
        pytest.param(Standing(step=41), None, id="tells nothing but its step"),
        pytest.param(Standing(), None, id="tells nothing"),
    ],
)
def test_the_first_difference_is_named(seen: Standing, found: tuple[str, str, str] | None) -> None:
    difference = audit(FULL, seen)
    assert difference == (None if found is None else Difference(field=found[0], got=found[1], expected=found[2]))


def test_what_one_side_does_not_tell_is_not_compared() -> None:
    assert compared(Standing(step=1, ranks=4), Standing(step=1, batch=1, ranks=4)) == ("step", "ranks")
    assert audit(Standing(), FULL) is None


def shown(step: int, *, batch: int | None = None, rate: float = 1e-3, ranks: int = 4) -> StepMatrix:
    values_FR = np.full((len(FEATURES), ranks), np.nan, np.float32)
    values_FR[FEATURES.index("learning_rate"), 1:] = rate  # rank 0 does not tell it
    return StepMatrix(
        topology=Topology(
            job=JobId("j"),
            epoch=Epoch(0),
            device_R=("",) * ranks,
            node_R=np.full(ranks, -1, np.int32),
            coords_RP=np.full((ranks, 5), -1, np.int16),
            domains={},
        ),
        step=step,
        batch=step if batch is None else batch,
        seen_ns=step,
        partial=False,
        values_FR=values_FR,
        seen_R=np.ones(ranks, np.bool_),
        flags_R=np.zeros(ranks, np.uint32),
    )


def saved(position: Json = 41, topology: Json = None) -> Checkpoint:
    return Checkpoint(
        name="step-40-0",
        job=JobId("j"),
        epoch=Epoch(0),
        step=40,
        t_ns=0,
        loss=None,
        grad_norm=None,
        data_position=position,
        topology=topology,
        rank_steps=dict.fromkeys(range(4), 40),
        trust="good",
        pinned=False,
        files={},
    )


RECORDED = [shown(40, batch=1040), shown(41, batch=1041, rate=2e-3)]
RATE = float(np.float32(2e-3))


@pytest.mark.parametrize(
    ("checkpoint", "recorded", "skip", "ranks", "told"),
    [
        pytest.param(saved(), [], [], None, Standing(step=41, batch=41, ranks=4), id="the checkpoint alone"),
        pytest.param(
            saved(41), [], [(41, 43)], None, Standing(step=41, batch=44, ranks=4), id="behind a skipped range"
        ),
        pytest.param(
            saved(None),
            RECORDED,
            [],
            None,
            Standing(step=41, batch=1041, ranks=4, learning_rate=RATE),
            id="as recorded",
        ),
        pytest.param(
            saved({"file": 3}), RECORDED[:1], [], None, Standing(step=41, batch=1041, ranks=4), id="after the recorded"
        ),
        pytest.param(
            saved(topology={"world_size": 8}), [], [], None, Standing(step=41, batch=41, ranks=8), id="told size"
        ),
        pytest.param(saved(), RECORDED, [], 3, Standing(step=41, batch=41, ranks=3), id="given fewer ranks"),
        pytest.param(None, [], [], None, Standing(step=1), id="afresh, nothing recorded"),
        pytest.param(
            None,
            [shown(1, batch=0)],
            [(0, 1)],
            4,
            Standing(step=1, batch=2, ranks=4, learning_rate=float(np.float32(1e-3))),
            id="afresh",
        ),
    ],
)
def test_where_an_attempt_must_begin(
    checkpoint: Checkpoint | None,
    recorded: Sequence[StepMatrix],
    skip: Sequence[tuple[int, int]],
    ranks: int | None,
    told: Standing,
) -> None:
    assert expected(checkpoint, {m.step: m for m in recorded}, skip, ranks, step=1) == told


def test_a_step_shows_where_its_run_stands() -> None:
    assert standing(shown(41, batch=7, rate=2e-3)) == Standing(step=41, batch=7, ranks=4, learning_rate=RATE)
    assert standing(shown(41, batch=-1, rate=np.nan)) == Standing(step=41, ranks=4)


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)).map(lambda r: (r[0], r[0] + r[1])), max_size=8),
)
def test_the_batch_behind_skipped_ranges_is_the_first_that_is_in_none(batch: int, skip: list[tuple[int, int]]) -> None:
    skipped = {index for first, last in skip for index in range(first, last + 1)}
    assert beyond(batch, skip) == next(index for index in range(batch, 200) if index not in skipped)
