"""`trainwarden agent`: one process a node that gathers what its sources see and hands it on.

The loop never waits for a source (app/isolation.py), nor for who it sends to: outlets take what they are given at once,
and count what they cannot keep. It decides nothing. It runs as any user; what that user may not read is blind.
"""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from trainwarden.app.domains import JobDomains
from trainwarden.app.endpoint import open_push
from trainwarden.app.isolation import Isolation, Item
from trainwarden.app.looking import Looking
from trainwarden.app.node_jobs import Jobs, JobSource
from trainwarden.app.node_sources import Devices, NodeSettings, build_job_sources, build_sources
from trainwarden.app.own_cost import Thrift
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import JobId, Subject, Tick
from trainwarden.core.ports import Source

if TYPE_CHECKING:
    from trainwarden.app.readings import Readings
    from trainwarden.app.uplink import Uplink
    from trainwarden.core.recording import Recorder

TURN_S: Final = 0.2
"""A death must be said within a second (app/node_jobs.py, RINGS_S)."""
TICK_NS: Final = 250_000_000
"""Between two ticks of a recording, as of a supervisor."""
STATES_NS: Final = 1_000_000_000
"""Between two looks at how the sources fare; nobody scrapes more often."""
CLOSE_S: Final = 0.7
"""For the last words to a server; with a second for the sources an end takes less than two."""
_OVER_MAX: Final = 1024
"""Jobs that are over and are remembered, so that their rings are not read again."""


class Outlet(Protocol):
    """Where everything goes. Never waits, never raises for what the world does."""

    def send(self, items: Sequence[Item], now_ns: int) -> None: ...

    @property
    def dropped(self) -> int:
        """Items that are lost."""
        ...

    @property
    def waiting_bytes(self) -> int | None:
        """What is not handed on yet; None: nothing ever waits."""
        ...

    def close(self) -> None: ...


class Recorded:
    """An outlet into a folder (core/recording.py), with ticks, so that a replay knows how time passed."""

    waiting_bytes = None

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder, self._tick_ns = recorder, 0

    def send(self, items: Sequence[Item], now_ns: int) -> None:
        """Record them as seen now: the receiver's stamp orders a recording."""
        for item in items:
            self._recorder.write(replace(item, seen_ns=now_ns))
        if now_ns >= self._tick_ns:
            self._tick_ns = now_ns + TICK_NS
            self._recorder.write(Tick(seen_ns=now_ns))

    @property
    def dropped(self) -> int:
        return self._recorder.lost_items

    def close(self) -> None:
        """Finish the open file."""
        self._recorder.close()


class Sent:
    """An outlet to a server (app/uplink.py)."""

    def __init__(self, uplink: "Uplink", say: Callable[[str], None]) -> None:
        """say: told why nothing is sent, when that changes."""
        self._uplink, self._say, self._failing = uplink, say, ""

    def send(self, items: Sequence[Item], now_ns: int) -> None:
        """Buffer them for the server."""
        if items:
            self._uplink.offer(items)
        if (failing := self._uplink.failing) != self._failing:
            self._failing = failing
            self._say(f"not sending: {failing}" if failing else "the server takes what is sent")

    @property
    def dropped(self) -> int:
        """Messages: frames, and batches of events."""
        counts = self._uplink.counts
        return counts.dropped_frames + counts.dropped_events + counts.too_large

    @property
    def waiting_bytes(self) -> int:
        return self._uplink.counts.waiting_bytes

    def close(self) -> None:
        """Send what can be sent in a moment; a connect or a name lookup that hangs ends with the process."""
        closing = threading.Thread(target=self._uplink.close, args=(CLOSE_S / 2,), daemon=True)
        closing.start()
        closing.join(CLOSE_S)


@dataclass(slots=True)
class Followed:
    """A job that is looked at."""

    job: JobSource
    sources: Sequence[Source]
    """That one, and what else looks at the job."""
    stamp: tuple[int, int]


