"""A process as something that can be named for good: (pid, start time), read from /proc, signalled by pidfd.

A pid alone is reused; with its start time (clock ticks since boot, field 22 of /proc/PID/stat) it is not. Standard
library only; the proc folder can be a miniature one in tests.
"""

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process of this host, ever."""

    pid: int
    start_time: int
    """Clock ticks since boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What /proc/PID/stat says (proc_pid_stat(5))."""

    state: str
    """R running, S sleeping, D uninterruptible, T stopped, t traced, Z zombie."""
    parent: int
    start_time: int
    exit_status: int | None
    """As waitpid gives it; only a zombie has one, and only for a reader who may trace it (else the kernel says 0)."""


def read_stat(pid: int, proc: Path = PROC) -> Stat | None:
    """The process's state, or None if there is no such process (or it may not be read)."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return parse_stat(text)


def parse_stat(text: str) -> Stat | None:
    """Parse one line of /proc/PID/stat; None if it is none. The name may hold blanks and brackets.

    >>> parse_stat("7 (a) b) T 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 900 0 0").start_time
    900
    """
    _, bracket, rest = text.rpartition(")")
    fields = rest.split()
    if not bracket or len(fields) < 20:
        return None
    try:
        zombie = fields[0] == "Z" and len(fields) >= 50
        return Stat(
            state=fields[0],
            parent=int(fields[1]),
            start_time=int(fields[19]),
            exit_status=int(fields[49]) if zombie else None,
        )
    except ValueError:
        return None


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now, or None."""
    stat = read_stat(pid)
    return None if stat is None else ProcessId(pid=pid, start_time=stat.start_time)


def alive(process: ProcessId) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    stat = read_stat(process.pid)
    return stat is not None and stat.start_time == process.start_time and stat.state not in "ZX"


def open_pidfd(process: ProcessId) -> int | None:
    """A pidfd of this very process (to be closed by the caller), or None if it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (ProcessLookupError, OSError):
        return None
    stat = read_stat(process.pid)
    if stat is None or stat.start_time != process.start_time:
        os.close(descriptor)
        return None
    return descriptor


def send(process: ProcessId, number: int) -> bool:
    """Signal this very process; False if it is gone. Raises PermissionError."""
    descriptor = open_pidfd(process)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def children(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Direct children of a process, by all its threads; empty if it is gone."""
    found: list[int] = []
    for task in _tasks(pid, proc):
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue
    return tuple(found)


def descendants(pid: int) -> tuple[int, ...]:
    """All processes below this one."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children(todo.pop())
        found += below
        todo += below
    return tuple(found)


def say_status(status: int) -> tuple[int | None, int | None]:
    """(exit code, signal) of a waitpid status; one of them is None.

    >>> say_status(9), say_status(256)
    ((None, 9), (1, None))
    """
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def signal_name(number: int) -> str:
    """SIGKILL for 9; `signal 77` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tasks(pid: int, proc: Path) -> Iterable[Path]:
    try:
        return list((proc / str(pid) / "task").iterdir())
    except OSError:
        return ()
