"""The kernel log from files: recorded dmesg (raw, -T, --decode), /dev/kmsg's own form, a syslog's kern.log.

A file is read on as it grows, under whatever name it is rotated to (files are known by their inode); one that became
shorter was emptied, which is told as a gap. What ends in .gz is read once. Times are those of the lines: with a zone
as they are, without one in UTC; seconds since boot count from boot_ns. A line without a time has that of the line
before it. Log files are root's, but what stands in their place may not be: links and special files are not opened.
"""

import errno
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from trainwarden.collectors.kernel_grammar import interesting
from trainwarden.collectors.kmsg import Gap
from trainwarden.core.model import Json

MAX_FILES: Final = 256
"""Of a folder."""

MAX_LINE_BYTES: Final = 8192
"""What a line has beyond this is read as a line of its own: no message of the kernel is that long."""

MAX_POLL_BYTES: Final = 4 << 20
"""Of one poll, lines without end (a sparse file of a terabyte) among them: 0.1 s of work."""

MAX_PACKED_BYTES: Final = 256 << 20
"""What a .gz may hold; the rest is told as a gap."""

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?")
_DMESG_T = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\]")
_SYSLOG = re.compile(r"([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) ")
_RAW = re.compile(r"(?:<\d{1,3}>)?\[ *(\d{1,9})\.(\d{6})\]")
_KMSG = re.compile(r"\d{1,4},\d{1,19},(\d{1,15})[,;]")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY_NS = 86_400_000_000_000


class KernelLogFiles:
    """One file or all files of a folder, from now on or from where an earlier process stood."""

    def __init__(self, path: Path, *, recorded: bool = False, boot_ns: int = 0) -> None:
        """recorded: from their beginning. boot_ns: Unix time of the boot, for lines that count seconds since then."""
        self.why_blind, self.behind = "", False
        self.lost: list[Gap] = []
        self._path, self._boot_ns = path, boot_ns
        self._read_bytes: dict[str, int] = {}
        self._tails: dict[str, int] = {}
        self._budget = 0
        self._last_ns = 0
        self._skip = not recorded

    @property
    def position(self) -> Mapping[str, Json]:
        """`device:inode` -> bytes read."""
        return dict(self._read_bytes)

    def resume(self, position: Mapping[str, Json]) -> None:
        """Go on behind these bytes."""
        self._skip = self._skip and not position
        self._read_bytes = {key: value for key, value in position.items() if isinstance(value, int) and value >= 0}

    def read(self, now_ns: int) -> Iterator[tuple[int, str]]:
        """Lines that may mean something, since the last call."""
        try:
            paths = self._paths()
        except OSError as error:
            self.why_blind = f"{self._path}: {error.strerror}"
            return
        self.why_blind, self.behind, self._budget = "", False, MAX_POLL_BYTES
        if self._skip:
            self._skip, self._read_bytes = False, {_key(path): path.lstat().st_size for path in paths}
        for path in paths:
            try:
                for line in self._lines(path):
                    text = line.decode(errors="replace")
                    if interesting(text):
                        self._last_ns = stamp(text, now_ns, self._boot_ns) or self._last_ns or now_ns
                        yield self._last_ns, text
            except (OSError, EOFError, zlib.error) as error:
                self.why_blind = f"{path}: {getattr(error, 'strerror', None) or error}"

    def close(self) -> None:
        """Nothing is open between two polls."""

    def _paths(self) -> list[Path]:
        """What to read, the oldest first; a file's rotated siblings only where they were read before."""
        if stat.S_ISDIR(os.stat(self._path).st_mode):
            near = islice(self._path.iterdir(), MAX_FILES)
            found = {path: key for path in near if (key := _key(path))}
        elif not stat.S_ISREG(os.lstat(self._path).st_mode):
            raise OSError(errno.EINVAL, "neither a plain file nor a folder (links to files are not followed)")
        else:
            siblings = self._path.parent.glob(f"{self._path.name}[.-]*")
            found = {path: key for path in siblings if (key := _key(path)) in self._read_bytes}
            found[self._path] = _key(self._path)
        self._read_bytes = {key: self._read_bytes.get(key, 0) for key in found.values() if key}
        return sorted((path for path, key in found.items() if key), key=lambda path: (_changed_ns(path), path.name))

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Lines behind what was read of a file."""
        with open(os.open(path, _FLAGS), "rb") as file:
            found = os.fstat(file.fileno())
            key = f"{found.st_dev}:{found.st_ino}"
            begin = self._read_bytes.get(key, 0)
            if not stat.S_ISREG(found.st_mode) or (path.suffix == ".gz" and begin):
                return
            if begin > found.st_size:
                self.lost.append((None, None))
                begin = self._read_bytes[key] = 0
            file.seek(begin)
            yield from self._packed(file, key) if path.suffix == ".gz" else self._plain(file, key, found.st_size)

    def _plain(self, file: BinaryIO, key: str, size: int) -> Iterator[bytes]:
        tail, self._tails[key] = self._tails.get(key), size
        while self._budget > 0:
            line = file.readline(MAX_LINE_BYTES)
            # a last line without its end is still being written, unless it was there just so at the last poll
            if not line or not (line.endswith(b"\n") or len(line) == MAX_LINE_BYTES or tail == size):
                return
            self._budget -= len(line)
            self._read_bytes[key] = file.tell()
            yield line
        self.behind = True

    def _packed(self, file: BinaryIO, key: str) -> Iterator[bytes]:
        self._read_bytes[key] = 1
        with gzip.GzipFile(fileobj=file) as unpacked:
            while unpacked.tell() < MAX_PACKED_BYTES:
                line = unpacked.readline(MAX_LINE_BYTES)
                if not line:
                    return
                yield line
        self.lost.append((None, None))


def stamp(line: str, now_ns: int, boot_ns: int = 0) -> int | None:
    """Unix time that a line's prefix tells; None: none, or no real one.

    >>> [stamp(line, 0) for line in ("[   12.500000] x", "[Sun Feb 23 16:24:18 2025] x", "6,901,100,-;x", "x")]
    [12500000000, 1740327858000000000, 100000, None]
    """
    head = line[:96]
    try:
        if found := _ISO.search(head):
            moment = datetime.fromisoformat(found[0].replace(",", "."))
            return _unix_ns(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
        if found := _DMESG_T.search(head):
            month, day, hour, minute, second, year = found.groups()
            return _unix_ns(_utc(int(year), month, day, hour, minute, second))
        if found := _SYSLOG.match(head):
            year_now = datetime.fromtimestamp(now_ns / 1e9, UTC).year
            t_ns = _unix_ns(_utc(year_now, *found.groups()))
            return t_ns if t_ns <= now_ns + _DAY_NS else _unix_ns(_utc(year_now - 1, *found.groups()))
    except (ValueError, OverflowError):
        return None
    if found := _KMSG.match(head):
        return boot_ns + int(found[1]) * 1000
    if found := _RAW.match(head):
        return boot_ns + int(found[1]) * 10**9 + int(found[2]) * 1000
    return None


def _utc(year: int, month: str, day: str, hour: str, minute: str, second: str) -> datetime:
    return datetime(year, _MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second), tzinfo=UTC)


def _unix_ns(moment: datetime) -> int:
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1) * 1000


def _key(path: Path) -> str:
    """`device:inode` of a plain file; "" for anything else."""
    try:
        found = path.lstat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}" if stat.S_ISREG(found.st_mode) else ""


def _changed_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
