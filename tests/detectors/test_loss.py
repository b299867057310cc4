"""Values that are not finite: where they began, as fast as they can be told."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.detectors.world import START_NS, World, evidence, feed, said, step_matrix, topology

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Finding, Frame, Input, StepMatrix
from trainwarden.core.records import GRAD_NONFINITE, LOCAL_NONFINITE, LOSS_NONFINITE
from trainwarden.detectors.loss import NonFinite, NonFiniteConfig

LOSS, GRAD, LOCAL = LOSS_NONFINITE, GRAD_NONFINITE, LOCAL_NONFINITE
NAN = float("nan")
WHERE = topology(4)
CLEAN = [0, 0, 0, 0]


def steps(*flags_SR: Sequence[int], epoch: int = 0, first: int = 0) -> list[StepMatrix]:
    where = topology(4, epoch=epoch)
    return [
        step_matrix(where, first + step, {"loss": [2.0] * 4, "local_loss": [2.0] * 4}, flags_R=flags_R)
        for step, flags_R in enumerate(flags_SR)
    ]


def findings(items: Sequence[Input]) -> list[Finding]:
    return feed(NonFinite(), items)


@pytest.mark.parametrize(
    ("flags_SR", "found", "words"),
    [
        pytest.param([CLEAN] * 3, [], "", id="finite"),
        pytest.param(
            [CLEAN, CLEAN, [LOSS, LOSS, LOSS | LOCAL, LOSS], [LOSS | LOCAL] * 4],
            [("final", "loss.nonfinite", "rank:2")],
            "loss is not finite on rank 2 at step 2 (batch 2)",
            id="a local value names the rank, and only the onset counts",
        ),
        pytest.param(
            [CLEAN, [LOSS] * 4, [LOSS] * 4],
            [("final", "loss.nonfinite", "job:job")],
            "loss is not finite at step 1 (batch 1), on ranks 0-3: no local value tells where it began",
            id="a global value is the same on all ranks and names none",
        ),
        pytest.param(
            [CLEAN, [LOSS | LOCAL] * 4],
            [("final", "loss.nonfinite", "job:job")],
            "loss is not finite at step 1 (batch 1), on ranks 0-3: no local value tells where it began",
            id="local values of all ranks at once: the batch, or the weights",
        ),
        pytest.param(
            [CLEAN, [LOCAL, LOCAL, 0, 0]],
            [("final", "loss.nonfinite", "rank:0")],
            "loss is not finite on ranks 0-1 at step 1 (batch 1)",
            id="two ranks",
        ),
        pytest.param(
            [CLEAN, [0, 0, 0, GRAD]],
            [("final", "loss.nonfinite", "rank:3")],
            "gradient norm is not finite on rank 3 at step 1 (batch 1)",
            id="a global value that is odd on one rank points at it",
        ),
        pytest.param(
            [[LOSS] * 4, CLEAN, CLEAN, CLEAN, CLEAN],
            [("final", "loss.nonfinite", "job:job"), ("cleared", "loss.nonfinite", "job:job")],
            "finite again, up to step 3; it was: "
            "loss is not finite at step 0 (batch 0), on ranks 0-3: no local value tells where it began",
            id="a skipped optimizer step heals it",
        ),
    ],
)
def test_closed_steps(flags_SR: list[list[int]], found: list[tuple[str, str, str]], words: str) -> None:
    told = findings(steps(*flags_SR))
    assert said(told) == found
    assert [f.reason for f in told[-1:]] == ([words] if words else [])


def test_evidence_has_words_for_what_is_no_number() -> None:
    values: dict[str, Sequence[float]] = {"loss": [NAN] * 4, "local_loss": [2.0, NAN, 2.0, 2.0], "grad_norm": [1.5] * 4}
    (found,) = findings([step_matrix(WHERE, 7, values, flags_R=[LOSS, LOSS | LOCAL, LOSS, LOSS])])
    told = evidence(found)
    assert (told["loss"], told["local_loss"], told["grad_norm"]) == ("NaN", "NaN", 1.5)
    assert "local_grad_norm" not in told, "not measured is not NaN"
    assert (told["step"], told["batch"], told["flags"]) == (7, 7, ["loss", "local"])
    assert (found.onset_step, str(found.suspects[0][0])) == (7, "rank:1")


def test_live_flags_tell_it_before_the_step_closes() -> None:
    world = World().begin().run_steps(10).run(0.1)
    step = world.step()
    before_ns = world.now_ns
    world.flags[2] = LOCAL
    world.items += steps(CLEAN, first=step - 1)
    found = findings(world.run(0.6).items)
    assert said(found) == [("provisional", "loss.nonfinite", "rank:2")]
    assert found[0].reason == f"loss is not finite on rank 2 at step {step} (batch {step})"
    assert 1e-9 * (found[0].seen_ns - before_ns) <= 0.36  # a poll and a tick


def test_the_live_path_waits_a_tick_for_the_step_before() -> None:
    """By then the NaN may have spread: the step that closes a moment later has the rank."""
    world = World().begin().run_steps(10)
    world.items += steps(CLEAN, first=world.step() - 2)
    world.flags = [LOSS | LOCAL] * 4
    world.run(0.2)  # the first tick that sees it
    world.items += steps([LOSS, LOSS | LOCAL, LOSS, LOSS], first=world.step() - 1)
    found = findings(world.run(1).items)
    assert said(found) == [("final", "loss.nonfinite", "rank:1")]


def test_what_live_flags_said_is_corrected_by_the_closed_step() -> None:
    world = World().begin().run_steps(10)
    world.flags = [LOSS | LOCAL] * 4
    world.run(0.6)
    world.items += steps([LOSS, LOSS | LOCAL, LOSS, LOSS], first=world.step() - 1)
    found = findings(world.items)
    assert said(found) == [("provisional", "loss.nonfinite", "job:job"), ("final", "loss.nonfinite", "rank:1")]
    assert {f.id for f in found} == {"non_finite/job/0/job:job/0"}


def test_without_the_step_before_it_is_said_all_the_same() -> None:
    world = World().begin().run_steps(10)
    before_ns = world.now_ns
    world.flags[0] = LOSS | LOCAL
    found = findings(world.run(1).items)
    assert said(found) == [("provisional", "loss.nonfinite", "rank:0")]
    assert 1e-9 * (found[0].seen_ns - before_ns) <= 0.6


def test_it_is_over_when_a_later_attempt_is_finite_for_some_steps() -> None:
    bad = steps(CLEAN, [LOSS] * 4)
    good = steps(*[CLEAN] * 4, epoch=1 << 32)
    found = findings([*bad, *good])
    assert said(found) == [("final", "loss.nonfinite", "job:job"), ("cleared", "loss.nonfinite", "job:job")]
    assert found[1].seen_ns == good[2].seen_ns


def test_the_same_batch_in_a_later_attempt_is_another_finding() -> None:
    found = findings([*steps(CLEAN, [LOSS] * 4), *steps(CLEAN, [LOSS] * 4, epoch=1 << 32)])
    assert [(f.status, f.id) for f in found] == [
        ("final", "non_finite/job/0/job:job/0"),
        ("cleared", "non_finite/job/0/job:job/0"),
        ("final", f"non_finite/job/{1 << 32}/job:job/1"),
    ]


def test_late_steps_of_an_earlier_attempt_say_nothing() -> None:
    assert findings([*steps(CLEAN, epoch=1 << 32), *steps([LOSS] * 4)]) == []


def test_an_incomplete_step_does_not_blame_who_was_seen() -> None:
    matrix = step_matrix(WHERE, 3, {"loss": [2.0] * 4}, flags_R=[LOSS, 0, LOSS, 0], seen_R=[True, True, True, False])
    assert said(findings([matrix])) == [("final", "loss.nonfinite", "job:job")]


@settings(max_examples=15)
@given(st.permutations(range(4)), st.integers(1, 3))
def test_it_does_not_matter_which_number_a_rank_has(order: list[int], culprits: int) -> None:
    flags_R = [LOSS | LOCAL if rank in order[:culprits] else LOSS for rank in range(4)]
    (found,) = findings(steps(CLEAN, flags_R))
    assert [str(subject) for subject, _ in found.suspects] == [f"rank:{rank}" for rank in sorted(order[:culprits])]


@settings(max_examples=15)
@given(st.floats(0, 1), st.booleans())
def test_neither_a_snapshot_nor_the_order_of_frames_changes_anything(where: float, turned: bool) -> None:
    world = World().begin().run_steps(5)
    world.flags[2] = LOCAL
    world.items += steps([0, 0, LOCAL, 0], first=world.step())
    items = world.run(2).new_attempt().begin().run(1).items + list(steps(*[CLEAN] * 4, epoch=1 << 32))
    mixed = turn_pairs(items) if turned else items
    cut = int(where * len(mixed))
    first, second = NonFinite(), NonFinite()
    found = feed(first, mixed[:cut])
    second.restore(first.snapshot())
    assert found + feed(second, mixed[cut:]) == findings(items)


def turn_pairs(items: Sequence[Input]) -> list[Input]:
    """Frames of the same moment, last node first."""
    out: list[Input] = []
    for item in items:
        last = out[-1] if out else None
        if isinstance(item, Frame) and isinstance(last, Frame) and last.seen_ns == item.seen_ns:
            out.insert(-1, item)
        else:
            out.append(item)
    return out


def test_a_wrong_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"detectors\.non_finite\.finite_steps: need at least 1, got 0"):
        NonFiniteConfig(finite_steps=0)


def test_times_are_the_receivers() -> None:
    assert findings(steps(CLEAN, [LOSS] * 4))[0].onset_ns == START_NS + 125_000_000
