from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.core.model import Epoch, Incident, JobId, Subject, Tier
from trainwarden.rehearsal.faults import Fault, Strike
from trainwarden.rehearsal.judging import Repaired, Told, Verdict, judge
from trainwarden.rehearsal.scenario import Expect, Scenario

KILL = Fault(kind="process.kill", rank=2, at_step=30)
SLOW = Fault(kind="slow_slot", slot=1, at_step=20, args={"factor": 1.6})
KILLED = Expect(kind="process.killed", tier="ERROR", culprit="rank:2", within_s=1)
SLOWED = Expect(kind="rank.slow", tier="WARN", culprit="rank:1", within_steps=20)
DEATH = Scenario(name="death", title="death", faults=(KILL,), expect=(KILLED,))
SLOWNESS = Scenario(name="slowness", title="slowness", faults=(SLOW,), expect=(SLOWED,))
CALM = Scenario(name="calm", title="calm")

STRUCK_S = 100.0
STEPS = [(round(1e9 * (90 + 0.125 * step)), step) for step in range(1, 200)]
"""Step 80 begins at STRUCK_S."""


def told(after_s: float, **changed: Any) -> Told:
    right: dict[str, Any] = {"id": "i1", "kind": "process.killed", "tier": Tier.ERROR, "culprit": "rank:2"}
    return Told(t_ns=round(1e9 * (STRUCK_S + after_s)), **{**right, **changed})


def slow_told(after_s: float, **changed: Any) -> Told:
    return told(after_s, **{"kind": "rank.slow", "tier": Tier.WARN, "culprit": "rank:1", **changed})


def verdict(scenario: Scenario, *said: Told) -> Verdict:
    strikes = [Strike(fault=0, step=80, t_ns=round(1e9 * STRUCK_S), rank=2)] if scenario.faults else []
    return judge(scenario, said, strikes, STEPS)


@pytest.mark.parametrize(
    ("said", "after_s", "ok"),
    [
        pytest.param([told(0.4)], 0.4, True, id="right and in time"),
        pytest.param([told(1.5)], 1.5, False, id="right and late"),
        pytest.param([], None, False, id="silence"),
        pytest.param([told(0.4), told(0.9), told(5.0)], 0.4, True, id="said again"),
        pytest.param([told(5.0), told(0.4)], 0.4, True, id="in any order"),
        pytest.param([told(0.3, culprit="rank:1"), told(0.6)], 0.6, True, id="the culprit is corrected in time"),
        pytest.param([told(0.3, culprit="rank:1"), told(1.6)], 1.6, False, id="the culprit is corrected too late"),
        pytest.param([told(0.3, tier=Tier.WARN), told(0.6)], 0.6, True, id="escalated in time"),
        pytest.param([told(0.3), told(0.4, culprit=None), told(0.8)], 0.8, True, id="right since the last change"),
        pytest.param([told(0.4), told(0.6, culprit="rank:3")], 0.6, False, id="wrong in the end"),
    ],
)
def test_how_fast_a_death_is_told(said: list[Told], after_s: float | None, ok: bool) -> None:
    found = verdict(DEATH, *said)
    assert (found.detected_after_s, found.ok) == (pytest.approx(after_s) if after_s else None, ok)
    assert not found.false_alarms


@pytest.mark.parametrize(
    ("said", "kind", "tier", "culprit"),
    [
        pytest.param(told(0.4, culprit="rank:0"), True, True, False, id="a victim is named"),
        pytest.param(told(0.4, culprit=None), True, True, False, id="nobody is named"),
        pytest.param(told(0.4, kind="process.unknown"), False, True, True, id="another cause"),
        pytest.param(told(0.4, tier=Tier.CRITICAL), True, False, True, id="too loud"),
    ],
)
def test_what_is_wrong_is_shown(said: Told, kind: bool, tier: bool, culprit: bool) -> None:
    found = verdict(DEATH, said)
    assert (found.kind_right, found.tier_right, found.culprit_right, found.ok) == (kind, tier, culprit, False)


@pytest.mark.parametrize(
    ("after_s", "steps", "ok"),
    [
        pytest.param(0.0, 0, True, id="at once"),
        pytest.param(2.5, 20, True, id="in the last step allowed"),
        pytest.param(2.6, 20, True, id="within that step"),
        pytest.param(2.7, 21, False, id="a step too late"),
    ],
)
def test_slowness_is_counted_in_steps(after_s: float, steps: int, ok: bool) -> None:
    found = verdict(SLOWNESS, slow_told(after_s))
    assert (found.detected_after_steps, found.ok) == (steps, ok)


