"""The writer's side of a ring: one file on a tmpfs, taken in full before the first step, or none at all.

Everything that could fail later is made to fail here: the space is allocated (posix_fallocate) and every page touched,
so that no store can end in SIGBUS; the file never changes its size. It is made under a temporary name, locked, filled
and then linked to its real one, so nobody ever sees half a ring, and of two processes that claim to be the same rank of
the same attempt the second finds the name taken and the lock held. The lock is on an open file of its own: a forked
child closes its copy of that (closing does not unlock) and the parent's lock lives and dies with the parent.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from trainwarden.collectors.rank.descriptor import Descriptor
from trainwarden.core.identity import Identity, Process
from trainwarden.core.records import (
    COUNTERS,
    COUNTERS_OFFSET,
    DETAIL_ROW,
    DETAIL_ROWS,
    DETAILS,
    HEADER,
    LIVE,
    LIVE_OFFSET,
    MAGIC,
    NAME_BYTES,
    NAME_SLOTS,
    NAMES_OFFSET,
    PHASES,
    SIDE_ROWS,
    STATES,
    STEP_ROW,
    STEP_ROWS,
    STEPS_OFFSET,
    VERSION,
)

_PAGE_BYTES = 4096
_STATE_OFFSET = LIVE_OFFSET + 8 * len(PHASES) + 4 * 8
_LAP_OFFSET = _STATE_OFFSET - 8


class NoRing(Exception):
    """There is no ring; the training goes on without us. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many rows of each sort a ring has."""

    step_rows: int
    detail_rows: int
    suffix: str

    @property
    def details_offset(self) -> int:
        return STEPS_OFFSET + self.step_rows * STEP_ROW.size

    @property
    def file_bytes(self) -> int:
        return self.details_offset + self.detail_rows * DETAIL_ROW.size


MAIN = Layout(step_rows=STEP_ROWS, detail_rows=DETAIL_ROWS, suffix=".ring")
SIDE = Layout(step_rows=0, detail_rows=SIDE_ROWS, suffix=".side.ring")


class Ring:
    """A mapped ring that this process owns. One thread writes."""

    __slots__ = (
        "_counters",
        "_detail_seq",
        "_lock",
        "_map",
        "_names",
        "first_lap",
        "layout",
        "live",
        "path",
        "view",
    )

    def __init__(self, folder: Path, me: Identity, process: Process, clock: int, layout: Layout = MAIN) -> None:
        """Make it in an existing private folder. Raises NoRing."""
        self.layout = layout
        self.path = folder / f"rank-{me.rank}-{me.attempt}-{me.restart}{layout.suffix}"
        self._names: dict[str, int] = {}
        self._detail_seq = 0
        self._lock: Descriptor | None = None
        draft = folder / f".{self.path.name}.{process.pid}"
        try:
            self._allocate(draft)
            self._fill(me, process, clock)
            self.first_lap = self._take_name(draft)
        except (OSError, ValueError) as error:
            self.close()
            raise NoRing(f"{folder}: {getattr(error, 'strerror', None) or error}") from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def state(self, name: str) -> None:
        """Say what the collector is: one of STATES."""
        struct.pack_into("@H", self.view, _STATE_OFFSET, STATES.index(name))

    def count(self, name: str) -> None:
        """One more of COUNTERS."""
        self._counters[COUNTERS.index(name)] += 1

    def name_id(self, name: str) -> int | None:
        """The number of a name, written on first use; None: the table is full or the name too long (counted)."""
        known = self._names.get(name)
        if known is not None:
            return known
        text = name.encode(errors="replace")
        if len(self._names) == NAME_SLOTS or not 0 < len(text) <= NAME_BYTES or b"\0" in text:
            self.count("names_dropped")
            return None
        number = len(self._names)
        start = NAMES_OFFSET + number * NAME_BYTES
        self.view[start : start + NAME_BYTES] = text.ljust(NAME_BYTES, b"\0")
        self._names[name] = number
        return number

    def detail(
        self,
        what: str,
        name: str,
        value: tuple[float, float, float],
        *,
        at: float,
        step: int,
        lap: int,
        mb: int = -1,
        flags: int = 0,
    ) -> None:
        """Write a detail row (value, CPU, run-queue seconds). A name without room is counted and its row dropped."""
        number = self.name_id(name)
        if number is None:
            return
        self._detail_seq = seq = self._detail_seq + 1
        start = self.layout.details_offset + (seq - 1) % self.layout.detail_rows * DETAIL_ROW.size
        row = (seq, step, DETAILS.index(what), number, mb, flags, at, *value, lap, seq)
        DETAIL_ROW.pack_into(self.view, start, *row)

    def close(self) -> None:
        """Give up the lock; the file stays for its reader."""
        if self._lock is not None:
            self._lock.close()

    def _allocate(self, draft: Path) -> None:
        size = self.layout.file_bytes
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        for page in range(0, size, _PAGE_BYTES):
            self._map[page] = 0
        self.view = memoryview(self._map)
        self.live = self.view[LIVE_OFFSET : LIVE_OFFSET + 8 * len(PHASES)].cast("d")
        self._counters = self.view[COUNTERS_OFFSET : COUNTERS_OFFSET + 8 * len(COUNTERS)].cast("Q")
        self._lock = Descriptor(draft)
        fcntl.flock(self._lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _fill(self, me: Identity, process: Process, clock: int) -> None:
        layout = self.layout
        HEADER.pack_into(
            self.view,
            0,
            *(MAGIC, VERSION, NAMES_OFFSET, STEPS_OFFSET, layout.step_rows, layout.details_offset),
            *(layout.detail_rows, layout.file_bytes, clock, me.rank, me.world_size, me.attempt, me.restart),
            *(process.pid, 0, process.start_time, time.time_ns()),
        )
        for phase in PHASES:
            self.name_id(phase)
        struct.pack_into("@2q", self.view, LIVE_OFFSET + 8 * len(PHASES), -1, -1)

    def _take_name(self, draft: Path) -> int:
        """Link the finished file to its name; the lap to begin with. Raises OSError, ValueError."""
        for _ in range(3):  # an agent that looks whether the lock is free holds it for a moment
            try:
                os.link(draft, self.path)
            except FileExistsError:
                lap = self._remove_stale()
                if lap is None:
                    time.sleep(0.01)
                    continue
                os.link(draft, self.path)
                return lap
            return 0
        raise ValueError(f"another living process is this rank of this attempt: it holds {self.path.name}")

    def _remove_stale(self) -> int | None:
        """Remove the ring of a process that is gone; the lap after its last one. None: it is alive."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if os.fstat(fd).st_ino != os.stat(self.path, follow_symlinks=False).st_ino:
                return None
            text = os.pread(fd, 8, _LAP_OFFSET)
            self.path.unlink()
            return int.from_bytes(text, "little") % 0xFFFF + 1
        finally:
            os.close(fd)


assert HEADER.size <= LIVE_OFFSET
assert LIVE_OFFSET + LIVE.size <= COUNTERS_OFFSET
