"""What one more plan waits for, and when the breaker opens and closes."""

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.remediation.plan_world import budget

from trainwarden.remediation.budgets import Budgets
from trainwarden.remediation.policy import BreakerConfig, LimitsConfig, Policy, RuleConfig

SECOND = 1_000_000_000
KILLED, SLOW = "process.killed", "rank.slow"


def books(job: int = 3, rule: int = 2, failed: int = 2, plans: int = 5) -> Budgets:
    """Windows of 100 s for the job, 50 s a rule, 200 s of the breaker; 10 s to cool down, 500 s to cool off."""
    own = RuleConfig(budget=budget(rule, 50), cool_down=timedelta(seconds=10))
    breaker = BreakerConfig(failed=failed, budget=budget(plans, 200), cool_off=timedelta(seconds=500))
    limits = LimitsConfig(budget=budget(job, 100), breaker=breaker)
    return Budgets(Policy(rules={KILLED: own, SLOW: own}, limits=limits))


@dataclass(frozen=True)
class Ended:
    """A plan of process.killed."""

    start_s: int
    end_s: int
    result: str = "reached"


def after(plans: list[Ended], made: Budgets | None = None) -> Budgets:
    made = made or books()
    for number, one in enumerate(plans):
        made.pass_time(one.start_s * SECOND)
        made.book(f"p{number}", KILLED, one.start_s * SECOND)
        made.pass_time(one.end_s * SECOND)
        if one.result == "nothing tried":
            made.give_back(f"p{number}")
        else:
            made.settle(
                KILLED, failed=one.result == "failed", reached=one.result == "reached", now_ns=one.end_s * SECOND
            )
    return made


Case: TypeAlias = tuple[list[Ended], str, int, str]


@pytest.mark.parametrize(
    ("plans", "rule", "until_s", "name"),
    [
        pytest.param([], KILLED, 0, "budget", id="nothing spent"),
        pytest.param([Ended(1000, 1005)], KILLED, 1015, "cool_down", id="cools down from the end on"),
        pytest.param([Ended(1000, 1005)], SLOW, 0, "budget", id="another rule need not cool down"),
        pytest.param([Ended(1000, 1001), Ended(1020, 1021)], KILLED, 1050, "rule_budget", id="two of one rule"),
        pytest.param(
            [Ended(1000, 1001), Ended(1020, 1021, "nothing tried")], KILLED, 1011, "cool_down", id="given back"
        ),
        pytest.param(
            [Ended(1000, 1001), Ended(1020, 1021), Ended(1060, 1061)], SLOW, 1100, "budget", id="three of the job"
        ),
        pytest.param(
            [Ended(1000, 1001, "failed"), Ended(1020, 1021, "failed")], SLOW, 1521, "breaker", id="two failed in a row"
        ),
        pytest.param(
            [Ended(1000, 1001, "failed"), Ended(1020, 1021), Ended(1060, 1061, "failed")],
            SLOW,
            1100,
            "budget",
            id="a success between two failures",
        ),
    ],
)
def test_one_more_plan_waits(plans: list[Ended], rule: str, until_s: int, name: str) -> None:
    guard = after(plans).guard(rule)
    assert (guard.until_ns, guard.name) == (until_s * SECOND, name)


def test_a_plan_that_would_make_room_is_not_counted() -> None:
    made = books(job=1)
    made.book("waits", SLOW, 1000 * SECOND)
    assert made.guard(KILLED).until_ns == 1100 * SECOND
    assert made.guard(KILLED, but="waits").until_ns == 0


def test_too_many_plans_open_the_breaker_though_none_failed() -> None:
    made = after([Ended(1000 + 40 * number, 1001 + 40 * number) for number in range(5)])
    assert made.opened == "5 plans within 200 s"


def test_the_breaker_closes_after_its_cool_off_or_by_a_person_and_begins_anew() -> None:
    failed = [Ended(1000, 1001, "failed"), Ended(1020, 1021, "failed")]
    cooled, closed = after(failed), after(failed)
    cooled.pass_time(1520 * SECOND)
    assert cooled.opened == "2 plans in a row failed"
    cooled.pass_time(1521 * SECOND)
    closed.close(1030 * SECOND)
    assert (cooled.opened, closed.opened) == ("", "")
    assert after([Ended(1600, 1601, "failed")], cooled).opened == ""
    assert after([Ended(1100, 1101, "failed"), Ended(1120, 1121, "failed")], closed).opened


def test_a_restored_book_has_it_all() -> None:
    made = after([Ended(1000, 1001, "failed"), Ended(1020, 1021, "failed")])
    made.close(1030 * SECOND)
    made.book("p9", SLOW, 1040 * SECOND)
    again = books()
    again.restore(json.loads(json.dumps(made.snapshot())))
    assert vars(again) == vars(made)


moves = st.lists(
    st.tuples(st.sampled_from((KILLED, SLOW)), st.integers(0, 60), st.integers(0, 30), st.sampled_from("fnr")),
    max_size=25,
)


@given(moves, st.integers(1, 3), st.integers(1, 3))
def test_whoever_heeds_the_guard_never_overspends(story: list[tuple[str, int, int, str]], job: int, rule: int) -> None:
    made, now_s, spent = books(job, rule), 1000, list[tuple[str, int]]()
    for number, (kind, waited_s, took_s, end) in enumerate(story):
        now_s += waited_s
        made.pass_time(now_s * SECOND)
        if made.guard(kind).until_ns > now_s * SECOND:
            continue
        assert not made.opened
        made.book(f"p{number}", kind, now_s * SECOND)
        started_s, now_s = now_s, now_s + took_s
        made.pass_time(now_s * SECOND)
        if end == "n":
            made.give_back(f"p{number}")
            continue
        made.settle(kind, failed=end == "f", reached=end == "r", now_ns=now_s * SECOND)
        spent.append((kind, started_s))
        assert sum(started_s - s < 100 for _, s in spent) <= job
        assert sum(started_s - s < 50 for name, s in spent if name == kind) <= rule
