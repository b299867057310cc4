"""Out of memory: what the kernel's OOM killer did to processes of this host.

Two witnesses, either may be missing (a container often may not read the kernel log): lines of /dev/kmsg name the pid
("Out of memory: Killed process 77 (python)", "Memory cgroup out of memory: Killed process 77"; mm/oom_kill.c), and the
cgroup counts kills (v2 `memory.events`, v1 `memory.oom_control`, both key oom_kill) without naming anyone.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_KILLED = re.compile(r"[Oo]ut of memory: Killed process (\d+)")
_RECORD_BYTES = 8192
"""One read of /dev/kmsg gives one record, at most this long (CONSOLE_EXT_LOG_MAX)."""


class KernelLog:
    """Follows /dev/kmsg from now on. `why_blind` is "" while it can be read."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self.why_blind = ""
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.why_blind = f"{path}: {error.strerror}"

    def kills(self) -> Iterator[tuple[int, str]]:
        """(pid, line) of each OOM kill logged since the last call."""
        for line in self._lines():
            killed = _KILLED.search(line)
            if killed is not None:
                yield int(killed.group(1)), line.partition(";")[2].strip()[:200]

    def close(self) -> None:
        """Stop following."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lines(self) -> Iterator[str]:
        while self._descriptor >= 0:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # records were overwritten before we read them: the next read goes on behind them
                continue
            except OSError as error:
                self.why_blind = f"/dev/kmsg: {error.strerror}"
                self.close()
                return
            if not record:
                return
            yield record.decode(errors="replace")


def memory_cgroup(pid: int, proc: Path = Path("/proc"), mounts: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The file that counts OOM kills of a process's memory cgroup (v2 or v1); None: not to be found."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    candidates: list[Path] = []
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            candidates.append(mounts / "memory" / path.lstrip("/") / "memory.oom_control")
        elif hierarchy == "0" and not controllers:
            candidates.append(mounts / path.lstrip("/") / "memory.events")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def count_kills(file: Path) -> int | None:
    """The oom_kill counter of a cgroup file; None: it cannot be read or has no such key."""
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
