"""Cases as JSON values and back, for the snapshots of Incidents."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainwarden.alerts.case import Case
from trainwarden.alerts.verdict import Judged
from trainwarden.core.codec import dumps, loads
from trainwarden.core.model import Event, Finding, Incident, Json, Plan

_PLAIN = ("id", "job", "epoch", "opened_ns", "state", "decided_ns", "resolved_ns", "part_of", "told_ns")
_LISTS = ("plans", "channels", "story", "mass")


def case_state(case: Case) -> Json:
    """A case as JSON."""
    saved: dict[str, Json] = {name: getattr(case, name) for name in _PLAIN}
    saved |= {name: list(getattr(case, name)) for name in _LISTS}
    saved["judged"] = [[dumps(one.finding), one.seen_ns, one.dealt] for one in case.judged.values()]
    saved["events"] = [dumps(event) for event in case.events]
    saved["shown"] = None if case.shown is None else dumps(case.shown)
    saved["told"] = None if case.told is None else dumps(case.told)
    return saved


def case_from(saved: Mapping[str, Any]) -> Case:
    """The case that case_state wrote."""
    plain: dict[str, Any] = {name: saved[name] for name in _PLAIN}
    case = Case(
        **plain | {name: tuple(saved[name]) for name in _LISTS},
        judged={one.finding.id: one for one in map(_judged, saved["judged"])},
        events=tuple(event_from(text) for text in saved["events"]),
        shown=_incident(saved["shown"]),
        told=_incident(saved["told"]),
    )
    case.note()
    return case


def event_from(text: str) -> Event:
    """The event in a line of the codec."""
    event = loads(text)
    assert isinstance(event, Event)
    return event


def plan_from(text: str) -> Plan:
    """The plan in a line of the codec."""
    plan = loads(text)
    assert isinstance(plan, Plan)
    return plan


def _judged(saved: Sequence[Any]) -> Judged:
    text, seen_ns, dealt = saved
    finding = loads(text)
    assert isinstance(finding, Finding)
    return Judged(finding=finding, seen_ns=seen_ns, dealt=dealt)


def _incident(text: str | None) -> Incident | None:
    if text is None:
        return None
    incident = loads(text)
    assert isinstance(incident, Incident)
    return incident
