"""What the host's own kernel says of its load: pressure, CPU time and steal, memory, stuck processes, heat, clock.

Each part is read on its own: what one lacks makes that part blind, with the reason, and nothing else. In a container
all but the processes are the host's. Processes in state D are counted a slice of /proc at a poll, since a big host has
thousands and each costs about 8 us; what is told is the count of the last complete round.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeAlias

from trainwarden.collectors.blind import Parts
from trainwarden.collectors.clockstate import ClockState, kernel_clock
from trainwarden.collectors.kernelfiles import count, keyed, names, read, read_or_nothing, said
from trainwarden.collectors.readingframes import ReadingFrames
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Subject

Values: TypeAlias = list[tuple[str, float]]
"""(signal, value)."""

_STAT_BYTES: Final = 1 << 20
"""/proc/stat has a line a CPU and one number an interrupt: 100 kB on 512 CPUs."""
_SLICE: Final = 64
"""Processes looked at in one poll: 0.5 ms."""
_ZONE_C: Final = (-40.0, 150.0)
"""What a thermal zone can have; sensors that are off say 0 K or -1 or 255."""
_PRESSURES: Final = ("cpu", "io", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """How often the host is looked at."""

    period: timedelta = timedelta(seconds=5)
    """How often everything is read, apart from processes in state D (64 processes each time)."""

    def __post_init__(self) -> None:
        if self.period < timedelta(milliseconds=100):
            raise ConfigError(f"collectors.host.period: need at least 100ms, got {self.period.total_seconds():g}s")


class _Blind(Exception):
    """Why a part tells nothing, or not all; `values` is what it does tell."""

    def __init__(self, why: str, values: Values | None = None) -> None:
        super().__init__(why)
        self.values: Values = values or []


class Host:
    """Source of node_* readings of one node, apart from PCIe errors and mounts."""

    def __init__(
        self,
        config: HostConfig,
        *,
        node: str,
        start_ns: int,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        ask_clock: Callable[[], ClockState] = kernel_clock,
    ) -> None:
        self.name = f"host@{node}"
        self.period_s = config.period.total_seconds()
        self._proc, self._sys, self._ask_clock = str(proc), str(sys), ask_clock
        self._node = str(Subject(kind="node", id=node))
        self._parts = Parts(Emitter(self.name, job=None, start_ns=start_ns))
        self._frames = ReadingFrames(self.name, start_ns=start_ns)
        self._ticks = float(os.sysconf("SC_CLK_TCK"))
        self._sleepers = _Sleepers(self._proc)

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """Everything, once."""
        values: Values = []
        events: list[Event] = []
        for part, look in (
            ("pressure", self._pressure),
            ("cpu", self._cpu),
            ("load", self._load),
            ("memory", self._memory),
            ("processes", self._sleepers.look),
            ("temperature", self._temperature),
            ("clock", self._clock),
        ):
            try:
                values += look()
                why = ""
            except _Blind as blind:
                values += blind.values
                why = str(blind)
            events += self._parts(part, why, now_ns)
        return [*self._frames([(self._node, signal, value) for signal, value in values], now_ns), *events]

    def _pressure(self) -> Values:
        if not names(f"{self._proc}/pressure"):
            raise _Blind(f"{self._proc}/pressure: a kernel without PSI (some need psi=1 on their command line)")
        values: Values = []
        why = ""
        for what in _PRESSURES:
            try:
                total_us = _pressure_total(_text(f"{self._proc}/pressure/{what}"))
                values.append((f"node_pressure_{what}_seconds", total_us * 1e-6))
            except _Blind as blind:
                why = str(blind)
        return _all(values, why)

    def _cpu(self) -> Values:
        path = f"{self._proc}/stat"
        text = _text(path, _STAT_BYTES)
        values: Values = []
        words = text.partition(b"\n")[0].split()
        if len(words) >= 9 and words[0] == b"cpu" and all(word.isdigit() and len(word) <= 20 for word in words[1:9]):
            user, nice, system, _idle, _wait, irq, softirq, steal = (int(word) for word in words[1:9])
            values.append(("node_cpu_seconds", (user + nice + system + irq + softirq) / self._ticks))
            values.append(("node_cpu_steal_seconds", steal / self._ticks))
        blocked = keyed(text, [b"procs_blocked"])
        values += (("node_blocked_tasks", float(number)) for number in blocked.values())
        return _all(values, "" if len(values) == 3 else f"{path}: no line cpu or procs_blocked with numbers")

    def _load(self) -> Values:
        path = f"{self._proc}/loadavg"
        word = _text(path).partition(b" ")[0]
        if not (word.replace(b".", b"", 1).isdigit() and word[:1].isdigit() and len(word) <= 12):
            raise _Blind(f"{path}: begins with no number")
        return [("node_load_1m", float(word))]

    def _memory(self) -> Values:
        path = f"{self._proc}/meminfo"
        found = keyed(_text(path), [b"MemAvailable"])
        values = [("node_memory_available_bytes", kilobytes * 1024.0) for kilobytes in found.values()]
        return _all(values, "" if values else f"{path}: no MemAvailable")

    def _temperature(self) -> Values:
        folder = f"{self._sys}/class/thermal"
        zones = [zone for zone in names(folder) if zone.startswith("thermal_zone")]
        hot = [celsius for zone in zones if (celsius := _celsius(f"{folder}/{zone}/temp")) is not None]
        if not hot:
            raise _Blind(f"{folder}: no thermal zone that tells a temperature")
        return [("node_temperature_celsius", max(hot))]

    def _clock(self) -> Values:
        try:
            state = self._ask_clock()
        except OSError as error:
            raise _Blind(said(error, "adjtimex")) from error
        offset = [] if state.offset_s is None else [("node_clock_offset_seconds", state.offset_s)]
        return [("node_clock_synchronized", float(state.synchronized)), *offset]


class _Sleepers:
    """Counts processes in uninterruptible sleep, a slice at a look."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._left: list[str] = []
        self._count = 0
        self._last: int | None = None

    def look(self) -> Values:
        """The count of the last complete round; nothing before the first is complete."""
        if _state(f"{self._proc}/1/stat") is None:
            self._left, self._last = [], None
            raise _Blind(f"{self._proc}/1/stat: cannot be read: the processes of others are hidden (hidepid)")
        if not self._left:
            self._left, self._count = [name for name in names(self._proc) if name.isdecimal()], 0
        now, self._left = self._left[:_SLICE], self._left[_SLICE:]
        self._count += sum(_state(f"{self._proc}/{pid}/stat") == b"D" for pid in now)
        if not self._left:
            self._last = self._count
        return [] if self._last is None else [("node_uninterruptible_processes", float(self._last))]


