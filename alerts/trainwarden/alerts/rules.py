"""The Prometheus alert rules that ship with trainwarden: rules/*.yaml, as Prometheus reads them, and as data.

Prometheus evaluates them, not we: they see what our own notices cannot, that *we* are gone or that nobody is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One alerting rule. A name may stand twice, with two severities."""

    name: str
    expr: str
    severity: str
    """info, warning, error or critical: what Alertmanager routes by."""
    lasting: str
    """How long `expr` must hold before it fires (Prometheus' `for`, as 5m); empty: not at all."""
    runbook: str
    """Path of the page in this repository."""


def rules_text() -> Mapping[str, str]:
    """File name -> text of every rule file that ships."""
    found = (entry for entry in (files("trainwarden.alerts") / "rules").iterdir() if entry.name.endswith(".yaml"))
    return {entry.name: entry.read_text(encoding="utf-8") for entry in sorted(found, key=lambda entry: entry.name)}


def load_rules() -> Sequence[Rule]:
    """Every rule that ships, in the order of the files."""
    groups = [group for text in rules_text().values() for group in yaml.safe_load(text)["groups"]]
    return [
        Rule(
            name=rule["alert"],
            expr=rule["expr"],
            severity=rule["labels"]["severity"],
            lasting=rule.get("for", ""),
            runbook=rule["annotations"]["runbook"],
        )
        for group in groups
        for rule in group["rules"]
    ]
