"""GPUs and NVLinks as the driver's library (NVML) tells them.

All calls are made by a child process (nvml_reader.py): in a fault they take 45 s (one GPU in an error storm), for ever
(a driver that waits for its device), or take the process with them. Here nothing waits: a pass is asked for, what was
answered by the next poll is taken, and a reader that is silent for too long is killed and replaced. The GPU that it
hung on is left out for a while, so that the others are seen; a reader that cannot be killed (state D) is left behind.

Silence on a GPU is told as source.blind of the part gpu-<index>, with its UUID; a GPU that NVML calls lost is an event.
What the node shares with others is told as node.domains: driver, gpu (the product), nvlink (a domain that spans nodes).
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from trainwarden.collectors.blind import Parts
from trainwarden.collectors.nvml_answers import Device, Told, Word, parse_answer
from trainwarden.collectors.readingframes import ReadingFrames, Row
from trainwarden.core.child import Talker
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ChildError, ConfigError, DataError
from trainwarden.core.model import Event, Frame, Json, Subject

DYING_MAX: Final = 2
"""Readers that were killed and are not gone: beyond that no other is started, each may hold a lock of the driver."""
RESTART_MAX_S: Final = 300.0
"""A reader that fails is started again after 1, 2, 4 s and so on, at most this: a driver may be loaded later."""
SKIP_S, SKIP_MAX_S = 60.0, 900.0
"""A GPU on which a call hung or crashed is left out for a minute, twice as long each time: each try costs a reader."""
RELIST_S: Final = 300.0
"""While a GPU is lost (or none is there) NVML is opened anew this often: a handle does not survive a GPU's reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlConfig:
    """How often GPUs are read, and how long that may take."""

    fast: timedelta = timedelta(seconds=1)
    """Between readings of temperature, power, clocks, utilization, memory, throttling. The driver itself averages power
    and utilization over up to 1 s (nvml.h, nvmlDeviceGetPowerUsage and nvmlUtilization_t): more often is no more."""

    slow: timedelta = timedelta(seconds=15)
    """Between readings of ECC, remapped rows, PCIe, NVLinks, processes: what changes by the hour. PCIe throughput alone
    takes 20 ms a direction and GPU (nvml.h, nvmlDeviceGetPcieThroughput). dcgm-exporter reads every 30 s."""

    deadline: timedelta = timedelta(seconds=5)
    """For all calls of one pass on one GPU: healthy ones take milliseconds, those in an error storm took 45 s."""

    start_deadline: timedelta = timedelta(seconds=60)
    """For opening NVML: without persistence mode that wakes up GPU after GPU, seconds each."""

    def __post_init__(self) -> None:
        for name, least_s in (("fast", 0.1), ("slow", 1.0), ("deadline", 1.0), ("start_deadline", 1.0)):
            got_s = getattr(self, name).total_seconds()
            if got_s < least_s:
                raise ConfigError(f"collectors.nvml.{name}: need at least {least_s:g}s, got {got_s:g}s")


@dataclass(slots=True)
class _Gpu:
    """A GPU that was seen, by UUID."""

    device: Device
    lost: bool = False
    given: set[str] = field(default_factory=set)
    """Signals it ever told."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Signals it did not tell in the last slow pass, and why."""
    pids: tuple[int, ...] = ()
    fabric: str = ""


