"""The dumps of one job's ranks on this host: found where the ranks' recorders write them, and asked for.

All of it is written by the job's user. A file is taken when it was the same at two polls, so that a dump under way is
not mistaken for a broken one; one that was there before the job is another job's. Of a ring that is dumped again only
what is new is told: records that came since, and older ones that have started or completed since, so that repeated
dumps show when each rank arrives at each collective.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.collectors.blind import Blind
from trainwarden.collectors.folder import Folder
from trainwarden.collectors.nccl.debug_server import Fetched
from trainwarden.collectors.nccl.dumps import PATH_MAX, Dump, NotRead, Teller, read_dumps
from trainwarden.collectors.nccl.places import PIPE_KEY, Places, read_places
from trainwarden.collectors.nccl.reader import DumpLimits
from trainwarden.collectors.nccl.restricted import plain
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Event, Frame, JobId, Look, Subject
from trainwarden.core.process import PROC, ProcessId

EMPTY_NS: Final = 10_000_000_000
"""A recorder opens its file and writes all of it: an empty one this old has no writer any more."""

Ranks = Callable[[], Mapping[int, ProcessId]]
_Stamp = tuple[int, int, int]
"""Inode, bytes, time of the last change (ns): which file it is, and how far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpsConfig:
    """Flight-recorder dumps."""

    prefixes: tuple[str, ...] = ()
    """Where ranks write dumps, as TORCH_FR_DUMP_TEMP_FILE has it (`/scratch/traces/rank_`), for scripts that set it
    themselves; beside what the ranks' environment says. torchft's `PREFIX_quorum_ID/` below it is looked into."""

    pipe: str = ""
    """The same for TORCH_NCCL_DEBUG_INFO_PIPE_FILE; empty: what the ranks' environment says."""

    worker_port: int = 0
    """Where ranks that call `torch.distributed.debug.start_debug_server(worker_port=PORT + LOCAL_RANK)` answer, as
    PORT: they are then asked there, not by their pipe. 0: they do not."""

    limits: DumpLimits = field(default_factory=DumpLimits)

    def __post_init__(self) -> None:
        for key, paths in (("prefixes", self.prefixes), ("pipe", (self.pipe,) if self.pipe else ())):
            if not all(os.path.isabs(path) for path in paths):
                raise ConfigError(f"collectors.dumps.{key}: need absolute paths, got {', '.join(paths)}")
        if not 0 <= self.worker_port < 65536:
            raise ConfigError(f"collectors.dumps.worker_port: need a port or 0, got {self.worker_port}")


