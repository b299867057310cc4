"""Incidents, events and outcomes for tests of plans: one job, two or four ranks, times in seconds."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from trainwarden.core.model import (
    Epoch,
    Event,
    Evidence,
    Finding,
    Incident,
    Instruction,
    JobId,
    Json,
    Outcome,
    Plan,
    Start,
    Stimulus,
    Subject,
    Tell,
    Tick,
    Tier,
)
from trainwarden.core.records import epoch_of
from trainwarden.remediation.policy import FINDING_KINDS, BudgetConfig, LimitsConfig, Policy, RuleConfig
from trainwarden.remediation.repairs import Repairs

JOB = JobId("train-3")
JOB_SUBJECT = Subject(kind="job", id=JOB)
TIERS = {"rank.slow": Tier.WARN, "loss.nonfinite": Tier.CRITICAL}


def at(t_s: float) -> int:
    return int((1_000_000 + t_s) * 1e9)


def rank(number: int) -> Subject:
    return Subject(kind="rank", id=str(number))


def incident(kind: str = "process.killed", who: int = 2, attempt: int = 1, **changes: object) -> Incident:
    """Confirmed by one final finding; its id names kind, rank and attempt."""
    cause: dict[str, Any] = {name: changes.pop(name) for name in ("status", "confidence") if name in changes}
    batch = [Evidence(what="batch", value=changes.pop("batch", 150))] if kind == "loss.nonfinite" else []  # type: ignore[arg-type]
    finding = Finding(
        id=f"{kind}/{JOB}/{attempt}/rank:{who}/0",
        revision=0,
        status=cause.get("status", "final"),
        kind=kind,
        subject=rank(who),
        suspects=((rank(who), 1.0),),
        job=JOB,
        epoch=Epoch(epoch_of(attempt, 0, 0)),
        onset_ns=at(5),
        onset_step=100,
        seen_ns=at(6),
        confidence=cause.get("confidence", 0.98),
        reason=f"rank {who} has {kind}",
        evidence=tuple(batch),
    )
    made = Incident(
        id=f"{kind}.{who}.{attempt}",
        revision=1,
        state="confirmed",
        tier=TIERS.get(kind, Tier.ERROR),
        kind=kind,
        culprit=rank(who),
        victims=(),
        job=JOB,
        epoch=finding.epoch,
        onset_ns=at(5),
        findings=(finding,),
        events=(),
        reason=finding.reason,
        action="",
        plans=(),
        lost_s={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name


def event(kind: str, t_s: float, **data: Json) -> Event:
    ns = at(t_s)
    return Event(
        kind=kind, subject=JOB_SUBJECT, source="run@n1", seq=ns // 1000, t_ns=ns, seen_ns=ns, job=JOB, data=data
    )


def started(attempt: int, t_s: float, *, slots: int = 4, term: int = 7, by: str = "run") -> Event:
    named = [f"n1:{index}" for index in range(slots)]
    return event("attempt.started", t_s, attempt=attempt, term=term, by=by, slots=named)


def hello(number: int, slot: int, attempt: int, t_s: float, ranks: int = 4) -> Event:
    data: dict[str, Json] = {"rank": number, "world_size": ranks, "slot": f"n1:{slot}", "attempt": attempt}
    return replace(event("hello", t_s + number / 1000, **data), subject=rank(number))


def attempt(number: int, t_s: float, *, slots: int = 4, seats: Sequence[int] = (0, 1, 2, 3)) -> list[Event]:
    """An attempt starts and its ranks say hello."""
    hellos = [hello(who, slot, number, t_s, len(seats)) for who, slot in enumerate(seats)]
    return [started(number, t_s, slots=slots, by="run" if number == 1 else "plan of term 7"), *hellos]


def command(verb: str, t_s: float, plan: str = "", expires_s: float = 1e6, why: str = "I know") -> Event:
    return event(f"command.{verb}", t_s, plan=plan, who="Ada", why=why, expires_ns=at(expires_s))


def tick(t_s: float) -> Tick:
    return Tick(seen_ns=at(t_s))


def outcome(plan: str, index: int, result: str, **changes: object) -> Outcome:
    made = Outcome(plan=plan, index=index, result="reached", reason="so", retryable=False, found={})
    return replace(made, result=result, **changes)  # type: ignore[arg-type]  # fields by name


def ends(plan: str, *results: str, whole: str = "", **changes: object) -> list[Outcome]:
    """Outcomes of the rungs, and of the whole (by default as its last rung)."""
    rungs = [outcome(plan, index, result) for index, result in enumerate(results)]
    return [*rungs, outcome(plan, -1, whole or results[-1], **changes)]


def budget(plans: int, window_s: float) -> BudgetConfig:
    return BudgetConfig(plans=plans, window=timedelta(seconds=window_s))


WIDE = budget(100, 3600)


def policy(
    mode: Literal["observe", "approve", "act"] = "act", limits: LimitsConfig | None = None, **changes: object
) -> Policy:
    """Every rule the same; wide budgets, and nothing has to cool down, unless the test says otherwise."""
    rule = RuleConfig(mode=mode, leave_out="alone", budget=WIDE, cool_down=timedelta(0))
    rule = replace(rule, **changes)  # type: ignore[arg-type]  # fields by name
    return Policy(rules=dict.fromkeys(FINDING_KINDS, rule), limits=limits or LimitsConfig(budget=WIDE))


def fed(machine: Repairs, *stimuli: Stimulus) -> list[Instruction]:
    """What is said, when a tick follows each incident and event (none goes back in time)."""
    said: list[Instruction] = []
    for one in stimuli:
        said += machine.handle(one)
        said += machine.handle(Tick(seen_ns=0)) if isinstance(one, Incident | Event) else []
    return said


def plans(said: Sequence[Instruction]) -> list[Plan]:
    return [one.plan for one in said if isinstance(one, Start)]


def words(said: Sequence[Instruction]) -> list[str]:
    """What was said, a line each."""
    return [_words(one) for one in said]


def _words(one: Instruction) -> str:
    if isinstance(one, Start):
        return f"{one.plan.mode} {one.plan.id}" + (f" ({one.plan.why})" if one.plan.why else "")
    assert isinstance(one, Tell)
    return f"{one.message['verb']} {one.plan} ({one.message['who']}: {one.message['why']})"
