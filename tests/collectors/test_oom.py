"""The OOM killer's two witnesses, and a real kill where a memory cgroup can be made."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwarden.collectors.oom import KernelKills, count_kills, memory_cgroup

EATER = """
print("ready", flush=True)
input()
x = bytearray(400 << 20)
for i in range(0, len(x), 4096):
    x[i] = 1
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A v1 memory cgroup of 64 MB; skipped where none can be made."""
    parent = Path("/sys/fs/cgroup/memory")
    path = parent / f"trainwarden-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"LOUD: no memory cgroup can be made here ({error}): a real OOM kill is not tested")
    yield path
    path.rmdir()


def test_a_real_oom_kill_is_counted_and_named(small_cgroup: Path) -> None:
    log = KernelKills()
    child = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    (small_cgroup / "cgroup.procs").write_text(str(child.pid))
    counter = memory_cgroup(child.pid)
    assert counter == small_cgroup / "memory.oom_control"
    assert count_kills(counter) == 0
    child.communicate(b"go\n")
    assert child.returncode == -signal.SIGKILL
    assert count_kills(counter) == 1
    if log.why_blind:
        pytest.skip(f"LOUD: the kernel log cannot be read here ({log.why_blind}): the named kill is not tested")
    named: list[int] = []
    end_s = time.monotonic() + 5
    while child.pid not in named and time.monotonic() < end_s:
        named += [pid for pid, _ in log.kills(time.time_ns())]
        time.sleep(0.01)
    log.close()
    assert child.pid in named


@pytest.mark.parametrize(
    ("cgroup", "file", "content"),
    [
        pytest.param("0::/job/step\n", "job/step/memory.events", "low 0\noom 2\noom_kill 2\n", id="v2"),
        pytest.param(
            "4:memory:/job\n0::/\n", "memory/job/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n", id="v1"
        ),
    ],
)
def test_the_counter_of_a_miniature_host(tmp_path: Path, cgroup: str, file: str, content: str) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(cgroup)
    counter = tmp_path / "fs" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(content)
    assert memory_cgroup(7, proc=tmp_path / "proc", mounts=tmp_path / "fs") == counter
    assert count_kills(counter) == 2


def test_a_process_without_a_memory_cgroup_has_no_counter(tmp_path: Path) -> None:
    assert memory_cgroup(7, proc=tmp_path, mounts=tmp_path) is None
    assert count_kills(tmp_path / "absent") is None


def test_a_kernel_log_that_cannot_be_read_is_blind_not_empty(tmp_path: Path) -> None:
    log = KernelKills(tmp_path / "absent")
    assert "No such file" in log.why_blind
    assert list(log.kills(time.time_ns())) == []


@pytest.mark.parametrize(
    ("line", "pid"),
    [
        ("6,1,2,-;Out of memory: Killed process 77 (python3) total-vm:1kB", 77),
        ("6,1,2,-;Memory cgroup out of memory: Killed process 78 (train.py) total-vm:1kB", 78),
    ],
)
def test_kernel_lines_name_the_pid(tmp_path: Path, line: str, pid: int) -> None:
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    log = KernelKills(fifo)
    os.write(writer, line.encode())
    assert [found for found, _ in log.kills(time.time_ns())] == [pid]
    os.close(writer)
    log.close()
