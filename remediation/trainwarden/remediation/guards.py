"""What stands against a plan: weak evidence, no spare slot, the stop-all switch, budgets and the breaker.

Nothing here stops what harms nobody: observing, verifying and ending a plan ask no guard.
"""

from collections.abc import Mapping
from typing import Any, Final

from trainwarden.core.model import Json
from trainwarden.remediation.budgets import Budgets, Guard, ns_of
from trainwarden.remediation.plans import LEAVES_OUT
from trainwarden.remediation.policy import Policy, RuleConfig
from trainwarden.remediation.slots import Slots
from trainwarden.remediation.trouble import Trouble

FOREVER_NS: Final = 1 << 62

UNTIL_REVISED: Final = frozenset({"evidence", "spare"})
"""Guards that a newer revision of the incident may satisfy."""

UNTIL_RESUMED: Final = frozenset({"stop_all", "breaker", "budget", "rule_budget", "cool_down"})
"""Guards that a person takes away by resuming."""

GUARDS: Final = UNTIL_RESUMED | UNTIL_REVISED
"""All there are."""


class Guards:
    """The guards of one job."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.budgets = Budgets(policy)
        self.slots = Slots(ns_of(policy.limits.strikes))
        self.stop_all = ""
        """Who switched all actions off, and why; empty: they are on."""

    def first(self, trouble: Trouble, now_ns: int, but: str = "") -> Guard | None:
        """What stands against a plan now; `but`: a plan that counts for no budget."""
        rule = self._policy.rules[trouble.incident.kind]
        if trouble.confidence < rule.min_confidence:
            return _never("evidence", _too_unsure(trouble, rule.min_confidence))
        kept = self._kept(trouble, rule) if trouble.incident.kind in LEAVES_OUT else None
        if kept is not None:
            return kept
        if self.stop_all:
            return _never("stop_all", f"all actions are switched off by {self.stop_all}")
        spent = self.budgets.guard(trouble.incident.kind, but)
        return spent if spent.until_ns > now_ns else None

    def without(self, trouble: Trouble, now_ns: int) -> tuple[str, ...]:
        """The slots that the next attempt leaves out: the culprit's too, if only that helps or it was struck before."""
        incident, out = trouble.incident, self.slots.without
        struck = self.slots.struck_before(trouble.slot, trouble.struck_in, now_ns)
        if not (struck or incident.kind in LEAVES_OUT) or self._kept(trouble, self._policy.rules[incident.kind]):
            return out
        return tuple(dict.fromkeys((*out, trouble.slot)))

    def book(self, trouble: Trouble, plan: str, now_ns: int) -> None:
        """A plan that may act starts."""
        self.budgets.book(plan, trouble.incident.kind, now_ns)
        if trouble.slot:
            self.slots.strike(trouble.slot, trouble.struck_in, now_ns)

    def resume(self, now_ns: int) -> None:
        """A person switches actions on again."""
        self.stop_all = ""
        self.budgets.close(now_ns)

    def _kept(self, trouble: Trouble, rule: RuleConfig) -> Guard | None:
        """Why the culprit's slot cannot be left out."""
        why = ""
        if not trouble.slot:
            why = "nobody knows the culprit's slot"
        elif rule.leave_out == "never":
            why = "the rule leaves no slot out"
        elif rule.leave_out == "witnessed" and not trouble.witnessed:
            why = "only the job's own ranks accuse it (leave_out: witnessed)"
        elif trouble.confidence < rule.leave_out_confidence:
            why = _too_unsure(trouble, rule.leave_out_confidence)
        elif not self.slots.spare_for(trouble.slot):
            return _never("spare", f"there is no spare for slot {trouble.slot}")
        return _never("evidence", f"slot {trouble.slot or 'unknown'} is not left out: {why}") if why else None

    def snapshot(self) -> Json:
        """As JSON."""
        return {"budgets": self.budgets.snapshot(), "slots": self.slots.snapshot(), "stop_all": self.stop_all}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take up what snapshot gave."""
        self.budgets.restore(saved["budgets"])
        self.slots.restore(saved["slots"])
        self.stop_all = saved["stop_all"]


def _never(name: str, why: str) -> Guard:
    return Guard(FOREVER_NS, name, why)


def _too_unsure(trouble: Trouble, needed: float) -> str:
    return f"confidence {trouble.confidence:g} is less than {needed:g}"
