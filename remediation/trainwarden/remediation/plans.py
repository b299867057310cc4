"""What is to be reached for each kind of incident, and which rung comes next. Pure: all there is to test of ladders.

A plan is carried out by asking `next_step` again and again and taking the rung that it names; `whole` says how it
ended. Both see only what is written down (the plan, outcomes, what the plan was told, a recorded time), so they say the
same after any interruption.

What a plan can be told (`Tell.message`: verb, who, why, expires_ns):
  approve    begin; counts until expires_ns, and only for a plan that waits for it
  deny       a person ends it before its next rung
  stop_all   all actions are switched off: ends before its next rung
  withdraw   it has become pointless: ends, unless its first effect is there (half a restart is worse than a whole one)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from trainwarden.core.model import Finding, Incident, JobId, Json, Outcome, Plan, Rung, Subject
from trainwarden.remediation.policy import RungsConfig

Message: TypeAlias = Mapping[str, Json]
Result: TypeAlias = Literal["reached", "already", "failed", "refused", "expired"]

BY_PLAN: Final = "plan"
"""First word of the `by` of attempt.stopping when a plan does it; anything else is a person's wish."""

RESTART: Final = ("stopped", "running", "verified")

LADDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "process.killed": RESTART,
    "process.oom": RESTART,
    "process.failed": RESTART,
    "process.unknown": RESTART,
    "rank.hung": ("evidence_collected", *RESTART),
    "rank.slow": ("checkpoint_taken", "quiesced", *RESTART),
    "loss.nonfinite": RESTART,
}
"""Kind -> goals, in order. A WARN is only acted on at a safe point, so its ladder takes a checkpoint first."""

LEAVES_OUT: Final = frozenset({"rank.slow"})
"""Kinds that nothing helps but leaving the culprit's slot out."""

ROLLS_BACK: Final = frozenset({"loss.nonfinite"})
"""Kinds that are in the model's state: the checkpoint must be older than their onset, and their batch is skipped."""

SOFT: Final = frozenset({"evidence_collected", "checkpoint_taken", "quiesced"})
"""Goals that need the job's help, and may fail: graceful paths hang on the thing that hangs. What follows does not."""

EFFECTS: Final = frozenset({"quiesced", "stopped", "running"})
"""Goals that change the job."""

