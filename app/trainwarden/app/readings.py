"""/metrics of a node agent: the newest value of every reading (core/readings.py), and how the agent itself fares.

A value that its source has not told again within three of its periods is gone: a frozen number looks healthy. Counters
are shown as the source tells them, resets and all: that is what Prometheus' rate() expects. Where two sources tell the
same, the one that READINGS names first is shown while it is fresh. Readings of jobs (what ranks say) are not shown
here: their names are the tenant's, and there would be a series a rank.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from prometheus_client import Metric as Family

from trainwarden.app.endpoint import ExportConfig, Listening
from trainwarden.app.exposition import families, family_of
from trainwarden.app.isolation import SourceState
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame
from trainwarden.core.printable import printable
from trainwarden.core.readings import READINGS, Subjects
from trainwarden.core.signals import Metric
from trainwarden.core.version import __version__

PERIODS: Final = 3
"""After so many periods a value is stale; its period is how far apart its source told it the last two times, since
sources read some things more often than others. Prometheus' own patience is five minutes for all."""
FIRST_NS, LONGEST_NS, LATE_NS = 60_000_000_000, 120_000_000_000, 1_000_000_000
"""The period of a value that was told once; the longest that counts; what a source may be late beside three periods."""
SERIES_MAX: Final = 20_000
"""Values kept: 16 GPUs with 18 links each and 16 ports have about 5,000. A source that invents subjects has no more."""

LABELS: Final[Mapping[Subjects, tuple[str, ...]]] = {
    "device": ("node", "uuid", "gpu"),
    "link": ("node", "uuid", "link"),
    "node": ("node",),
}
"""gpu: the index, empty where no source told it; uuid: of the device, or of the device that a link belongs to, else
empty; link: a port (`mlx5_0/1`), or `nvlink-3`."""


def _own(name: str, meaning: str, *labels: str, counter: bool = False) -> Metric:
    name = f"trainwarden_{name}{'_total' if counter else ''}"
    return Metric(name=name, type="counter" if counter else "gauge", meaning=meaning, labels=labels, of_job=False)


AGENT_METRICS: Final[Mapping[str, Metric]] = {
    row.name: row
    for row in (
        _own("source_up", "1: the source can be read; 0: it is blind or stale", "source"),
        _own("source_answer_age_seconds", "since the last answer of a source that is blind or stale", "source"),
        _own("source_stretch_ratio", "times its period a source is polled at, where not 1: agent.budget", "source"),
        _own("agent_cpu_cores", "CPU that the agent took in its last window, children included, in cores"),
        _own("agent_cpu_budget_cores", "what it may take (agent.budget.cores) before it polls less often"),
        _own("agent_heartbeat_timestamp_seconds", "when the agent last gathered from its sources (Unix time)"),
        _own("agent_jobs", "jobs whose rings are followed"),
        _own("agent_items", "frames and events gathered", counter=True),
        _own("agent_source_failures", "polls of sources that raised", counter=True),
        _own("agent_dropped_items", "frames and events dropped: nobody took them in time", counter=True),
        _own("agent_unsent_bytes", "what waits to be sent, or to be acknowledged by the server"),
        _own("gpu_info", "always 1: which GPU this is", "node", "uuid", "gpu", "pci", "name", "driver"),
        _own("build_info", "always 1: which version watches", "version"),
    )
}
"""What the agent says beside READINGS; `process_*` (CPU, memory, files) come from prometheus-client."""

_SHOWN: Final[Mapping[str, Metric]] = {
    name: Metric(name=one.metric, type=one.kind, meaning=one.meaning, labels=LABELS[one.of], of_job=False)
    for name, one in READINGS.items()
}

_INFO: Final = ("uuid", "index", "pci", "name", "driver")
_DEVICES_MAX: Final = 256