class _Environments:
    """Places of processes, each read once."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._known: dict[ProcessId, Places] = {}

    def __call__(self, process: ProcessId) -> Places:
        """Raises OSError."""
        if process not in self._known:
            self._known[process] = read_places(process.pid, self._proc)
        return self._known[process]


class Dumps:
    """Source of collective frames and dump events of one job's ranks on this host."""

    period_s = 1.0

    def __init__(
        self,
        config: DumpsConfig,
        *,
        node: str,
        job: JobId,
        owner_uid: int,
        ranks: Ranks,
        epoch: Callable[[], Epoch],
        since_ns: int,
        start_ns: int,
        fetched: Fetched | None = None,
        proc: Path = PROC,
    ) -> None:
        """ranks, epoch: the job's processes here, and its epoch, as they are now; owner_uid: the job's user; since_ns:
        when the job began; fetched: where DumpRequests puts what it got."""
        self.name = f"dumps@{node}"
        self._config, self._owner_uid, self._since_ns = config, owner_uid, since_ns
        self._ranks, self._epoch = ranks, epoch
        emit = Emitter(self.name, job=job, start_ns=start_ns)
        self._tell, self._blind = Teller(emit, job, start_ns=start_ns), Blind(emit)
        self._places, self._fetched = _Environments(proc), fetched
        self._quorums: dict[str, Folder] = {}
        self._seen: Mapping[str, _Stamp] = {}
        self._taken: dict[str, _Stamp] = {}
        self._told: dict[ProcessId, _Told] = {}

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """The dumps that have been finished since the last poll."""
        processes, epoch = self._ranks(), self._epoch()
        ranks_of: dict[str, list[int]] = {}
        for rank, process in processes.items():
            for prefix in (yield from self._prefixes(process, now_ns)):
                ranks_of.setdefault(prefix, []).append(rank)
        places = [(place, ranks) for prefix, ranks in ranks_of.items() for place in self._below(prefix, now_ns)]
        files = {f"{place}{rank}": rank for place, ranks in places for rank in ranks}
        stamps = dict[str, _Stamp]()
        for path in files:
            try:
                stamps[path] = _stamp(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                yield from self._blind(f"{plain(os.path.dirname(path))}: {error.strerror}", now_ns)
        ready = {path: files[path] for path in self._finished(stamps, now_ns)}
        for found in read_dumps(ready, owner_uid=self._owner_uid, limits=self._config.limits):
            if isinstance(found, NotRead):
                yield from self._tell.refuse(found.path, found.why, now_ns)
            else:
                told = self._told.setdefault(processes[found.rank], _Told())
                yield from self._tell.say(found, told.new_rows(found), epoch, now_ns)

    def _prefixes(self, process: ProcessId, now_ns: int) -> Generator[Event, None, tuple[str, ...]]:
        """Where a process's dumps may lie; an event if that is not known."""
        fetched = () if self._fetched is None else self._fetched.prefixes
        named = self._config.prefixes + fetched
        try:
            return named + self._places(process).prefixes
        except OSError as error:
            why = f"{error.strerror}: where ranks write dumps is not known; name it by collectors.dumps.prefixes"
            yield from () if self._config.prefixes else self._blind(f"environment of processes: {why}", now_ns)
        return named

    def _below(self, prefix: str, now_ns: int) -> Iterator[str]:
        """The prefix, and the newest of torchft's folders behind it: one a quorum, ranks' numbers in it."""
        yield prefix
        if prefix not in self._quorums:
            folder, name = os.path.split(prefix)
            self._quorums[prefix] = Folder(Path(folder), re.compile(re.escape(name) + r"_quorum_(\d{1,18})"))
        names = [name for name, _ in self._quorums[prefix].files(now_ns)]
        if names:
            newest = max(names, key=lambda name: int(name.rpartition("_")[2]))
            yield f"{os.path.dirname(prefix)}/{newest}/"

    def _finished(self, stamps: Mapping[str, _Stamp], now_ns: int) -> list[str]:
        """Those that are new and have stopped growing."""
        ready = [
            path
            for path, stamp in stamps.items()
            if stamp == self._seen.get(path) != self._taken.get(path) and stamp[2] >= self._since_ns
            if stamp[1] or now_ns - stamp[2] > EMPTY_NS
        ]
        self._seen = stamps
        self._taken |= {path: stamps[path] for path in ready}
        return ready


def _stamp(path: str) -> _Stamp:
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


class _Told:
    """What has been told of the ring of one process."""

    def __init__(self) -> None:
        self._last = -1
        """Number of the newest record."""
        self._enqueued_ns = -1
        """Its time: after a reset records are numbered from 0 again."""
        self._open: dict[int, tuple[int, int]] = {}
        """Records that had not completed: started, completed."""

    def new_rows(self, dump: Dump) -> NDArray[np.void]:
        """The rows of a dump that are new or have changed, which then are told."""
        record_N, rows_N = dump.record_N, dump.rows_N
        if not len(rows_N):
            return rows_N
        if not self._goes_on(record_N, rows_N):
            self._last, self._open = -1, {}
        new_N = record_N > self._last
        times_N = rows_N[["started_ns", "completed_ns"]]
        for place in np.flatnonzero(np.isin(record_N, [*self._open])):
            new_N[place] = times_N[place].item() != self._open[int(record_N[place])]
        newest = int(record_N.argmax())
        self._last, self._enqueued_ns = int(record_N[newest]), int(rows_N["enqueued_ns"][newest])
        open_N = rows_N["completed_ns"] == -1
        self._open = dict(zip(record_N[open_N].tolist(), times_N[open_N].tolist(), strict=True))
        return rows_N[new_N]

    def _goes_on(self, record_N: NDArray[np.int64], rows_N: NDArray[np.void]) -> bool:
        known = np.flatnonzero(record_N == self._last)
        if len(known):
            return bool(rows_N["enqueued_ns"][known[-1]] == self._enqueued_ns)
        return int(record_N.max()) > self._last


class DumpRequests:
    """Witness: asks ranks of this host for a dump, by their recorder's pipe or by torch's debug server. For the pipe it
    never waits: the dump that is written then (0.9 to 1.2 s later) is found by Dumps, as is what the server answered;
    here is told only who cannot be asked."""

    def __init__(
        self,
        config: DumpsConfig,
        *,
        node: str,
        job: JobId,
        owner_uid: int,
        ranks: Ranks,
        start_ns: int,
        fetched: Fetched | None = None,
        clock: Clock = unix_ns,
        proc: Path = PROC,
    ) -> None:
        """fetched: where answers of the debug server go; None: it is not asked."""
        self._config, self._owner_uid, self._ranks, self._clock = config, owner_uid, ranks, clock
        self._fetched = fetched
        self._emit = Emitter(f"dump-requests@{node}", job=job, start_ns=start_ns)
        self._places = _Environments(proc)

    def look(self, look: Look) -> Iterator[Event]:
        """One dump.refused for each reason why ranks of this host that were to be asked could not."""
        wanted = {subject.id for subject in look.subjects if subject.kind == "rank"} if look.what == "dump" else set()
        refused: dict[tuple[str, str], list[int]] = {}
        for rank, process in sorted(self._ranks().items()):
            if str(rank) in wanted and (no := self._ask(rank, process)):
                refused.setdefault(no, []).append(rank)
        source = Subject(kind="source", id=self._emit.source)
        for (path, why), ranks in refused.items():
            words = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} cannot be asked for a dump: {why}"
            said = {"path": plain(path, PATH_MAX), "why": words}
            yield self._emit("dump.refused", source, now_ns=self._clock(), data=said)

    def _ask(self, rank: int, process: ProcessId) -> tuple[str, str] | None:
        """(path, why) where it cannot be asked."""
        port = self._config.worker_port
        try:
            if port and self._fetched is not None:
                return self._fetched.fetch(rank, self._places(process), port, self._config.limits.max_bytes)
            pipe = self._config.pipe or self._places(process).pipe
        except OSError as error:
            return "", f"where to ask it is not known: {error.strerror}"
        if not pipe:
            return "", f"no requests are taken: {PIPE_KEY} is not set"
        path = f"{pipe}{rank}.pipe"
        why = ask(path, self._owner_uid)
        return (path, why) if why else None


def ask(path: str, owner_uid: int) -> str:
    """Write one byte into a recorder's pipe, without ever waiting: why it cannot be done, "" if it was. What the
    tenant put there is opened only once it is known to be a pipe of his: opening a device can do things."""
    place = to = -1
    try:
        place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(place)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner_uid:
            return "what lies there is no pipe of the job's user"
        to = os.open(f"/proc/self/fd/{place}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(to, b"1")
    except OSError as error:  # EAGAIN: asked often, never read
        return "nobody reads its pipe" if error.errno == errno.ENXIO else str(error.strerror)
    finally:
        for fd in {place, to} - {-1}:
            os.close(fd)
    return ""
