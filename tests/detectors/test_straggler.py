"""Slow ranks: who needs longer for its own work than its peers, why, and since when."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.detectors.world import World, evidence, feed, said, step_matrix, topology

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Finding, Input, StepMatrix, Topology
from trainwarden.core.records import CONTAINS_COMM, DEVICE_TIMED, FEATURES
from trainwarden.detectors.straggler import Straggler, StragglerConfig

SHARE = {"data_s": 0.1, "forward_s": 0.4, "backward_s": 0.4, "optimizer_s": 0.1}
"""Of own work."""
STEPS = 40
NAN = float("nan")
Noise = NDArray[np.float64]
OUTLIER, OUTLIER_RATE = 1.4, 0.05


def noisy(ranks: int = 4, steps: int = STEPS, seed: int = 0, sd: float = 0.05) -> Noise:
    """Own work of healthy ranks on a busy machine: 5 % log-normal noise, one step in twenty 1.4 times as long."""
    dice = np.random.default_rng(seed)
    noise_SR = 0.1 * np.exp(sd * dice.standard_normal((steps, ranks)))
    return np.asarray(np.where(dice.random((steps, ranks)) < OUTLIER_RATE, OUTLIER * noise_SR, noise_SR), np.float64)


def slow(
    factor: float, rank: int = 2, *, begin: int = 0, end: int = STEPS, phase: str | None = None, asleep: bool = False
) -> list[Input]:
    """One rank is slower from a step on, in all phases or in one, computing or asleep."""
    own_SR = noisy()
    excess_S = np.zeros(STEPS)
    excess_S[begin:end] = (factor - 1) * own_SR[begin:end, rank]
    return list(series(own_SR, {rank: excess_S}, phase=phase, asleep=asleep))


def series(
    own_SR: Noise,
    excess: Mapping[int, Noise] | None = None,
    *,
    phase: str | None = None,
    asleep: bool = False,
    where: Topology | None = None,
    first: int = 0,
) -> list[StepMatrix]:
    where = where or topology(own_SR.shape[1])
    made = []
    for step, own_R in enumerate(own_SR):
        over_R = np.zeros(len(own_R))
        for rank, excess_S in (excess or {}).items():
            over_R[rank] = excess_S[step]
        parts = {
            name: share * own_R + (share if phase is None else name == phase) * over_R for name, share in SHARE.items()
        }
        cpu_R = own_R if asleep else own_R + over_R
        values = parts | {"cpu_s": cpu_R, "runq_s": np.full(len(own_R), 0.03), "wait_s": np.full(len(own_R), 0.2)}
        made.append(step_matrix(where, first + step, values))
    return made


def findings(items: Sequence[Input], config: StragglerConfig | None = None) -> list[Finding]:
    return feed(Straggler(config), items)


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_healthy_noise_says_nothing(ranks: int) -> None:
    """240 windows of each size; no seed was chosen."""
    detector = Straggler()
    assert [f for seed in range(5) for f in feed(detector, series(noisy(ranks, 200, seed)))] == []


def test_a_slow_rank_is_suspected_after_a_window_and_certain_after_two() -> None:
    found = findings(slow(1.6))
    assert said(found) == [("provisional", "rank.slow", "rank:2"), ("final", "rank.slow", "rank:2")]
    assert [f.id for f in found] == ["straggler/job/0/rank:2/0"] * 2
    last = found[-1]
    assert last.lost_s_per_step == pytest.approx(0.06, rel=0.15)
    assert evidence(last)["ratio"] == pytest.approx(1.6, rel=0.1)
    assert (evidence(last)["device"], last.confidence > found[0].confidence) == ("n1:2", True)


@pytest.mark.parametrize("begin", range(8, 16))
def test_it_is_found_within_16_steps_wherever_in_a_window_it_began(begin: int) -> None:
    found = findings(slow(1.6, begin=begin))
    final = next(f for f in found if f.status == "final")
    step = next(m.step for m in series(noisy()) if m.seen_ns == final.seen_ns)
    assert step + 1 - begin <= 16
    assert final.onset_step is not None
    assert abs(final.onset_step - begin) <= 2


@pytest.mark.parametrize(
    ("asleep", "phase", "cause", "named"),
    [
        pytest.param(False, None, "computing", None, id="slow by computing"),
        pytest.param(True, None, "stalling", None, id="slow by sleeping"),
        pytest.param(False, "backward_s", "computing", "backward", id="slow in backward only"),
        pytest.param(True, "data_s", "stalling", "data", id="waits for its data"),
    ],
)
def test_why_it_is_slow(asleep: bool, phase: str | None, cause: str, named: str | None) -> None:
    last = findings(slow(1.6, phase=phase, asleep=asleep))[-1]
    assert evidence(last)["cause"] == cause
    assert cause in last.reason
    if named is not None:
        assert evidence(last)["phase"] == named
        assert last.reason.endswith(f"most of it in {named}")


@pytest.mark.parametrize(
    ("items", "found"),
    [
        pytest.param(lambda: slow(1.6, end=24), ["provisional", "final", "cleared"], id="it heals"),
        pytest.param(lambda: slow(1.6, begin=10, end=16), ["provisional", "withdrawn"], id="it does not last"),
        pytest.param(lambda: slow(1.2), [], id="not slow enough"),
        pytest.param(lambda: slow(30.0, begin=12, end=13), [], id="one stall of one step"),
        pytest.param(lambda: slow(5.0, end=6), [], id="first steps that compile"),
        pytest.param(lambda: series(noisy(1), {0: np.ones(STEPS)}), [], id="one rank alone has no peers"),
    ],
)
def test_life_of_a_finding(items: Callable[[], list[Input]], found: list[str]) -> None:
    assert [f.status for f in findings(items())] == found


def test_peers_are_of_the_same_pipeline_stage() -> None:
    """The last stage has the head and works twice as long: nobody is slow."""
    where, own_SR = topology(8, stages=2), noisy(8)
    own_SR[:, 4:] *= 2.0
    assert findings(series(own_SR, where=where)) == []
    found = findings(series(own_SR, {1: 0.6 * own_SR[:, 1]}, where=where))
    assert {str(f.subject) for f in found} == {"rank:1"}


def test_two_slow_ranks_of_four_are_both_found() -> None:
    own_SR = noisy()
    found = findings(series(own_SR, {0: 0.6 * own_SR[:, 0], 3: 0.8 * own_SR[:, 3]}))
    assert [str(f.subject) for f in found if f.status == "final"] == ["rank:0", "rank:3"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda m: with_value(m, "runq_s", NAN), "run-queue wait is not measured", id="clock wall"),
        pytest.param(lambda m: with_flags(m, CONTAINS_COMM), "contains communication", id="a wait inside a phase"),
    ],
)
def test_blind_is_said_and_never_a_finding(spoil: Callable[[StepMatrix], StepMatrix], words: str) -> None:
    detector = Straggler()
    assert feed(detector, [spoil(m) for m in slow(1.6) if isinstance(m, StepMatrix)]) == []
    assert detector.blind_reason is not None
    assert words in detector.blind_reason
    assert detector.blind_reason.startswith("ranks 0-3: ")


def test_a_rank_whose_collector_says_that_it_is_blind_is_left_out() -> None:
    detector = Straggler()
    assert feed(detector, [*World().hello([2], blind=["own_work"]).items, *slow(1.6)]) == []
    assert detector.blind_reason == "rank 2: the collector cannot tell own work there"


def test_a_device_with_its_own_clock_needs_no_run_queue_wait() -> None:
    where = topology(4, devices=[f"GPU-{rank}" for rank in range(4)])
    own_SR = noisy()
    items = [with_value(m, "runq_s", NAN) for m in series(own_SR, {2: 0.6 * own_SR[:, 2]}, where=where)]
    detector = Straggler()
    assert said(feed(detector, items))[-1] == ("final", "rank.slow", "rank:2")
    assert detector.blind_reason is None


def test_a_step_that_the_device_timed_needs_no_run_queue_wait() -> None:
    own_SR = noisy()
    items = [with_value(m, "runq_s", NAN) for m in series(own_SR, {2: 0.6 * own_SR[:, 2]})]
    timed = [replace(m, flags_R=m.flags_R | np.uint32(DEVICE_TIMED)) for m in items]
    detector = Straggler()
    assert said(feed(detector, timed))[-1] == ("final", "rank.slow", "rank:2")
    assert detector.blind_reason is None


def test_a_phase_that_is_not_marked_counts_as_nothing() -> None:
    items = [with_value(m, "optimizer_s", NAN) for m in slow(1.6) if isinstance(m, StepMatrix)]
    assert said(findings(items))[-1] == ("final", "rank.slow", "rank:2")


def test_without_cpu_time_the_cause_is_unknown() -> None:
    items = [with_value(m, "cpu_s", NAN) for m in slow(1.6) if isinstance(m, StepMatrix)]
    assert evidence(findings(items)[-1])["cause"] == "unknown"


def test_incomplete_steps_count_for_who_was_seen() -> None:
    items = []
    for m in slow(1.6):
        assert isinstance(m, StepMatrix)
        seen_R = [True, m.step % 4 != 0, m.step % 5 != 0, True]
        values = {name: m.values_FR[row] for row, name in enumerate(("step_s", *SHARE))}
        values |= {"runq_s": np.zeros(4), "cpu_s": np.full(4, 0.1)}
        items.append(step_matrix(m.topology, m.step, values, seen_R=seen_R))
    assert said(findings(items))[-1] == ("final", "rank.slow", "rank:2")


def test_slowness_belongs_to_the_device() -> None:
    """After a restart the slow device carries another rank; then it is left out."""
    own_SR = noisy()
    second = topology(4, epoch=1 << 32, devices=["n1:0", "n1:2", "n1:1", "n1:3"])
    third = topology(4, epoch=2 << 32, devices=["n1:0", "n1:1", "n1:3", "n1:4"])
    found = findings(
        [
            *series(own_SR, {2: 0.6 * own_SR[:, 2]}),
            *series(own_SR, {1: 0.6 * own_SR[:, 1]}, where=second, first=STEPS),
            *series(own_SR, where=third, first=2 * STEPS),
        ]
    )
    assert [f.status for f in found] == ["provisional", "final", "cleared"]
    assert len({f.id for f in found}) == 1
    assert found[-1].reason.startswith("its device is no longer part of the job")


def test_what_is_known_of_a_device_is_carried_into_the_next_epoch() -> None:
    """15 slow steps, then 7 under another number: neither alone would be enough."""
    own_SR = noisy()
    second = topology(4, epoch=1 << 32, devices=["n1:2", "n1:0", "n1:1", "n1:3"])
    found = findings(
        [
            *series(own_SR[:15], {2: 0.6 * own_SR[:15, 2]}),
            *series(own_SR[15:22], {0: 0.6 * own_SR[15:22, 0]}, where=second, first=15),
        ]
    )
    assert said(found) == [("provisional", "rank.slow", "rank:2"), ("final", "rank.slow", "rank:0")]


@settings(max_examples=12)
@given(st.integers(0, 3), st.sampled_from([0.25, 0.5, 2.0, 4.0]), st.floats(1.0, 2.0))
def test_scale_does_not_matter(rank: int, k: float, factor: float) -> None:
    own_SR = noisy()
    excess = {rank: (factor - 1) * own_SR[:, rank]}
    one = findings(series(own_SR, excess))
    other = findings(series(k * own_SR, {rank: k * excess[rank]}))
    assert said(one) == said(other)
    assert [evidence(f)["ratio"] for f in one] == [evidence(f)["ratio"] for f in other]


@settings(max_examples=12)
@given(st.permutations(range(4)), st.integers(0, 3))
def test_it_does_not_matter_which_number_a_rank_has(order: list[int], culprit: int) -> None:
    own_SR = noisy()
    straight = findings(series(own_SR, {culprit: 0.6 * own_SR[:, culprit]}))
    turned_SR = own_SR[:, order]
    place = order.index(culprit)
    turned = findings(series(turned_SR, {place: 0.6 * turned_SR[:, place]}))
    assert [f.lost_s_per_step for f in straight] == [f.lost_s_per_step for f in turned]
    assert {str(f.subject) for f in turned} == {f"rank:{place}"}


@settings(max_examples=12)
@given(st.integers(0, STEPS + 20))
def test_a_snapshot_in_between_changes_nothing(cut: int) -> None:
    items = [*slow(1.6, begin=6, end=24), *series(noisy(), where=topology(4, epoch=1 << 32), first=STEPS)]
    first, second = Straggler(), Straggler()
    found = feed(first, items[:cut])
    second.restore(first.snapshot())
    assert found + feed(second, items[cut:]) == findings(items)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"window_steps": 7}, "window_steps: need an even number >= 4, got 7", id="odd window"),
        pytest.param({"healthy": 1.5}, r"healthy: need 1 < healthy <= slow, got 1\.5, 1\.3", id="bars crossed"),
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StragglerConfig(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def with_value(matrix: StepMatrix, name: str, value: float) -> StepMatrix:
    values = values_of(matrix) | {name: np.full(len(matrix.seen_R), value)}
    return step_matrix(matrix.topology, matrix.step, values, flags_R=matrix.flags_R.tolist())


def with_flags(matrix: StepMatrix, flags: int) -> StepMatrix:
    return step_matrix(matrix.topology, matrix.step, values_of(matrix), flags_R=[flags] * len(matrix.seen_R))


def values_of(matrix: StepMatrix) -> dict[str, Noise]:
    return {name: matrix.values_FR[row].astype(np.float64) for row, name in enumerate(FEATURES)}
