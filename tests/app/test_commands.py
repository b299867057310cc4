"""Files that people leave for a running supervisor: whatever they hold, each is taken once and nothing is raised."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.app.commands import MAX_BYTES, Commands, write_command
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Event, JobId, Json

GOOD: Mapping[str, Json] = {"plan": "p", "who": "ada", "why": "", "expires_ns": 5}


def poll(source: Commands) -> list[Event]:
    found = list(source.poll(time.time_ns()))
    assert all(isinstance(one, Event) for one in found)
    return [one for one in found if isinstance(one, Event)]


@pytest.fixture
def source(tmp_path: Path) -> Commands:
    (tmp_path / "commands").mkdir()
    return Commands(tmp_path, JobId("job"), start_ns=1)


@pytest.mark.parametrize("verb", ["approve", "deny", "stop_all"])
def test_a_command_is_told_once_with_who_and_why(tmp_path: Path, verb: str) -> None:
    source = Commands(tmp_path, JobId("job"), start_ns=1)
    assert poll(source) == []
    write_command(tmp_path, verb, GOOD)
    (event,) = poll(source)
    assert (event.kind, dict(event.data)) == (f"command.{verb}", GOOD)
    assert set(event.data) == set(KINDS[event.kind].data)
    assert poll(source) == []


def test_commands_are_told_in_the_order_they_were_given(tmp_path: Path, source: Commands) -> None:
    for plan in "cab":
        write_command(tmp_path, "deny", {**GOOD, "plan": plan})
    assert [event.data["plan"] for event in poll(source)] == ["c", "a", "b"]


def a_symlink_to_a_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def a_symlink_to_nothing(file: Path) -> None:
    file.symlink_to("/nowhere")


def a_symlink_to_a_good_one(file: Path) -> None:
    other = file.with_suffix(".other")
    other.write_text(json.dumps({"verb": "approve", **GOOD}))
    file.symlink_to(other)


def a_loop(file: Path) -> None:
    file.symlink_to(file)


def a_pipe(file: Path) -> None:
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    (file / "inside").mkdir(parents=True)


def a_huge_file(file: Path) -> None:
    file.write_text(json.dumps({"verb": "approve", **GOOD, "why": "x" * (2 * MAX_BYTES)}))


def a_deep_one(file: Path) -> None:
    file.write_text("[" * 60_000)


def a_long_number(file: Path) -> None:
    file.write_text(json.dumps({"verb": "approve", **GOOD}).replace("5}", "9" * 5000 + "}"))


def text(content: str) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_text(content)

    write.__name__ = content or "nothing"
    return write


@pytest.mark.parametrize(
    "make",
    [
        a_symlink_to_a_device,
        a_symlink_to_nothing,
        a_symlink_to_a_good_one,
        a_loop,
        a_pipe,
        a_folder,
        a_huge_file,
        a_deep_one,
        a_long_number,
        text(""),
        text("null"),
        text("[1]"),
        text('"deny"'),
        text('{"verb": "approve"}'),
        text(json.dumps({"verb": ["approve"], **GOOD})),
        text(json.dumps({"verb": {}, **GOOD})),
        text(json.dumps({"verb": "reboot", **GOOD})),
        text(json.dumps({"verb": "approve", **GOOD, "expires_ns": "soon"})),
        text(json.dumps({"verb": "approve", **GOOD, "expires_ns": True})),
        text(json.dumps({"verb": "approve", **GOOD, "expires_ns": 2**80})),
        text(json.dumps({"verb": "approve", **GOOD, "plan": {"a": 1}})),
        text(json.dumps({"verb": "approve", **GOOD, "who": ["ada"]})),
    ],
    ids=lambda make: make.__name__[:40],
)
@pytest.mark.timeout(20)
def test_what_is_no_command_is_told_as_blind_once_and_taken(
    tmp_path: Path, source: Commands, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "commands" / "1.json")
    write_command(tmp_path, "deny", GOOD)
    blind, good = poll(source)
    assert blind.kind == "source.blind"
    assert "1.json" in str(blind.data["why"])
    assert good.kind == "command.deny"
    assert poll(source) == []


@given(content=st.binary(max_size=200))
@settings(max_examples=50)
def test_any_bytes_are_taken_once(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("job")
    (folder / "commands").mkdir()
    (folder / "commands" / "1.json").write_bytes(content)
    source = Commands(folder, JobId("job"), start_ns=1)
    assert [event.kind for event in poll(source)] == ["source.blind"]
    assert poll(source) == []


def test_a_folder_that_cannot_be_changed_tells_each_command_once(tmp_path: Path, source: Commands) -> None:
    """What cannot be marked as taken is remembered; a file whose taken name is a folder cannot be renamed."""
    file = write_command(tmp_path, "deny", GOOD)
    (file.with_suffix(".taken") / "in the way").mkdir(parents=True)
    assert [event.kind for event in poll(source)] == ["command.deny"]
    assert poll(source) == []
