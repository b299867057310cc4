"""Network ports from sysfs: InfiniBand and RoCE ports of RDMA devices, and the Ethernet or IPoIB interfaces on them.

Every port gives its state, speed and counters; a change of state is Event link.state, seen between two polls only (what
was so at first sight raises nothing). Counters are told as the kernel keeps them and raise nothing here: they begin
with any value, go back to a smaller one when a driver is loaded again or a tool clears them, and those of the standard
port counters (InfiniBand Architecture 1, PortCounters, 16.1.3.5) stop at their last value: 15 for local_integrity and
buffer_overruns, 255 for link_downs and link_recoveries, 65535 for the other errors, 2^32 - 1 for the wait ticks. Who
takes differences must take a smaller value for a reset and must not take a stopped counter for a quiet link.

Data counters count units of 4 bytes (Documentation/ABI/stable/sysfs-class-infiniband); told here in bytes. Counters of
pause frames stand in no file of sysfs (ethtool has them), so they are not told. A port that is gone or has no readable
state is blind, and nothing is told of it. On real adapters each counter costs a command to the firmware, hence 5 s.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from os.path import exists
from pathlib import Path
from typing import Final

from trainwarden.collectors.blind import Parts
from trainwarden.collectors.kernelfiles import names, read, read_count, read_or_nothing, said
from trainwarden.collectors.readingframes import ReadingFrames, Row
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Subject

_Files = Mapping[str, tuple[tuple[str, int], ...]]
"""Signal -> files that can hold it, the first that is there counts, with what one unit of it is."""

_PORT: Final[_Files] = {
    "port_transmitted_bytes": (("counters/port_xmit_data", 4), ("hw_counters/tx_bytes", 1)),
    "port_received_bytes": (("counters/port_rcv_data", 4), ("hw_counters/rx_bytes", 1)),
    "port_transmitted_packets": (("counters/port_xmit_packets", 1), ("hw_counters/tx_pkts", 1)),
    "port_received_packets": (("counters/port_rcv_packets", 1), ("hw_counters/rx_pkts", 1)),
    "port_symbol_errors": (("counters/symbol_error", 1),),
    "port_link_recoveries": (("counters/link_error_recovery", 1),),
    "port_link_downs": (("counters/link_downed", 1), ("hw_counters/link_downed", 1)),
    "port_receive_errors": (("counters/port_rcv_errors", 1),),
    "port_remote_physical_errors": (("counters/port_rcv_remote_physical_errors", 1),),
    "port_transmit_discards": (("counters/port_xmit_discards", 1),),
    "port_transmit_wait_ticks": (("counters/port_xmit_wait", 1),),
    "port_local_integrity_errors": (("counters/local_link_integrity_errors", 1),),
    "port_buffer_overruns": (("counters/excessive_buffer_overrun_errors", 1),),
    "port_out_of_sequence": (
        ("hw_counters/out_of_sequence", 1),
        ("hw_counters/oos_drop_count", 1),
        ("hw_counters/out_of_seq_request", 1),
    ),
    "port_retransmits": (
        ("hw_counters/roce_adp_retrans", 1),
        ("hw_counters/to_retransmits", 1),
        ("hw_counters/retrans_pkts", 1),
    ),
    "port_ack_timeouts": (("hw_counters/local_ack_timeout_err", 1), ("hw_counters/retrans_timeout_events", 1)),
    "port_sequence_naks": (("hw_counters/packet_seq_err", 1), ("hw_counters/seq_err_naks_rcvd", 1)),
    "port_ecn_marked": (("hw_counters/np_ecn_marked_roce_packets", 1), ("hw_counters/rx_ecn_marked_pkts", 1)),
    "port_cnp_received": (("hw_counters/rp_cnp_handled", 1), ("hw_counters/rx_cnp_pkts", 1)),
}
"""Names of mlx5 first, then bnxt_re, efa, rxe (drivers/infiniband/{hw,sw}/*/*counters*.c of the kernel)."""
_INTERFACE: Final[_Files] = {
    "port_transmitted_bytes": (("statistics/tx_bytes", 1),),
    "port_received_bytes": (("statistics/rx_bytes", 1),),
    "port_transmitted_packets": (("statistics/tx_packets", 1),),
    "port_received_packets": (("statistics/rx_packets", 1),),
    "port_receive_errors": (("statistics/rx_errors", 1),),
    "port_transmit_discards": (("statistics/tx_dropped", 1),),
    "port_link_downs": (("carrier_down_count", 1),),
}
_STATES: Final = {b"1": "DOWN", b"2": "INIT", b"3": "ARMED", b"4": "ACTIVE", b"5": "ACTIVE_DEFER"}
"""Of `4: ACTIVE`; 0 is "no change", which says nothing."""
_PHYSICAL: Final = {bytes(str(number), "ascii"): float(number == 5) for number in range(1, 8)}
"""Of `5: LinkUp`; 1 sleep, 2 polling, 3 disabled, 4 training, 6 recovery, 7 test."""
_OPERATIONAL: Final = {
    word: word.decode().upper() for word in (b"up", b"down", b"lowerlayerdown", b"notpresent", b"dormant", b"testing")
}
"""Of operstate; "unknown" says nothing."""
_UP: Final = ("ACTIVE", "UP")
_RATE: Final = re.compile(rb"(\d{1,6}(?:\.\d)?) Gb/sec")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfinibandConfig:
    """Which ports count, and how often they are read."""

    period: timedelta = timedelta(seconds=5)
    """How often each port is read: a flap shorter than this shows in port_link_downs only."""

    devices: tuple[str, ...] = ("*",)
    """RDMA devices that count, with the interfaces on them (shell patterns): `["mlx5_[0-9]*"]`."""

    skip: tuple[str, ...] = ()
    """Of these, devices that do not count: those of the storage or management network."""

    virtual_functions: bool = False
    """Whether virtual functions count that this host lends to guests. (In a guest a lent function is a device.)"""

    interfaces: tuple[str, ...] = ()
    """Interfaces that count though no RDMA device is below them (shell patterns): `["bond0"]`."""

    def __post_init__(self) -> None:
        if self.period < timedelta(milliseconds=100):
            got = f"{self.period.total_seconds():g}s"
            raise ConfigError(f"collectors.infiniband.period: need at least 100ms, got {got}")


@dataclass(slots=True)
class _Port:
    """A port in sight; `path` ends in a slash."""

    name: str
    path: str
    rdma: bool
    subject: str
    files: list[tuple[str, str, int]] = field(default_factory=list)
    """(signal, path, unit) of the counters that were there when it came in sight."""
    state: str = ""
    gone: bool = True
    """Not in sight at the last poll (or never yet)."""


class Infiniband:
    """Source of port_* readings and link.state of one node."""

    def __init__(self, config: InfinibandConfig, *, node: str, start_ns: int, sys: Path = Path("/sys")) -> None:
        self.name = f"infiniband@{node}"
        self.period_s = config.period.total_seconds()
        self._config, self._node, self._sys = config, node, str(sys)
        self._emit = Emitter(self.name, job=None, start_ns=start_ns)
        self._parts = Parts(self._emit)
        self._frames = ReadingFrames(self.name, start_ns=start_ns)
        self._ports: dict[str, _Port] = {}

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """State, speed and counters of every port; what changed."""
        seen = dict(self._found())
        for name, (path, rdma) in seen.items():
            if name not in self._ports:
                subject = str(Subject(kind="link", id=f"{self._node}/{name}"))
                self._ports[name] = _Port(name=name, path=path, rdma=rdma, subject=subject)
            self._ports[name].path = path
        rows: list[Row] = []
        events = self._parts("", "" if self._ports else f"no RDMA device in {self._sys}/class/infiniband", now_ns)
        for port in self._ports.values():
            events += self._read(port, rows, now_ns) if port.name in seen else self._lose(port, "is gone", now_ns)
        return [*self._frames(rows, now_ns), *events]

    def _found(self) -> Iterator[tuple[str, tuple[str, bool]]]:
        """Name, folder and sort of every port that counts: `mlx5_0/1`, `ib0`."""
        devices, nets = f"{self._sys}/class/infiniband", f"{self._sys}/class/net"
        for device in names(devices):
            path = f"{devices}/{device}"
            if not self._counts(device, path):
                continue
            for number in names(f"{path}/ports"):
                yield f"{device}/{number}", (f"{path}/ports/{number}/", True)
            for interface in names(f"{path}/device/net"):
                yield interface, (f"{path}/device/net/{interface}/", False)
        for interface in names(nets) if self._config.interfaces else ():
            if _matches(interface, self._config.interfaces):
                yield interface, (f"{nets}/{interface}/", False)

    def _counts(self, device: str, path: str) -> bool:
        config = self._config
        wanted = _matches(device, config.devices) and not _matches(device, config.skip)
        return wanted and (config.virtual_functions or not exists(f"{path}/device/physfn"))

    def _lose(self, port: _Port, why: str, now_ns: int) -> list[Event]:
        port.gone = True
        return self._parts(port.name, f"{port.name}: {why}", now_ns)

    def _read(self, port: _Port, rows: list[Row], now_ns: int) -> list[Event]:
        """Add a port's rows; its events."""
        state_file = port.path + ("state" if port.rdma else "operstate")
        try:
            text = read(state_file)
        except OSError as error:
            return self._lose(port, said(error, state_file), now_ns)
        state = _STATES.get(_code(text)) if port.rdma else _OPERATIONAL.get(text.strip())
        if state is None:
            return self._lose(port, f"{state_file}: tells no state", now_ns)
        if port.gone:
            port.files, port.gone = _there(port), False
        rows.append((port.subject, "port_up", float(state in _UP)))
        rows += ((port.subject, signal, value) for signal, value in _speed(port))
        numbers = [
            (signal, unit, number) for signal, path, unit in port.files if (number := read_count(path)) is not None
        ]
        rows += ((port.subject, signal, float(number * unit)) for signal, unit, number in numbers)
        why = f"{port.path}: none of its counters can be read" if port.files and not numbers else ""
        events = [*self._parts(port.name, "", now_ns), *self._parts(f"{port.name}/counters", why, now_ns)]
        return [*events, *self._turned(port, state, now_ns)]

    def _turned(self, port: _Port, state: str, now_ns: int) -> Iterator[Event]:
        before, port.state = port.state, state
        if before and before != state:
            link = Subject(kind="link", id=f"{self._node}/{port.name}")
            line = f"{port.name}: {before} -> {state}"
            yield self._emit("link.state", link, now_ns=now_ns, data={"port": port.name, "state": state, "line": line})


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _code(text: bytes) -> bytes:
    """The number before the colon of `4: ACTIVE`; empty: not of this form."""
    code, colon, _ = text.partition(b":")
    return code if colon else b""


def _there(port: _Port) -> list[tuple[str, str, int]]:
    folders = {folder: set(names(port.path + folder)) for folder in ("counters", "hw_counters", "statistics", "")}
    found = []
    for signal, candidates in (_PORT if port.rdma else _INTERFACE).items():
        for file, unit in candidates:
            folder, _, name = file.rpartition("/")
            if name in folders[folder]:
                found.append((signal, port.path + file, unit))
                break
    return found


def _speed(port: _Port) -> Iterator[tuple[str, float]]:
    """What the port could move; and whether its cable has light, where that is told."""
    if not port.rdma:
        megabits = read_count(f"{port.path}speed")
        if megabits:  # 0: not known
            yield "port_rate_bytes_per_second", megabits * 125_000.0
        return
    physical = _PHYSICAL.get(_code(read_or_nothing(f"{port.path}phys_state")))
    if physical is not None:
        yield "port_physically_up", physical
    gigabits = _gigabits(read_or_nothing(f"{port.path}rate"))
    if gigabits is not None:
        yield "port_rate_bytes_per_second", gigabits * 125e6


def _gigabits(text: bytes) -> float | None:
    """Of `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`; None: not of this form.

    >>> _gigabits(b"400 Gb/sec (4X NDR)\\n"), _gigabits(b"2.5 Gb/sec (1X SDR)"), _gigabits(b"nan Gb/sec")
    (400.0, 2.5, None)
    """
    rate = _RATE.match(text)
    return float(rate.group(1)) if rate else None