def _text(path: str, limit: int = 1 << 16) -> bytes:
    try:
        return read(path, limit)
    except OSError as error:
        raise _Blind(said(error, path)) from error


def _all(values: Values, why: str) -> Values:
    """The values, if nothing is missing."""
    if why:
        raise _Blind(why, values)
    return values


def _state(path: str) -> bytes | None:
    """The state letter of /proc/PID/stat: behind the last bracket, since a process may call itself `) D (`."""
    _, bracket, rest = read_or_nothing(path).rpartition(b")")
    words = rest.split(None, 1)
    return words[0] if bracket and words else None


def _pressure_total(text: bytes) -> int:
    """Microseconds of `some avg10=0.00 avg60=0.08 avg300=8.42 total=4557828457`."""
    line = text.partition(b"\n")[0]
    total = count(line.rpartition(b" total=")[2])
    if not line.startswith(b"some ") or total is None:
        raise _Blind("pressure: no line some with a total")
    return total


def _celsius(path: str) -> float | None:
    """Of a file in thousandths of a degree."""
    text = read_or_nothing(path).strip()
    number = count(text.removeprefix(b"-"))
    celsius = None if number is None else number / (-1000.0 if text.startswith(b"-") else 1000.0)
    return celsius if celsius is not None and _ZONE_C[0] < celsius < _ZONE_C[1] and celsius != 0.0 else None