def test_an_undisturbed_run_passes_in_silence() -> None:
    assert verdict(CALM).ok


def test_any_notice_of_an_undisturbed_run_is_a_false_alarm() -> None:
    found = verdict(CALM, told(0.1), told(0.2), told(0.3, id="i2", tier=Tier.INFO))
    assert [one.id for one in found.false_alarms] == ["i1", "i2"]
    assert not found.ok


def test_a_second_incident_is_a_false_alarm() -> None:
    found = verdict(DEATH, told(0.4), told(0.5, id="i2", kind="rank.hung", culprit="rank:0"))
    assert [one.id for one in found.false_alarms] == ["i2"]
    assert (found.culprit_right, found.ok) == (True, False)


def test_an_incident_of_another_matter_is_not_taken_for_the_expected_one() -> None:
    found = verdict(DEATH, told(0.4, kind="rank.slow", culprit="rank:0"))
    assert (found.detected_after_s, len(found.false_alarms)) == (None, 1)


def test_each_expectation_has_an_incident_of_its_own() -> None:
    both = Scenario(
        title="both",
        faults=(KILL, SLOW),
        expect=(KILLED, Expect(kind="rank.slow", tier="WARN", culprit="rank:1", within_steps=20, fault=1)),
    )
    strikes = [Strike(fault=fault, step=80, t_ns=round(1e9 * STRUCK_S)) for fault in (0, 1)]
    found = judge(both, [told(0.4), slow_told(2.0, id="i2")], strikes, STEPS)
    assert found.ok
    assert found.detected_after_s == pytest.approx(2.0)
    assert found.detected_after_steps == 16


def test_a_fault_that_never_struck_cannot_be_found_in_time() -> None:
    found = judge(DEATH, [told(0.4)], [], STEPS)
    assert (found.detected_after_s, found.ok) == (None, False)


def test_the_first_rank_that_is_struck_starts_the_clock() -> None:
    strikes = [Strike(fault=0, step=80, t_ns=round(1e9 * (STRUCK_S + later_s))) for later_s in (0.5, 0.0)]
    assert judge(DEATH, [told(1.2)], strikes).detected_after_s == pytest.approx(1.2)


@given(st.permutations([told(0.3, culprit=None), told(0.6), told(2.0), told(0.5, id="i2", kind="rank.slow")]))
def test_the_order_in_which_notices_are_read_does_not_matter(said: list[Told]) -> None:
    assert verdict(DEATH, *said) == verdict(DEATH, *sorted(said, key=lambda one: one.t_ns))


def test_a_notice_is_what_its_incident_says() -> None:
    incident = Incident(
        id="i1",
        revision=1,
        state="confirmed",
        tier=Tier.ERROR,
        kind="process.killed",
        culprit=Subject(kind="rank", id="2"),
        victims=(),
        job=JobId("job"),
        epoch=Epoch(0),
        onset_ns=0,
        findings=(),
        events=(),
        reason="",
        action="",
        plans=(),
        lost_s={},
    )
    assert Told.of(incident, told(0.4).t_ns) == told(0.4)


BITS, OTHER_BITS = (1.5).hex(), (1.25).hex()
LOSSES = {"undisturbed": BITS, "reference": OTHER_BITS}
BACK = Repaired(attempts=2, checkpoint=20, recovered_after_s=11.0, steps_lost=10, final_loss=BITS)
UNTOUCHED = Repaired(attempts=1, final_loss=BITS)
ROLLED_BACK = replace(BACK, skip=(35,), final_loss=OTHER_BITS)
MOVED = replace(BACK, checkpoint=45, without=(1,))

RESTART = replace(DEATH, expect=(replace(KILLED, checkpoint=20, final_loss="undisturbed"),))
MOVE = replace(SLOWNESS, expect=(replace(SLOWED, without=(1,), final_loss="undisturbed"),))
ROLL_BACK = replace(DEATH, expect=(replace(KILLED, checkpoint=20, skip=(35,), final_loss="reference"),))
PAUSE = replace(CALM, final_loss="undisturbed")


