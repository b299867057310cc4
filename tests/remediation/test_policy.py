"""The policy file: everything observes unless it says otherwise, and what is wrong with it is said exactly.

Each tests/fixtures/config/policy-bad-*.yaml is wrong in one way and has its message here.
"""

from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from trainwarden.core.config import field_docs, schema
from trainwarden.core.errors import ConfigError
from trainwarden.core.goals import GOALS
from trainwarden.core.kinds import KINDS
from trainwarden.remediation.policy import (
    FINDING_KINDS,
    SECTIONS,
    BreakerConfig,
    BudgetConfig,
    LimitsConfig,
    Policy,
    RuleConfig,
    RungsConfig,
    load_policy,
    shipped_policy,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "config"

BAD = {
    "budget": "rules.process.killed.budget.window: is missing",
    "budget-of-nothing": "limits.budget.plans: need at least 1 (mode: observe does nothing), got 0",
    "cool-down": "rules.rank.hung.cool_down: needs a duration with its unit, such as 250ms, 10s, 20 min or 1h, got 60",
    "confidence": "rules.rank.slow.leave_out_confidence: need 0 to 1, got 95",
    "kind": "rules.rank.lazy: is not known here, got {}; allowed: hung, slow",
    "mode": "rules.rank.slow.mode: needs 'observe', 'approve' or 'act', got \"automatic\"",
    "rung": "rules.loss.nonfinite.rungs.stopped: need more than 0, got 0 ms",
    "steps": "rules.loss.nonfinite.rungs.verified_steps: need at least 1, got 0",
    "breaker": "limits.breaker.failed: need at least 1, got 0",
    "limit": 'limits.patience_: is not known here, got "1h"; allowed: breaker, budget, patience, strikes',
}


@pytest.mark.parametrize(
    "name", sorted(path.stem.removeprefix("policy-bad-") for path in FIXTURES.glob("policy-bad-*"))
)
def test_what_is_wrong_is_said(name: str) -> None:
    path = FIXTURES / f"policy-bad-{name}.yaml"
    with pytest.raises(ConfigError) as refused:
        load_policy(path)
    assert str(refused.value) == f"{path}: {BAD[name]}"


def test_each_way_to_be_wrong_has_its_file() -> None:
    assert {path.stem.removeprefix("policy-bad-") for path in FIXTURES.glob("policy-bad-*")} == set(BAD)


def test_what_ships_only_observes() -> None:
    assert shipped_policy("default") == Policy()
    assert {rule.mode for rule in Policy().rules.values()} == {"observe"}


def test_the_demo_acts_on_every_kind_and_within_two_minutes_and_a_half() -> None:
    demo = shipped_policy("demo")
    assert {rule.mode for rule in demo.rules.values()} == {"act"}
    assert demo.limits == LimitsConfig(), "limits are those of everybody"
    for kind, rule in demo.rules.items():
        goals = ("evidence_collected", "stopped", "running", "verified")
        assert sum(rule.rungs.deadline_s(goal) for goal in goals) <= 160, kind


def test_every_kind_of_finding_has_a_rule_and_no_other() -> None:
    findings = {name for name, row in KINDS.items() if row.of == "finding"}
    assert set(FINDING_KINDS) == findings == set(Policy().rules) == set(shipped_policy("demo").rules)
    assert set(SECTIONS) == {f"rules.{kind}" for kind in findings} | {"limits"}
    assert set(schema(SECTIONS)["properties"]) == {"rules", "limits"}


def test_every_goal_has_a_deadline() -> None:
    assert set(GOALS) <= {one.name for one in fields(RungsConfig)}


@pytest.mark.parametrize("config", [BudgetConfig, RungsConfig, RuleConfig, BreakerConfig, LimitsConfig, Policy])
def test_every_setting_is_explained(config: Any) -> None:
    docs = field_docs(config)
    assert [one.name for one in fields(config) if len(docs.get(one.name, "")) < 15] == []


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (RuleConfig, {"cool_down": timedelta(seconds=-1)}, "cool_down: need 0 or more"),
        (RuleConfig, {"approval": timedelta(0)}, "approval: need more than 0"),
        (LimitsConfig, {"patience": timedelta(seconds=-1)}, "patience: need 0 or more"),
        (BreakerConfig, {"cool_off": timedelta(0)}, "cool_off: need more than 0"),
    ],
)
def test_what_a_file_cannot_say_is_refused_too(config: Any, wrong: dict[str, timedelta], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**wrong)
