"""Ending an attempt is certain: stopped, stubborn and orphaned processes included."""

import os
import signal
import subprocess
import sys
import time

import pytest

from trainwarden.core.process import ProcessId, alive, identify, read_stat
from trainwarden.remediation import killing
from trainwarden.remediation.killing import end

IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STUBBORN = f"import signal, time; {IGNORE}; print('up', flush=True); time.sleep(60)"


def start(*command: str) -> tuple["subprocess.Popen[bytes]", ProcessId]:
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    process = identify(child.pid)
    assert process is not None
    return child, process


def test_a_launcher_with_a_stopped_and_a_stubborn_rank_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killing, "TERM_GRACE_S", 0.3)  # neither answers in any time
    launcher, launcher_id = start("sh", "-c", f'"{sys.executable}" -c "{STUBBORN}" & sleep 60 & wait')
    stopped, stopped_id = start("sh", "-c", "echo up; kill -STOP $$")
    while (stat := read_stat(stopped.pid)) is not None and stat.state != "T":
        time.sleep(0.01)
    assert end([stopped_id], launcher_id) == ()
    assert not alive(stopped_id)
    assert not alive(launcher_id)
    assert stopped.wait() == -signal.SIGKILL
    for child in (launcher, stopped):
        child.communicate()


def test_a_process_with_a_reused_pid_is_left_alone() -> None:
    own = identify(os.getpid())
    assert own is not None
    assert end([ProcessId(pid=own.pid, start_time=own.start_time - 5)], None) == ()
