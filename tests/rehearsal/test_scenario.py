import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from trainwarden.app.wiring import load_settings
from trainwarden.core.errors import ConfigError
from trainwarden.rehearsal.faults import FAULT_KINDS
from trainwarden.rehearsal.scenario import Scenario, built_in, read

NAMES = (
    "undisturbed",
    "reference",
    "a-killed",
    "b-stopped",
    "c-slow-slot",
    "d-poisoned",
    "e-corrupted",
    "f-long-checkpoint",
)


def test_the_built_in_scenarios_come_in_order() -> None:
    assert tuple(built_in()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_a_scenario_are_ones_that_run_takes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(dict(built_in()[name].config)))
    assert load_settings(path).hang.floor.total_seconds() == 4


def test_legal_pauses_are_longer_than_what_would_be_a_hang() -> None:
    calm = built_in()["f-long-checkpoint"]
    assert calm.expect == ()
    assert all(fault.number("seconds") > 4 and fault.at_step > 20 for fault in calm.faults)


def test_every_fault_strikes_while_the_training_runs() -> None:
    for scenario in built_in().values():
        for fault in scenario.faults:
            assert fault.at_step < scenario.steps
            assert FAULT_KINDS[fault.kind].where in ("rank", "outside")


def test_the_command_line_of_a_scenario() -> None:
    lengths = ["--steps", "80", "--checkpoint-every", "30", "--eval-every", "25"]
    places = ["--checkpoint-dir", "/ckpt", "--out", "/out.json"]
    assert built_in()["f-long-checkpoint"].arguments(Path("/ckpt"), Path("/out.json")) == [*lengths, *places]


def test_batches_that_are_never_used_are_on_the_command_line() -> None:
    scenario = Scenario(title="short of two", skip=(35, 36))
    assert scenario.arguments(Path("/ckpt"), Path("/out.json"))[-2:] == ["--skip", "35,36"]


def test_every_fault_that_is_told_must_be_repaired() -> None:
    assert {name for name, one in built_in().items() if one.repairs} == {
        n for n, one in built_in().items() if one.expect
    }


def test_what_a_loss_is_compared_with_comes_first() -> None:
    names = list(built_in())
    for name, scenario in built_in().items():
        if scenario.compared_with:
            other = built_in()[scenario.compared_with]
            assert names.index(other.name) < names.index(name)
            assert (other.steps, other.compared_with, other.faults) == (scenario.steps, None, ())


def test_the_reference_never_sees_what_the_repair_skips() -> None:
    assert built_in()["reference"].skip == built_in()["d-poisoned"].expect[0].skip


def test_the_kill_waits_for_the_corrupted_shard() -> None:
    faults = built_in()["e-corrupted"].faults
    assert [fault.kind for fault in faults] == ["checkpoint.corrupt", "process.kill"]
    assert all(fault.outside for fault in faults)
    assert faults[1] == replace(built_in()["a-killed"].faults[0], at_step=faults[1].at_step)


def test_a_scenario_is_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "z-quiet.yaml"
    path.write_text("scenario: {title: quiet}")
    assert read(path) == Scenario(name="z-quiet", title="quiet")


KILLED = "{kind: process.kill, rank: 1, at_step: 3}"
EXPECTED = "{kind: process.killed, tier: ERROR, culprit: 'rank:1', within_s: 1}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("scenario: {}", "scenario.title: is missing", id="no title"),
        pytest.param("scenario: {title: x, step: 3}", "scenario.step: is not known here, got 3", id="unknown key"),
        pytest.param("scenario: {title: x, steps: many}", "scenario.steps: needs a whole number, got", id="no number"),
        pytest.param(
            "scenario: {title: x, faults: [{kind: gremlin}]}",
            "scenario.faults[0].kind: no fault 'gremlin'; there are poison_batch",
            id="unknown fault",
        ),
        pytest.param(
            f"scenario: {{title: x, steps: 2, faults: [{KILLED}]}}",
            "scenario.faults[0].at_step: need 1 to 2, got 3",
            id="a fault after the end",
        ),
        pytest.param(
            f"scenario: {{title: x, expect: [{EXPECTED}]}}",
            "scenario.expect[0].fault: there is no fault 0",
            id="an expectation without a fault",
        ),
        pytest.param(
            f"scenario: {{title: x, faults: [{KILLED}], expect: [{EXPECTED.replace(', within_s: 1', '')}]}}",
            "scenario.expect[0].within_s: is missing (or within_steps)",
            id="no limit of time",
        ),
        pytest.param(
            f"scenario: {{title: x, faults: [{KILLED}], expect: [{EXPECTED.replace('process.killed', 'hello')}]}}",
            "scenario.expect[0].kind: no finding 'hello'",
            id="a kind that is no finding",
        ),
        pytest.param(
            f"scenario: {{title: x, faults: [{KILLED}], expect: [{EXPECTED.replace('ERROR', 'LOUD')}]}}",
            "scenario.expect[0].tier: needs 'INFO', 'WARN', 'ERROR' or 'CRITICAL', got \"LOUD\"",
            id="no tier",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_value(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"wrong.yaml: {re.escape(message)}"):
        read(path)
