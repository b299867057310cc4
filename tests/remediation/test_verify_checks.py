"""The measure of values: how much neighbouring steps differ."""

import math

import numpy as np
import pytest

from trainwarden.remediation.checks import FLOOR, as_fast_as_peers, median, no_rise, spread_of, step_time

CALM = np.array([2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 2.0])
STEPS = np.arange(len(CALM))
NONE = np.array([np.nan, np.nan])


def test_a_spike_does_not_widen_the_spread() -> None:
    spiked = CALM.copy()
    spiked[5] = 50.0
    assert spread_of(STEPS, spiked) == pytest.approx(spread_of(STEPS, CALM), rel=0.5)


def test_a_slow_trend_hardly_adds_to_the_spread() -> None:
    assert spread_of(STEPS, CALM - 0.01 * STEPS) == pytest.approx(spread_of(STEPS, CALM), rel=0.1)


def test_a_flat_past_has_the_spread_of_rounding() -> None:
    assert spread_of(STEPS, np.full(10, 3.0)) == 3.0 * FLOOR


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        pytest.param(STEPS[:8], CALM[:8], id="too few steps"),
        pytest.param(2 * STEPS, CALM, id="steps that are no neighbours"),
        pytest.param(STEPS, np.where(STEPS < 5, CALM, np.nan), id="values not told"),
        pytest.param(STEPS[:0], CALM[:0], id="nothing recorded"),
    ],
)
def test_a_spread_that_cannot_be_told_is_not_told(steps: np.ndarray, values: np.ndarray) -> None:
    assert math.isnan(spread_of(steps, values))


def test_what_is_not_measured_cannot_be_told() -> None:
    assert math.isnan(median(NONE))
    assert no_rise("loss", NONE, 2.0, spread=0.1).result == "cannot tell"
    assert no_rise("loss", CALM, None, spread=0.1).result == "cannot tell"
    assert no_rise("loss", CALM, 2.0, spread=math.nan).result == "cannot tell"
    assert as_fast_as_peers(NONE, bar=1.15, settled=True).result == "cannot tell"
    assert step_time(CALM, NONE, bar=1.3, settled=True).result == "cannot tell"


def test_only_a_rise_over_the_saved_value_fails() -> None:
    assert no_rise("loss", CALM, 9.0, spread=0.1).result == "holds"
    assert str(no_rise("loss", CALM, 1.0, spread=0.1)) == (
        "loss: got 2 after 1; 1 away, expected at most 3.5 times the recorded spread of 0.1"
    )