class Nvml:
    """Source of readings of GPUs and NVLinks, device.found and device.lost."""

    def __init__(
        self, config: NvmlConfig, *, node: str, start_ns: int, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name = f"nvml@{node}"
        self._config, self._clock = config, clock
        self._emit = Emitter(self.name, job=None, start_ns=start_ns)
        self._parts = Parts(self._emit)
        self._frames = ReadingFrames(self.name, start_ns=start_ns)
        self._gpus: dict[str, _Gpu] = {}
        self._domains: dict[str, str] = {}
        self.restarts = 0
        """Readers that had to be replaced."""
        self._reader: Talker | None = None
        self._dying: list[Talker] = []
        self._failures = 0
        self._start_at = clock()
        self._skip: dict[int, tuple[int, int]] = {}
        """GPU index -> until when it is left out, and how often it was."""
        self._forget_reader()

    def _forget_reader(self) -> None:
        now = self._clock()
        self._busy, self._ready, self._at, self._count = True, False, -1, 0
        self._heard_at = self._fast_at = self._slow_at = now
        self._relist_at = now + int(RELIST_S * 1e9)
        self._opened: dict[int, str] = {}

    @property
    def period_s(self) -> float:
        """Of looking whether there is an answer, or whether to ask again; how often GPUs are read is NvmlConfig's."""
        due = self._start_at if self._reader is None else self._clock() if self._busy else self._fast_at
        return min(max((due - self._clock()) / 1e9, 0.25), 1.0)

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return self._busy

    @property
    def abandoned(self) -> int:
        """Readers that were killed and are not gone yet."""
        return len(self._dying)

    @property
    def reader_pid(self) -> int | None:
        """The child's, to tell its cost."""
        return self._reader.pid if self._reader else None

    def absent(self) -> dict[str, Mapping[str, str]]:
        """GPU UUID -> signal -> why NVML does not tell it."""
        return {uuid: gpu.absent for uuid, gpu in [*self._gpus.items()]}

    def devices(self) -> dict[str, str]:
        """PCI address as the kernel log has it (0000:10:1c) -> UUID, lost GPUs too."""
        return {gpu.device.pci: uuid for uuid, gpu in [*self._gpus.items()]}

    def pids(self) -> dict[str, tuple[int, ...]]:
        """GPU UUID -> its compute processes at the last slow pass (as the host numbers them)."""
        return {uuid: gpu.pids for uuid, gpu in [*self._gpus.items()] if not gpu.lost}

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """What was answered since the last poll. Never waits."""
        self._dying = [reader for reader in self._dying if reader.code is None]
        events: list[Event] = []
        rows: list[tuple[Row, int]] = []
        if self._reader is None and self._clock() >= self._start_at:
            events += self._start(now_ns)
        if self._reader is not None:
            events += self._hear(self._reader, rows, now_ns)
        if self._reader is not None:
            events += self._watch(self._reader, now_ns)
        frames = self._frames([row for row, _ in rows], now_ns)
        for frame in frames:
            frame.rows["t_ns"] = [min(t_ns, now_ns) for _, t_ns in rows]
        return [*events, *frames]

    def close(self) -> None:
        """End the reader; one that cannot be killed is left behind."""
        if self._reader is not None:
            self._bury(self._reader)
        for reader in self._dying:
            reader.wait(1.0)

    # the reader

    def _start(self, now_ns: int) -> list[Event]:
        if len(self._dying) >= DYING_MAX:
            why = f"{DYING_MAX} readers hang in the driver and cannot be killed: no other is started until one is gone"
            return self._parts("", why, now_ns)
        patience_s = 2 * int(self._config.deadline.total_seconds() + 1)
        try:
            module = "trainwarden.collectors.nvml_reader"
            self._reader = Talker([sys.executable, "-P", "-m", module, str(patience_s)])
        except ChildError as error:
            return self._fail(str(error), now_ns)
        self._forget_reader()
        return []

    def _hear(self, reader: Talker, rows: list[tuple[Row, int]], now_ns: int) -> Iterator[Event]:
        code = reader.code  # before its last words are read, or they would be lost
        try:
            for line in reader.lines():
                self._heard_at = self._clock()
                said = parse_answer(line)
                yield from self._gpu(said, rows, now_ns) if isinstance(said, Told) else self._word(said, now_ns)
        except (ChildError, DataError) as error:
            yield from self._end(reader, str(error), now_ns)
        if code is not None and self._reader is reader:
            yield from self._end(reader, self._last_words(code), now_ns)

    def _word(self, word: Word, now_ns: int) -> Iterator[Event]:
        if word.what == "ready":
            self._ready, self._busy, self._count = True, False, word.number
            yield from self._parts("", "" if word.number else "NVML finds no GPU", now_ns)
        elif word.what == "at":
            self._at = word.number
        elif word.what == "done":
            self._busy, self._at, self._failures = False, -1, 0
            yield from self._unlisted(now_ns)
            yield from self._in_common(now_ns)
        elif self._reader is not None:
            self._at = -1  # it is not about a GPU
            yield from self._end(self._reader, f"NVML: {word.why}", now_ns)

    def _watch(self, reader: Talker, now_ns: int) -> list[Event]:
        """Lose patience, or ask for the next pass."""
        now = self._clock()
        limit = self._config.deadline if self._ready else self._config.start_deadline
        if self._busy:
            late = now - self._heard_at > limit.total_seconds() * 1e9
            return self._end(reader, f"NVML did not answer for {limit.total_seconds():g} s", now_ns) if late else []
        if now >= self._relist_at and (not self._count or any(gpu.lost for gpu in self._gpus.values())):
            self._bury(reader)
        elif now >= self._fast_at:
            slow = now >= self._slow_at
            self._fast_at = max(self._fast_at + _ns(self._config.fast), now)
            self._slow_at = now + _ns(self._config.slow) if slow else self._slow_at
            skip = [index for index, (until, _) in self._skip.items() if now < until]
            self._busy, self._heard_at = True, now
            reader.ask(json.dumps({"slow": slow, "skip": skip}).encode())
        return []

    def _end(self, reader: Talker, why: str, now_ns: int) -> list[Event]:
        """Kill a reader that failed; the GPU it was at is left out for a while."""
        at = self._at
        self._bury(reader)
        self.restarts += 1
        if at < 0:
            return self._fail(why, now_ns)
        times = self._skip.get(at, (0, 0))[1]
        self._skip[at] = (self._clock() + int(min(SKIP_S * 2**times, SKIP_MAX_S) * 1e9), times + 1)
        where = f"{why} on GPU {at}" + (f" ({self._opened[at]})" if at in self._opened else "")
        return self._parts(f"gpu-{at}", where, now_ns)

    def _fail(self, why: str, now_ns: int) -> list[Event]:
        self._start_at = self._clock() + int(min(2.0**self._failures, RESTART_MAX_S) * 1e9)
        self._failures += 1
        return self._parts("", why, now_ns)

    def _bury(self, reader: Talker) -> None:
        reader.kill()
        self._dying.append(reader)
        self._reader, self._start_at = None, self._clock()
        self._busy = False

    @staticmethod
    def _last_words(code: int) -> str:
        if importlib.util.find_spec("pynvml") is None:
            return "nvidia-ml-py is not installed here: pip install 'trainwarden[agent]'"
        return f"the reader of NVML ended by itself ({f'signal {-code}' if code < 0 else f'status {code}'})"

    # GPUs

    def _gpu(self, told: Told, rows: list[tuple[Row, int]], now_ns: int) -> Iterator[Event]:
        if told.device is not None:
            self._opened[told.index] = told.device.uuid
        uuid, part = self._opened.get(told.index), f"gpu-{told.index}"
        if uuid is None:
            yield from self._parts(part, f"GPU {told.index} cannot be opened: {told.lost}", now_ns)
            return
        yield from self._parts(part, "", now_ns)
        self._skip.pop(told.index, None)
        new = uuid not in self._gpus or self._gpus[uuid].lost
        if told.device is not None:
            known = self._gpus.setdefault(uuid, _Gpu(device=told.device))
            known.device = told.device
        gpu = self._gpus[uuid]
        if told.lost:
            yield from self._lost(gpu, told.lost, now_ns)
            return
        gpu.lost = False
        if told.pids is not None:
            gpu.absent, gpu.pids = told.absent, told.pids
            gpu.fabric = told.fabric or gpu.fabric  # while it is reset it does not say so
            yield from self._vanished(gpu, part, now_ns)
        gpu.given |= told.values.keys()
        if new:
            yield self._found(gpu, now_ns)
        rows += ((row, told.t_ns) for row in _rows(uuid, told))

    def _found(self, gpu: _Gpu, now_ns: int) -> Event:
        device = gpu.device
        data: dict[str, Json] = {"uuid": device.uuid, "pci": device.pci, "index": device.index, "name": device.name}
        data |= {"driver": device.driver, "mig": list(device.mig), "absent": dict(gpu.absent)}
        return self._emit("device.found", Subject(kind="device", id=device.uuid), now_ns=now_ns, data=data)

    def _lost(self, gpu: _Gpu, why: str, now_ns: int) -> Iterator[Event]:
        if not gpu.lost:
            subject = Subject(kind="device", id=gpu.device.uuid)
            yield self._emit("device.lost", subject, now_ns=now_ns, data={"why": f"NVML: {why}"})
        gpu.lost = True

    def _unlisted(self, now_ns: int) -> Iterator[Event]:
        """GPUs that an older reader saw and this one does not."""
        for uuid, gpu in self._gpus.items():
            if uuid not in self._opened.values() and gpu.device.index not in self._skip:
                yield from self._lost(gpu, "it is not listed any more", now_ns)

    def _in_common(self, now_ns: int) -> Iterator[Event]:
        """Fault domains of the node, where they changed; a GPU that is lost still hangs where it hung."""
        found: dict[str, str] = {}
        for name, of in _DOMAINS.items():
            values = {gpu.device.index: of(gpu) for gpu in self._gpus.values()}
            alike = len(set(values.values())) == 1
            found |= {name if alike else f"{name}.{index}": value for index, value in values.items() if value}
        if found != self._domains:
            self._domains = found
            node = Subject(kind="node", id=self.name.partition("@")[2])
            yield self._emit("node.domains", node, now_ns=now_ns, data={"from": "nvml", "domains": found})

    def _vanished(self, gpu: _Gpu, part: str, now_ns: int) -> list[Event]:
        gone = sorted(gpu.given & gpu.absent.keys())
        words = ", ".join(f"{name} ({gpu.absent[name]})" for name in gone)
        why = f"GPU {gpu.device.index} ({gpu.device.uuid}) does not tell any more: {words}" if gone else ""
        return self._parts(f"{part}/signals", why, now_ns)


_DOMAINS: Final[Mapping[str, Callable[[_Gpu], str]]] = {
    "driver": lambda gpu: gpu.device.driver,
    "gpu": lambda gpu: gpu.device.name,
    "nvlink": lambda gpu: gpu.fabric,
}
"""Fault domain -> what a GPU says of it; where GPUs of a node differ, each has its own: nvlink.3."""


def _rows(uuid: str, told: Told) -> Iterator[Row]:
    for name, value in told.values.items():
        yield f"device:{uuid}", name, value
    for link, values in told.links.items():
        for name, value in values.items():
            yield f"link:{uuid}/nvlink-{link}", name, value


def _ns(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1e9)
