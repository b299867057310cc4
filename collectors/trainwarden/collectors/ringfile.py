"""The reader's side of one ring: opened with distrust, followed row by row.

What a tenant wrote is read by system calls, never loaded from a mapping: a file that is cut short under us is then a
short read, not SIGBUS.
A row counts when two reads at least 1 ms apart are byte-equal and its head equals its tail, since the writer (Python)
has no memory barriers and may be stopped in the middle of a row for as long as it likes. Rows come in the order of
their numbers; one that is not whole while a later one is was damaged and is counted as lost.
"""

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.errors import DataError
from trainwarden.core.records import (
    CLOCKS,
    DETAIL_ROW,
    HEADER,
    LIVE,
    LIVE_OFFSET,
    MAGIC,
    MAX_FILE_BYTES,
    NAME_BYTES,
    NAME_SLOTS,
    NAMES_OFFSET,
    STEP_ROW,
    STEPS_OFFSET,
    VERSION,
)

FILE_NAME: Final = re.compile(r"rank-(\d{1,7})-(\d{1,5})-(\d{1,5})(\.side)?\.ring")

_CHUNK_ROWS: Final = 8
"""Rows fetched when one is new; a second call fetches the rest where all of them are."""
_HEAD_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Looked:
    """New rows of one area as they were at the first look: bytes of whole rows, the first of which is number `seq`."""

    tail: "Tail"
    seq: int
    data: bytes


