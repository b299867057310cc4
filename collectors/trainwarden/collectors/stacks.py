"""Where a rank stands, seen from outside: a hung rank answers no request.

py-spy reads the Python stack without the process's help (`--nonblocking`, so that it also works on a stopped process).
Where it may not (ptrace is denied) the rank is asked by a real-time signal, which faulthandler answers unless the
process is stopped; and /proc always tells state and wait channel. What was denied is said, never left out.
"""

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from sysconfig import get_path
from typing import IO

from trainwarden.core.child import run
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ChildError
from trainwarden.core.model import Event, JobId, Json, Look, Subject
from trainwarden.core.process import PROC, ProcessId, alive, read_stat, send
from trainwarden.core.records import STACK_SIGNAL, stack_file

DEADLINE_S = 10.0
"""py-spy needs 0.3-1 s for a process that has torch loaded; a machine in trouble gets ten times that."""

ANSWER_S = 2.0
"""A thread answers a signal when it next runs; on a loaded machine that takes a scheduler's round or two."""

MAX_DUMP_BYTES = 1 << 20
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

MAX_FRAMES = 32
"""Innermost frames kept: deeper ones are the launcher's and the interpreter's start."""

MAX_FRAME_CHARS = 500
"""Of a frame, whose names are the tenant's."""


class Stacks:
    """Witness of the ranks of one host: one `stack` event a rank that was asked for."""

    def __init__(
        self,
        *,
        node: str,
        job: JobId,
        ranks: Callable[[], Mapping[int, ProcessId]],
        start_ns: int,
        hellos: Path | None = None,
        clock: Clock = unix_ns,
    ) -> None:
        """hellos: the folder where ranks of this job leave their hellos, and their stacks on request."""
        self._ranks, self._clock, self._hellos = ranks, clock, hellos
        self._emit = Emitter(f"stacks@{node}", job=job, start_ns=start_ns)

    def look(self, look: Look) -> Iterable[Event]:
        """Take the stacks of the ranks among the look's subjects, two at a time; takes seconds."""
        wanted = {int(subject.id) for subject in look.subjects if subject.kind == "rank"}
        here = {rank: process for rank, process in sorted(self._ranks().items()) if rank in wanted}
        with ThreadPoolExecutor(max_workers=2) as pool:
            seen = pool.map(lambda process: see(process, self._hellos), here.values())
            return [self._say(rank, data) for rank, data in zip(here, seen, strict=True)]

    def _say(self, rank: int, data: Mapping[str, Json]) -> Event:
        subject = Subject(kind="rank", id=str(rank))
        return self._emit("stack", subject, now_ns=self._clock(), data={"rank": rank, **data})


def see(process: ProcessId, hellos: Path | None = None) -> dict[str, Json]:
    """frames (innermost first, `file:line function`), state, wchan and denied ("" if nothing was) of one process."""
    found = read_stat(process.pid)
    if found is None or not alive(process):
        return {"frames": [], "state": "gone", "wchan": "", "denied": ""}
    frames, denied = _python_stack(process.pid)
    if not frames and hellos is not None:
        frames, why_not = _asked_stack(process, stack_file(hellos, process.pid))
        denied = "; ".join(filter(None, (denied, why_not)))
    wchan, wchan_denied = _wait_channel(process.pid)
    why_not = "; ".join(filter(None, (denied, wchan_denied)))
    return {"frames": list(frames), "state": found.state, "wchan": wchan, "denied": why_not}


def _python_stack(pid: int) -> tuple[list[str], str]:
    command = which("py-spy", path=get_path("scripts")) or which("py-spy")
    if command is None:
        return [], "py-spy is not installed: pip install 'trainwarden[agent]'"
    try:
        ran = run([command, "dump", "--nonblocking", "--json", "--pid", str(pid)], deadline_s=DEADLINE_S)
    except ChildError as error:
        return [], str(error)
    if ran.code != 0:
        return [], f"py-spy: {ran.err.strip().splitlines()[0] if ran.err.strip() else f'exit status {ran.code}'}"
    return parse_dump(ran.out, pid)


def parse_dump(text: str, pid: int) -> tuple[list[str], str]:
    """The main thread's frames of `py-spy dump --json`, innermost first.

    >>> parse_dump('[{"thread_name": "MainThread", "frames": [{"name": "f", "filename": "/a/t.py", "line": 3}]}]', 1)
    (['/a/t.py:3 f'], '')
    """
    try:
        threads = json.loads(text)
        main = next(
            (t for t in threads if t.get("thread_name") == "MainThread" or t.get("os_thread_id") == pid), threads[0]
        )
        told = main["frames"][:MAX_FRAMES]
        frames = [f"{frame['filename']}:{frame['line']} {frame['name']}"[:MAX_FRAME_CHARS] for frame in told]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return [], f"py-spy: its answer is not understood ({type(error).__name__})"
    return frames, ""


def _asked_stack(process: ProcessId, file: Path) -> tuple[list[str], str]:
    """Ask by signal and read what is new in the file. Only a process that catches it is asked: others would die."""
    try:
        with _opened(file, os.stat(PROC / str(process.pid)).st_uid) as dump:
            before_bytes = dump.seek(0, os.SEEK_END)
            if not _catches(process.pid, STACK_SIGNAL):
                return [], "faulthandler: the rank does not answer the signal"
            send(process, STACK_SIGNAL)
            end_s = time.monotonic() + ANSWER_S
            while time.monotonic() < end_s:
                dump.seek(before_bytes)
                frames = parse_faulthandler(dump.read(MAX_DUMP_BYTES).decode(errors="replace"))
                if frames:
                    return frames, ""
                time.sleep(0.02)
    except OSError as error:
        return [], f"faulthandler: {error.strerror}"
    return [], f"faulthandler: no answer within {ANSWER_S:g} s"


def _opened(file: Path, owner_uid: int) -> IO[bytes]:
    """A regular file of this user, who may have put anything in its place. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != owner_uid:
        os.close(fd)
        raise OSError(errno.EPERM, f"{file.name} is no file of the rank's user")
    return os.fdopen(fd, "rb")


def parse_faulthandler(text: str) -> list[str]:
    """The main thread's frames of a dump, innermost first; none while it is not whole.

    >>> parse_faulthandler("Current thread 0x1 (most recent call first):" + chr(10) + '  File "t.py", line 3 in f\\n')
    ['t.py:3 f']
    """
    blocks = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[1:]
    if not blocks or not text.endswith("\n"):
        return []
    main = blocks[-1]  # faulthandler writes the oldest thread, the main one, last
    return [f"{file}:{line} {name}"[:MAX_FRAME_CHARS] for file, line, name in _FRAME.findall(main)][:MAX_FRAMES]


def _catches(pid: int, number: int) -> bool:
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _wait_channel(pid: int) -> tuple[str, str]:
    try:
        name = (PROC / str(pid) / "wchan").read_text()
    except OSError as error:
        return "", f"wchan: {error.strerror}"
    return ("" if name == "0" else name), ""
