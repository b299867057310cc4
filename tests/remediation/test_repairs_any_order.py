"""Whatever happens in whatever order: one plan at a time, never more than the budgets, nothing against a person's word,
and a replay or a restored snapshot says the same.

Incidents and Repairs stand behind each other as in the engine; plans are carried out by next_step and whole, with a
world that answers anything.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.remediation.plan_world import JOB, at, budget, command, event, hello, outcome, rank, started

from trainwarden.alerts.incidents import Incidents
from trainwarden.core.codec import dumps
from trainwarden.core.model import (
    Epoch,
    Finding,
    Incident,
    Instruction,
    Outcome,
    Plan,
    Start,
    Stimulus,
    Tell,
    Tick,
)
from trainwarden.core.records import epoch_of
from trainwarden.remediation.plans import DONE, Message, next_step, whole
from trainwarden.remediation.policy import FINDING_KINDS, BreakerConfig, LimitsConfig, Policy, RuleConfig
from trainwarden.remediation.repairs import Repairs

MODES: dict[str, Literal["observe", "approve", "act"]] = {"rank.hung": "approve", "process.oom": "observe"}
RULE = RuleConfig(
    mode="act",
    leave_out="alone",
    budget=budget(2, 60),
    cool_down=timedelta(seconds=5),
    approval=timedelta(seconds=40),
)
LIMITS = LimitsConfig(
    budget=budget(4, 120),
    breaker=BreakerConfig(failed=2, budget=budget(6, 400), cool_off=timedelta(seconds=150)),
    patience=timedelta(seconds=30),
)
POLICY = Policy(rules={kind: replace(RULE, mode=MODES.get(kind, "act")) for kind in FINDING_KINDS}, limits=LIMITS)
TELLS_TO_END = {"deny", "stop_all", "withdraw"}


class Machines:
    """The engine's order: what one machine says goes on to the other."""

    def __init__(self) -> None:
        self.incidents, self.repairs = Incidents(), Repairs(POLICY, JOB)

    def handle(self, stimulus: Stimulus) -> list[Instruction]:
        said: list[Instruction] = []
        todo: deque[tuple[Stimulus, Sequence[Incidents | Repairs]]] = deque(
            [(stimulus, (self.incidents, self.repairs))]
        )
        while todo:
            one, machines = todo.popleft()
            for machine in machines:
                for instruction in machine.handle(one):
                    said.append(instruction)
                    if isinstance(instruction, Incident):
                        todo.append((instruction, (self.repairs,)))
                    if isinstance(instruction, Start):
                        todo.append((instruction, (self.incidents,)))
        return said

    def is_due(self, now_ns: int) -> bool:
        due = (self.incidents.due_ns(), self.repairs.due_ns())
        return any(due_ns is not None and due_ns <= now_ns for due_ns in due)

    def snapshot(self) -> str:
        return json.dumps([self.incidents.snapshot(), self.repairs.snapshot()], allow_nan=False)

    def restore(self, text: str) -> "Machines":
        incidents, repairs = json.loads(text)
        self.incidents.restore(incidents)
        self.repairs.restore(repairs)
        return self


@dataclass
class Book:
    """What was spent, counted in another way than by the machine."""

    acted: list[tuple[str, int, str]] = field(default_factory=list)
    """Rule, start and plan of each plan that may act and was not given back."""
    failed: int = 0
    open_ns: int | None = None

    def check(self, plan: Plan, now_ns: int) -> None:
        rule, limits = POLICY.rules[plan.rule], POLICY.limits
        assert self.within(now_ns, limits.budget.window) < limits.budget.plans
        assert self.within(now_ns, rule.budget.window, plan.rule) < rule.budget.plans
        assert self.open_ns is None or now_ns >= self.open_ns + ns(limits.breaker.cool_off)
        self.open_ns = None

    def within(self, now_ns: int, window: timedelta, rule: str = "") -> int:
        return sum(now_ns - start_ns < ns(window) and rule in ("", name) for name, start_ns, _ in self.acted)

    def close(self, plan: Plan, end: Outcome, tried: bool, now_ns: int) -> None:
        if end.found.get("verb") == "withdraw" or not (tried or end.retryable):
            self.acted = [one for one in self.acted if one[2] != plan.id]
            return
        self.failed = (
            self.failed + 1 if end.result in ("failed", "expired") else 0 if end.result in DONE else self.failed
        )
        if self.failed >= LIMITS.breaker.failed and self.open_ns is None:
            self.open_ns, self.failed = now_ns, 0


