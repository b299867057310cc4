"""The tables that join the components fit together: every kind of finding has one tier, an action, and a page."""

import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from trainwarden.alerts.tiers import standard_tiers
from trainwarden.core.kinds import KINDS, Kind
from trainwarden.core.model import Tier

RUNBOOKS = Path(__file__).resolve().parent.parent / "docs" / "runbooks"
FINDINGS = tuple(kind for kind in KINDS.values() if kind.of == "finding")
EVENTS = tuple(kind for kind in KINDS.values() if kind.of == "event")
OUR_OWN = {"journal-unwritable"}
"""Pages of incidents that no finding makes."""


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


def test_every_page_belongs_to_a_finding() -> None:
    orphans = {path.stem for path in RUNBOOKS.glob("*.md")} - {kind.runbook for kind in FINDINGS} - OUR_OWN
    assert orphans <= {"README", "index"}


def test_an_event_has_neither_tier_nor_page() -> None:
    assert [kind.name for kind in EVENTS if kind.name in standard_tiers() or kind.runbook] == []


def test_names_are_words_and_a_finding_has_no_data() -> None:
    assert [name for name in KINDS if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", name)] == []
    assert [kind.name for kind in FINDINGS if kind.data] == [], "their facts are evidence"
