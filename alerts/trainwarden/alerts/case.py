"""One incident while it lives: the findings of one cause, where it stands, and what people last heard of it.

Everything that is shown is derived from the findings at hand, so no order of revisions leaves a stale verdict behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainwarden.alerts.tiers import Tiers, row_of
from trainwarden.alerts.verdict import Judged, cause_of, culprit_of, reason_of, victims_of
from trainwarden.core.errors import InvalidTransition
from trainwarden.core.model import Epoch, Event, Finding, Incident, JobId, Outcome, Plan, Subject, Tier

IncidentState = Literal["suspected", "confirmed", "mitigating", "recovering", "resolved", "reopened"]

TRANSITIONS: Mapping[IncidentState, frozenset[IncidentState]] = {
    "suspected": frozenset({"confirmed", "mitigating", "resolved"}),
    "confirmed": frozenset({"mitigating", "resolved"}),
    "mitigating": frozenset({"recovering", "confirmed", "resolved"}),
    "recovering": frozenset({"mitigating", "confirmed", "resolved"}),
    "resolved": frozenset({"reopened"}),
    "reopened": frozenset({"mitigating", "resolved"}),
}
"""suspected: provisional findings only. confirmed: a final one. mitigating: a plan acts. recovering: the job runs again
and is watched. resolved: the findings are cleared, or a plan was verified. reopened: a resolved trouble came back."""

STORY_LINES = 16
"""Steps of its past that an incident remembers for an InvalidTransition."""

PAST_FINDINGS = 16
"""Findings of its past that a reopened incident keeps."""

MASS_ACTION = "check trainwarden's own measurement first (clocks, agents, load of the hosts); act on no single rank"


@dataclass(slots=True, kw_only=True)
class Case:
    """An incident in the making."""

    id: str
    job: JobId | None
    epoch: Epoch | None
    opened_ns: int
    """When its first finding was seen; after a reopening, when the trouble was seen again."""
    judged: dict[str, Judged] = field(default_factory=dict)
    """By finding id, in the order of joining."""
    state: IncidentState = "suspected"
    decided_ns: int | None = None
    """When the first final finding was seen."""
    resolved_ns: int | None = None
    part_of: str = ""
    """The incident that this one turned out to belong to."""
    mass: tuple[str, ...] = ()
    """A kind of finding and why, for this kind, our own measurement is suspected."""
    events: tuple[Event, ...] = ()
    plans: tuple[str, ...] = ()
    shown: Incident | None = None
    """The newest revision."""
    told: Incident | None = None
    """What people last heard; None: nothing since it was opened or reopened."""
    told_ns: int = 0
    channels: tuple[str, ...] = ()
    """Who heard of it since then."""
    story: tuple[str, ...] = ()
    troubles: frozenset[tuple[str, Subject]] = frozenset()
    """Kind and subject of the findings that still hold."""
    kinds: frozenset[str] = frozenset()

    def note(self) -> None:
        """Bring the summaries of `judged` up to date, by which most cases are told apart without a closer look."""
        self.troubles = frozenset((one.finding.kind, one.finding.subject) for one in self.live)
        self.kinds = frozenset(kind for kind, _ in self.troubles)

    def move(self, finish: IncidentState, why: str) -> None:
        """Change the state. Raises InvalidTransition."""
        self.story = (*self.story[1 - STORY_LINES :], f"{self.state}: {why}")
        if finish not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"incident {self.id}", self.state, finish, self.story)
        self.state = finish

    @property
    def open(self) -> bool:
        return self.state != "resolved"

    @property
    def live(self) -> tuple[Judged, ...]:
        """Findings that still hold and that no plan has dealt with."""
        return tuple(one for one in self.judged.values() if one.live)

    def cause(self, tiers: Tiers) -> Judged:
        """The finding that explains the others; when none holds any more, the one that did."""
        return cause_of(self.live or tuple(self.judged.values()), tiers)

    def loud(self, tiers: Tiers) -> bool:
        """Whether people are to hear of it at all."""
        return any(
            one.finding.status == "final" or row_of(tiers, one.finding.kind).announce == "provisional"
            for one in self.live
        )

    def settle(self, now_ns: int) -> None:
        """Let the state follow the findings."""
        self.note()
        final = any(one.finding.status == "final" for one in self.live)
        if final and self.decided_ns is None:
            self.decided_ns = now_ns
        if self.state == "suspected" and final:
            self.move("confirmed", "a finding is final")
        if self.state in ("suspected", "confirmed", "reopened") and not self.live:
            self.resolve(now_ns, "its findings are cleared or withdrawn")

    def resolve(self, now_ns: int, why: str) -> None:
        """It is over."""
        self.move("resolved", why)
        self.resolved_ns = now_ns

    def reopen(self, finding: Finding) -> None:
        """The trouble is back."""
        self.move("reopened", "the trouble came back")
        self.opened_ns, self.decided_ns, self.resolved_ns, self.epoch = finding.seen_ns, None, None, finding.epoch
        self.mass, self.judged = (), dict(list(self.judged.items())[-PAST_FINDINGS:])

    def follow(self, plan: Plan, outcome: Outcome, now_ns: int) -> None:
        """Let the state follow how far a plan that acts has come."""
        reached = outcome.result in ("reached", "already")
        why = f"plan {plan.id}, rung {outcome.index}: {outcome.result}"
        if outcome.index >= 0:
            if reached and self.state not in ("mitigating", "recovering"):
                self.move("mitigating", why)  # an approved plan acts from its first rung on
            if reached and self.state == "mitigating" and _goal(plan, outcome.index) == "running":
                self.move("recovering", why)
        elif reached:
            self.judged = {name: replace(one, dealt=True) for name, one in self.judged.items()}
            self.resolve(now_ns, why)
        elif self.state in ("mitigating", "recovering"):
            self.move("confirmed", why)  # open, though the restart may have cleared its findings: nobody verified it

    def adopt(self, other: "Case", now_ns: int) -> None:
        """Take over the findings of a case that turned out to have the same cause."""
        self.judged |= other.judged
        self.opened_ns = min(self.opened_ns, other.opened_ns)
        self.plans += tuple(plan for plan in other.plans if plan not in self.plans)
        self.events += tuple(event for event in other.events if event not in self.events)
        other.part_of = self.id
        other.resolve(now_ns, f"part of incident {self.id}")

    def view(self, tiers: Tiers, revision: int) -> Incident:
        """The incident as it is shown."""
        cause = self.cause(tiers)
        row = row_of(tiers, cause.finding.kind)
        mass = self._mass(cause)
        culprit = None if mass else culprit_of(cause.finding)
        judged = self.live or tuple(self.judged.values())
        return Incident(
            id=self.id,
            revision=revision,
            state=self.state,
            tier=min(row.tier, Tier.WARN) if mass else row.tier,
            kind=cause.finding.kind,
            culprit=culprit,
            victims=victims_of(judged, culprit),
            job=self.job,
            epoch=self.epoch,
            onset_ns=cause.finding.onset_ns,
            findings=self._findings(),
            events=self.events,
            reason=self._reason(cause, judged),
            action=MASS_ACTION if mass else row.action,
            plans=self.plans,
            lost_s=self._lost_s(cause.finding),
        )

    def _mass(self, cause: Judged) -> str:
        kind, why = self.mass or ("", "")
        return why if kind == cause.finding.kind else ""

    def _findings(self) -> tuple[Finding, ...]:
        """By first abnormal sign."""
        return tuple(sorted((one.finding for one in self.judged.values()), key=lambda one: (one.onset_ns, one.id)))

    def _reason(self, cause: Judged, judged: tuple[Judged, ...]) -> str:
        if self.part_of:
            return f"part of incident {self.part_of}: {cause.finding.reason}"
        return self._mass(cause) or reason_of(cause.finding, [one.finding for one in judged if one is not cause])

    def _lost_s(self, cause: Finding) -> Mapping[str, float]:
        lost_s = {"detect": max(0, self.opened_ns - cause.onset_ns) / 1e9}
        if self.decided_ns is not None:
            lost_s["decide"] = max(0, self.decided_ns - self.opened_ns) / 1e9
        return lost_s


def _goal(plan: Plan, index: int) -> str:
    return plan.ladder[index].goal if index < len(plan.ladder) else ""