def ns(time: timedelta) -> int:
    return int(time.total_seconds() * 1e9)


class World:
    """Carries plans out, remembers everything, and checks each instruction as it comes."""

    def __init__(self) -> None:
        self.machines, self.book = Machines(), Book()
        self.now_s, self.attempt, self.stopped = 0.0, 0, False
        self.story: list[Stimulus] = []
        self.said: list[list[str]] = []
        self.incidents: dict[str, Incident] = {}
        self.revisions: dict[str, int] = {}
        self.plans: set[str] = set()
        self.tells: set[str] = set()
        self.plan: Plan | None = None
        self.outcomes: list[Outcome] = []
        self.told: list[Message] = []
        self.ended: tuple[Plan, Outcome, bool] | None = None
        """A plan that has ended, at a time that nobody knows yet."""
        self.start("run")

    def feed(self, stimulus: Stimulus) -> None:
        self.story.append(stimulus)
        if self.ended is not None and not isinstance(stimulus, Outcome):
            self.book.close(*self.ended, now_ns=at(self.now_s))
            self.ended = None
        said = self.machines.handle(stimulus)
        self.said.append([dumps(one) for one in said])
        for one in said:
            self.hear(one)

    def hear(self, one: Instruction) -> None:
        match one:
            case Incident():
                self.incidents[one.id] = one
            case Start():
                self.begin(one.plan)
            case Tell():
                assert self.plan is not None, "only a plan that runs is told anything"
                assert (one.plan, one.key in self.tells) == (self.plan.id, False)
                self.tells.add(one.key)
                self.told.append(one.message)

    def begin(self, plan: Plan) -> None:
        assert self.plan is None, "one plan at a time"
        assert self.ended is None, "a plan has ended before the next begins"
        assert plan.id not in self.plans
        self.plans.add(plan.id)
        self.plan, self.outcomes, self.told = plan, [], []
        assert plan.ladder
        if plan.mode == "observe":
            return
        assert plan.mode == MODES.get(plan.rule, "act")
        assert not self.stopped, "all actions are switched off"
        known = self.incidents[plan.incident]
        assert known.state not in ("suspected", "resolved")
        self.book.check(plan, at(self.now_s))
        self.book.acted.append((plan.rule, at(self.now_s), plan.id))

    # moves

    def find(self, kind: str, who: int, status: Any) -> None:
        name = f"{kind}/{JOB}/{self.attempt}/rank:{who}/0"
        self.revisions[name] = self.revisions.get(name, -1) + 1
        seen_ns = at(self.now_s)
        finding = Finding(
            id=name,
            revision=self.revisions[name],
            status=status,
            kind=kind,
            subject=rank(who),
            suspects=((rank(who), 1.0),),
            job=JOB,
            epoch=Epoch(epoch_of(self.attempt, 0, 0)),
            onset_ns=seen_ns - 10**9,
            onset_step=None,
            seen_ns=seen_ns,
            confidence=0.95,
            reason="so",
            evidence=(),
        )
        self.feed(finding)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self.machines.is_due(at(self.now_s)):
            self.feed(Tick(seen_ns=at(self.now_s)))

    def start(self, by: str) -> None:
        self.attempt += 1
        self.now_s += 0.01
        self.feed(started(self.attempt, self.now_s, slots=5, by=by))
        for who in range(4):
            self.feed(hello(who, who, self.attempt, self.now_s))
        self.now_s += 0.01

    def carry(self, result: str) -> None:
        """One look of carry_out."""
        if self.plan is None:
            return
        step = next_step(self.plan, self.outcomes, self.told, at(self.now_s))
        if step == "wait":
            return
        if step == "done":
            end = whole(self.plan, self.outcomes, self.told, at(self.now_s))
            self.ended = (
                (self.plan, end, any(one.result != "refused" for one in self.outcomes))
                if self.plan.mode != "observe"
                else None
            )
            self.plan = None
            self.feed(end)
            return
        if self.plan.mode != "observe" and self.plan.ladder[step].goal == "running" and result in DONE:
            self.start("plan of term 7")
        self.outcomes.append(outcome(self.plan.id, step, result, retryable=True))
        self.feed(self.outcomes[-1])

    def carry_on(self, well: int, result: str) -> None:
        """So many rungs go well, then one may not, and then time goes on."""
        for one in (*["reached"] * well, result, "reached"):
            self.carry(one)
        self.wait(0.25)

    def live(self, kind: str, who: int, well: int, result: str) -> None:
        """A fault, and what is done about it."""
        self.find(kind, who, "final")
        self.wait(0.25)
        self.say("approve", late=False)
        self.carry_on(well, result)

    def say(self, verb: str, late: bool) -> None:
        self.now_s += 0.01
        name = self.plan.id if self.plan is not None else "nothing"
        expires_s = self.now_s + (-1 if late else 100)
        if verb == "stop":
            self.feed(event("attempt.stopping", self.now_s, attempt=self.attempt, by="SIGINT"))
            return
        plan = {"resume": "resume", "stop_all": ""}.get(verb, name)
        self.feed(command("stop_all" if verb == "resume" else verb, self.now_s, plan, expires_s))
        self.stopped |= verb == "stop_all"
        if verb == "resume" and not late:
            self.stopped, self.book.open_ns, self.book.failed = False, None, 0


