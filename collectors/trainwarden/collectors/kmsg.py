"""The kernel log of a node: Xids, SXids, lost GPUs, PCIe errors, ports, OOM kills, crashes as events.

/dev/kmsg gives one record a read: `priority,number,microseconds,flags;message`, then lines with ` KEY=value`. Numbers
tell exactly how many records were overwritten before we read them (Event telemetry.lost). A record that a program wrote
has a facility other than 0 (the kernel sees to that), so it is no fact of the kernel's: a privileged container could
write any Xid. Format: Documentation/ABI/testing/dev-kmsg.
"""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from trainwarden.collectors.blind import Parts
from trainwarden.collectors.kernel_bursts import Bursts, BurstsConfig, Told
from trainwarden.collectors.kernel_grammar import Fact, KernelGrammar
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.model import Event, Frame, Json, Subject
from trainwarden.core.sealed import read_sealed, write_sealed

MAX_RECORDS: Final = 20_000
"""Of one poll, 0.2 s of work in a storm. More waits in the kernel's buffer, and is counted if overwritten there."""

RETRY_NS: Final = 10_000_000_000
"""Between two attempts to open a log that could not be read."""

SAVE_NS: Final = 2_000_000_000
"""Between two saves of the position (each waits for the disk); a killed agent's successor reads this much again."""

_RECORD_BYTES = 8192
"""One read of /dev/kmsg gives one record, at most this long (CONSOLE_EXT_LOG_MAX)."""

_HEAD = re.compile(rb"(\d{1,4}),(\d{1,19}),(\d{1,15})(?:,[^;]{0,64})?;")
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_GRANTS = {
    errno.EPERM: "kernel.dmesg_restrict=1: grant CAP_SYSLOG, or read the journal (collectors.kernel_log.source)",
    errno.EACCES: "grant read access (root, group adm or CAP_DAC_READ_SEARCH), or read the journal instead",
    errno.ENOENT: "mount /dev/kmsg into the container, or read the journal or log files of the host instead",
}

_ANOTHER = "not the kernel's log device (1, 11): containers may have /dev/null or a console in its place"

Gap = tuple[int | None, int | None]
"""First and last number of records that nobody will see; None: not known."""


