"""When people hear of a case: at once when they would act differently, else now and then, never twice the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainwarden.alerts.case import Case
from trainwarden.alerts.routes import RoutesConfig
from trainwarden.alerts.tiers import Tiers
from trainwarden.core.model import Incident, Notice

Change = Literal["opened", "updated", "escalated", "resolved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teller:
    """Turns what a case has become into notices for its tier's channels."""

    routes: RoutesConfig
    tiers: Tiers
    update_every_ns: int

    def tell(self, case: Case, now_ns: int) -> Sequence[Notice]:
        """What is to be said now, on every channel of the tier and on every one that heard of it before."""
        change, incident = self._change(case, now_ns), case.shown
        if change is None or incident is None:
            return ()
        channels = tuple(dict.fromkeys((*self.routes.channels(incident.tier), *case.channels)))
        over = change == "resolved"
        case.told, case.told_ns, case.channels = (None, now_ns, ()) if over else (incident, now_ns, channels)
        return [_notice(incident, channel, change) for channel in channels]

    def due_ns(self, case: Case) -> int | None:
        """When words that were held back may go out."""
        if not case.open or case.shown is None or case.told is None or _words(case.shown) == _words(case.told):
            return None
        return case.told_ns + self.update_every_ns

    def _change(self, case: Case, now_ns: int) -> Change | None:
        if case.shown is None:
            return None
        if case.told is None:
            return "opened" if case.open and case.loud(self.tiers) else None
        if not case.open:
            return "resolved"
        if case.shown.tier > case.told.tier:
            return "escalated"
        due_ns = self.due_ns(case)
        refined = due_ns is not None and now_ns >= due_ns
        return "updated" if refined or _acted_on(case.shown) != _acted_on(case.told) else None


def _notice(incident: Incident, channel: str, change: Change) -> Notice:
    key = f"{incident.id}/{incident.revision}/{channel}"
    return Notice(key=key, channel=channel, change=change, incident=incident)


def _acted_on(incident: Incident) -> tuple[object, ...]:
    """What a person would act on."""
    return incident.kind, incident.culprit, incident.tier, incident.state


def _words(incident: Incident) -> tuple[str, str]:
    return incident.reason, incident.action
