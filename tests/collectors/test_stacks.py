"""Stacks are taken from outside, of running and of stopped processes; what is denied is said."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainwarden.collectors import stacks
from trainwarden.collectors.rank import attach
from trainwarden.collectors.stacks import Stacks, parse_dump, see
from trainwarden.core.model import JobId, Look, Subject
from trainwarden.core.process import ProcessId, alive, identify, read_stat
from trainwarden.core.records import stack_file

SLEEPER = """
import time
def wait_for_data():
    print("ready", flush=True)
    time.sleep(60)
wait_for_data()
"""


@pytest.fixture
def sleeper() -> Iterator[ProcessId]:
    child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    process = identify(child.pid)
    assert process is not None
    yield process
    child.kill()
    child.communicate()


def test_a_stopped_process_shows_its_python_frame_and_state(sleeper: ProcessId) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    while (stat := read_stat(sleeper.pid)) is not None and stat.state != "T":
        pass
    seen = see(sleeper)
    assert seen["state"] == "T"
    if "py-spy" in str(seen["denied"]):
        pytest.skip(f"LOUD: py-spy may not trace here: {seen['denied']}")
    frames = seen["frames"]
    assert isinstance(frames, list)
    assert "wait_for_data" in str(frames[0])


def test_the_witness_answers_for_each_rank_it_was_asked_for(sleeper: ProcessId) -> None:
    own = identify(os.getpid())
    assert own is not None
    gone = ProcessId(pid=own.pid, start_time=1)
    witness = Stacks(
        node="n1", job=JobId("j"), ranks=lambda: {0: own, 2: sleeper, 3: gone}, start_ns=0, clock=lambda: 5
    )
    subjects = tuple(Subject(kind="rank", id=str(rank)) for rank in (2, 3, 9))
    events = list(witness.look(Look(key="k", what="stack", subjects=subjects)))
    assert [event.data["rank"] for event in events] == [2, 3]
    assert events[1].data["state"] == "gone"
    assert {event.seen_ns for event in events} == {5}


@pytest.mark.parametrize("text", ["", "{}", "[]", "[{}]", "[1]", '[{"thread_name": "MainThread"}]', "null"])
def test_an_answer_that_is_not_understood_is_said(text: str) -> None:
    frames, denied = parse_dump(text, 1)
    assert frames == []
    assert denied.startswith("py-spy: its answer is not understood")


RECORDER = """
import time
from trainwarden.collectors.rank import attach
w = attach(job="stacks")
assert not w.why_off, w.why_off
def wait_for_peers():
    print(w._ring.path.parent.parent, flush=True)
    time.sleep(60)
wait_for_peers()
"""


def test_a_rank_that_may_not_be_traced_answers_a_signal(monkeypatch: pytest.MonkeyPatch, ring_root: Path) -> None:
    attach(job="stacks-of-the-parent").close()  # leaves the signal ignored, and the child inherits that
    child = subprocess.Popen([sys.executable, "-c", RECORDER], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    process = identify(child.pid)
    assert process is not None
    monkeypatch.setattr(stacks, "_python_stack", lambda pid: ([], "py-spy: denied"))
    seen = see(process, folder / "hello")
    os.kill(child.pid, signal.SIGSTOP)
    stopped = see(process, folder / "hello")
    child.kill()
    child.communicate()
    frames = seen["frames"]
    assert isinstance(frames, list)
    assert frames, seen["denied"]
    assert "wait_for_peers" in str(frames[0])
    assert stopped["frames"] == []
    assert "faulthandler: no answer" in str(stopped["denied"])


def test_a_process_that_is_no_rank_is_not_signalled(sleeper: ProcessId, tmp_path: Path) -> None:
    stack_file(tmp_path, sleeper.pid).touch()
    assert stacks._asked_stack(sleeper, stack_file(tmp_path, sleeper.pid)) == (
        [],
        "faulthandler: the rank does not answer the signal",
    )
    assert alive(sleeper)


@pytest.mark.parametrize("spoil", [lambda file, secret: file.symlink_to(secret), lambda file, secret: os.mkfifo(file)])
def test_what_a_tenant_puts_in_the_place_of_his_stacks_is_not_read(
    spoil: Callable[[Path, Path], None], sleeper: ProcessId, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text('Current thread 0x1:\n  File "secret", line 1 in secret\n')
    spoil(stack_file(tmp_path, sleeper.pid), tmp_path / "secret")
    frames, why = stacks._asked_stack(sleeper, stack_file(tmp_path, sleeper.pid))
    assert frames == []
    assert why.startswith("faulthandler: ")
    assert "does not answer" not in why


def test_names_without_end_are_cut() -> None:
    long = "f" * 10_000
    told = f'[{{"thread_name": "MainThread", "frames": [{{"name": "{long}", "filename": "t.py", "line": 3}}]}}]'
    asked = f'Current thread 0x1 (most recent call first):\n  File "t.py", line 3 in {long}\n'
    assert [len(frame) for frame in (*parse_dump(told, 1)[0], *stacks.parse_faulthandler(asked))] == [500, 500]
