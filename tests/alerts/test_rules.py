"""The alert rules that ship: series in and alerts out by promtool, and only metrics that somebody exports.

What each alert says, when it fires and when it does not stands in rules/*.yaml beside this file.
"""

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trainwarden.alerts.rules import Rule, load_rules, rules_text
from trainwarden.core.model import Tier
from trainwarden.core.signals import ACTIVITIES, METRICS

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "alerts" / "trainwarden" / "alerts" / "rules"
SCENES = sorted((Path(__file__).parent / "rules").glob("*.yaml"))
PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="NOT TESTED: alert rules, promtool is not installed (Debian package prometheus; .ci/run installs it)",
)
NAMES = {rule.name for rule in load_rules()}
OF_A_SCRAPE = {"job", "instance"}
"""Labels that Prometheus puts on every series."""
VALUES = {
    "activity": set(ACTIVITIES),
    "signal": {"loss", "grad_norm", "local"},
    "quantile": {"0.5", "0.99", "1"},
    "tier": {tier.name for tier in Tier},
    "job": {"trainwarden"},
}
"""What a matcher may ask for: a value that nobody exports would never match, and the alert never fire."""


def promtool(*words: str) -> str:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@PROMTOOL
def test_promtool_takes_the_rules() -> None:
    said = promtool("check", "rules", *(str(RULES / name) for name in rules_text()))
    assert sum(int(count) for count in re.findall(r"(\d+) rules found", said)) == len(load_rules())


@PROMTOOL
@pytest.mark.parametrize("scenes", SCENES, ids=lambda path: path.stem)
def test_series_in_alerts_out(scenes: Path) -> None:
    promtool("test", "rules", str(scenes))


def test_each_alert_is_seen_at_each_severity_and_twice_not_at_all() -> None:
    fires, silent = defaultdict[str, set[str]](set), defaultdict[str, int](int)
    for scenes in SCENES:
        for case in (
            case for scene in yaml.safe_load(scenes.read_text())["tests"] for case in scene["alert_rule_test"]
        ):
            silent[case["alertname"]] += not case["exp_alerts"]
            for alert in case["exp_alerts"]:
                fires[case["alertname"]].add(alert["exp_labels"]["severity"])
    assert fires == {name: {rule.severity for rule in load_rules() if rule.name == name} for name in NAMES}
    assert {name for name in NAMES if silent[name] < 2} == set(), "below the threshold, and resolved"


def test_what_is_packaged_is_what_lies_in_the_folder() -> None:
    assert rules_text() == {path.name: path.read_text() for path in RULES.glob("*.yaml")}


ASKED = re.compile(r"\b(up|trainwarden_\w+)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)\s*(=~|=)\s*\"([^\"]*)\"")
GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def selectors(rule: Rule) -> Iterator[tuple[str, dict[str, str]]]:
    """(metric, what its labels must be) of each selector; the alternatives of a regular expression stay together."""
    for metric, matchers in ASKED.findall(rule.expr):
        yield metric, {label: value for label, _, value in MATCHER.findall(matchers)}


def labels_of(metric: str) -> set[str]:
    return OF_A_SCRAPE | (set() if metric == "up" else {"job_id", *METRICS[metric].labels})


@pytest.mark.parametrize("rule", load_rules(), ids=lambda rule: f"{rule.name}-{rule.severity}")
def test_a_rule_asks_only_for_what_is_exported(rule: Rule) -> None:
    asked = list(selectors(rule))
    assert asked
    assert [metric for metric, _ in asked if metric != "up" and metric not in METRICS] == []
    for metric, matchers in asked:
        assert set(matchers) <= labels_of(metric), metric
        wanted = {(label, value) for label, values in matchers.items() for value in values.split("|")}
        assert [(label, value) for label, value in wanted if value not in VALUES[label]] == []
    grouped = {label.strip() for labels in GROUPED.findall(rule.expr) for label in labels.split(",")} - {""}
    assert grouped <= set().union(*(labels_of(metric) for metric, _ in asked))


@pytest.mark.parametrize("rule", load_rules(), ids=lambda rule: f"{rule.name}-{rule.severity}")
def test_a_rule_keeps_jobs_apart(rule: Rule) -> None:
    """Without `by (job_id)` the worst job of a Prometheus would hide the others. Two alerts are of no job."""
    if rule.name in ("TrainwardenDown", "TrainwardenDeadMan"):
        return
    gathered = re.findall(r"\b(?:max|min|sum|count)\b\s*(?:by\s*\(([^)]*)\))?", rule.expr)
    assert gathered
    assert [labels for labels in gathered if "job_id" not in labels] == []
