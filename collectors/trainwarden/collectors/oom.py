"""Out of memory: what the kernel's OOM killer did to processes of this host.

Two witnesses, either may be missing (a container often may not read the kernel log): the kernel's lines name the pid
(collectors/kernel_grammar.py), and the cgroup counts kills (v2 `memory.events`, v1 `memory.oom_control`, both key
oom_kill) without naming anyone.
"""

from collections.abc import Iterator
from pathlib import Path

from trainwarden.collectors.kernel_grammar import parse
from trainwarden.collectors.kmsg import Kmsg


class KernelKills:
    """OOM kills in the kernel log from now on."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._log = Kmsg(path)
        self._log.open(0)
        self._last_pid: object = None

    @property
    def why_blind(self) -> str:
        """Why the kernel log cannot be read; "" while it can."""
        return self._log.why_blind

    def kills(self, now_ns: int) -> Iterator[tuple[int, str]]:
        """(pid, line) of each OOM kill logged since the last call; the two lines of one kill count once."""
        for _, line in self._log.read(now_ns):
            fact = parse(line)
            if fact is not None and fact.kind == "oom.kill" and fact.data["pid"] != self._last_pid:
                self._last_pid = fact.data["pid"]
                yield int(fact.where), str(fact.data["line"])

    def close(self) -> None:
        """Stop following."""
        self._log.close()


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
