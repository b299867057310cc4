"""The configuration file. Each tests/fixtures/config/bad-*.yaml is wrong in one way and has its exact message here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.core.config import field_docs, load, schema
from trainwarden.core.durations import format_duration, parse_duration
from trainwarden.core.errors import ConfigError
from trainwarden.core.steps import StepsConfig

FIXTURES = Path(__file__).parents[1] / "fixtures" / "config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule."""

    name: str
    """What it is called."""

    after: timedelta = timedelta(seconds=1)
    """How long it waits."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name: may not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherRule(Rule):
    """One more."""

    again: int = 1
    """How often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangConfig:
    """When silence is a hang."""

    steps_known: int = 20
    """Steps it learns from,
    before it judges."""

    floor: timedelta = timedelta(seconds=10)
    """Shortest budget."""

    ratio: float = 3.0
    """Times the usual."""

    clock: Literal["wall", "cpu"] = "wall"
    """What is measured."""

    budgets: Mapping[str, timedelta] = field(default_factory=dict)
    """Phase -> how long it may take."""

    rules: tuple[Rule, ...] = ()
    """Applied in this order."""

    def __post_init__(self) -> None:
        if self.floor > timedelta(hours=2):
            raise ConfigError(f"detectors.hang.floor: need at most 2 h, got {format_duration(self.floor)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowConfig:
    """When a rank is slow."""

    enabled: bool = True
    """Whether it looks at all."""

    only: tuple[str, ...] | None = None
    """Phases it looks at; unset: all."""

    def __post_init__(self) -> None:
        if self.enabled and self.only == ():
            raise ConfigError("enabled without a phase to look at")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """Where recordings go."""

    directory: Path = Path("frames")
    """Made when it is missing."""


SECTIONS: dict[str, type[Any]] = {
    "detectors.hang": HangConfig,
    "detectors.slow": SlowConfig,
    "recording": RecordingConfig,
}
DURATION = "needs a duration with its unit, such as 250ms, 10s, 20 min or 1h"
HANG = "budgets, clock, floor, ratio, rules, steps_known"

BAD = {
    "unknown-top-level": 'detector: is not known here, got {"hang": {"floor": "4s"}}; allowed: detectors, recording',
    "unknown-section": 'detectors.hung: is not known here, got {"floor": "4s"}; allowed: hang, slow',
    "unknown-field": f'detectors.hang.flor: is not known here, got "4s"; allowed: {HANG}',
    "unknown-nested-field": 'detectors.hang.rules[1].afterr: is not known here, got "3s"; allowed: after, name',
    "wrong-type": 'detectors.hang.steps_known: needs a whole number, got "30"',
    "fraction": "detectors.hang.steps_known: needs a whole number, got 30.5",
    "truth": 'detectors.slow.enabled: needs true or false, got "on"',
    "choice": "detectors.hang.clock: needs 'wall' or 'cpu', got \"gpu\"",
    "not-finite": "detectors.hang.ratio: needs a finite number, got Infinity",
    "empty-value": "detectors.hang.steps_known: needs a whole number, got null",
    "duration-without-unit": f"detectors.hang.floor: {DURATION}, got 10",
    "duration-unknown-unit": f'detectors.hang.budgets.init: {DURATION}, got "20 fortnights"',
    "duration-negative": f'detectors.hang.floor: {DURATION}, got "-4s"',
    "duration-too-long": f'detectors.hang.floor: {DURATION}, got "99999999999999 d"',
    "list-expected": 'detectors.hang.rules: needs a list, got {"name": "quiet"}',
    "section-not-a-mapping": 'detectors.hang: needs a mapping, got "4s"',
    "group-not-a-mapping": 'detectors: needs a mapping, got ["hang"]',
    "missing-field": "detectors.hang.rules[0].name: is missing",
    "contradiction": "detectors.hang.floor: need at most 2 h, got 3 h",
    "contradiction-nested": "detectors.hang.rules[1].name: may not be empty",
    "contradiction-of-two": "detectors.slow: enabled without a phase to look at",
    "several": f"""4 problems
  detector: is not known here, got {{}}; allowed: detectors, recording
  detectors.hang.clock: needs 'wall' or 'cpu', got "gpu"
  detectors.hang.floor: {DURATION}, got 10
  detectors.slow: enabled without a phase to look at""",
    "syntax": "line 4: expected ',' or ']', but got '<stream end>'",
    "tab": "line 2: found character '\\t' that cannot start any token",
    "duplicate-key": "line 5: key floor stands twice, first in line 3",
    "not-a-mapping": "needs a mapping of sections, got list",
    "loop": "is not YAML: Circular reference detected",
    "code": "line 1: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
    "not-utf8": "is not UTF-8 text: invalid continuation byte at byte 19",
    "control-character": "is not YAML: unacceptable character #x0001: special characters are not allowed",
}


def refusal(path: Path, sections: dict[str, type[Any]]) -> str:
    with pytest.raises(ConfigError) as refused:
        load(path, sections)
    return str(refused.value)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_message(name: str) -> None:
    path = FIXTURES / f"bad-{name}.yaml"
    assert refusal(path, SECTIONS) == f"{path}: {BAD[name]}"


def test_every_bad_file_has_its_message() -> None:
    assert {path.stem for path in FIXTURES.glob("bad-*.yaml")} == {f"bad-{name}" for name in BAD}


def test_a_good_file_becomes_dataclasses() -> None:
    hang = HangConfig(
        steps_known=30,
        floor=timedelta(seconds=4),
        ratio=2.0,
        clock="cpu",
        budgets={"init": timedelta(minutes=20), "eval": timedelta(minutes=90)},
        rules=(Rule(name="quiet", after=timedelta(milliseconds=250)), Rule(name="loud")),
    )
    assert load(FIXTURES / "good.yaml", SECTIONS) == {
        "detectors.hang": hang,
        "detectors.slow": SlowConfig(enabled=False),
        "recording": RecordingConfig(directory=Path("/var/lib/trainwarden")),
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "detectors:\n", "detectors:\n  hang:\n", "{}"])
def test_what_is_not_set_has_its_default(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trainwarden.yaml"
    path.write_text(text)
    assert load(path, SECTIONS) == {name: cls() for name, cls in SECTIONS.items()}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert refusal(path, SECTIONS) == f"{path}: cannot be read: No such file or directory"
    assert refusal(tmp_path, SECTIONS) == f"{tmp_path}: cannot be read: Is a directory"


def test_a_section_that_must_be_said_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "trainwarden.yaml"
    path.write_text("")
    assert refusal(path, {"alerts.rule": Rule}) == f"{path}: alerts.rule.name: is missing"


def test_a_section_can_hold_sections(tmp_path: Path) -> None:
    path = tmp_path / "trainwarden.yaml"
    sections: dict[str, type[Any]] = {"slow": SlowConfig, "slow.rule": Rule}
    path.write_text("slow: {enabled: false, rule: {name: inner}}")
    assert load(path, sections) == {"slow": SlowConfig(enabled=False), "slow.rule": Rule(name="inner")}
    path.write_text("slow: {rul: {name: inner}, rule: 3}")
    assert refusal(path, sections).splitlines()[1:] == [
        '  slow.rul: is not known here, got {"name": "inner"}; allowed: enabled, only, rule',
        "  slow.rule: needs a mapping, got 3",
    ]


def test_the_schema_tells_types_defaults_and_docs() -> None:
    made = schema(SECTIONS)
    hang = made["properties"]["detectors"]["properties"]["hang"]
    assert json.loads(json.dumps(made)) == made
    assert made["additionalProperties"] is False
    assert hang["additionalProperties"] is False
    assert hang["description"] == "When silence is a hang."
    assert hang["properties"]["steps_known"] == {
        "default": 20,
        "description": "Steps it learns from, before it judges.",
        "title": "Steps Known",
        "type": "integer",
    }
    assert hang["properties"]["floor"]["default"] == "10 s"
    assert hang["properties"]["clock"]["enum"] == ["wall", "cpu"]
    assert made["$defs"]["Rule"]["required"] == ["name"]


def test_field_docs_are_the_texts_below_the_fields() -> None:
    assert field_docs(Rule) == {"name": "What it is called.", "after": "How long it waits."}
    assert field_docs(int) == {}


def test_field_docs_are_inherited() -> None:
    assert field_docs(FurtherRule) == {**field_docs(Rule), "again": "How often."}


def test_every_step_setting_is_documented() -> None:
    assert list(field_docs(StepsConfig)) == [one.name for one in fields(StepsConfig)]


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("250ms", timedelta(milliseconds=250)),
        ("10s", timedelta(seconds=10)),
        (" 20  min ", timedelta(minutes=20)),
        ("1h", timedelta(hours=1)),
        ("1.5 h", timedelta(minutes=90)),
        ("2 d", timedelta(days=2)),
        ("0s", timedelta(0)),
    ],
)
def test_durations(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text", ["", "10", "s", "10 S", "1h30", "1e3 s", "10 us", "-1s", "+1s", ".5s", "\u0661s", "10s\nx"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**12).map(lambda number: timedelta(milliseconds=number)))
def test_a_formatted_duration_reads_back(duration: timedelta) -> None:
    assert parse_duration(format_duration(duration)) == duration


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_files_raise_nothing_but_config_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    body = bytearray((FIXTURES / "good.yaml").read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[at] = data.draw(st.sampled_from(b"{}[]:,&*!|>'\"%@` \n\t-#a0.~\xff\x00"))
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_bytes(body[: data.draw(st.one_of(st.just(len(body)), st.integers(0, len(body))))])
    try:
        made = load(path, SECTIONS)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017 (either is fine)
    else:
        assert made.keys() == SECTIONS.keys()