@dataclass(slots=True)
class _Newest:
    value: float
    seen_ns: int
    until_ns: int
    place: int
    """Of its source in Reading.sources: 0 is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fares:
    """How the agent fares, at one turn; replaced as a whole."""

    turn_ns: int = 0
    sources: Sequence[SourceState] = ()
    jobs: int = 0
    items: int = 0
    dropped: int = 0
    """By whatever sends; what sources dropped is theirs to tell."""
    unsent_bytes: int | None = None
    """None: nothing sends."""
    cpu_cores: float | None = None
    """None: not measured yet."""
    cpu_budget_cores: float | None = None
    """None: there is no budget."""


class Readings:
    """A prometheus_client collector of one node."""

    def __init__(self, node: str, now: Callable[[], int]) -> None:
        self._node, self._now = node, now
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], _Newest] = {}
        """By signal and subject."""
        self._devices: dict[str, tuple[str, ...]] = {}
        """uuid -> what device.found said, as _INFO."""
        self.fares = Fares()

    def take(self, items: Iterable[Frame | Event]) -> None:
        """What sources gave."""
        with self._lock:
            for item in items:
                if isinstance(item, Frame):
                    if item.schema == "reading" and item.job is None:
                        self._read(item)
                elif item.kind == "device.found" and len(self._devices) < _DEVICES_MAX:
                    told = tuple(printable(str(item.data.get(key, "")))[:80] for key in _INFO)
                    self._devices[told[0]] = told
                elif item.kind == "device.lost":
                    self._devices.pop(item.subject.id, None)

    def collect(self) -> Iterator[Family]:
        """Every value that is not stale."""
        now_ns, found = self._now(), dict[str, dict[tuple[str, ...], float]]()
        with self._lock:
            stale = [key for key, newest in self._newest.items() if newest.until_ns < now_ns]
            for key in stale:
                del self._newest[key]
            for (signal, subject), newest in self._newest.items():
                found.setdefault(signal, {})[self._labels(signal, subject)] = newest.value
            devices = [*self._devices.values()]
        for name in READINGS:
            if values := found.get(name):
                yield family_of(_SHOWN[name], values)
        yield from families(self._of_us(self.fares, devices), AGENT_METRICS)

    def _read(self, frame: Frame) -> None:
        rows = zip(*(frame.rows[name].tolist() for name in ("signal", "subject", "value")), strict=True)
        for signal, subject, value in rows:
            key = frame.names[signal], frame.names[subject]
            if key[0] not in READINGS or not math.isfinite(value):
                continue
            known, place = self._newest.get(key), _place_of(key[0], frame.source)
            if known is None and len(self._newest) >= SERIES_MAX:
                continue
            if known is not None and place > known.place and known.until_ns >= frame.seen_ns:
                continue
            period_ns = FIRST_NS
            if known is not None and known.place == place:
                period_ns = min(max(frame.seen_ns - known.seen_ns, 0), LONGEST_NS)
            until_ns = frame.seen_ns + PERIODS * period_ns + LATE_NS
            self._newest[key] = _Newest(value, frame.seen_ns, until_ns, place)

    def _labels(self, signal: str, subject: str) -> tuple[str, ...]:
        of = READINGS[signal].of
        if of == "node":
            return (self._node,)
        one, within = _place(subject)
        if of == "link":
            return (self._node, one, within) if one != self._node else (self._node, "", within)
        index = self._devices[one][1] if one in self._devices else within
        return (self._node, one if not within else "", index)

    def _of_us(self, now: Fares, devices: Iterable[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], float]]:
        for state in now.sources:
            yield ("source_up", printable(state.name)), state.word == "up"
            if state.word != "up":
                yield ("source_answer_age_seconds", printable(state.name)), state.age_s
            if state.stretch != 1:
                yield ("source_stretch_ratio", printable(state.name)), state.stretch
        if now.cpu_cores is not None:
            yield ("agent_cpu_cores",), now.cpu_cores
        if now.cpu_budget_cores is not None:
            yield ("agent_cpu_budget_cores",), now.cpu_budget_cores
        yield ("agent_heartbeat_timestamp_seconds",), now.turn_ns / 1e9
        yield ("agent_jobs",), now.jobs
        yield ("agent_items_total",), now.items
        yield ("agent_source_failures_total",), sum(state.raised for state in now.sources)
        yield ("agent_dropped_items_total",), now.dropped + sum(state.dropped for state in now.sources)
        if now.unsent_bytes is not None:
            yield ("agent_unsent_bytes",), now.unsent_bytes
        yield from ((("gpu_info", self._node, *told), 1.0) for told in devices)
        yield ("build_info", __version__), 1


def serve(readings: Readings, config: ExportConfig) -> Listening:
    """Serve them at the address that the settings name. Raises ConfigError."""
    try:
        return Listening(readings, config)
    except OSError as error:
        raise ConfigError(f"--metrics: cannot listen on {config.listen}: {error.strerror or error}") from error


@lru_cache(maxsize=4096)
def _place_of(signal: str, source: str) -> int:
    """The place of `nvml@n1` among the sources of a signal; 0 for one that is not named there."""
    told, sources = source.partition("@")[0], READINGS[signal].sources
    return sources.index(told) if told in sources else 0


@lru_cache(maxsize=4096)
def _place(subject: str) -> tuple[str, str]:
    """(device or node, place within it) of a subject's text.

    >>> _place("device:GPU-1"), _place("device:n1:3"), _place("link:n1/mlx5_0/1"), _place("link:GPU-1/nvlink-2")
    (('GPU-1', ''), ('n1', '3'), ('n1', 'mlx5_0/1'), ('GPU-1', 'nvlink-2'))
    """
    kind, _, name = printable(subject)[:160].partition(":")
    one, _, within = name.partition("/" if kind == "link" else ":")
    return one, within
