"""The tier table ships whole, and a wrong one is refused with the path of what is wrong."""

from pathlib import Path

import pytest

from trainwarden.alerts.tiers import TierRow, load_tiers, parse_tiers, row_of, standard_tiers
from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Tier

ROW = "tier: WARN, action: do it, announce: final, onset: exact, explains: []"


def test_every_finding_kind_has_a_row_and_nothing_else_has() -> None:
    assert set(standard_tiers()) == {name for name, kind in KINDS.items() if kind.of == "finding"}


def test_the_table_is_read_once() -> None:
    assert standard_tiers() is standard_tiers()


def test_a_table_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "tiers.yaml"
    path.write_text(f"rank.slow: {{{ROW}, look: stack}}")
    row = load_tiers(path)["rank.slow"]
    assert row == TierRow(
        kind="rank.slow", tier=Tier.WARN, action="do it", look="stack", announce="final", onset="exact"
    )


def test_a_kind_that_nobody_foresaw_wakes_nobody() -> None:
    assert row_of(standard_tiers(), "sky.falling").tier == Tier.WARN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "t.yaml: the whole: Input should be a valid dictionary", id="empty"),
        pytest.param("rank.slow: [", "t.yaml: not YAML", id="not YAML"),
        pytest.param(f"rank.fast: {{{ROW}}}", r"t.yaml: rank.fast: no kind of finding; allowed: process", id="kind"),
        pytest.param(f"hello: {{{ROW}}}", "t.yaml: hello: no kind of finding", id="an event has no tier"),
        pytest.param("rank.slow: WARN", "t.yaml: rank.slow: Input should be a valid dictionary", id="row"),
        pytest.param("rank.slow: {}", "t.yaml: rank.slow.tier: Field required", id="missing key"),
        pytest.param(
            f"rank.slow: {{{ROW.replace('WARN', 'WARM')}}}",
            "t.yaml: rank.slow.tier: Input should be 'INFO', 'WARN', 'ERROR' or 'CRITICAL', got 'WARM'",
            id="tier",
        ),
        pytest.param(
            f"rank.slow: {{{ROW}, speed: 3}}",
            "t.yaml: rank.slow.speed: Extra inputs are not permitted",
            id="unknown key",
        ),
        pytest.param(
            f"rank.slow: {{{ROW.replace('[]', '[rank.hung, stack]')}}}",
            "t.yaml: rank.slow.explains.1: no kind of finding",
            id="explains an event",
        ),
        pytest.param(
            f"rank.slow: {{{ROW.replace('do it', '')}}}",
            "t.yaml: rank.slow.action: Input should be a valid string",
            id="action",
        ),
    ],
)
def test_a_wrong_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tiers(text, "t.yaml")


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_tiers(tmp_path / "none.yaml")