class NodeAgent:
    """turn() every TURN_S; close() in the end."""

    def __init__(
        self,
        node: str,
        isolation: Isolation,
        sources: Sequence[Source],
        outlets: Sequence[Outlet],
        readings: "Readings | None" = None,
        devices: Devices | None = None,
        *,
        looking: Looking | None = None,
        thrift: Thrift | None = None,
        settings: NodeSettings | None = None,
        clock: Clock = unix_ns,
    ) -> None:
        """sources: where one of them looks for jobs (Jobs), what it finds is read too. looking: what a server asks.
        thrift: keeps the agent's cost in its budget; None: nobody does."""
        self._node, self._isolation, self._outlets = node, isolation, tuple(outlets)
        self._jobs = next((source for source in sources if isinstance(source, Jobs)), None)
        self._readings, self._devices, self._clock = readings, devices or Devices(), clock
        self._settings, self._looking, self._thrift = settings or NodeSettings(), looking, thrift
        self._following: dict[JobId, Followed] = {}
        self._over: dict[JobId, tuple[int, int]] = {}
        """Jobs that were let go, and the stamp that they had."""
        self._items = self._states_ns = 0
        self._started = Emitter(f"agent-start@{node}", job=None, start_ns=clock())
        for source in sources:
            isolation.add(source)

    @property
    def jobs(self) -> frozenset[JobId]:
        """Those that are followed."""
        return frozenset(self._following)

    def turn(self) -> None:
        """Gather once and hand on."""
        now_ns = self._clock()
        items: list[Item] = []
        if not self._states_ns:
            subject = Subject(kind="source", id=f"agent@{self._node}")
            items.append(self._started("source.started", subject, now_ns=now_ns, data={"why": "the agent started"}))
        if self._jobs is not None:
            items += self._follow(self._jobs, now_ns)
        if self._looking is not None:
            followed = [source for one in self._following.values() for source in one.sources]
            items += self._looking.hand_on(followed, now_ns)
        if self._thrift is not None:
            items += self._thrift.turn()
        items += self._isolation.drain()
        self._items += len(items)
        self._devices.hear(items)
        for outlet in self._outlets:
            outlet.send(items, now_ns)
        if self._readings is not None:
            self._readings.take(items)
        if now_ns >= self._states_ns:
            self._states_ns = now_ns + STATES_NS
            self._show(now_ns)

    def close(self, within_s: float = 1.0) -> list[str]:
        """End the sources, hand on what they still had; the names of those that hang."""
        hanging = self._isolation.close(within_s)
        items = self._isolation.drain()
        for outlet in self._outlets:
            outlet.send(items, self._clock())
            outlet.close()
        return hanging

    def _follow(self, jobs: Jobs, now_ns: int) -> list[Item]:
        """Begin to read new jobs; let those go that are over, with the last that they had."""
        found, last = jobs.found, list[Item]()
        for job, one in [*self._following.items()]:
            if one.job.over or job not in found:
                for source in one.sources:
                    last += self._isolation.remove(source.name)
                self._over[job] = one.stamp
                del self._following[job]
        for job, where in found.items():
            if job not in self._following and self._over.get(job) != where.stamp:
                first = JobDomains(self._devices.domains, job, self._node, start_ns=now_ns)
                made = JobSource(where, self._node, start_ns=now_ns, first=first)
                sources = build_job_sources(self._settings, self._node, made)
                for source in sources:
                    self._isolation.add(source)
                self._following[job] = Followed(job=made, sources=sources, stamp=where.stamp)
            elif job in self._following:
                self._following[job].stamp = where.stamp
        while len(self._over) > _OVER_MAX:
            del self._over[next(iter(self._over))]
        return last

    def _show(self, now_ns: int) -> None:
        if self._readings is None:
            return
        thrift = self._thrift
        self._readings.fares = replace(
            self._readings.fares,
            turn_ns=now_ns,
            cpu_cores=None if thrift is None else thrift.cores,
            cpu_budget_cores=None if thrift is None else thrift.allowed,
            sources=tuple(self._isolation.states()),
            jobs=len(self._following),
            items=self._items,
            dropped=sum(outlet.dropped for outlet in self._outlets),
            unsent_bytes=next((size for one in self._outlets if (size := one.waiting_bytes) is not None), None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """What an agent was asked to do."""

    node: str
    settings: NodeSettings
    outlets: Sequence[Outlet] = ()
    looking: Looking | None = None
    for_s: float | None = None
    """None: until it is stopped."""


def gather(asked: Gathering, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Turn until stop is set or the time is over; then end: its own waits take less than two seconds.

    Raises ConfigError.
    """
    now_ns, devices = unix_ns(), Devices()
    readings, end, close = _shown(asked, say)
    sources = build_sources(asked.settings, asked.node, devices, start_ns=now_ns)
    isolation = Isolation(asked.settings.isolation, asked.node)
    agent = NodeAgent(
        asked.node,
        isolation,
        sources,
        asked.outlets,
        readings,
        devices,
        looking=asked.looking,
        thrift=Thrift(asked.settings.budget, isolation, say),
        settings=asked.settings,
    )
    say(f"watching node {asked.node}: {', '.join(source.name for source in sources)}")
    until_ns = None if asked.for_s is None else now_ns + int(asked.for_s * 1e9)
    try:
        while not stop.wait(TURN_S) and (until_ns is None or unix_ns() < until_ns):
            agent.turn()
    finally:
        end()
        if hanging := agent.close():
            say(f"ended without an answer of {', '.join(hanging)}")
        close()


def _shown(
    asked: Gathering, say: Callable[[str], None]
) -> tuple["Readings | None", Callable[[], None], Callable[[], None]]:
    """What keeps the values that are served or sent, if they are; what ends the sending, and what then closes all."""
    metrics = asked.settings.metrics
    push = open_push(metrics, f"{asked.node}/agent", say)
    if not metrics.listen and push is None:
        return None, _nothing, _nothing
    from trainwarden.app.readings import Readings, serve

    readings = Readings(asked.node, unix_ns)
    listening = serve(readings, metrics) if metrics.listen else None
    if listening is not None:
        say(f"metrics are at http://{listening.address}/metrics")
    if push is not None:
        push.start(lambda: [(None, readings.collect())])

    def close() -> None:
        if listening is not None:
            listening.close()
        if push is not None:
            push.close()

    return readings, _nothing if push is None else push.end, close


def node_name(given: str | None, settings: NodeSettings) -> str:
    """As the option, the settings, TRAINWARDEN_NODE or the host say."""
    return given or settings.agent.node or os.environ.get("TRAINWARDEN_NODE") or socket.gethostname()


def _nothing() -> None:
    return None


def recorded(folder: Path, max_bytes: int = 1 << 30) -> Recorded:
    """An outlet into a folder; beyond its cap the oldest part goes. Raises ConfigError where it cannot be written."""
    from trainwarden.core.recording import Recorder  # pyarrow: 30 MB that an agent without it does not spend

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror or error}") from error
    return Recorded(Recorder(folder, max_bytes=max_bytes))
