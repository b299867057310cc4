"""The keeper outlives whoever started it and writes down how everything ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainwarden.core.process import alive, identify

ORPHAN = "sleep 0.4 & echo $! > orphan; kill -9 $$"


def start(folder: Path, *command: str, **env: str) -> "subprocess.Popen[bytes]":
    (folder / "spec.json").write_text(json.dumps({"command": command, "cwd": str(folder), "env": env}))
    return subprocess.Popen([sys.executable, "-P", "-m", "trainwarden.app.keeper", str(folder)])


def exits(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "exits.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [
        pytest.param("exit 0", 0, None, id="in order"),
        pytest.param("exit 3", 3, None, id="with an error"),
        pytest.param("kill -9 $$", None, 9, id="by a signal"),
    ],
)
def test_the_launcher_s_end_is_written_down(tmp_path: Path, script: str, code: int | None, number: int | None) -> None:
    start(tmp_path, "sh", "-c", script).wait()
    (record,) = exits(tmp_path)
    assert (record["launcher"], record["code"], record["signal"]) == (True, code, number)
    assert abs(record["t_ns"] - time.time_ns()) < 30e9


def test_a_rank_that_outlives_its_launcher_is_waited_for(tmp_path: Path) -> None:
    start(tmp_path, "sh", "-c", ORPHAN).wait()
    launcher, orphan = exits(tmp_path)
    assert launcher["signal"] == signal.SIGKILL
    assert (orphan["pid"], orphan["code"]) == (int((tmp_path / "orphan").read_text()), 0)


def test_output_goes_to_files_and_the_environment_is_handed_on(tmp_path: Path) -> None:
    start(tmp_path, "sh", "-c", "echo out $A; echo err >&2", A="b").wait()
    assert (tmp_path / "out.log").read_text() == "out b\n"
    assert (tmp_path / "err.log").read_text() == "err\n"


def test_a_command_that_cannot_start_is_told_like_a_shell_does(tmp_path: Path) -> None:
    assert start(tmp_path, "/no/such/launcher").wait() == 127
    (record,) = exits(tmp_path)
    assert record["code"] == 127
    assert "cannot be started" in (tmp_path / "err.log").read_text()


def test_the_training_goes_on_when_the_starter_dies_and_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    keeper = start(tmp_path, "sh", "-c", "trap 'echo term; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    while not (tmp_path / "keeper.json").exists() or "up" not in (tmp_path / "out.log").read_text():
        time.sleep(0.01)
    os.kill(keeper.pid, signal.SIGINT)
    told = json.loads((tmp_path / "keeper.json").read_text())
    launcher = identify(told["launcher_pid"])
    assert launcher is not None
    assert launcher.start_time == told["launcher_start_time"]
    assert alive(launcher)
    os.kill(launcher.pid, signal.SIGTERM)
    assert keeper.wait() == 5
