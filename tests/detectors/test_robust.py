"""Medians, deviations, quantiles, streaks and CUSUMs, each against its plain definition."""

import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from trainwarden.detectors.robust import (
    NO_GROUP,
    CusumBank,
    RollingQuantile,
    Streak,
    group_median,
    mean_over,
    median_over,
    peer_median,
    robust_z,
)

NAN = float("nan")
value = st.one_of(st.floats(-1e6, 1e6), st.just(NAN))
ranks = st.lists(st.tuples(value, st.integers(-1, 3)), min_size=1, max_size=24)


def plain(values: Sequence[float]) -> float:
    return statistics.median(values) if values else NAN


def others(of: Sequence[tuple[float, int]], rank: int, *, itself: bool) -> list[float]:
    group = of[rank][1]
    return [x for r, (x, g) in enumerate(of) if g == group and not np.isnan(x) and (itself or r != rank)]


@given(ranks)
def test_medians_of_a_group_and_of_peers(of: list[tuple[float, int]]) -> None:
    values, groups = np.array([x for x, _ in of]), np.array([g for _, g in of])
    judged = [not np.isnan(x) and g != NO_GROUP for x, g in of]
    for itself, got in ((True, group_median(values, groups)), (False, peer_median(values, groups))):
        expected = [plain(others(of, rank, itself=itself)) if judged[rank] else NAN for rank in range(len(of))]
        assert_allclose(got, expected)


@given(st.lists(st.lists(value, min_size=3, max_size=3), min_size=1, max_size=9), st.integers(1, 4))
def test_median_and_mean_over_steps(rows: list[list[float]], least: int) -> None:
    values_SR = np.array(rows)
    known = [[x for x in column if not np.isnan(x)] for column in values_SR.T]
    assert_allclose(median_over(values_SR, least=least), [plain(k) if len(k) >= least else NAN for k in known])
    assert_allclose(mean_over(values_SR), [statistics.fmean(k) if k else NAN for k in known], rtol=1e-6, atol=1e-3)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20), st.sampled_from([0.25, 0.5, 2.0, 4.0]))
def test_robust_z_does_not_depend_on_the_scale(values: list[float], k: float) -> None:
    group = np.zeros(len(values), np.int32)
    assert_array_equal(robust_z(np.array(values), group), robust_z(k * np.array(values), group))


def test_robust_z_of_a_far_value() -> None:
    z = robust_z(np.array([2.0, 2.1, 1.9, 2.0, 9.0]), np.zeros(5, np.int32))
    assert z[4] == pytest.approx(0.6745 * 7.0 / 0.1)
    assert np.abs(z[:4]).max() < 1


def test_robust_z_of_a_group_without_spread_is_held_down_by_the_floor() -> None:
    values, group = np.array([1.0, 1.0, 1.0, 1.0 + 1e-9]), np.zeros(4, np.int32)
    assert robust_z(values, group)[3] == np.inf
    assert robust_z(values, group, floor=1e-3)[3] < 1e-3


@given(st.lists(st.floats(-1e3, 1e3), max_size=40), st.integers(1, 12), st.floats(0, 1))
def test_a_rolling_quantile_is_that_of_the_newest_values(values: list[float], window: int, q: float) -> None:
    recent = RollingQuantile(window)
    recent.push(values)
    kept = values[-window:]
    assert recent.count == len(kept)
    assert_allclose(recent.value(q), np.quantile(kept, q) if kept else NAN)
    assert_array_equal(recent.snapshot(), kept)
    assert_array_equal(RollingQuantile.of(window, recent.snapshot()).snapshot(), kept)


@pytest.mark.parametrize(
    ("readings", "high", "low"),
    [
        pytest.param([1.4, 1.4, 1.4], 3, 0, id="three in a row"),
        pytest.param([1.4, 1.2, 1.4], 1, 0, id="between the bars ends both"),
        pytest.param([1.4, NAN, 1.4], 2, 0, id="no reading is no news"),
        pytest.param([1.4, 1.0, 1.1], 0, 2, id="low again"),
        pytest.param([1.3], 1, 0, id="the upper bar itself is high"),
        pytest.param([1.15], 0, 0, id="the lower bar itself is not low"),
    ],
)
def test_streaks(readings: list[float], high: int, low: int) -> None:
    streak = Streak(above=1.3, below=1.15)
    streak.carry(np.array([-1], np.int32))
    for reading in readings:
        streak.update(np.array([reading]))
    assert (streak.high_R.tolist(), streak.low_R.tolist()) == ([high], [low])


def test_a_cusum_tells_a_shift_and_when_it_began() -> None:
    bank = CusumBank([0.1, 1.0])
    bank.carry(np.array([-1, -1], np.int32))
    for reading in [0.0] * 5 + [0.4] * 4:
        bank.update(np.array([reading, 0.0]))
    assert_allclose(bank.sum_KR, [[4 * 0.35, 0.0], [0.0, 0.0]])
    assert bank.age_KR.tolist() == [[4, 0], [0, 0]]


def test_state_follows_its_device() -> None:
    bank = CusumBank([0.1])
    bank.carry(np.array([-1, -1], np.int32))
    bank.update(np.array([1.0, 0.0]))
    bank.carry(np.array([1, -1, 0], np.int32))
    assert bank.age_KR.tolist() == [[0, 0, 1]]
