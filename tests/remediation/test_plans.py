"""Each kind has its ladder; the next rung and the end of a plan follow from what is written down alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.remediation.plan_world import JOB, JOB_SUBJECT, at, incident, outcome

from trainwarden.core.goals import GOALS
from trainwarden.core.model import Json, Outcome, Plan, Rung
from trainwarden.remediation.plans import (
    LADDERS,
    SOFT,
    Facts,
    Message,
    approval_ends_ns,
    ladder,
    next_step,
    paused,
    whole,
)
from trainwarden.remediation.policy import FINDING_KINDS, RungsConfig

FACTS = Facts(job=JOB, attempt=4, without=("n1:7",), skip=((30, 31),))
STOPPED = ("stopped", {"attempt": 4})
VERIFIED = ("verified", {"attempt": 5, "steps": 10})
RUNNING: dict[str, Json] = {"attempt": 5, "before_ns": None, "without": ["n1:7"], "skip": [[30, 31]]}
BACK = RUNNING | {"before_ns": at(5), "skip": [[30, 31], [150, 150]]}


@pytest.mark.parametrize(
    ("kind", "rungs"),
    [
        *(
            (f"process.{how}", [STOPPED, ("running", RUNNING), VERIFIED])
            for how in ("killed", "oom", "failed", "unknown")
        ),
        (
            "rank.hung",
            [("evidence_collected", {"incident": "rank.hung.2.1"}), STOPPED, ("running", RUNNING), VERIFIED],
        ),
        (
            "rank.slow",
            [("checkpoint_taken", {"within_steps": 10}), ("quiesced", {}), STOPPED, ("running", RUNNING), VERIFIED],
        ),
        ("loss.nonfinite", [STOPPED, ("running", BACK), VERIFIED]),
        ("nobody.foresaw", []),
    ],
)
def test_a_kind_has_its_ladder(kind: str, rungs: list[tuple[str, Any]]) -> None:
    made = ladder(incident(kind), FACTS, RungsConfig())
    assert [(rung.goal, rung.args) for rung in made] == rungs
    assert {rung.target for rung in made} <= {JOB_SUBJECT}
    assert [rung.deadline_s for rung in made] == [RungsConfig().deadline_s(rung.goal) for rung in made]


def test_every_kind_of_finding_has_a_ladder_of_goals_that_ends_verified() -> None:
    assert set(LADDERS) == set(FINDING_KINDS)
    for kind, goals in LADDERS.items():
        assert set(goals) <= set(GOALS), kind
        assert goals[-3:] == ("stopped", "running", "verified"), kind
        assert set(goals[:-3]) <= SOFT, "what asks the job for help may fail; what follows does not need it"


@pytest.mark.parametrize("batch", [None, -1, "x"])
def test_a_batch_that_is_not_known_is_not_skipped(batch: object) -> None:
    running = ladder(incident("loss.nonfinite", batch=batch), FACTS, RungsConfig())[1]
    assert running.args["skip"] == [[30, 31]]


def plan(mode: Literal["observe", "approve", "act"] = "act", *goals: str, why: str = "") -> Plan:
    """Each rung has 10 s; waits 30 s for a person."""
    rungs = [Rung(goal=goal, target=JOB_SUBJECT, args={}, deadline_s=10) for goal in goals or LADDERS["rank.slow"]]
    ends_s = 10 * len(rungs) + (30 if mode == "approve" else 0)
    return Plan(
        id="p", incident="i", rule="r", mode=mode, fence=1, deadline_ns=at(ends_s), ladder=tuple(rungs), why=why
    )


def told(verb: str, expires_s: float = 100) -> Message:
    return {"verb": verb, "who": "Ada", "why": "so", "expires_ns": at(expires_s)}


def so_far(*results: str) -> list[Outcome]:
    return [outcome("p", index, result) for index, result in enumerate(results)]


REACHED, FAILED, REFUSED = "reached", "failed", "refused"


@pytest.mark.parametrize(
    ("mode", "results", "messages", "t_s", "step"),
    [
        pytest.param("act", [], [], 0, 0, id="the first rung first"),
        pytest.param("act", [REACHED], [], 5, 1, id="then the next"),
        pytest.param("act", [FAILED, REFUSED], [], 5, 2, id="what needs the job's help may fail"),
        pytest.param("act", [REACHED, REACHED, "already"], [], 5, 3, id="what is there already counts"),
        pytest.param(
            "act", [REACHED, REACHED, FAILED], [], 5, "done", id="a job that cannot be stopped is not started"
        ),
        pytest.param("act", [REACHED] * 5, [], 5, "done", id="the end of the ladder"),
        pytest.param("act", [REACHED], [told("stop_all")], 5, "done", id="switched off before the next rung"),
        pytest.param("act", [REACHED] * 3, [told("stop_all")], 5, "done", id="switched off in the middle too"),
        pytest.param("act", [REACHED] * 5, [told("stop_all")], 5, "done", id="switched off too late"),
        pytest.param("act", [REACHED], [told("withdraw")], 5, "done", id="withdrawn before anything was done"),
        pytest.param("act", [REACHED, FAILED], [told("withdraw")], 5, "done", id="a checkpoint more is no effect"),
        pytest.param("act", [REACHED, REACHED], [told("withdraw")], 5, 2, id="withdrawn after the first effect"),
        pytest.param("act", [], [told("deny")], 5, "done", id="a person may stop it unasked"),
        pytest.param("act", [], [told("approve")], 5, 0, id="leave that nobody asked for"),
        pytest.param("act", [REACHED], [], 50, "done", id="past its time"),
        pytest.param("approve", [], [], 0, "wait", id="waits for a person"),
        pytest.param("approve", [], [told("approve")], 29, 0, id="leave given"),
        pytest.param("approve", [], [told("approve", 20)], 25, "wait", id="leave that is past"),
        pytest.param("approve", [], [], 30, "done", id="nobody came"),
        pytest.param("approve", [], [told("approve")], 30, 0, id="leave in time, taken up late"),
        pytest.param("approve", [REACHED], [told("approve", 20)], 60, 1, id="leave is for the whole plan"),
        pytest.param("approve", [], [told("approve"), told("deny")], 5, "done", id="leave taken back"),
        pytest.param("observe", [REFUSED], [told("deny")], 500, 1, id="observing harms nobody"),
        pytest.param("observe", [REFUSED] * 5, [], 5, "done", id="observed to the end"),
    ],
)
def test_the_next_step(
    mode: Literal["observe", "approve", "act"],
    results: list[str],
    messages: list[Message],
    t_s: float,
    step: int | str,
) -> None:
    assert next_step(plan(mode), so_far(*results), messages, at(t_s)) == step


@pytest.mark.parametrize(
    ("made", "results", "messages", "t_s", "result", "reason", "retryable", "verb"),
    [
        pytest.param(
            plan(),
            [FAILED, "already", *[REACHED] * 3],
            [],
            5,
            "reached",
            "quiesced, stopped, running, verified; without checkpoint_taken (so)",
            False,
            None,
            id="reached",
        ),
        pytest.param(plan(), [REACHED] * 3 + [FAILED], [], 5, "failed", "running: so", True, None, id="failed"),
        pytest.param(plan(), [REACHED] * 2 + [REFUSED], [], 5, "refused", "stopped: so", True, None, id="fenced"),
        pytest.param(plan(), [REACHED] * 2 + ["expired"], [], 5, "expired", "stopped: so", True, None, id="too slow"),
        pytest.param(
            plan(), [], [], 50, "expired", "its time was over before checkpoint_taken was begun", True, None, id="late"
        ),
        pytest.param(
            plan("approve"), [], [], 30, "expired", "nobody approved it in time", False, None, id="nobody came"
        ),
        pytest.param(plan(), [], [told("deny")], 5, "refused", "deny by Ada: so", False, "deny", id="denied"),
        pytest.param(
            plan("observe", "stopped", "running", why="refused: no budget"),
            ["already", REFUSED],
            [],
            5,
            "refused",
            "observed only: would have tried stopped, running (there already: stopped); refused: no budget",
            False,
            None,
            id="observed",
        ),
    ],
)
def test_the_end_in_words(
    made: Plan,
    results: list[str],
    messages: list[Message],
    t_s: float,
    result: str,
    reason: str,
    retryable: bool,
    verb: str | None,
) -> None:
    outcomes = [replace(one, retryable=True) for one in so_far(*results)]
    end = whole(made, outcomes, messages, at(t_s))
    assert (end.index, end.result, end.reason, end.retryable) == (-1, result, reason, retryable)
    assert end.found.get("verb") == verb


@pytest.mark.parametrize(
    ("results", "left"),
    [
        ([REACHED], False),
        ([REACHED, REACHED], True),
        ([FAILED, "already", FAILED], True),
        ([REACHED, REACHED, REACHED], False),
    ],
)
def test_ranks_that_were_left_waiting_are_told(results: list[str], left: bool) -> None:
    assert paused(plan(), so_far(*results)) is left


messages = st.lists(
    st.builds(told, st.sampled_from(("approve", "deny", "withdraw", "stop_all")), st.integers(0, 80)), max_size=3
)
RESULTS = ("reached", "already", "failed", "refused", "expired")


@given(
    st.sampled_from(("observe", "approve", "act")),
    st.sampled_from(sorted(LADDERS)),
    st.lists(st.tuples(st.sampled_from(RESULTS), st.integers(1, 12), messages), min_size=1, max_size=12),
)
def test_any_plan_ends_once_and_takes_each_rung_at_most_once(
    mode: Literal["observe", "approve", "act"], kind: str, story: Sequence[tuple[str, int, list[Message]]]
) -> None:
    made, outcomes, heard, t_s = plan(mode, *LADDERS[kind]), list[Outcome](), list[Message](), 0
    for result, waited_s, more in story:
        heard, t_s = [*heard, *more], t_s + waited_s
        step = next_step(made, outcomes, heard, at(t_s))
        if step == "done":
            break
        if step != "wait":
            assert step == len(outcomes)
            outcomes.append(outcome("p", step, result))
    if next_step(made, outcomes, heard, at(t_s)) == "done":
        end = whole(made, outcomes, heard, at(t_s))
        hard = [one.result for one in outcomes if made.ladder[one.index].goal not in SOFT]
        done = len(outcomes) == len(made.ladder) and set(hard) <= {"reached", "already"}
        assert (end.result == "reached") is (done and mode != "observe")
        assert next_step(made, outcomes, heard, at(t_s) + 1) == "done", "an end is an end"
        leave = any(one["verb"] == "approve" for one in heard)
        assert mode != "approve" or leave or not outcomes, "nothing without leave"
    elif mode == "approve" and not outcomes:
        assert at(t_s) < approval_ends_ns(made) or any(one["verb"] == "approve" for one in heard)