kinds = st.sampled_from(FINDING_KINDS)
statuses = st.sampled_from(("final", "final", "final", "final", "provisional", "cleared"))
results = st.sampled_from(("reached", "reached", "already", "failed", "refused", "expired"))
verbs = st.sampled_from(("approve",) * 8 + ("resume", "resume", "deny", "stop_all", "stop"))
finds = st.tuples(st.just("find"), kinds, st.integers(0, 3), statuses)
moves = st.one_of(
    *[st.tuples(st.just("live"), kinds, st.integers(0, 3), st.integers(2, 6), results)] * 5,
    *[finds] * 2,
    *[st.tuples(st.just("carry"), results)] * 2,
    *[st.tuples(st.just("carry_on"), st.integers(0, 6), results)] * 3,
    *[st.tuples(st.just("wait"), st.sampled_from((0.25, 1.0, 2.0, 5.0, 8.0, 20.0, 200.0)))] * 2,
    st.tuples(st.just("say"), verbs, st.sampled_from((False, False, False, True))),
    st.tuples(st.just("start"), st.just("run")),
)
stories = st.lists(moves, min_size=10, max_size=50)


def lived(story: Sequence[tuple[Any, ...]]) -> World:
    world = World()
    for name, *args in story:
        getattr(world, name)(*args)
    return world


@settings(max_examples=100, deadline=None)
@given(stories, st.integers(0, 200))
def test_no_order_breaks_a_limit_and_all_can_be_said_again(story: list[tuple[Any, ...]], cut: int) -> None:
    world = lived(story)
    again, at_cut = Machines(), min(cut, len(world.story))
    said = [[dumps(one) for one in again.handle(stimulus)] for stimulus in world.story[:at_cut]]
    restored = Machines().restore(again.snapshot())
    assert (restored.repairs.due_ns(), restored.snapshot()) == (again.repairs.due_ns(), again.snapshot())
    said += [[dumps(one) for one in again.handle(stimulus)] for stimulus in world.story[at_cut:]]
    assert said == world.said, "a replay says the same"
    rest = [[dumps(one) for one in restored.handle(stimulus)] for stimulus in world.story[at_cut:]]
    assert rest == world.said[at_cut:], "so does a restored snapshot"


@settings(max_examples=100, deadline=None)
@given(stories)
def test_whatever_happened_nothing_is_left_hanging(story: list[tuple[Any, ...]]) -> None:
    """A plan that is carried on ends, and what then waits, waits for something that comes soon."""
    world = lived(story)
    for _ in range(12):
        world.now_s += 0.1
        world.carry("reached")
        if world.plan is not None and world.plan.mode == "approve" and not world.outcomes:
            world.now_s += 100
    due_ns = world.machines.repairs.due_ns()
    assert world.plan is None or world.outcomes or world.plan.mode != "approve"
    assert due_ns is None or due_ns <= at(world.now_s) + ns(LIMITS.patience)