DONE: Final = frozenset({"reached", "already"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a ladder must know beside its incident."""

    job: JobId
    attempt: int
    """The running one."""
    without: tuple[str, ...] = ()
    """Slots that the next attempt leaves out, those left out before included."""
    skip: tuple[tuple[int, int], ...] = ()
    """Batches that earlier plans skipped, first and last: every later attempt skips them too."""


def ladder(incident: Incident, facts: Facts, config: RungsConfig) -> tuple[Rung, ...]:
    """The rungs for an incident; none for a kind that nobody foresaw."""
    target = Subject(kind="job", id=facts.job)
    return tuple(
        Rung(goal=goal, target=target, args=_args(goal, incident, facts, config), deadline_s=config.deadline_s(goal))
        for goal in LADDERS.get(incident.kind, ())
    )


def cause_of(incident: Incident) -> Finding | None:
    """The finding that the incident shows as its cause."""
    alike = [one for one in incident.findings if (one.kind, one.onset_ns) == (incident.kind, incident.onset_ns)]
    return next(iter(alike), None)


def _args(goal: str, incident: Incident, facts: Facts, config: RungsConfig) -> Mapping[str, Json]:
    following = facts.attempt + 1
    match goal:
        case "evidence_collected":
            return {"incident": incident.id}
        case "checkpoint_taken":
            return {"within_steps": config.within_steps}
        case "stopped":
            return {"attempt": facts.attempt}
        case "running":
            back = incident.kind in ROLLS_BACK
            skip = sorted({*facts.skip, *(_batches(incident) if back else ())})
            return {
                "attempt": following,
                "before_ns": incident.onset_ns if back else None,
                "without": list(facts.without),
                "skip": [list(batches) for batches in skip],
            }
        case "verified":
            return {"attempt": following, "steps": config.verified_steps}
    return {}


def _batches(incident: Incident) -> list[tuple[int, int]]:
    """The batch that the cause names."""
    cause = cause_of(incident)
    named = [] if cause is None else [one.value for one in cause.evidence if one.what == "batch"]
    return [(batch, batch) for batch in named if isinstance(batch, int) and batch >= 0]


def next_step(
    plan: Plan, outcomes: Sequence[Outcome], told: Sequence[Message], now_ns: int
) -> int | Literal["wait", "done"]:
    """The rung to take next; "wait": for a person; "done": see `whole`. outcomes: of the rungs so far, in order."""
    if _end(plan, outcomes, told, now_ns) is not None:
        return "done"
    if plan.mode == "approve" and not outcomes and not _approved(told, now_ns):
        return "wait"
    return len(outcomes)


def whole(plan: Plan, outcomes: Sequence[Outcome], told: Sequence[Message], now_ns: int) -> Outcome:
    """The outcome of a plan that is done; `found.verb` is what ended it from outside, if something did."""
    end = _end(plan, outcomes, told, now_ns)
    assert end is not None, f"plan {plan.id} has not ended"
    found: Mapping[str, Json] = {"verb": end.verb} if end.verb else {}
    return Outcome(plan=plan.id, index=-1, result=end.result, reason=end.reason, retryable=end.retryable, found=found)


def paused(plan: Plan, outcomes: Sequence[Outcome]) -> bool:
    """Whether ranks were left waiting by a plan that ended: whoever carried it out must ask them to go on."""
    reached = {goal for goal, one in _named(plan, outcomes) if one.result in DONE}
    return "quiesced" in reached and not reached & {"stopped", "running"}


def approval_ends_ns(plan: Plan) -> int:
    """Until when a plan that waits for a person waits."""
    return plan.deadline_ns - rungs_ns(plan.ladder)


def rungs_ns(rungs: Sequence[Rung]) -> int:
    """What the rungs may take together."""
    return int(1e9 * sum(rung.deadline_s for rung in rungs))


class _End(NamedTuple):
    result: Result
    reason: str
    retryable: bool = False
    verb: str = ""


def _end(plan: Plan, outcomes: Sequence[Outcome], told: Sequence[Message], now_ns: int) -> _End | None:
    """How the plan ended; None: it goes on."""
    over = len(outcomes) >= len(plan.ladder)
    if plan.mode == "observe":
        return _observed(plan, outcomes) if over else None
    for goal, one in _named(plan, outcomes):
        if one.result not in DONE and goal not in SOFT:
            return _End(one.result, f"{goal}: {one.reason}", one.retryable)
    if over:
        return _End("reached", _say_reached(plan, outcomes))
    return _told_to_end(plan, outcomes, told) or _late(plan, outcomes, told, now_ns)


def _told_to_end(plan: Plan, outcomes: Sequence[Outcome], told: Sequence[Message]) -> _End | None:
    begun = any(goal in EFFECTS and one.result in DONE for goal, one in _named(plan, outcomes))
    for message in told:
        verb = str(message["verb"])
        if verb in ("deny", "stop_all") or (verb == "withdraw" and not begun):
            return _End("refused", f"{verb} by {message['who']}: {message['why']}", verb=verb)
    return None


def _late(plan: Plan, outcomes: Sequence[Outcome], told: Sequence[Message], now_ns: int) -> _End | None:
    waits = plan.mode == "approve" and not outcomes and not _approved(told, now_ns)
    if waits and now_ns >= approval_ends_ns(plan):
        return _End("expired", "nobody approved it in time")
    if now_ns >= plan.deadline_ns:
        following = plan.ladder[len(outcomes)].goal
        return _End("expired", f"its time was over before {following} was begun", retryable=True)
    return None


def _approved(told: Sequence[Message], now_ns: int) -> bool:
    approvals = [message["expires_ns"] for message in told if message["verb"] == "approve"]
    return any(isinstance(until_ns, int) and until_ns > now_ns for until_ns in approvals)


def _observed(plan: Plan, outcomes: Sequence[Outcome]) -> _End:
    there = [goal for goal, one in _named(plan, outcomes) if one.result in DONE]
    words = f"observed only: would have tried {', '.join(rung.goal for rung in plan.ladder)}"
    words += f" (there already: {', '.join(there)})" if there else ""
    return _End("refused", words + (f"; {plan.why}" if plan.why else ""))


def _say_reached(plan: Plan, outcomes: Sequence[Outcome]) -> str:
    named = list(_named(plan, outcomes))
    reached = [goal for goal, one in named if one.result in DONE]
    missed = [f"{goal} ({one.reason})" for goal, one in named if one.result not in DONE]
    return ", ".join(reached) + (f"; without {', '.join(missed)}" if missed else "")


def _named(plan: Plan, outcomes: Sequence[Outcome]) -> list[tuple[str, Outcome]]:
    return [(plan.ladder[one.index].goal, one) for one in outcomes]