@pytest.mark.parametrize(
    ("scenario", "repaired", "repair", "loss"),
    [
        pytest.param(RESTART, BACK, True, True, id="restarted"),
        pytest.param(RESTART, replace(BACK, checkpoint=40), False, True, id="from another checkpoint"),
        pytest.param(RESTART, replace(BACK, checkpoint=None), False, True, id="from the beginning"),
        pytest.param(RESTART, replace(BACK, refused=(40,)), True, True, id="past one that does not verify"),
        pytest.param(RESTART, replace(BACK, without=(2,)), False, True, id="a slot left out for nothing"),
        pytest.param(RESTART, replace(BACK, skip=(35,)), False, True, id="a batch left out for nothing"),
        pytest.param(RESTART, replace(BACK, attempts=3), False, True, id="restarted twice"),
        pytest.param(RESTART, UNTOUCHED, False, True, id="not restarted"),
        pytest.param(RESTART, replace(BACK, recovered_after_s=None), False, True, id="never seen to run again"),
        pytest.param(RESTART, replace(BACK, relapses=("rank.slow",)), False, True, id="and then something else"),
        pytest.param(RESTART, replace(BACK, final_loss=OTHER_BITS), True, False, id="to another loss"),
        pytest.param(RESTART, replace(BACK, final_loss=None), True, False, id="to no end"),
        pytest.param(MOVE, MOVED, True, True, id="moved"),
        pytest.param(MOVE, replace(MOVED, checkpoint=60), True, True, id="moved, from wherever it was saved"),
        pytest.param(MOVE, replace(MOVED, checkpoint=None), False, True, id="moved, and all work thrown away"),
        pytest.param(MOVE, replace(MOVED, without=()), False, True, id="left where it is slow"),
        pytest.param(MOVE, replace(MOVED, without=(2,)), False, True, id="the wrong slot left out"),
        pytest.param(MOVE, replace(MOVED, relapses=("rank.slow",)), False, True, id="moved, and slow again"),
        pytest.param(ROLL_BACK, ROLLED_BACK, True, True, id="rolled back"),
        pytest.param(ROLL_BACK, replace(ROLLED_BACK, skip=()), False, True, id="the batch is used again"),
        pytest.param(ROLL_BACK, replace(ROLLED_BACK, skip=(34, 35)), False, True, id="one batch too many left out"),
        pytest.param(ROLL_BACK, replace(ROLLED_BACK, final_loss=BITS), True, False, id="the loss of the wrong run"),
        pytest.param(CALM, UNTOUCHED, True, True, id="calm and untouched"),
        pytest.param(CALM, replace(UNTOUCHED, final_loss=None), True, False, id="calm, and to no end"),
        pytest.param(CALM, BACK, False, True, id="calm and restarted"),
        pytest.param(PAUSE, UNTOUCHED, True, True, id="a legal pause"),
        pytest.param(PAUSE, replace(UNTOUCHED, final_loss=OTHER_BITS), True, False, id="a pause that changes the loss"),
    ],
)
def test_what_was_done_is_judged(scenario: Scenario, repaired: Repaired, repair: bool, loss: bool) -> None:
    said = {"death": [told(0.4)], "slowness": [slow_told(2.0)], "calm": []}[scenario.name]
    strikes = [Strike(fault=0, step=80, t_ns=round(1e9 * STRUCK_S))] if scenario.faults else []
    found = judge(scenario, said, strikes, STEPS, repaired, LOSSES)
    assert (found.repair_right, found.loss_right, found.ok) == (repair, loss, repair and loss)


@pytest.mark.parametrize("scenario", [RESTART, ROLL_BACK, CALM, PAUSE], ids=lambda one: one.name)
def test_what_was_not_to_be_done_is_not_judged(scenario: Scenario) -> None:
    assert verdict(scenario, *([told(0.4)] if scenario.faults else [])).ok


def test_a_loss_is_wrong_when_the_one_to_compare_with_is_not_known() -> None:
    assert not judge(PAUSE, [], [], STEPS, UNTOUCHED, {"undisturbed": None}).loss_right
    assert not judge(PAUSE, [], [], STEPS, UNTOUCHED, {}).loss_right


def test_a_repair_that_was_said_wrongly_is_not_right() -> None:
    strikes = [Strike(fault=0, step=80, t_ns=round(1e9 * STRUCK_S))]
    found = judge(RESTART, [told(0.4, culprit="rank:1")], strikes, STEPS, BACK, LOSSES)
    assert (found.repair_right, found.loss_right, found.ok) == (True, True, False)