@dataclass(slots=True)
class Tail:
    """Follows the rows of one area of one ring."""

    fd: int
    offset: int
    rows: int
    row_bytes: int
    seq: int = 0
    """Number of the last row taken."""
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Numbers of rows that are gone (first, last), to be told and forgotten by whoever reads."""
    torn_since_ns: int | None = None
    """Since when the next row has been there but not whole."""
    given_up: bool = False
    """Nothing comes any more: the row that is not whole never will be."""

    @property
    def next_at(self) -> int:
        """Where in the file the next row will stand."""
        return self.offset + self.seq % self.rows * self.row_bytes

    def look(self) -> Looked | None:
        """What seems to be new. Raises DataError if the file has become too short."""
        if self.rows == 0 or self.given_up:
            return None
        slot, head = self.seq % self.rows, os.pread(self.fd, _HEAD_BYTES, self.next_at)
        if len(head) == _HEAD_BYTES and int.from_bytes(head, "little") in (0, self.seq + 1 - self.rows):
            return None
        data = self._read(slot, min(_CHUNK_ROWS, self.rows - slot))
        new = int.from_bytes(data[:_HEAD_BYTES], "little") == self.seq + 1
        return self._new_rows(data) if new else self._resync()

    def give_up(self) -> None:
        """The writer died in the middle of the next row: it is lost, and the last."""
        self.lost.append((self.seq + 1, self.seq + 1))
        self.given_up, self.torn_since_ns = True, None

    def catch_up(self) -> None:
        """Begin with the oldest row that is still there: for a ring that was filled before we came."""
        self.seq = max(0, self._newest(self._read(0, self.rows)) - self.rows)

    def still(self, looked: Looked) -> bytes:
        """The rows, from the first on, that are still the same bytes."""
        slot, count = (looked.seq - 1) % self.rows, len(looked.data) // self.row_bytes
        try:
            now = self._read_around(slot, count)
        except (OSError, DataError):
            return b""  # the next look will say why
        if now == looked.data:
            return now
        before_RB = np.frombuffer(looked.data, np.uint8).reshape(count, -1)
        changed_R = (np.frombuffer(now, np.uint8).reshape(count, -1) != before_RB).any(axis=1)
        return now[: int(changed_R.argmax()) * self.row_bytes]

    def _new_rows(self, data: bytes) -> Looked:
        """Some rows of which the first is new."""
        heads = memoryview(data).cast("I")[:: self.row_bytes // _HEAD_BYTES].tolist()
        count = next((place for place, head in enumerate(heads) if head != self.seq + 1 + place), len(heads))
        if count == len(heads):
            data = self._read_around(self.seq % self.rows, self.rows)
            heads_R = self._column(data, 0)
            right_R = heads_R == np.arange(self.seq + 1, self.seq + 1 + self.rows)
            count = self.rows if right_R.all() else int(right_R.argmin())
        return Looked(self, self.seq + 1, data[: count * self.row_bytes])

    def _resync(self) -> Looked | None:
        """The next row is not what should be there: the writer went round once more than we did, or it is damaged."""
        newest = self._newest(self._read(0, self.rows))
        if newest <= self.seq:
            return None
        oldest = max(self.seq, newest - self.rows)
        if oldest > self.seq:
            self.lost.append((self.seq + 1, oldest))
            self.seq = oldest
        return Looked(self, oldest + 1, self._read_around(oldest % self.rows, newest - oldest))

    def _newest(self, area: bytes) -> int:
        """Largest number of a whole row that stands where it belongs; 0: none."""
        heads_R, tails_R = self._column(area, 0), self._column(area, self.row_bytes // _HEAD_BYTES - 1)
        whole_R = (heads_R == tails_R) & ((heads_R - 1) % self.rows == np.arange(self.rows)) & (heads_R > 0)
        return int(heads_R[whole_R].max(initial=0))

    def _column(self, data: bytes, word: int) -> NDArray[np.int64]:
        """The u4 at one place of every row."""
        return np.frombuffer(data, "<u4").reshape(-1, self.row_bytes // _HEAD_BYTES)[:, word].astype(np.int64)

    def _read_around(self, slot: int, count: int) -> bytes:
        """Rows from a slot on, over the end of the area."""
        before_end = min(count, self.rows - slot)
        data = self._read(slot, before_end)
        return data + self._read(0, count - before_end) if count > before_end else data

    def _read(self, slot: int, count: int) -> bytes:
        size = count * self.row_bytes
        data = os.pread(self.fd, size, self.offset + slot * self.row_bytes)
        if len(data) != size:
            raise DataError("the file has become shorter")
        return data


def confirm(looked: Sequence[Looked], now_ns: int) -> tuple[bytes, list[int]]:
    """Second look at rows of one sort: the bytes of those that count, and how many there are of each tail.

    To be called at least 1 ms after the first look.
    """
    parts = [look.tail.still(look) for look in looked]
    counts = [len(part) // look.tail.row_bytes for part, look in zip(parts, looked, strict=True)]
    ends = np.cumsum(counts)
    words_RW = np.frombuffer(b"".join(parts), "<u4").reshape(ends[-1], -1) if ends[-1] else np.empty((0, 1), np.uint32)
    first_R = np.repeat(np.array([look.seq for look in looked]) + counts - ends, counts)
    numbers_R = first_R + np.arange(len(words_RW))
    whole_R = (words_RW[:, 0] == numbers_R) & (words_RW[:, -1] == numbers_R)
    for place, look in enumerate(looked):
        end, taken = int(ends[place]), counts[place]
        part_R = whole_R[end - taken : end]
        if not part_R.all():
            parts[place], taken = _without_damaged(parts[place], part_R, look)
            counts[place] = len(parts[place]) // look.tail.row_bytes
        look.tail.seq += taken
        look.tail.torn_since_ns = None if taken else look.tail.torn_since_ns or now_ns
    return b"".join(parts), counts


def _without_damaged(data: bytes, whole_R: NDArray[np.bool_], look: Looked) -> tuple[bytes, int]:
    """The whole rows, and how many rows there are up to the last whole one.

    Those before it that are not whole are lost; those after it may still become whole.
    """
    taken = len(whole_R) - int(whole_R[::-1].argmax()) if whole_R.any() else 0
    whole_R = whole_R[:taken]
    look.tail.lost += [(look.seq + int(place), look.seq + int(place)) for place in np.flatnonzero(~whole_R)]
    rows_RB = np.frombuffer(data, np.uint8).reshape(-1, look.tail.row_bytes)
    return rows_RB[:taken][whole_R].tobytes(), taken


class RingFile:
    """One ring, opened for reading."""

    def __init__(self, path: Path, owner_uid: int) -> None:
        """Raises DataError, OSError."""
        self.name = path.name
        self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.inode = _check_file(self.fd, owner_uid)
            self._read_header()
        except (DataError, OSError):
            os.close(self.fd)
            raise
        self.names: tuple[str, ...] = ()
        self.ending = False
        """It will not be written any more: detached, removed, or of an incarnation that is over."""
        self.quiet_polls = 0
        for tail in (self.steps, self.details):
            if tail.rows:
                tail.catch_up()

    @property
    def generation(self) -> tuple[int, int]:
        """Which incarnation of the job it belongs to; larger is newer."""
        return self.attempt, self.restart

    @property
    def is_side(self) -> bool:
        """Whether it belongs to a rank's other threads: then it has no steps and no live block."""
        return self.steps.rows == 0

    def live(self) -> bytes:
        """The live block. Raises DataError."""
        data = os.pread(self.fd, LIVE.size, LIVE_OFFSET)
        if len(data) != LIVE.size:
            raise DataError("the file has become shorter")
        return data

    def name_of(self, number: int) -> str | None:
        """What a name id means; None for an id without a name."""
        if number >= len(self.names):
            self.names = _names(os.pread(self.fd, NAME_SLOTS * NAME_BYTES, NAMES_OFFSET))
        return self.names[number] if number < len(self.names) else None

    def writer_is_gone(self) -> bool:
        """Whether nobody holds the writer's lock any more."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        os.close(self.fd)
        self.view = memoryview(b"")

    def _read_header(self) -> None:
        data = os.pread(self.fd, HEADER.size, 0)
        if len(data) != HEADER.size or not data.startswith(MAGIC):
            raise DataError("no ring: its first bytes are others")
        fields: tuple[Any, ...] = HEADER.unpack(data)
        _, version, names_offset, steps_offset, step_rows, details_offset, detail_rows, file_bytes, clock = fields[:9]
        self.rank, self.world_size, self.attempt, self.restart, self.pid = fields[9:14]
        if version > VERSION:
            raise DataError(f"layout version {version}, we read up to {VERSION}: upgrade the agent")
        expected = (NAMES_OFFSET, STEPS_OFFSET, STEPS_OFFSET + step_rows * STEP_ROW.size)
        whole = expected[2] + detail_rows * DETAIL_ROW.size
        if (names_offset, steps_offset, details_offset) != expected or file_bytes != whole or version < 1:
            raise DataError("no ring: its header contradicts itself")
        if os.fstat(self.fd).st_size != file_bytes:
            raise DataError(f"its size is not the {file_bytes} bytes that its header says")
        try:
            self.view = memoryview(mmap.mmap(self.fd, file_bytes, prot=mmap.PROT_READ))
            """The kernel copies from it (ringglance.py); to load from it is SIGBUS once the file has been cut short."""
        except ValueError as error:
            raise DataError("the file has become shorter") from error
        if not 0 <= self.rank < self.world_size or clock >= len(CLOCKS):
            raise DataError(f"rank {self.rank} of {self.world_size} on clock {clock}: none that can be")
        self._check_name()
        self.steps = Tail(self.fd, STEPS_OFFSET, step_rows, STEP_ROW.size)
        self.details = Tail(self.fd, details_offset, detail_rows, DETAIL_ROW.size)

    def _check_name(self) -> None:
        found = FILE_NAME.fullmatch(self.name)
        if found is None or tuple(map(int, found.groups()[:3])) != (self.rank, self.attempt, self.restart):
            raise DataError(f"its header says rank {self.rank}, attempt {self.attempt}, restart {self.restart}")


def _check_file(fd: int, owner_uid: int) -> int:
    """The inode of an open file that may be read as a ring. Raises DataError."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise DataError("not a regular file")
    if found.st_uid != owner_uid:
        raise DataError(f"belongs to user {found.st_uid}, the job to user {owner_uid}")
    if found.st_size > MAX_FILE_BYTES:
        raise DataError(f"{found.st_size} bytes, a ring has at most {MAX_FILE_BYTES}")
    return found.st_ino


def _names(table: bytes) -> tuple[str, ...]:
    """The names up to the first empty slot.

    >>> _names(b"loss".ljust(48, b"\\0") + bytes(48))
    ('loss',)
    """
    slots = (table[at : at + NAME_BYTES].rstrip(b"\0") for at in range(0, len(table), NAME_BYTES))
    names = []
    for slot in slots:
        if not slot:
            break
        names.append(slot.decode(errors="replace"))
    return tuple(names)
