"""`trainwarden checkpoints`: what a person sees of a job's checkpoints, and what their word does."""

import json
from pathlib import Path

import pytest
from tests.remediation.shelves import JOB, published, store
from typer.testing import CliRunner

from trainwarden.app.cli.checkpoints import checkpoints
from trainwarden.core.errors import ConfigError

NEW, OLD = "step-40-4294967296", "step-20-4294967296"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """STATE with two checkpoints of a job."""
    for step in (20, 40):
        published(tmp_path / JOB / "checkpoints", step)
    return tmp_path


def said(state: Path, *words: str, status: int = 0) -> str:
    done = CliRunner().invoke(checkpoints, [words[0], "--job", JOB, "--state", str(state), *words[1:]])
    assert done.exit_code == status, (done.output, done.exception)
    return done.output


def test_the_list_shows_each_in_one_row_newest_first(state: Path) -> None:
    (state / JOB / "checkpoints" / "published" / "st\x1b[2J").mkdir()
    lines = said(state, "list").splitlines()
    assert [line.split()[1] for line in lines if "step-" in line] == [NEW, OLD]
    assert "2.5" in said(state, "list")
    assert "\x1b" not in said(state, "list")
    assert "broken" in said(state, "list")


def test_json_is_one_object_a_line(state: Path) -> None:
    first, _ = (json.loads(line) for line in said(state, "list", "--json").splitlines())
    assert first == {
        "name": NEW,
        "trust": "unverified",
        "pinned": False,
        "reason": "",
        "step": 40,
        "epoch": 4294967296,
        "attempt": 1,
        "t_ns": 1_700_000_040_000_000_000,
        "loss": 2.5,
        "grad_norm": 0.75,
        "bytes": sum(length for length, _ in store(state / JOB / "checkpoints").catalogue(JOB)[0].files.values()),
        "files": 5,
    }


def test_verify_marks_what_it_found_and_fails_if_one_is_bad(state: Path) -> None:
    assert said(state, "verify").count("good") == 2
    (state / JOB / "checkpoints" / "published" / NEW / "__1_0.distcp").unlink()
    assert "│ __1_0.distcp: missing" in said(state, "verify", NEW, status=1)
    assert said(state, "verify", OLD).count("good") == 1
    assert [json.loads(line)["trust"] for line in said(state, "list", "--json").splitlines()] == ["distrusted", "good"]


def test_a_persons_word_is_kept_and_can_be_taken_back(state: Path) -> None:
    said(state, "pin", NEW)
    said(state, "distrust", NEW, "--why", "the data was wrong")
    first = json.loads(said(state, "list", "--json").splitlines()[0])
    assert (first["pinned"], first["trust"], first["reason"]) == (True, "distrusted", "the data was wrong")
    said(state, "pin", NEW, "--undo")
    said(state, "distrust", NEW, "--undo")
    first = json.loads(said(state, "list", "--json").splitlines()[0])
    assert (first["pinned"], first["trust"], first["reason"]) == (False, "unverified", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param(["list", "--job", "other"], "--job: there are no checkpoints of job other", id="no such job"),
        pytest.param(["list", "--job", JOB, "--root", "/absent"], "--root: there are no", id="no such folder"),
        pytest.param(["pin", "--job", JOB, "step-9-9"], "no checkpoint 'step-9-9' in", id="no such checkpoint"),
        pytest.param(["pin", "--job", JOB, "../x"], "no checkpoint '../x' in", id="a path"),
    ],
)
def test_what_is_not_there_is_said_in_words(state: Path, words: list[str], told: str) -> None:
    done = CliRunner().invoke(checkpoints, [*words, "--state", str(state)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(told)


def test_a_root_elsewhere(state: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(checkpoints, ["list", "--job", JOB, "--root", str(state / JOB / "checkpoints"), "--json"])
    assert len(done.output.splitlines()) == 2