class Log(Protocol):
    """Where lines of the kernel come from: the device, the journal, files."""

    why_blind: str
    """"" while it can be read."""
    lost: list[Gap]
    """Gaps since the last read."""
    behind: bool
    """Whether the last read left lines that were there."""

    @property
    def position(self) -> Mapping[str, Json]:
        """Where the reading stands; {} = nowhere yet. For `resume` of a later process."""
        ...

    def resume(self, position: Mapping[str, Json]) -> None:
        """Go on from there, if that is still possible. Before the first read."""
        ...

    def read(self, now_ns: int) -> Iterator[tuple[int, str]]:
        """(t_ns, message) of what is new, not more than one poll's worth; raises nothing."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...


class Kmsg:
    """/dev/kmsg, from now on or from where an earlier process of this boot stood."""

    def __init__(self, path: Path = Path("/dev/kmsg"), *, drills: bool = False) -> None:
        """drills: take records that programs wrote for the kernel's."""
        self.why_blind, self.behind = "", False
        self.lost: list[Gap] = []
        self._path, self._drills = path, drills
        self._descriptor = -1
        self._number: int | None = None
        self._boot = _boot_id()
        self._drained_ns = 0
        self._retry_ns = 0
        self._overrun = False

    @property
    def position(self) -> Mapping[str, Json]:
        """Boot and number of the last record read."""
        return {} if self._number is None else {"boot": self._boot, "number": self._number}

    def resume(self, position: Mapping[str, Json]) -> None:
        """Records after this one; all of this boot's if it is of another boot."""
        number = position.get("number")
        if isinstance(number, int):
            self._number = number if position.get("boot") == self._boot else -1

    def open(self, now_ns: int) -> bool:
        """Whether the device is open; tried again after RETRY_NS if not. What is written from now on will be seen."""
        if self._descriptor < 0 and now_ns >= self._retry_ns:
            self._retry_ns = now_ns + RETRY_NS
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
                if not _is_kernel_log(os.fstat(self._descriptor)):
                    raise OSError(errno.ENODEV, _ANOTHER)
                with contextlib.suppress(OSError):  # a pipe in place of the device is read from where it is
                    os.lseek(self._descriptor, 0, os.SEEK_END if self._number is None else os.SEEK_SET)
                self.why_blind = ""
            except OSError as error:
                self._fail(error)
        return self._descriptor >= 0

    def read(self, now_ns: int) -> Iterator[tuple[int, str]]:
        """Messages of the kernel since the last call."""
        if not self.open(now_ns):
            return
        boot_ns = now_ns - time.monotonic_ns()
        self.behind = True
        for _ in range(MAX_RECORDS):
            record = self._record()
            if record is None:
                self._drained_ns, self.behind = now_ns, False
                return
            head = _HEAD.match(record)
            if head is None or not self._is_next(int(head[2])):
                continue
            if int(head[1]) >> 3 and not self._drills:
                continue
            # printk's clock drifts from the real one by seconds a week, but we know when we last had read everything
            t_ns = min(max(boot_ns + int(head[3]) * 1000, self._drained_ns), now_ns)
            for line in _text(record[head.end() :]).split("\n"):
                yield t_ns, line

    def close(self) -> None:
        """Close the device."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _record(self) -> bytes | None:
        """The next record, b"" for one that was overwritten before we read it, None if there is none now."""
        try:
            return os.read(self._descriptor, _RECORD_BYTES) or None
        except BlockingIOError:
            return None
        except BrokenPipeError:  # the next read goes on behind what was overwritten
            self._overrun = True
            return b""
        except OSError as error:
            self._fail(error)
            return None

    def _is_next(self, number: int) -> bool:
        """Whether a record is new; notes what is missing before it."""
        last, overrun = self._number, self._overrun
        if last is not None and number <= last:
            return False
        if overrun if last is None else number > last + 1:
            self.lost.append((None if last is None else last + 1, number - 1))
        self._number, self._overrun = number, False
        return True

    def _fail(self, error: OSError) -> None:
        self.close()
        grant = _GRANTS.get(error.errno or 0, "")
        self.why_blind = f"{self._path}: {error.strerror}" + (f" ({grant})" if grant else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogConfig:
    """How the kernel log is read."""

    source: str = "kmsg"
    """kmsg (/dev/kmsg), journal (journalctl), or the path of a log file or of a folder of them."""

    position: Path | None = None
    """File that remembers where the reading stood, so that a restart of ours misses nothing; unset: from now on."""

    recorded: bool = False
    """Whether log files are read from their beginning (recordings), not from now on."""

    drills: bool = False
    """Whether records that programs wrote to /dev/kmsg count as the kernel's (to try out alarms)."""

    bursts: BurstsConfig = field(default_factory=BurstsConfig)
    """When lines are one event."""

    def __post_init__(self) -> None:
        if self.source not in ("kmsg", "journal") and not self.source.startswith("/"):
            raise ConfigError(
                f"collectors.kernel_log.source: need kmsg, journal or an absolute path, got {self.source!r}"
            )


