"""What was decided about a job, in the order it was decided: what traces and the report are made from.

STATE/<job>/story.jsonl holds a line for each revision of an incident, each plan that started, what it was told and each
outcome, with the moment it was noted. The journal has what was decided *on*; this has the decisions, which only the
machines with the policy of that day could make again. After a crash the machines say their last instructions again: a
line is noted once.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from trainwarden.app.engine import key_of
from trainwarden.core.codec import dumps, loads
from trainwarden.core.errors import DataError
from trainwarden.core.model import Incident, Outcome, Plan, Start, Tell

Told: TypeAlias = Incident | Start | Tell | Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStory:
    """One plan: when it was made, and how its rungs and itself (index -1, the last) ended."""

    plan: Plan
    started_ns: int
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    """(when, how)."""
    told: list[tuple[int, Tell]] = field(default_factory=list)
    """(when, what it was told): approvals, denials, that it is withdrawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentStory:
    """One incident: every revision, and what was planned against it."""

    revisions: list[tuple[int, Incident]] = field(default_factory=list)
    """(when, how it stood); never empty."""
    plans: list[PlanStory] = field(default_factory=list)

    @property
    def newest(self) -> Incident:
        """How it stands."""
        return self.revisions[-1][1]

    @property
    def opened_ns(self) -> int:
        """When it was first noted."""
        return self.revisions[0][0]


class Story:
    """All incidents of one job by id, in the order in which they were opened. A help, never a duty: see `failures`."""

    def __init__(self, path: Path) -> None:
        """Take up what the file holds; lines that cannot be read are counted and passed over."""
        self.incidents: dict[str, IncidentStory] = {}
        self.failures = 0
        """Lines that could not be read or written."""
        self._path = path
        self._plans: dict[str, PlanStory] = {}
        self._keys: set[str] = set()
        text = _text(path)
        self._torn = bool(text) and not text.endswith("\n")
        """Whether a crash cut the last line short: the next one must not be appended to it."""
        for line in text.splitlines():
            self._read(line)

    def note(self, thing: Told, now_ns: int) -> bool:
        """Whether it is news. Never raises."""
        if not self._take(thing, now_ns):
            return False
        line = json.dumps({"t_ns": now_ns, "said": json.loads(dumps(thing))}, sort_keys=True) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + line if self._torn else line)
            self._torn = False
        except OSError:
            self.failures, self._torn = self.failures + 1, True
        return True

    def plan(self, name: str) -> PlanStory | None:
        """A plan by its id."""
        return self._plans.get(name)

    def about(self, thing: Told) -> IncidentStory | None:
        """The incident that something is about."""
        match thing:
            case Incident():
                return self.incidents.get(thing.id)
            case Start():
                return self.incidents.get(thing.plan.incident)
        plan = self._plans.get(thing.plan)
        return None if plan is None else self.incidents.get(plan.plan.incident)

    @property
    def open(self) -> Mapping[str, Incident]:
        """Incidents that are not resolved, as they stand."""
        stories = self.incidents.items()
        return {name: story.newest for name, story in stories if story.newest.state != "resolved"}

    def _read(self, line: str) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, DataError):
            said = json.loads(line)
            thing = loads(json.dumps(said["said"]))
            if isinstance(thing, Incident | Start | Tell | Outcome):
                self._take(thing, int(said["t_ns"]))
                return
        self.failures += 1

    def _take(self, thing: Told, now_ns: int) -> bool:
        key = f"{type(thing).__name__}/{thing.key if isinstance(thing, Tell) else key_of(thing)}"
        if key in self._keys:
            return False
        self._keys.add(key)
        match thing:
            case Incident():
                self.incidents.setdefault(thing.id, IncidentStory()).revisions.append((now_ns, thing))
            case Start() if thing.plan.incident in self.incidents:
                plan = self._plans[thing.plan.id] = PlanStory(plan=thing.plan, started_ns=now_ns)
                self.incidents[thing.plan.incident].plans.append(plan)
            case Tell() if thing.plan in self._plans:
                self._plans[thing.plan].told.append((now_ns, thing))
            case Outcome() if thing.plan in self._plans:
                self._plans[thing.plan].outcomes.append((now_ns, thing))
        return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
