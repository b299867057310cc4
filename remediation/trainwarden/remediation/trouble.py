"""An incident as Repairs sees it, and the plan that runs: what is remembered of each."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from trainwarden.core.codec import dumps, loads
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Finding, Incident, Json, Outcome, Plan
from trainwarden.core.records import attempt_of
from trainwarden.remediation.plans import cause_of


@dataclass(slots=True, kw_only=True)
class Trouble:
    """An incident that is not resolved."""

    incident: Incident
    attempt: int
    """The attempt that it is about: a later one has solved it."""
    retry: bool = False
    """Whether its repair was begun, failed, and may be tried again, whatever is said of the first fault by now."""
    slot: str = ""
    """Where its culprit sat; empty: not known."""
    settled: str = ""
    """The guard that refused it or how its plan ended; empty: it may be planned."""
    refused: tuple[str, ...] = ()
    """Guards whose refusal was told."""
    cause: Finding | None = field(init=False)

    def __post_init__(self) -> None:
        self.cause = cause_of(self.incident)

    @classmethod
    def of(cls, incident: Incident, attempt: int) -> "Trouble":
        """A new one; `attempt`: what it is about if it does not say so itself."""
        return cls(incident=incident, attempt=attempt if incident.epoch is None else attempt_of(incident.epoch))

    def revised(self, incident: Incident, may_change: Set[str]) -> "Trouble":
        """The same after a newer revision. Another verdict is judged anew; `may_change`: guards asked again anyhow."""
        before, self.incident, self.cause = self.incident, incident, cause_of(incident)
        if (before.kind, before.culprit) != (incident.kind, incident.culprit) and self.settled != "deny":
            self.settled, self.refused = "", ()
        elif self.settled in may_change:
            self.settled = ""
        return self

    def refuse(self, guard: str) -> bool:
        """Let it rest; False when the same was told before."""
        told = guard in self.refused
        self.settled = guard
        self.refused = self.refused if told else (*self.refused, guard)
        return not told

    @property
    def certain(self) -> bool:
        """Whether its detector has made up its mind."""
        return self.incident.state != "suspected" and self.cause is not None and self.cause.status == "final"

    @property
    def struck_in(self) -> int:
        """The attempt in which the fault struck."""
        return attempt_of(self.incident.epoch or 0)

    @property
    def confidence(self) -> float:
        return 0.0 if self.cause is None else self.cause.confidence

    @property
    def witnessed(self) -> bool:
        """Whether somebody else than the job's own ranks accuses the culprit."""
        events = (event.kind for event in self.incident.events if event.subject == self.incident.culprit)
        return any(name in KINDS and KINDS[name].hard for name in (self.incident.kind, *events))

    def snapshot(self) -> Json:
        """As JSON."""
        return {
            "incident": dumps(self.incident),
            "attempt": self.attempt,
            "retry": self.retry,
            "slot": self.slot,
            "settled": self.settled,
            "refused": list(self.refused),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Trouble":
        """What snapshot gave."""
        incident = loads(saved["incident"])
        assert isinstance(incident, Incident)
        return cls(**{**saved, "incident": incident, "refused": tuple(saved["refused"])})


@dataclass(slots=True, kw_only=True)
class Running:
    """The plan that has started and not ended."""

    plan: Plan
    reached: frozenset[str] = frozenset()
    """Goals."""
    tried: bool = False
    """Whether any rung was taken, and not only refused."""
    dismissed: bool = False
    """Whether it was told to end."""
    end: Outcome | None = None

    @property
    def listens(self) -> bool:
        """Whether telling it something can change anything."""
        return self.plan.mode != "observe" and self.end is None

    def snapshot(self) -> Json:
        """As JSON."""
        return {
            "plan": dumps(self.plan),
            "reached": sorted(self.reached),
            "tried": self.tried,
            "dismissed": self.dismissed,
            "end": None if self.end is None else dumps(self.end),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Running":
        """What snapshot gave."""
        plan, end = loads(saved["plan"]), None if saved["end"] is None else loads(saved["end"])
        assert isinstance(plan, Plan)
        assert end is None or isinstance(end, Outcome)
        return cls(**{**saved, "plan": plan, "end": end, "reached": frozenset(saved["reached"])})
