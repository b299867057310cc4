"""All cases at hand: which finding belongs to which, which are one, which come back, which may be forgotten."""

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from trainwarden.alerts.case import Case
from trainwarden.alerts.saved import case_from, case_state
from trainwarden.alerts.tiers import Tiers, row_of
from trainwarden.alerts.verdict import Judged, explains, start_of
from trainwarden.core.model import Finding, State


class Casebook:
    """Cases by id, in the order in which they were opened."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._cases: dict[str, Case] = {}
        self._case_of: dict[str, Case] = {}
        """By finding id."""

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())

    def __contains__(self, case: Case) -> bool:
        return case.id in self._cases

    def get(self, incident: str) -> Case | None:
        """The case of an incident, or the one that it became part of."""
        case = self._cases.get(incident)
        while case is not None and case.part_of:
            case = self._cases.get(case.part_of)
        return case

    def take(self, finding: Finding) -> tuple[Case, bool] | None:
        """The case of a finding and whether the finding is new here; None: nothing changes by it."""
        case = self._case_of.get(finding.id)
        if case is not None:
            return (case, False) if self._revise(case, finding) else None
        if finding.status not in ("provisional", "final"):
            return None
        case = self._returning(finding)
        if case is not None:
            self._reopen(case, finding)
        else:
            case = Case(id=self._new_id(finding), job=finding.job, epoch=finding.epoch, opened_ns=finding.seen_ns)
            self._cases[case.id] = case
            self._put(case, finding)
        return case, True

    def akin(self, case: Case) -> tuple[Case, Case] | None:
        """Two open cases of one start of the ranks, this one among them, that have one cause; the older first."""
        before, explained = True, self._explained(case.kinds)
        for other in self:
            if other is case:
                before = False
            elif self._may_concern(case, explained, other) and self._one_cause(case, other):
                return (other, case) if before else (case, other)
        return None

    def fold(self, older: Case, others: Iterable[Case], now_ns: int) -> None:
        """Make one case of several. Nothing is left of one that was never shown."""
        for other in others:
            older.adopt(other, now_ns)
            self._case_of |= dict.fromkeys(other.judged, older)
            if other.shown is None:
                del self._cases[other.id]
        older.settle(now_ns)

    def like(self, finding: Finding) -> list[Case]:
        """Open cases of the finding's start of the ranks whose cause is of its kind."""
        place = (finding.job, start_of(finding.epoch))
        here = [case for case in self if finding.kind in case.kinds and (case.job, start_of(case.epoch)) == place]
        return [case for case in here if case.open and case.cause(self._tiers).finding.kind == finding.kind]

    def count(self, kind: str) -> int:
        """Findings of a kind that still hold, at most (those in one case with them are counted too)."""
        return sum(len(case.troubles) for case in self if kind in case.kinds)

    def forget(self, before_ns: int, kept_max: int) -> None:
        """Let go of cases resolved before this time, and of the oldest beyond what is kept, resolved ones first."""
        old = [case for case in self if case.resolved_ns is not None and case.resolved_ns < before_ns]
        surplus = len(self._cases) - len(old) - kept_max
        if surplus > 0:
            kept = [case for case in self if case not in old]
            old += sorted(kept, key=lambda case: case.open)[:surplus]
        for case in old:
            del self._cases[case.id]
            self._keep_index(case, frozenset())

    def snapshot(self) -> State:
        """For Incidents.snapshot."""
        return {
            "cases": [case_state(case) for case in self],
            "case_of": {finding: case.id for finding, case in self._case_of.items()},
        }

    def restore(self, state: State) -> None:
        """Take up what snapshot gave."""
        cases = [case_from(saved) for saved in state["cases"]]
        self._cases = {case.id: case for case in cases}
        self._case_of = {finding: self._cases[case] for finding, case in state["case_of"].items()}

    def _revise(self, case: Case, finding: Finding) -> bool:
        known = case.judged[finding.id]
        if finding.revision <= known.finding.revision:
            return False
        newer = replace(known, finding=finding)
        if not case.open and newer.live and not known.live:
            self._reopen(case, finding)
        else:
            case.judged[finding.id] = newer
        return True

    def _returning(self, finding: Finding) -> Case | None:
        """A resolved incident whose trouble this is again."""
        trouble = (finding.job, finding.kind, finding.subject)
        for case in reversed(self._cases.values()):
            past = [one.finding for one in case.judged.values()]
            if not case.open and not case.part_of and trouble in [(one.job, one.kind, one.subject) for one in past]:
                return case
        return None

    def _reopen(self, case: Case, finding: Finding) -> None:
        case.reopen(finding)
        self._keep_index(case, case.judged.keys())
        self._put(case, finding)

    def _put(self, case: Case, finding: Finding) -> None:
        case.judged[finding.id] = Judged(finding=finding, seen_ns=finding.seen_ns)
        self._case_of[finding.id] = case

    def _keep_index(self, case: Case, findings: Set[str]) -> None:
        self._case_of = {name: of for name, of in self._case_of.items() if of is not case or name in findings}

    def _new_id(self, finding: Finding) -> str:
        """The first finding's id, fit for a file name; a finding that was forgotten since gives another one."""
        name = re.sub(r"[^A-Za-z0-9_-]+", ".", finding.id.replace(":", "-"))
        name += f".{finding.revision}" if finding.revision > 1 else ""
        while name in self._cases:
            name += "+"
        return name

    def _explained(self, kinds: Set[str]) -> frozenset[str]:
        return frozenset().union(*(row_of(self._tiers, kind).explains for kind in kinds))

    def _may_concern(self, case: Case, explained: Set[str], other: Case) -> bool:
        """A first look, by kinds and subjects alone: of thousands of cases few have anything to do with each other."""
        if not explained.isdisjoint(other.kinds) or not case.troubles.isdisjoint(other.troubles):
            return True
        return not self._explained(other.kinds).isdisjoint(case.kinds)

    def _one_cause(self, case: Case, other: Case) -> bool:
        here = case.job is not None and (case.job, start_of(case.epoch)) == (other.job, start_of(other.epoch))
        if not here or not other.open:
            return False
        return self._explains(other, case) or self._explains(case, other)

    def _explains(self, case: Case, other: Case) -> bool:
        cause = other.cause(self._tiers)
        return any(explains(one, cause, self._tiers) for one in case.live)
