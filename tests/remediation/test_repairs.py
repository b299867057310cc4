"""What is planned, what waits, what is refused and why; what a running plan is told. Stimuli -> instructions."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.remediation.plan_world import (
    WIDE,
    at,
    attempt,
    budget,
    command,
    ends,
    event,
    fed,
    hello,
    incident,
    outcome,
    plans,
    policy,
    rank,
    started,
    tick,
    words,
)

from trainwarden.core.model import Event, Incident, JobId, Json, Plan, Stimulus, Tell
from trainwarden.remediation.policy import BreakerConfig, LimitsConfig, Policy
from trainwarden.remediation.repairs import Repairs

JOB = JobId("train-3")
KILLED, HUNG, SLOW, NAN = (incident(kind) for kind in ("process.killed", "rank.hung", "rank.slow", "loss.nonfinite"))
FIRST = "process.killed.2.1/plan-1"
RESTART = ("reached", "reached", "reached")


def repairs(made: Policy | None = None, *more: Stimulus, slots: int = 4) -> Repairs:
    """With attempt 1 of four ranks running."""
    machine = Repairs(made or policy(), JOB)
    assert fed(machine, *attempt(1, 0, slots=slots), tick(6), *more) == []
    return machine


def running(made: Plan) -> dict[str, Json]:
    return dict(next(rung.args for rung in made.ladder if rung.goal == "running"))


def again(t_s: float, number: int = 2, seats: Sequence[int] = (0, 1, 2, 3)) -> list[Event]:
    return attempt(number, t_s, seats=seats)


# what is planned


def test_a_plan_has_the_mode_of_its_rule_the_newest_term_and_the_time_of_its_ladder() -> None:
    terms = (started(1, 5, term=9), started(1, 5, term=8))
    machine = repairs(policy("approve", approval=timedelta(seconds=30)), *terms)
    (made,) = plans(fed(machine, KILLED))
    assert (made.id, made.incident, made.rule) == (FIRST, "process.killed.2.1", "process.killed")
    assert (made.mode, made.fence, made.deadline_ns) == ("approve", 9, at(6 + 30 + 30 + 1200 + 600))
    assert [rung.args.get("attempt") for rung in made.ladder] == [1, 2, 2]


@pytest.mark.parametrize(
    "not_yet",
    [
        pytest.param(replace(KILLED, state="suspected"), id="suspected"),
        pytest.param(incident(status="provisional"), id="provisional"),
        pytest.param(incident(status="provisional", state="reopened"), id="back, but not certain"),
        pytest.param(incident(status="cleared"), id="nothing holds any more"),
        pytest.param(replace(KILLED, state="resolved"), id="over"),
        pytest.param(replace(KILLED, kind="nobody.foresaw"), id="without a rule"),
        pytest.param(replace(KILLED, job=JobId("another")), id="of another job"),
        pytest.param(incident(attempt=0), id="of an attempt that is past"),
    ],
)
def test_nothing_is_planned_for_what_is_not_certain_or_not_ours(not_yet: Incident) -> None:
    assert words(fed(repairs(), not_yet, tick(20))) == []


def test_an_incident_is_planned_once() -> None:
    machine = repairs(policy("observe"))
    assert words(fed(machine, KILLED, KILLED)) == [f"observe {FIRST}"]
    assert words(fed(machine, outcome(FIRST, -1, "refused"), tick(7), KILLED, tick(8))) == []


def test_the_loudest_goes_first() -> None:
    machine = repairs(policy(), command("stop_all", 6.5))
    (refused,) = plans(fed(machine, SLOW := incident("rank.slow", 1)))  # its end makes room
    fed(machine, NAN, KILLED, command("stop_all", 7, "resume"))
    said = fed(machine, outcome(refused.id, -1, "refused"), tick(8))
    assert words(said) == ["act loss.nonfinite.2.1/plan-1"]
    assert SLOW.tier < KILLED.tier < NAN.tier


def test_what_was_skipped_and_left_out_stays_so() -> None:
    machine = repairs(slots=5)
    (nan,) = plans(fed(machine, NAN))
    assert running(nan) == {"attempt": 2, "before_ns": at(5), "without": [], "skip": [[150, 150]]}
    fed(machine, *ends(nan.id, *RESTART), replace(NAN, state="resolved"), *again(20))
    (slow,) = plans(fed(machine, incident("rank.slow", 1, 2)))
    assert running(slow) == {"attempt": 3, "before_ns": None, "without": ["n1:1"], "skip": [[150, 150]]}
    fed(machine, *ends(slow.id, "failed", "failed", *RESTART), *again(40, 3, (0, 4, 2, 3)))
    (killed,) = plans(fed(machine, incident(attempt=3)))
    assert running(killed) == {"attempt": 4, "before_ns": None, "without": ["n1:1"], "skip": [[150, 150]]}


# leaving a slot out


def test_a_slow_slot_is_left_out_for_a_spare() -> None:
    assert running(plans(fed(repairs(slots=5), SLOW))[0])["without"] == ["n1:2"]


@pytest.mark.parametrize(
    ("made", "slots", "found", "why"),
    [
        pytest.param(policy(), 4, SLOW, "there is no spare for slot n1:2", id="no spare"),
        pytest.param(
            policy(leave_out="witnessed"),
            5,
            SLOW,
            "slot n1:2 is not left out: only the job's own ranks accuse it (leave_out: witnessed)",
            id="no witness",
        ),
        pytest.param(
            policy(leave_out="never"), 5, SLOW, "slot n1:2 is not left out: the rule leaves no slot out", id="never"
        ),
        pytest.param(
            policy(),
            5,
            incident("rank.slow", confidence=0.8),
            "slot n1:2 is not left out: confidence 0.8 is less than 0.9",
            id="not sure enough",
        ),
        pytest.param(
            policy(),
            5,
            replace(SLOW, culprit=None),
            "slot unknown is not left out: nobody knows the culprit's slot",
            id="nobody accused, as in a mass alarm",
        ),
        pytest.param(
            policy(min_confidence=0.5),
            5,
            incident(confidence=0.45),
            "confidence 0.45 is less than 0.5",
            id="a restart on thin evidence",
        ),
    ],
)
def test_what_evidence_or_spares_do_not_carry_is_refused(made: Policy, slots: int, found: Incident, why: str) -> None:
    machine = repairs(made, slots=slots)
    said = words(fed(machine, found))
    assert said == [f"observe {found.id}/plan-1 (refused: {why})"]
    assert sum(machine.refusals.values()) == 1


def test_better_evidence_lifts_a_refusal() -> None:
    machine = repairs(policy(leave_out="witnessed"), slots=5)
    fed(machine, SLOW, outcome("rank.slow.2.1/plan-1", -1, "refused"))
    assert words(fed(machine, replace(SLOW, revision=2), tick(8))) == [], "the same is not said twice"
    oom = replace(event("process.exit", 8), subject=rank(2))
    assert words(fed(machine, replace(SLOW, revision=3, events=(oom,)))) == ["act rank.slow.2.1/plan-2"]


def test_a_fault_whose_repair_is_tried_again_struck_once() -> None:
    machine = repairs(slots=5)
    (second,) = plans(fed(machine, KILLED, *ends(FIRST, "failed", retryable=True), tick(8)))[1:]
    assert running(second)["without"] == []


def test_nobody_sits_anywhere_before_its_attempt_says_so() -> None:
    machine = repairs(policy(), started(2, 6.5, slots=5), slots=5)
    (refused,) = plans(fed(machine, incident("rank.slow", 2, 2)))
    assert "nobody knows the culprit's slot" in refused.why


@pytest.mark.parametrize(
    ("slots", "second_s", "who", "without"),
    [
        pytest.param(5, 100, 2, ["n1:2"], id="struck twice"),
        pytest.param(5, 100, 1, [], id="another slot"),
        pytest.param(5, 2000, 2, [], id="long ago"),
        pytest.param(4, 100, 2, [], id="no spare: restarted as it is"),
    ],
)
def test_a_slot_that_is_struck_twice_is_left_out(slots: int, second_s: float, who: int, without: list[str]) -> None:
    limits = LimitsConfig(budget=WIDE, strikes=timedelta(seconds=1000))
    machine = repairs(policy(limits=limits), slots=slots)
    fed(machine, KILLED, *ends(FIRST, *RESTART), replace(KILLED, state="resolved"), *again(20))
    (second,) = plans(fed(machine, tick(second_s), incident("rank.hung", who, 2)))
    assert running(second)["without"] == without


# one plan at a time


def test_a_second_incident_waits_and_needs_no_plan_when_the_job_was_restarted() -> None:
    machine = repairs()
    assert words(fed(machine, KILLED, HUNG)) == [f"act {FIRST}"]
    rungs = [outcome(FIRST, index, "reached") for index in range(3)]
    assert words(fed(machine, *rungs[:1], *again(10), *rungs[1:], outcome(FIRST, -1, "reached"), tick(20))) == []


def test_a_second_incident_is_planned_when_the_first_plan_changed_nothing() -> None:
    machine = repairs(slots=5)
    fed(machine, KILLED, HUNG)
    assert words(fed(machine, *ends(FIRST, "failed"), tick(20))) == ["act rank.hung.2.1/plan-1"]


def test_a_slow_slot_that_is_still_in_use_is_planned_after_the_restart() -> None:
    machine = repairs(slots=5)
    fed(machine, KILLED, incident("rank.slow", 1))
    said = fed(machine, outcome(FIRST, 0, "reached"), *again(10), *ends(FIRST, *RESTART)[1:], tick(20))
    assert words(said) == ["act rank.slow.1.1/plan-1"]
    assert running(plans(said)[0]) == {"attempt": 3, "before_ns": None, "without": ["n1:1"], "skip": []}


def test_a_plan_has_ended_at_the_first_time_after_it() -> None:
    """An outcome tells no time, and a cool-down must not begin before the end."""
    machine = repairs(policy(cool_down=timedelta(seconds=60)))
    fed(machine, KILLED)
    assert machine.due_ns() is None
    assert fed(machine, *ends(FIRST, "failed", retryable=True)) == []
    assert machine.due_ns() == at(6), "at once"
    assert fed(machine, tick(500)) == []
    assert machine.due_ns() == at(560)


# what a running plan is told


@pytest.mark.parametrize(
    ("news", "why"),
    [
        pytest.param([replace(NAN, state="resolved")], "its incident is over", id="resolved"),
        pytest.param(
            [incident("loss.nonfinite", batch=149, reason="it was batch 149")],
            "the verdict was revised: it was batch 149",
            id="another batch",
        ),
        pytest.param(
            [replace(incident("rank.hung"), id=NAN.id)],
            "the verdict was revised: rank 2 has rank.hung",
            id="another kind",
        ),
        pytest.param(
            [incident("loss.nonfinite", status="cleared")],
            "its incident is not certain any more, or the job was started anew",
            id="cleared while it is acted upon",
        ),
        pytest.param(
            [started(2, 7)],
            "its incident is not certain any more, or the job was started anew",
            id="restarted by a person",
        ),
        pytest.param([replace(NAN, reason="in other words")], "", id="the same in other words"),
        pytest.param([KILLED], "", id="something quieter"),
    ],
)
def test_a_plan_is_withdrawn_when_it_has_become_pointless(news: list[Stimulus], why: str) -> None:
    machine = repairs()
    (made,) = plans(fed(machine, NAN))
    told = [f"withdraw {made.id} (trainwarden: {why})"] if why else []
    assert words(fed(machine, *news, *news)) == told, "once"


def test_nothing_is_withdrawn_after_the_first_effect() -> None:
    machine = repairs()
    fed(machine, KILLED, outcome(FIRST, 0, "reached"))
    assert words(fed(machine, replace(KILLED, state="resolved"), tick(9))) == []


def test_a_plan_that_waits_for_a_person_makes_room_for_something_louder() -> None:
    machine = repairs(policy("approve", limits=LimitsConfig(budget=budget(1, 3600))), slots=5)
    (slow,) = plans(fed(machine, SLOW))
    louder = "process.killed is louder: rank 2 has process.killed"
    assert words(fed(machine, KILLED)) == [f"withdraw {slow.id} (trainwarden: {louder})"]
    withdrawn = outcome(slow.id, -1, "refused", found={"verb": "withdraw"})
    assert words(fed(machine, withdrawn, tick(8))) == [f"approve {FIRST}"]


def test_a_withdrawn_plan_costs_nothing_and_its_incident_is_planned_anew() -> None:
    limits = LimitsConfig(budget=budget(1, 3600), patience=timedelta(0))
    machine = repairs(policy(limits=limits, cool_down=timedelta(hours=1)))
    fed(machine, NAN, incident("loss.nonfinite", batch=149))
    said = fed(machine, outcome(f"{NAN.id}/plan-1", -1, "refused", found={"verb": "withdraw"}), tick(8))
    assert words(said) == [f"act {NAN.id}/plan-2"]
    assert running(plans(said)[0])["skip"] == [[149, 149]]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param(command("approve", 7, FIRST), [f"approve {FIRST} (Ada: I know)"], id="approved"),
        pytest.param(command("deny", 7, FIRST), [f"deny {FIRST} (Ada: I know)"], id="denied"),
        pytest.param(command("deny", 7, FIRST, expires_s=1), [f"deny {FIRST} (Ada: I know)"], id="a denial stays one"),
        pytest.param(command("approve", 7, "another/plan-1"), [], id="of another plan"),
        pytest.param(command("approve", 7, FIRST, expires_s=7), [], id="past"),
        pytest.param(command("stop_all", 7), [f"stop_all {FIRST} (Ada: I know)"], id="all switched off"),
        pytest.param(
            event("attempt.stopping", 7, attempt=1, by="SIGINT"),
            [f"stop_all {FIRST} (SIGINT: the job is being stopped)"],
            id="a person stops the job",
        ),
        pytest.param(event("attempt.stopping", 7, attempt=1, by="plan of term 7"), [], id="the plan stops the job"),
    ],
)
def test_what_people_say_reaches_the_plan(said: Event, told: list[str]) -> None:
    machine = repairs(policy("approve"))
    fed(machine, KILLED)
    heard = fed(machine, said)
    assert words(heard) == told
    assert [one.key for one in heard if isinstance(one, Tell)] == [f"run@n1/{said.seq}"] * len(told)
    assert machine.refusals["command"] == (said.kind == "command.approve" and not told)


def test_a_person_who_stops_the_job_wants_it_stopped() -> None:
    machine = repairs(policy(), event("attempt.stopping", 6.5, attempt=1, by="SIGINT"))
    assert fed(machine, KILLED, tick(20)) == []
    assert words(fed(machine, *again(30), incident(attempt=2))) == ["act process.killed.2.2/plan-1"]


# limits


def test_what_will_soon_be_free_is_waited_for() -> None:
    machine = repairs(policy(cool_down=timedelta(seconds=60)))
    fed(machine, KILLED, *ends(FIRST, "failed", retryable=True))
    assert fed(machine, tick(10)) == []
    assert machine.due_ns() == at(70)
    assert fed(machine, tick(69.9)) == []
    assert words(fed(machine, tick(70))) == ["act process.killed.2.1/plan-2"]


def test_what_will_not_soon_be_free_is_refused_with_the_reason() -> None:
    machine = repairs(policy(budget=budget(1, 3600)))
    fed(machine, KILLED, *ends(FIRST, "failed", retryable=True))
    why = "refused: 1 plan in 1 h of rule process.killed are used up"
    assert words(fed(machine, tick(10))) == [f"observe process.killed.2.1/plan-2 ({why})"]
    assert machine.refusals == {"rule_budget": 1}
    assert fed(machine, *ends("process.killed.2.1/plan-2", whole="refused"), tick(4000), KILLED) == [], "no surprise"


def test_the_breaker_stops_repairing_until_somebody_resumes() -> None:
    limits = LimitsConfig(budget=WIDE, breaker=BreakerConfig(failed=2))
    machine = repairs(policy(limits=limits))
    fed(machine, KILLED, *ends(FIRST, "failed", retryable=True), tick(10))
    said = words(fed(machine, *ends("process.killed.2.1/plan-2", "failed", retryable=True), tick(20)))
    why = "refused: the breaker is open: 2 plans in a row failed"
    assert said == [f"observe process.killed.2.1/plan-3 ({why})"]
    fed(machine, *ends("process.killed.2.1/plan-3", whole="refused"), tick(30))
    assert fed(machine, command("stop_all", 40, "resume", expires_s=39)) == [], "a command that is past"
    assert words(fed(machine, command("stop_all", 41, "resume"))) == ["act process.killed.2.1/plan-4"]


def test_a_denial_holds_whatever_is_said_later() -> None:
    machine = repairs(policy("approve"))
    fed(machine, KILLED, outcome(FIRST, -1, "refused", found={"verb": "deny"}), tick(8))
    assert fed(machine, replace(incident("rank.hung"), id=KILLED.id), command("stop_all", 9, "resume")) == []


def test_a_plan_that_could_not_be_written_down_stays_spent_so_that_it_is_not_tried_for_ever() -> None:
    machine = repairs(policy(budget=budget(1, 3600)))
    fed(machine, KILLED, outcome(FIRST, -1, "refused", retryable=True))
    assert [made.mode for made in plans(fed(machine, tick(8)))] == ["observe"]


def test_nothing_is_done_while_all_is_switched_off() -> None:
    machine = repairs(policy(), command("stop_all", 6.5, why="maintenance"))
    why = "refused: all actions are switched off by Ada: maintenance"
    assert words(fed(machine, KILLED)) == [f"observe {FIRST} ({why})"]
    fed(machine, outcome(FIRST, -1, "refused"), tick(8))
    assert words(fed(machine, command("stop_all", 9, "resume"))) == ["act process.killed.2.1/plan-2"]


def test_a_plan_that_was_switched_off_is_taken_up_when_somebody_resumes() -> None:
    machine = repairs()
    fed(machine, KILLED, outcome(FIRST, 0, "reached"), command("stop_all", 7))
    fed(machine, outcome(FIRST, -1, "refused", found={"verb": "stop_all"}), tick(8))
    assert words(fed(machine, command("stop_all", 9, "resume"))) == ["act process.killed.2.1/plan-2"]


# how it ended


@pytest.mark.parametrize(
    ("end", "said"),
    [
        pytest.param(ends(FIRST, *RESTART), [], id="reached"),
        pytest.param(ends(FIRST, "failed"), [], id="failed for good: a person's"),
        pytest.param(ends(FIRST, "failed", retryable=True), ["act process.killed.2.1/plan-2"], id="may be tried again"),
        pytest.param(ends(FIRST, whole="refused", found={"verb": "deny"}), [], id="denied"),
        pytest.param(ends(FIRST, whole="expired"), [], id="nobody approved it"),
        pytest.param(ends(FIRST, whole="refused", retryable=True), ["act process.killed.2.1/plan-2"], id="no journal"),
    ],
)
def test_after_its_end(end: list[Stimulus], said: list[str]) -> None:
    machine = repairs()
    fed(machine, KILLED)
    assert words(fed(machine, *end, tick(10), tick(20))) == said


def test_a_restart_that_was_not_verified_is_tried_again_from_where_it_left_the_job() -> None:
    machine = repairs(slow_down := policy(cool_down=timedelta(seconds=60)))
    fed(machine, KILLED, outcome(FIRST, 0, "reached"), *again(10))
    failed = ends(FIRST, "reached", "reached", "failed", retryable=True)[1:]
    assert fed(machine, *failed, incident(status="cleared"), tick(20)) == []
    restored = repairs(slow_down)
    restored.restore(json.loads(json.dumps(machine.snapshot())))
    said = fed(restored, tick(80), *ends("process.killed.2.1/plan-2", "refused", retryable=True), tick(90), tick(150))
    assert words(said) == ["act process.killed.2.1/plan-2", "act process.killed.2.1/plan-3"], "its first fault is past"
    assert [rung.args["attempt"] for rung in plans(said)[0].ladder] == [2, 3, 3]


def test_a_slot_is_left_out_once_however_often_it_is_tried() -> None:
    machine = repairs(slots=6)
    (first,) = plans(fed(machine, SLOW))
    fed(machine, *ends(first.id, *["reached"] * 3)[:3], *again(10, 2, (0, 1, 4, 3)))
    (second,) = plans(fed(machine, *ends(first.id, *["reached"] * 4, "failed", retryable=True)[3:], tick(20)))
    assert (running(second)["without"], running(second)["attempt"]) == (["n1:2"], 3)


@pytest.mark.parametrize("verdict", [incident("rank.hung"), replace(KILLED, culprit=rank(1))], ids=["kind", "culprit"])
def test_another_verdict_is_judged_anew(verdict: Incident) -> None:
    machine = repairs()
    fed(machine, KILLED, *ends(FIRST, "failed"), tick(8))
    assert words(fed(machine, replace(verdict, id=KILLED.id))) == ["act process.killed.2.1/plan-2"]


def test_another_verdict_that_is_refused_too_is_said_too() -> None:
    machine = repairs()
    fed(machine, SLOW, outcome("rank.slow.2.1/plan-1", -1, "refused"), tick(8))
    why = "refused: there is no spare for slot n1:1"
    other = replace(incident("rank.slow", 1), id=SLOW.id)
    assert words(fed(machine, other)) == [f"observe rank.slow.2.1/plan-2 ({why})"]


def test_a_trouble_that_comes_back_gets_another_plan() -> None:
    machine = repairs(policy("observe"))
    fed(machine, KILLED, outcome(FIRST, -1, "refused"), replace(KILLED, state="resolved"), *again(20))
    back = replace(incident(attempt=2), id=KILLED.id, state="reopened")
    assert words(fed(machine, back)) == ["observe process.killed.2.1/plan-2"]


def test_a_rule_that_observes_says_what_would_have_stood_against_it() -> None:
    machine = repairs(policy("observe", min_confidence=0.99))
    why = "it would be refused: confidence 0.98 is less than 0.99"
    assert words(fed(machine, KILLED)) == [f"observe {FIRST} ({why})"]
    assert machine.refusals == {}


def test_hellos_of_an_attempt_that_is_past_seat_nobody() -> None:
    machine = repairs(policy(), *again(5), hello(2, 3, 1, 5.5), slots=5)
    assert running(plans(fed(machine, incident("rank.slow", 2, 2)))[0])["without"] == ["n1:2"]
