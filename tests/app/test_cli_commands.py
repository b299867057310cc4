"""What a person types to a running job's repairs: words, exit statuses, and what is left for the supervisor."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwarden.app.cli.commands import _app as commands
from trainwarden.core.errors import ConfigError


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """STATE with two jobs."""
    for job in ("one", "two"):
        (tmp_path / job).mkdir()
        (tmp_path / job / "journal.sqlite").touch()
    return tmp_path


def run(state: Path, *words: str) -> str:
    done = CliRunner().invoke(commands, [*words, "--state", str(state)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def left(state: Path, job: str) -> list[dict[str, object]]:
    """The commands that wait for a job's supervisor, in order."""
    return [json.loads(file.read_text()) for file in sorted((state / job / "commands").glob("*.json"))]


def test_approve_and_deny_are_handed_over_with_who_why_and_until_when(state: Path) -> None:
    assert "approve p1: handed to the supervisor of job one" in run(state, "approve", "p1", "--job", "one")
    run(state, "deny", "p2", "--job", "one", "--why", "not now")
    approved, denied = left(state, "one")
    assert (approved["verb"], approved["plan"]) == ("approve", "p1")
    assert (denied["verb"], denied["plan"], denied["why"]) == ("deny", "p2", "not now")
    assert approved["who"] == denied["who"] != ""
    assert not (state / "two" / "commands").exists()


def test_stop_all_of_one_job_leaves_the_other_alone(state: Path) -> None:
    run(state, "stop-all", "--job", "one")
    assert (state / "one" / "stop-all").exists()
    assert not (state / "stop-all").exists()
    run(state, "stop-all", "--job", "one", "--undo")
    assert not (state / "one" / "stop-all").exists()
    assert [one["plan"] for one in left(state, "one")] == ["", "resume"]
    assert left(state, "two") == []


def test_stop_all_without_a_job_is_told_to_all_jobs(state: Path) -> None:
    run(state, "stop-all")
    assert (state / "stop-all").exists()
    assert [one["verb"] for job in ("one", "two") for one in left(state, job)] == ["stop_all", "stop_all"]


@pytest.mark.parametrize("words", [["approve", "p"], ["deny", "p"], ["stop-all"]], ids=lambda words: words[0])
def test_a_job_that_is_not_there_is_refused_in_words(state: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="there is no job 'three'"):
        run(state, *words, "--job", "three")
