"""What was spent on plans, when one more fits, and the breaker that opens when repairing does not help.

A start is booked when a plan leaves and stays booked for its window, unless the plan ended without having tried
anything. The breaker counts ends. Times are those of the stimuli.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from trainwarden.core.durations import format_duration
from trainwarden.core.model import Json
from trainwarden.remediation.policy import BudgetConfig, Policy


class Guard(NamedTuple):
    """What stands against a plan, and until when."""

    until_ns: int
    name: str
    why: str


class Budgets:
    """The books of one job."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        rules = policy.rules.values()
        windows = (
            one.window for one in (policy.limits.budget, policy.limits.breaker.budget, *(r.budget for r in rules))
        )
        self._kept_ns = ns_of(max(windows))
        self._starts: dict[str, tuple[str, int]] = {}
        """By plan: its rule and when it started."""
        self._ended_ns: dict[str, int] = {}
        """By rule: when its last plan that tried something ended."""
        self._failed = 0
        """Plans that failed in a row."""
        self._opened: tuple[int, str] | None = None
        """When and why the breaker opened."""
        self._closed_ns = 0
        """When it was last closed: what was before does not count."""

    @property
    def opened(self) -> str:
        """Why the breaker is open; empty: it is closed."""
        return "" if self._opened is None else self._opened[1]

    def pass_time(self, now_ns: int) -> None:
        """Forget what no window holds any more; close a breaker that has cooled off."""
        self._starts = {plan: one for plan, one in self._starts.items() if now_ns - one[1] < self._kept_ns}
        if self._opened is not None and now_ns >= self._opened[0] + ns_of(self._policy.limits.breaker.cool_off):
            self.close(now_ns)

    def guard(self, rule: str, but: str = "") -> Guard:
        """Until when a plan of this rule does not fit, which may well be past; `but`: a plan that does not count."""
        limits, own = self._policy.limits, self._policy.rules[rule]
        starts = [start for plan, start in self._starts.items() if plan != but]
        all_ns, rule_ns = [ns for _, ns in starts], [ns for name, ns in starts if name == rule]
        cool_ns = self._ended_ns[rule] + ns_of(own.cool_down) if rule in self._ended_ns else 0
        opened = [(self._opened[0] + ns_of(limits.breaker.cool_off), self._opened[1])] if self._opened else []
        waits = [
            Guard(_free_ns(all_ns, limits.budget), "budget", f"{_say(limits.budget)} of this job are used up"),
            Guard(_free_ns(rule_ns, own.budget), "rule_budget", f"{_say(own.budget)} of rule {rule} are used up"),
            Guard(cool_ns, "cool_down", f"rule {rule} cools down for {format_duration(own.cool_down)}"),
            *(Guard(until_ns, "breaker", f"the breaker is open: {why}") for until_ns, why in opened),
        ]
        return max(waits, key=lambda wait: wait.until_ns)

    def book(self, plan: str, rule: str, now_ns: int) -> None:
        """A plan starts."""
        self._starts[plan] = (rule, now_ns)

    def give_back(self, plan: str) -> None:
        """A plan ended without having tried anything."""
        self._starts.pop(plan, None)

    def rest(self, rule: str, now_ns: int) -> None:
        """A plan could not begin: the next one of its rule comes after the cool-down."""
        self._ended_ns[rule] = now_ns

    def settle(self, rule: str, *, failed: bool, reached: bool, now_ns: int) -> None:
        """A plan that tried something ended."""
        self._ended_ns[rule] = now_ns
        self._failed = self._failed + 1 if failed else 0 if reached else self._failed
        breaker = self._policy.limits.breaker
        since_ns = max(self._closed_ns, now_ns - ns_of(breaker.budget.window))
        recent = sum(start_ns > since_ns for _, start_ns in self._starts.values())
        if self._opened is None and self._failed >= breaker.failed:
            self._opened = (now_ns, f"{self._failed} plans in a row failed")
        elif self._opened is None and recent >= breaker.budget.plans:
            self._opened = (now_ns, f"{recent} plans within {format_duration(breaker.budget.window)}")

    def close(self, now_ns: int) -> None:
        """Close the breaker."""
        self._opened, self._failed, self._closed_ns = None, 0, now_ns

    def snapshot(self) -> Json:
        """As JSON."""
        return {
            "starts": {plan: list(one) for plan, one in self._starts.items()},
            "ended_ns": dict(self._ended_ns),
            "failed": self._failed,
            "opened": None if self._opened is None else list(self._opened),
            "closed_ns": self._closed_ns,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take up what snapshot gave."""
        self._starts = {plan: (rule, start_ns) for plan, (rule, start_ns) in saved["starts"].items()}
        self._ended_ns = dict(saved["ended_ns"])
        self._failed, self._closed_ns = saved["failed"], saved["closed_ns"]
        self._opened = None if saved["opened"] is None else (saved["opened"][0], saved["opened"][1])


def _free_ns(starts_ns: Sequence[int], budget: BudgetConfig) -> int:
    """When one more start fits into the budget.

    >>> _free_ns([10, 20, 30], BudgetConfig(plans=2, window=timedelta(microseconds=1)))
    1020
    """
    held = sorted(starts_ns)[-budget.plans :]
    return held[0] + ns_of(budget.window) if len(held) == budget.plans else 0


def _say(budget: BudgetConfig) -> str:
    plans = "1 plan" if budget.plans == 1 else f"{budget.plans} plans"
    return f"{plans} in {format_duration(budget.window)}"


def ns_of(time: timedelta) -> int:
    """Whole nanoseconds."""
    return time // timedelta(microseconds=1) * 1000
