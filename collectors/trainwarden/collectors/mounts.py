"""How long file systems of the network take to answer one statfs.

A server that is gone holds who asks it for ever, in a sleep that no signal ends on some of them. So each mount is asked
by a thread of its own, which a poll only starts and looks at; while it hangs no second one is started, and the agent
ends without it (daemon threads). A child process would be worse: it could not be killed either, and waiting for its end
would hang us. What is told is the slowest answer since the last poll, and for a mount that has not answered the time
it has taken so far; beyond `deadline` it is blind too.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from trainwarden.collectors.blind import Parts
from trainwarden.collectors.kernelfiles import read, said
from trainwarden.collectors.readingframes import ReadingFrames
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Subject

NETWORK: Final = frozenset(
    (
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "wekafs",
        "cifs",
        "smb3",
        "panfs",
        "fuse.glusterfs",
        "fuse.juicefs",
    )
)
"""Types of file systems that are asked unless `folders` says which. Not FUSE as such: any user can mount one that
never answers."""
MOUNTS_MAX: Final = 32
"""Mounts asked, and so threads that can hang."""
_TABLE_BYTES: Final = 1 << 20
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MountsConfig:
    """Which mounts are asked, how often, and how long they may take."""

    period: timedelta = timedelta(seconds=15)
    """How often each mount is asked."""

    deadline: timedelta = timedelta(seconds=5)
    """A mount that takes longer is blind until it answers. A busy parallel file system answers within a second."""

    folders: tuple[str, ...] = ()
    """Folders to ask; none: every mount of a network file system, at most 32."""

    def __post_init__(self) -> None:
        if self.period < timedelta(seconds=1):
            raise ConfigError(f"collectors.mounts.period: need at least 1s, got {self.period.total_seconds():g}s")
        if self.deadline < timedelta(milliseconds=10):
            raise ConfigError(f"collectors.mounts.deadline: need at least 10ms, got {self.deadline.total_seconds():g}s")
        if len(self.folders) > MOUNTS_MAX:
            raise ConfigError(f"collectors.mounts.folders: need at most {MOUNTS_MAX}, got {len(self.folders)}")


@dataclass(slots=True)
class _Question:
    """One statfs under way, or answered."""

    began_s: float = field(default_factory=time.monotonic)
    took_s: float | None = None
    failed: str = ""


class Mounts:
    """Source of node_mount_latency_seconds of one node."""

    def __init__(
        self,
        config: MountsConfig,
        *,
        node: str,
        start_ns: int,
        proc: Path = Path("/proc"),
        ask: Callable[[str], object] = os.statvfs,
    ) -> None:
        self.name = f"mounts@{node}"
        self.period_s = config.period.total_seconds()
        self._deadline_s = config.deadline.total_seconds()
        self._config, self._table, self._ask = config, f"{proc}/self/mounts", ask
        self._node = str(Subject(kind="node", id=node))
        self._parts = Parts(Emitter(self.name, job=None, start_ns=start_ns))
        self._frames = ReadingFrames(self.name, start_ns=start_ns)
        self._asked: dict[str, _Question] = {}

    @property
    def hanging(self) -> int:
        """Threads that wait for an answer."""
        return sum(question.took_s is None for question in self._asked.values())

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """What the mounts answered since the last poll; asks them again. Never waits."""
        events: list[Event] = []
        slowest: list[float] = []
        for folder, question in self._asked.items():
            waiting = question.took_s is None
            took_s = question.took_s or time.monotonic() - question.began_s
            if not waiting or took_s > self._deadline_s:  # a question under way says nothing yet
                events += self._parts(_label(folder), self._why(_label(folder), question), now_ns)
            if not question.failed:
                slowest.append(took_s)
        events += self._ask_again(now_ns)
        rows = [(self._node, "node_mount_latency_seconds", max(slowest))] if slowest else []
        return [*self._frames(rows, now_ns), *events]

    def _why(self, label: str, question: _Question) -> str:
        if question.failed:
            return f"mount {label}: {question.failed}"
        return f"mount {label} does not answer within {self._deadline_s:g} s" if question.took_s is None else ""

    def _ask_again(self, now_ns: int) -> list[Event]:
        """Start a question to each mount that has none under way; forget mounts that are gone and do not hang."""
        try:
            folders = self._config.folders or tuple(_network_mounts(read(self._table, _TABLE_BYTES)))[:MOUNTS_MAX]
            why = ""
        except OSError as error:
            folders, why = (), said(error, self._table)
        events = self._parts("", why, now_ns)
        waiting = {folder: question for folder, question in self._asked.items() if question.took_s is None}
        for folder in self._asked.keys() - waiting.keys() - {*folders}:
            events += self._parts(_label(folder), "", now_ns)
        self._asked = dict(waiting)
        for folder in folders:
            if folder not in waiting and len(self._asked) < MOUNTS_MAX:
                question = self._asked[folder] = _Question()
                name = f"statfs {_label(folder)}"[:60]
                threading.Thread(target=self._wait_for, args=(folder, question), name=name, daemon=True).start()
        return events

    def _wait_for(self, folder: str, question: _Question) -> None:
        try:
            self._ask(folder)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            question.failed = getattr(error, "strerror", None) or type(error).__name__
        question.took_s = time.monotonic() - question.began_s


def _label(folder: str) -> str:
    """A path as plain ASCII: it goes on the wire."""
    return ascii(folder)[1:-1]


def _network_mounts(table: bytes) -> Iterator[str]:
    r"""Where network file systems are mounted, of the lines of /proc/self/mounts; spaces in paths are octal there.

    >>> list(_network_mounts(b"n1:/x /my\\040data nfs4 rw 0 0\n/dev/sda / ext4 rw 0 0\n"))
    ['/my data']
    """
    for line in table.splitlines():
        words = line.split()
        if len(words) >= 3 and words[2].decode("ascii", "replace") in NETWORK:
            yield os.fsdecode(_OCTAL.sub(lambda code: bytes([int(code.group(1), 8) & 0xFF]), words[1]))