class KernelLog:
    """Source of what the kernel says: xid, sxid, gpu.off_bus, driver.error, pcie.aer, link.state, kernel.segfault,
    oom.kill, telemetry.lost. Events of one burst have the same subject, code and first_ns; the newest has its count."""

    period_s = 0.5

    def __init__(
        self,
        config: KernelLogConfig,
        node: str,
        *,
        start_ns: int,
        log: Log | None = None,
        device_of: Callable[[str], str | None] = lambda pci: None,
    ) -> None:
        """device_of: UUID of the GPU at a canonical PCI address (kernel_grammar.canonical_pci), None if unknown."""
        self.name = f"kernel-log@{node}"
        self._node, self._device_of = node, device_of
        self._emit = Emitter(self.name, job=None, start_ns=start_ns)
        self._parts = Parts(self._emit)
        self._log: Log = log if log is not None else _log(config)
        self._grammar, self._bursts = KernelGrammar(), Bursts(config.bursts)
        self._file, self._save_ns = config.position, 0
        self._saved: Mapping[str, Json] = _load(config.position)
        if self._saved:
            self._log.resume(self._saved)

    @property
    def totals(self) -> Mapping[tuple[str, str, object], tuple[int, int]]:
        """(kind, place, code) -> (bursts, lines) since the start, for counters per code."""
        return self._bursts.totals

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """What the kernel said since the last poll."""
        self._save(now_ns)
        told = [one for t_ns, line in self._log.read(now_ns) for one in self._read(line, t_ns)]
        if not self._log.behind:  # else a burst may go on in what is still to be read
            told += self._bursts.over(now_ns)
        events = [*self._parts("", self._log.why_blind, now_ns), *self._gaps(now_ns)]
        return events + [self._event(one, now_ns) for one in told]

    def close(self) -> None:
        """Stop reading."""
        self._save(None)
        self._log.close()

    def _read(self, line: str, t_ns: int) -> Iterator[Told]:
        fact = self._grammar(line)
        if fact is not None:
            yield from self._bursts.add(fact, t_ns)

    def _gaps(self, now_ns: int) -> Iterator[Event]:
        source = Subject(kind="source", id=self.name)
        for first, last in self._log.lost:
            data: dict[str, Json] = {"from_seq": first, "to_seq": last, "what": "kernel log records"}
            yield self._emit("telemetry.lost", source, now_ns=now_ns, data=data)
        self._log.lost.clear()

    def _event(self, told: Told, now_ns: int) -> Event:
        fact = told.fact
        data = {**fact.data, "count": told.count, "first_ns": told.first_ns}
        return self._emit(fact.kind, self._subject(fact), now_ns=now_ns, data=data, t_ns=told.last_ns)

    def _subject(self, fact: Fact) -> Subject:
        if fact.kind == "link.state":
            return Subject(kind="link", id=f"{self._node}/{fact.where}")
        if fact.kind in ("kernel.segfault", "oom.kill") or not fact.where:
            return Subject(kind="node", id=self._node)
        uuid = self._device_of(fact.where) or self._grammar.uuids.get(fact.where)
        return Subject(kind="device", id=uuid or f"{self._node}/pci-{fact.where}")

    def _save(self, now_ns: int | None) -> None:
        """Remembers where the last poll stood: what it gave has been taken by now. A full disk costs only that."""
        position = self._log.position
        if self._file is None or not position or position == self._saved:
            return
        if now_ns is not None:
            if now_ns < self._save_ns:
                return
            self._save_ns = now_ns + SAVE_NS
        try:
            write_sealed(self._file, {"position": dict(position)})
            self._saved = position
        except (OSError, DataError):
            pass


def _log(config: KernelLogConfig) -> Log:
    if config.source == "kmsg":
        return Kmsg(drills=config.drills)
    if config.source == "journal":
        from trainwarden.collectors.kernel_journal import Journal

        return Journal(drills=config.drills)
    from trainwarden.collectors.files.kernel_logs import KernelLogFiles

    return KernelLogFiles(Path(config.source), recorded=config.recorded)


def _is_kernel_log(found: os.stat_result) -> bool:
    """The device, or a pipe: then somebody gives us records."""
    device = stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 11)
    return device or stat.S_ISFIFO(found.st_mode)


def _load(file: Path | None) -> Mapping[str, Json]:
    try:
        position = read_sealed(file).take("position") if file is not None else {}
    except (OSError, DataError):
        return {}
    return position if isinstance(position, dict) else {}


def _text(record: bytes) -> str:
    """The message of a record: its first line, with what the kernel escaped (`\\x0a` ...) as it was."""
    message = record.partition(b"\n")[0]
    if b"\\x" in message:
        message = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), message)
    return message.decode(errors="replace")


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
