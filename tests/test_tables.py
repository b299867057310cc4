"""The tables that join the components fit together: every kind of finding has one tier, an action, and a page; every
alert rule has a page and somebody who is told."""

import re
from collections import Counter
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from trainwarden.alerts.notify.alertmanager import SEVERITIES
from trainwarden.alerts.rules import Rule, load_rules
from trainwarden.alerts.tiers import standard_tiers
from trainwarden.core.kinds import KINDS, Kind
from trainwarden.core.model import Tier

ROOT = Path(__file__).resolve().parent.parent
RUNBOOKS = ROOT / "docs" / "runbooks"
FINDINGS = tuple(kind for kind in KINDS.values() if kind.of == "finding")
EVENTS = tuple(kind for kind in KINDS.values() if kind.of == "event")
ALERTS = load_rules()


def page(kind: Kind) -> Path:
    return RUNBOOKS / f"{kind.runbook}.md"


@pytest.mark.parametrize("kind", FINDINGS, ids=lambda kind: kind.name)
def test_a_finding_has_a_tier_and_an_action_in_one_line(kind: Kind) -> None:
    row = standard_tiers()[kind.name]
    assert row.tier in Tier
    assert len(row.action) >= 20
    assert row.action.isprintable()
    assert not row.action.endswith("."), "the sentence around it ends it"


def test_a_kind_stands_once_in_the_tier_table() -> None:
    """YAML would take the last of two rows without a word."""
    text = (files("trainwarden.alerts") / "tiers.yaml").read_text(encoding="utf-8")
    rows = Counter(re.findall(r"^([\w.]+):", text, flags=re.MULTILINE))
    assert rows == Counter(kind.name for kind in FINDINGS)


@pytest.mark.parametrize("kind", FINDINGS, ids=lambda kind: kind.name)
def test_a_finding_has_a_page_that_names_it(kind: Kind) -> None:
    assert page(kind).is_file(), f"write {page(kind).relative_to(RUNBOOKS.parent.parent)}"
    assert kind.name in page(kind).read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule.name}-{rule.severity}")
def test_an_alert_has_a_page_that_names_it(rule: Rule) -> None:
    found = ROOT / rule.runbook
    assert found.parent == RUNBOOKS
    assert found.is_file(), f"write {rule.runbook}"
    assert rule.name in found.read_text(encoding="utf-8")


def test_every_page_belongs_to_a_finding_or_an_alert() -> None:
    wanted = {kind.runbook for kind in FINDINGS} | {Path(rule.runbook).stem for rule in ALERTS}
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - wanted <= {"README", "index"}


def test_every_severity_has_a_route_of_its_own() -> None:
    """What no route names would go to the pager: loud, and a sign that the two have parted."""
    config = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8"))
    matchers = [matcher for route in config["route"]["routes"] for matcher in route["matchers"]]
    routed = {
        word for matcher in matchers if "severity" in matcher for word in re.findall(r"\w+", matcher.partition("=")[2])
    }
    assert {rule.severity for rule in ALERTS} <= routed
    assert set(SEVERITIES.values()) <= routed


def test_an_event_has_neither_tier_nor_page() -> None:
    assert [kind.name for kind in EVENTS if kind.name in standard_tiers() or kind.runbook] == []


def test_names_are_words_and_a_finding_has_no_data() -> None:
    assert [name for name in KINDS if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", name)] == []
    assert [kind.name for kind in FINDINGS if kind.data] == [], "their facts are evidence"


def test_the_page_of_metrics_says_what_the_table_says() -> None:
    spec = spec_from_file_location("metrics_page", ROOT / ".ci" / "metrics.py")
    assert spec is not None
    assert spec.loader is not None
    writer = module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), "make docs"
