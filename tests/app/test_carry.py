"""Taking rungs and climbing ladders with no engine below: what is asked, what is decided, what a crash changes."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.runtime import Scripted, ladder

from trainwarden.app.carry import Message, Permit, Work, climb, take
from trainwarden.app.store import Store
from trainwarden.core.errors import ActionError, FencedError
from trainwarden.core.model import JobId, Json, Outcome, Plan, Rung
from trainwarden.core.ports import Actuator
from trainwarden.remediation.plans import next_step, whole

T = TypeVar("T")
SECOND = 1_000_000_000
JOB = JobId("job")
PLAN = Plan(
    id="incident/plan-1",
    incident="incident",
    rule="process.killed",
    mode="act",
    fence=3,
    deadline_ns=1000 * SECOND,
    ladder=ladder(JOB, 1.0, ("running",)),
)


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


def taken(actuator: Actuator, guard: Callable[[Plan], str | None] = lambda plan: None, plan: Plan = PLAN) -> Outcome:
    clock = Clock()
    return take(plan, 0, actuators={"running": actuator}, guard=guard, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize(
    ("actuator", "result", "calls"),
    [
        pytest.param(Scripted(True), "already", ["reached"], id="there already"),
        pytest.param(Scripted(False, True), "reached", ["reached", "pursue 3", "reached"], id="at once"),
        pytest.param(
            Scripted(False, False, False, True), "reached", ["reached", "pursue 3", *["reached"] * 3], id="later"
        ),
        pytest.param(Scripted(False), "failed", ["reached", "pursue 3", *["reached"] * 6], id="never"),
        pytest.param(Scripted(None), "failed", ["reached"] * 6, id="who cannot tell does not act"),
        pytest.param(
            Scripted(None, None, False, True), "reached", [*["reached"] * 3, "pursue 3", "reached"], id="can tell later"
        ),
        pytest.param(
            Scripted(False, None, True),
            "reached",
            ["reached", "pursue 3", "reached", "reached"],
            id="blind then",
        ),
    ],
)
def test_a_rung(actuator: Scripted, result: str, calls: list[str]) -> None:
    assert taken(actuator).result == result
    assert actuator.calls == calls


@pytest.mark.parametrize(
    ("raised", "result", "reason", "retryable"),
    [
        (ActionError("no spare", retryable=False), "failed", "no spare", False),
        (ActionError("busy", retryable=True), "failed", "busy", True),
        (FencedError("term 3 is over"), "refused", "term 3 is over", False),
        (ZeroDivisionError("a fault of ours"), "failed", "ZeroDivisionError: a fault of ours", False),
    ],
    ids=["an action failed", "it may work later", "fenced", "anything else"],
)
def test_nothing_raises(raised: Exception, result: str, reason: str, retryable: bool) -> None:
    outcome = taken(Scripted(False, pursue=raised))
    assert (outcome.result, outcome.reason, outcome.retryable) == (result, reason, retryable)


def test_a_late_rung_says_what_was_not_reached() -> None:
    assert taken(Scripted(False)).reason == "running is not reached within 1 s"
    assert taken(Scripted(None)).reason == "running cannot be told within 1 s"


def test_a_goal_that_nobody_reaches_is_refused() -> None:
    clock = Clock()
    outcome = take(PLAN, 0, actuators={}, guard=lambda plan: None, clock=clock, sleep=clock.sleep)
    assert (outcome.result, outcome.reason) == ("refused", "nothing here can reach running")


@pytest.mark.parametrize(("answer", "result"), [(True, "already"), (False, "refused"), (None, "refused")])
def test_one_who_observes_only_looks(answer: bool | None, result: str) -> None:
    actuator = Scripted(answer)
    assert taken(actuator, plan=replace(PLAN, mode="observe")).result == result
    assert actuator.calls == ["reached"]


def test_what_was_found_is_kept_and_what_was_reached_before_can_be_recalled() -> None:
    class Recalling(Scripted):
        def found(self, rung: Rung) -> Mapping[str, Json]:
            return {"checkpoint": "from the folder"}

    assert taken(Scripted(False, True, pursue={"checkpoint": "c"})).found == {"checkpoint": "c"}
    assert taken(Scripted(True)).found == {}
    assert taken(Recalling(True)).found == {"checkpoint": "from the folder"}


def test_the_guard_is_asked_before_anything_and_at_every_look() -> None:
    actuator = Scripted(False)
    assert taken(actuator, guard=lambda plan: "switched off").result == "refused"
    assert actuator.calls == []
    answers = [None, None, None, "switched off"]
    outcome = taken(actuator, guard=lambda plan: answers.pop(0))
    assert (outcome.result, outcome.reason, outcome.retryable) == ("refused", "switched off", True)
    assert actuator.calls == ["reached", "pursue 3", "reached", "reached"]


def test_a_permit_is_the_term_the_switches_and_what_others_say(tmp_path: Path) -> None:
    store = Store(tmp_path / "journal.sqlite")
    switch = tmp_path / "stop-all"
    also: list[str | None] = [None]
    permit = Permit(store, JOB, [switch], [lambda plan: also[0]])
    assert permit(PLAN) == "job job is not ours any more: our term 3 is over"
    terms = [store.claim(JOB, 1, 0, now_ns) for now_ns in range(3)]  # process 1 began at another time: it is gone
    assert terms[-1] == PLAN.fence
    assert permit(PLAN) is None
    also[0] = "the breaker is open"
    assert permit(PLAN) == "the breaker is open"
    switch.touch()
    assert permit(PLAN) == f"all actions are switched off: {switch} exists"
    switch.unlink()
    store.close()
    assert "journal.sqlite" in str(permit(PLAN)), "who cannot read whose the job is does not act"


# ladders


class Crash(BaseException):
    """kill -9, for one plan."""


class Memory:
    """A record as the engine keeps it: what was recorded is not done again. Dies at the n-th chance it gets."""

    def __init__(self, told: Sequence[Message] = ()) -> None:
        self.answers: list[Any] = []
        self.inbox = list(told)
        self.consumed = 0
        self._at = 0
        self.dies_in: int | None = None

    def again(self, dies_in: int | None) -> "Memory":
        self._at, self.dies_in = 0, dies_in
        return self

    def record(self, name: str, work: Callable[[], T]) -> T:
        if self._at == len(self.answers):
            self._chance()
            answer = work()
            self._chance()
            self.answers.append(answer)
            self._chance()
        self._at += 1
        known: T = self.answers[self._at - 1]
        return known

    def heard(self) -> Sequence[Message]:
        def consume() -> list[Message]:
            return self.inbox[self.consumed :]

        new = self.record("heard", consume)
        self.consumed = max(self.consumed, sum(len(one) for one in self.answers if isinstance(one, list)))
        return new

    def _chance(self) -> None:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                raise Crash


class World:
    """Goals that are reached by being pursued; counts how often each was."""

    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self.goals = frozenset[str]()
        self.done: list[str] = []
        self._failing = failing

    def reached(self, rung: Rung) -> bool:
        return rung.goal in self.done

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        if rung.goal in self._failing:
            raise ActionError("cannot", retryable=False)
        self.done.append(rung.goal)
        return {}


FIVE = replace(PLAN, ladder=ladder(JOB))


def climbed(plan: Plan, world: World, log: Memory, clock: Clock) -> tuple[Outcome, list[Outcome]]:
    said: list[Outcome] = []
    wake = threading.Event()
    wake.set()
    actuators = {rung.goal: world for rung in plan.ladder}
    work = Work(
        actuators=actuators, guard=lambda plan: None, next_step=next_step, whole=whole, settle=_settled, clock=clock
    )
    return climb(plan, work, log, said.append, wake, clock.sleep), said


def _settled(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    assert outcomes or plan.mode == "approve"


@given(st.lists(st.integers(0, 60), max_size=6), st.sets(st.sampled_from([rung.goal for rung in FIVE.ladder])))
def test_killed_anywhere_any_number_of_times_each_effect_happens_once(kills: list[int], failing: set[str]) -> None:
    """A step's record has three chances to die at: before its work, between work and record, after the record."""
    undisturbed, disturbed = World(frozenset(failing)), World(frozenset(failing))
    end, said = climbed(FIVE, undisturbed, Memory(), Clock())
    log, clock = Memory(), Clock()
    for kill in kills:
        try:
            climbed(FIVE, disturbed, log.again(kill), clock)
        except Crash:
            continue
    again, said_again = climbed(FIVE, disturbed, log.again(None), clock)
    assert disturbed.done == undisturbed.done
    assert (again.index, again.result) == (-1, end.result)
    assert [one.index for one in said_again] == [one.index for one in said]
    same = {"reached": "reached", "already": "reached"}
    for one, other in zip(said_again, said, strict=True):
        assert same.get(one.result, one.result) == same.get(other.result, other.result)


def message(verb: str, expires_ns: int = 10**15) -> Message:
    return {"verb": verb, "who": "ops", "why": "because", "expires_ns": expires_ns}


WAITS = replace(FIVE, mode="approve")


@pytest.mark.parametrize(
    ("told", "result", "reason"),
    [
        ([message("approve")], "reached", ""),
        ([message("deny")], "refused", "deny by ops: because"),
        ([], "expired", "nobody approved it in time"),
        ([message("approve", expires_ns=0)], "expired", "nobody approved it in time"),
    ],
    ids=["approved", "denied", "nobody came", "an approval that was over"],
)
def test_a_plan_that_waits_for_a_person(told: list[Message], result: str, reason: str) -> None:
    world = World()
    end, _ = climbed(WAITS, world, Memory(told), Clock())
    assert end.result == result
    assert reason in end.reason
    assert bool(world.done) == (result == "reached")
