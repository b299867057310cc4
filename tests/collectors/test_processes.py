"""Exits of ranks and launcher become events; a status nobody saw stays null."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainwarden.collectors.processes import Processes
from trainwarden.core.emit import Emitter
from trainwarden.core.model import Event, JobId, Json, Subject
from trainwarden.core.process import ProcessId, identify

TABLE = """\
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 13)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 13
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    source = Processes(node="n1", job=JobId("j"), attempt=1, folder=tmp_path, start_ns=1_000_000)
    yield source
    source.close()


def hello(rank: int, process: ProcessId, attempt: int = 1) -> Event:
    emit = Emitter("rings@n1", job=JobId("j"), start_ns=0)
    keys = ("world_size", "coords", "slot", "device", "node", "uid", "ring", "clock", "blind", "versions")
    data: dict[str, Json] = dict.fromkeys(keys)
    data |= {"rank": rank, "pid": process.pid, "start_time": process.start_time}
    data |= {"attempt": attempt, "restart": 0, "lap": 0}
    return emit("hello", Subject(kind="rank", id=str(rank)), now_ns=0, data=data)


def sleeper() -> tuple["subprocess.Popen[bytes]", ProcessId]:
    child = subprocess.Popen(["sleep", "60"])
    process = identify(child.pid)
    assert process is not None
    return child, process


def poll(source: Processes, kind: str, until: Callable[[list[Event]], bool] = bool) -> list[Event]:
    """Events of one kind, polled until they satisfy (at most 10 s)."""
    found: list[Event] = []
    end_s = time.monotonic() + 10
    while not until(found) and time.monotonic() < end_s:
        items = source.poll(time.time_ns())
        found += [item for item in items if isinstance(item, Event) and item.kind == kind]
        time.sleep(0.01)
    return found


def test_a_killed_rank_is_told_with_signal_and_time(processes: Processes) -> None:
    child, process = sleeper()
    processes.watch(hello(1, process))
    assert processes.ranks == {1: process}
    before_ns = time.time_ns()
    child.send_signal(signal.SIGKILL)
    (event,) = poll(processes, "process.exit")
    child.wait()
    assert str(event.subject) == "rank:1"
    assert (event.data["signal"], event.data["code"], event.data["oom"]) == (9, None, None)
    assert before_ns <= event.t_ns <= event.seen_ns


def test_a_hello_of_another_attempt_is_not_watched(processes: Processes) -> None:
    own = identify(os.getpid())
    assert own is not None
    processes.watch(hello(0, own, attempt=2))
    assert processes.ranks == {}


def test_the_launcher_s_end_brings_its_failure_table(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "err.log").write_text(TABLE)
    record = {"pid": 12, "launcher": True, "code": 1, "signal": None, "t_ns": 5}
    line = json.dumps(record)
    (tmp_path / "exits.jsonl").write_text(line[:20])
    assert list(processes.poll(time.time_ns())) == [] or not processes.launcher_ended  # half a line is no line
    (tmp_path / "exits.jsonl").write_text(line + "\n")
    events = [item for item in processes.poll(time.time_ns()) if isinstance(item, Event)]
    assert [event.kind for event in events] == ["launcher.failure", "process.exit"]
    assert events[0].data["root"] == 1
    assert (events[1].data["rank"], events[1].data["code"], events[1].data["by"]) == (None, 1, "keeper")
    assert processes.launcher_ended
    assert list(processes.poll(time.time_ns())) == []


def test_the_pidfd_tells_when_keeper_and_launcher_are_both_gone(processes: Processes) -> None:
    child, process = sleeper()
    processes.UNSEEN_NS = 50_000_000
    processes.watch_launcher(process)
    child.send_signal(signal.SIGKILL)
    (event,) = poll(processes, "process.exit")
    child.wait()
    assert (event.data["rank"], event.data["signal"], event.data["by"] != "keeper") == (None, 9, True)
    assert processes.launcher_ended


def test_an_orphaned_rank_s_status_comes_from_the_keeper(processes: Processes, tmp_path: Path) -> None:
    own = identify(os.getpid())
    assert own is not None
    processes.watch(hello(3, own))
    record = {"pid": own.pid, "launcher": False, "code": 4, "signal": None, "t_ns": 5}
    (tmp_path / "exits.jsonl").write_text(json.dumps(record) + "\n")
    (event,) = poll(processes, "process.exit")
    assert (event.data["rank"], event.data["code"], event.data["by"]) == (3, 4, "keeper")
