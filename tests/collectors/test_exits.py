"""Process ends are seen at once, with their status, without being the parent."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from trainwarden.collectors.exits import Exit, ExitWatch
from trainwarden.core.process import ProcessId, identify, say_status


@pytest.fixture
def watch() -> Iterator[ExitWatch]:
    exits = ExitWatch()
    yield exits
    exits.close()


def drain(watch: ExitWatch, count: int) -> list[Exit]:
    """The next `count` ends, or what came within 10 s."""
    found: list[Exit] = []
    end_s = time.monotonic() + 10
    while len(found) < count and time.monotonic() < end_s:
        found += watch.drain()
        time.sleep(0.005)
    return found


def start(*command: str) -> tuple["subprocess.Popen[bytes]", ProcessId]:
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    process = identify(child.pid)
    assert process is not None
    return child, process


def test_deaths_come_in_their_order_with_their_signals(watch: ExitWatch) -> None:
    sleepers = [start("sleep", "60") for _ in range(3)]
    for _, process in sleepers:
        watch.add(process)
    for number, signal_ in ((2, signal.SIGKILL), (0, signal.SIGTERM), (1, signal.SIGKILL)):
        sleepers[number][0].send_signal(signal_)
        while os.waitid(os.P_PID, sleepers[number][1].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)  # until it is a zombie, so that the next one dies later
    ended = drain(watch, 3)
    assert [end.process for end in ended] == [sleepers[2][1], sleepers[0][1], sleepers[1][1]]
    assert [say_status(end.status or 0) for end in ended] == [(None, 9), (None, 15), (None, 9)]
    for child, _ in sleepers:
        child.wait()


def test_a_child_of_somebody_else_tells_its_exit_code(watch: ExitWatch) -> None:
    shell, _ = start("sh", "-c", "(sleep 0.3; exit 7) & echo $!; wait; exec sleep 5")
    assert shell.stdout is not None
    process = identify(int(shell.stdout.readline()))
    assert process is not None
    watch.add(process)
    (ended,) = drain(watch, 1)
    shell.kill()
    shell.communicate()
    # the shell fetches it at once: seen as a zombie, told by the pidfd, or (old kernels) by nobody; never 0
    assert ended.status == 7 << 8 or (ended.status is None and ended.by == "nobody")


def test_a_process_that_is_already_gone_is_told_as_unknown(watch: ExitWatch) -> None:
    child, process = start("true")
    child.communicate()
    watch.add(process)
    (ended,) = drain(watch, 1)
    assert ended.status is None
    assert ended.by == "nobody"


def test_a_reused_pid_is_not_the_process(watch: ExitWatch) -> None:
    own = identify(os.getpid())
    assert own is not None
    watch.add(ProcessId(pid=own.pid, start_time=own.start_time - 1))
    (ended,) = drain(watch, 1)
    assert ended.status is None
