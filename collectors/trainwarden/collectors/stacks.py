"""Where a rank stands, seen from outside: a hung rank answers no request.

py-spy reads the Python stack without the process's help (`--nonblocking`, so that it also works on a stopped process);
where it may not (ptrace is denied), /proc still tells state and wait channel. What was denied is said, never left out.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from sysconfig import get_path

from trainwarden.core.child import run
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ChildError
from trainwarden.core.model import Event, JobId, Json, Look, Subject
from trainwarden.core.process import ProcessId, alive, read_stat

DEADLINE_S = 10.0
"""py-spy needs 0.3-1 s for a process that has torch loaded; a machine in trouble gets ten times that."""

MAX_FRAMES = 32
"""Innermost frames kept: deeper ones are the launcher's and the interpreter's start."""


class Stacks:
    """Witness of the ranks of one host: one `stack` event a rank that was asked for."""

    def __init__(
        self,
        *,
        node: str,
        job: JobId,
        ranks: Callable[[], Mapping[int, ProcessId]],
        start_ns: int,
        clock: Clock = unix_ns,
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self._emit = Emitter(f"stacks@{node}", job=job, start_ns=start_ns)

    def look(self, look: Look) -> Iterable[Event]:
        """Take the stacks of the ranks among the look's subjects, two at a time; takes seconds."""
        wanted = {int(subject.id) for subject in look.subjects if subject.kind == "rank"}
        here = {rank: process for rank, process in sorted(self._ranks().items()) if rank in wanted}
        with ThreadPoolExecutor(max_workers=2) as pool:
            seen = pool.map(see, here.values())
            return [self._say(rank, data) for rank, data in zip(here, seen, strict=True)]

    def _say(self, rank: int, data: Mapping[str, Json]) -> Event:
        subject = Subject(kind="rank", id=str(rank))
        return self._emit("stack", subject, now_ns=self._clock(), data={"rank": rank, **data})


def see(process: ProcessId) -> dict[str, Json]:
    """frames (innermost first, `file:line function`), state, wchan and denied ("" if nothing was) of one process."""
    stat = read_stat(process.pid)
    if stat is None or not alive(process):
        return {"frames": [], "state": "gone", "wchan": "", "denied": ""}
    frames, denied = _python_stack(process.pid)
    wchan, wchan_denied = _wait_channel(process.pid)
    why_not = "; ".join(filter(None, (denied, wchan_denied)))
    return {"frames": list(frames), "state": stat.state, "wchan": wchan, "denied": why_not}


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
        frames = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in main["frames"][:MAX_FRAMES]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return [], f"py-spy: its answer is not understood ({type(error).__name__})"
    return frames, ""


def _wait_channel(pid: int) -> tuple[str, str]:
    try:
        name = (Path("/proc") / str(pid) / "wchan").read_text()
    except OSError as error:
        return "", f"wchan: {error.strerror}"
    return ("" if name == "0" else name), ""
