"""`trainwarden server`: the network's thread reads (ingest.py), the main thread does all else, for all jobs (jobs.py).

What was read waits in one queue; a turn takes it up in the order of arrival, all of it seen at one instant. Now and
then everything is written down, and then, not before, the senders are told that it is safe: a server that is killed
loses nothing that it acknowledged.
"""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainwarden.app.asking import ask_agents
from trainwarden.app.endpoint import Listening, MetricsConfig, joined, open_push
from trainwarden.app.ingest import Ingest, IngestConfig, Link
from trainwarden.app.jobs import Job, Jobs, JobsConfig
from trainwarden.app.posting import HttpConfig, Posting
from trainwarden.app.run import TICK_NS
from trainwarden.app.sources_seen import GONE_NS
from trainwarden.app.wiring import SECTIONS, Settings
from trainwarden.core.auth import TlsFiles, TokensFile
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.config import load_fields
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, StepMatrix
from trainwarden.core.signals import Metric

if TYPE_CHECKING:
    from prometheus_client import Metric as Family


TURN_S: Final = 0.2
"""A turn ends after this long, so that ticks come in time while much is waiting."""
IDLE_S: Final = 0.05
SAVE_BYTES: Final = 16 * 1024 * 1024
"""Taken since the last time that all was written down: then it is, before its time, so that senders can forget."""
SAVE_SPACING_NS: Final = 1_000_000_000
TOKENS_NS: Final = 1_000_000_000
"""Between two looks whether the file of tokens has changed: a revoked token ends within seconds."""
HEALTHY_S: Final = 30.0
"""A server that took nothing up for so long is none: a turn ends within TURN_S and a write to a disk."""


def _own(kind: str, name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=f"trainwarden_{name}", type=kind, meaning=meaning, labels=labels, of_job=False)  # type: ignore[arg-type]


SERVER_METRICS: Final[Mapping[str, Metric]] = {
    row.name: row
    for row in (
        _own("gauge", "server_links", "connections of agents and jobs that said hello"),
        _own("gauge", "server_jobs", "jobs that are watched"),
        _own("gauge", "server_queue_bytes", "bytes that were read and are not taken up"),
        _own("gauge", "server_saved_timestamp_seconds", "when everything was last written down (Unix time)"),
        _own("counter", "server_received_bytes_total", "bytes of messages"),
        _own(
            "counter",
            "server_items_total",
            "frames and events by `fate`: taken, copies (came again), lost (missing), no_job, not_open",
            "fate",
        ),
        _own(
            "counter",
            "server_looks_total",
            "looks that agents were asked for by `fate`: asked, answered, refused, unanswered; too_often: not asked",
            "fate",
        ),
        _own("counter", "server_refused_total", "messages, items and connections refused, by `reason`", "reason"),
        _own("counter", "server_held_total", "how often a connection was not read, by `reason`", "reason"),
        _own("counter", "server_otlp_pushes_total", "sendings of metrics to an OTLP receiver", "result"),
    )
}
"""What the server says beside the metrics of its jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`trainwarden server`."""

    host: str
    port: int
    state: Path
    tokens: Path
    tls: TlsFiles = field(default_factory=TlsFiles)
    settings: Settings = field(default_factory=Settings)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    http: HttpConfig = field(default_factory=HttpConfig)


def load_server_settings(path: Path | None) -> tuple[Settings, IngestConfig, JobsConfig, HttpConfig]:
    """What a settings file says: as for `trainwarden run`, and the sections server.ingest, server.jobs and server.http.

    Raises ConfigError.
    """
    own: dict[str, tuple[str, type[object]]] = {
        "server.ingest": ("ingest", IngestConfig),
        "server.jobs": ("jobs", JobsConfig),
        "server.http": ("http", HttpConfig),
    }
    said = load_fields(path, {**SECTIONS, **own})
    ingest, jobs = said.pop("ingest", IngestConfig()), said.pop("jobs", JobsConfig())
    http = said.pop("http", HttpConfig())
    return Settings(**said), ingest, jobs, http


def address_of(listen: str, key: str = "--listen") -> tuple[str, int]:
    """HOST and PORT. Raises ConfigError.

    >>> address_of("[::1]:9401")
    ('::1', 9401)
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{key}: need HOST:PORT, such as 127.0.0.1:9401, got {listen!r}")
    return host.strip("[]"), int(port)


class Serving:
    """start(), turn() again and again, finish()."""

    def __init__(self, config: ServerConfig, say: Callable[[str], None], clock: Clock = unix_ns) -> None:
        """Raises ConfigError."""
        self._config, self._say, self._clock = config, say, clock
        self._queue: deque[tuple[Link, list[Frame | Event], int, int]] = deque()
        self._more = threading.Event()
        self._done: dict[Link, int] = {}
        """Messages of each link that were taken up."""
        self._settle_ns = self._tick_ns = self._save_ns = self._saved_ns = self._unsaved = 0
        self._received = 0
        self._safe: Mapping[Link, int] = {}
        """Of these, what is on the disk."""
        self.jobs = Jobs(config.settings, config.jobs, config.state, say)
        self._tokens, self._tokens_ns = TokensFile(config.tokens), 0
        tls = config.tls.server()
        self.ingest = Ingest(config.ingest, self._tokens.tokens, self._take, say, tls)
        self.jobs.send = partial(ask_agents, self.ingest.links.copy)
        self._turned_s = time.monotonic()
        self._posting: Posting | None = None
        if config.http.listen:
            self._posting = Posting(config.http, self.ingest, tls, self._healthy)
        self._close_metrics: Callable[[], None] = lambda: None
        self._push = open_push(config.settings.metrics, f"{socket.gethostname()}:{config.port}", say)
        self._began_ns = clock()

    def start(self) -> tuple[str, int]:
        """Take up the jobs of before, then listen. Raises ConfigError."""
        now_ns = self._clock()
        self._config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        metrics = self._config.settings.metrics
        if metrics.listen or self._push is not None:
            self.jobs.on_open = self._measure
        if metrics.listen:
            self._close_metrics = _serve(self, metrics, self._say)
        if self._push is not None:
            self._push.start(self.told)
        self.jobs.resume(now_ns)
        address = self.ingest.start(self._config.host, self._config.port)
        self._save_ns = now_ns + _ns(self._config.ingest.ack)
        self._settle_ns = now_ns + _ns(self._config.ingest.settle)
        if self._posting is not None:
            host, port = self._posting.start(*address_of(self._config.http.listen, "server.http.listen"))
            scheme = "http" if self._config.tls.cert is None else "https"
            self._say(f"server: POSTs are taken at {scheme}://{joined(host, port)}")
        self._say(f"server: listening on {address[0]}:{address[1]}; observe only: nothing is repaired from here yet")
        return address

    def turn(self) -> None:
        """Take up what was read, let time pass, acknowledge; waits a little where nothing came."""
        self._more.wait(IDLE_S)
        self._more.clear()
        now_ns, end_s, freed = self._clock(), time.monotonic() + TURN_S, 0
        if self._settle_ns:  # all of it is seen at one instant, so that whose backlog came first does not matter
            end_s = self._settled(now_ns)
        while self._queue and time.monotonic() < end_s:
            freed += self._take_up(now_ns)
        if self._queue and not self._settle_ns:
            self._more.set()
        if freed:
            self.ingest.freed(freed)
        self._turned_s = time.monotonic()
        if now_ns >= self._tokens_ns:
            self._tokens_ns = now_ns + TOKENS_NS
            self._look_at_tokens()
        if now_ns >= self._tick_ns:
            self._tick_ns = now_ns + TICK_NS
            (self.jobs.renew if self._settle_ns else self.jobs.tick)(now_ns)
            for job in self.jobs.open.values():
                _tell(job, now_ns, self._clock())
        early = self._unsaved > SAVE_BYTES and now_ns >= self._saved_ns + SAVE_SPACING_NS
        if early or now_ns >= self._save_ns:
            self._save(now_ns)

    def finish(self) -> None:
        """Take up what was read, write everything down, say so, and end. The jobs go on with the next server."""
        while self._queue:
            self._take_up(self._clock())
        self._save(self._clock())
        if self._posting is not None:
            self._posting.close()
        self.ingest.close()
        if self._push is not None:
            self._push.end()
        self.jobs.close()
        self._close_metrics()
        if self._push is not None:
            self._push.close()

    def _look_at_tokens(self) -> None:
        """Take up what the file of tokens says now; what cannot be used is said, and the last good one holds."""
        try:
            if self._tokens.changed():
                self.ingest.renew(self._tokens.tokens)
                self._say("tokens: the file has changed: what it says holds from now on")
        except ConfigError as error:
            self._say(f"tokens: what was said before holds: {error}")

    def _healthy(self) -> bool:
        """Any thread."""
        return time.monotonic() - self._turned_s < HEALTHY_S

    def _settled(self, now_ns: int) -> float:
        """After a start every node has a backlog, and comes back at its own time: one node's alone would push steps
        out of the window that wait for the others' rows. So nothing is taken up before all are back, or the wait is
        over. Until when (of the monotonic clock) the turn may last."""
        back = {link.hello.uplink for link in self.ingest.links.copy() if link.hello is not None and link.caught_up}
        if now_ns < self._settle_ns and not self.ingest.full and self.jobs.uplinks - back:
            return 0.0
        self._settle_ns = 0
        return math.inf

    def _take(self, link: Link, items: list[Frame | Event], count: int, size: int) -> None:
        """The network's thread."""
        self._queue.append((link, items, count, size))
        self._more.set()

    def _take_up(self, now_ns: int) -> int:
        self._turned_s = time.monotonic()
        link, items, count, size = self._queue.popleft()
        if items and link.hello is not None:
            self.jobs.take(link.hello.uplink, items, now_ns, of_node=link.is_agent)
        self._done[link] = count
        self._unsaved += size
        self._received += size
        return size

    def _save(self, now_ns: int) -> None:
        """All that was taken up is on the disk, then acknowledged; an ack without news is a sign of life."""
        self._save_ns, self._saved_ns, self._unsaved = now_ns + _ns(self._config.ingest.ack), now_ns, 0
        links = self.ingest.links.copy()
        self._done = {link: count for link, count in self._done.items() if link in links}
        if self.jobs.save():
            self._safe = dict(self._done)
        self.ingest.ack({link: self._safe.get(link, 0) for link in links})

    # what is asked

    def _measure(self, job: Job) -> None:
        """Let the metrics of a job hear of everything."""
        from trainwarden.app.metrics import JobMetrics

        settings = self._config.settings
        fresh_ns = _ns(max(settings.hang.fresh, 3 * settings.run.poll))
        file = job.folder.path / "metrics.json"
        metrics = JobMetrics(
            job.job,
            settings.metrics,
            file,
            started_ns=job.heard_ns,
            fresh_ns=fresh_ns,
            peers=job.outlets.peers_up,
            exported=job.outlets.exported,
        )

        def stepped(matrix: StepMatrix) -> None:
            job.outlets.stepped(matrix)
            metrics.step(matrix)

        job.server.metrics, job.server.line.on_step = metrics, stepped
        _tell(job, job.heard_ns, job.heard_ns)  # what others count from here on is new

    def collect(self) -> Iterator["Family"]:
        """Of all jobs, each family once, and what the server says of itself; in the thread that answers."""
        found: dict[str, Family] = {}
        for _, told in self.told():
            for family in told:
                if family.name not in found:
                    found[family.name] = family
                elif "build_info" not in family.name:
                    found[family.name].samples += family.samples
        yield from found.values()

    def told(self) -> Iterator[tuple[int, Iterable["Family"]]]:
        """Of each job that was heard of lately, and of the server: since when its counters count, and all families."""
        from trainwarden.app.exposition import families  # prometheus_client: only for those who are asked

        now_ns = self._clock()
        for job in [*self.jobs.open.values()]:
            if job.server.metrics is not None and now_ns - job.heard_ns < GONE_NS:
                yield job.server.metrics.since_ns, job.server.metrics.collect()
        yield self._began_ns, families(self._own_values(), SERVER_METRICS)

    def _own_values(self) -> Iterator[tuple[tuple[str, ...], float]]:
        yield ("server_links",), len(self.ingest.links)
        yield ("server_jobs",), len(self.jobs.open)
        yield ("server_queue_bytes",), sum(size for *_, size in [*self._queue])
        if self._saved_ns:
            yield ("server_saved_timestamp_seconds",), self._saved_ns / 1e9
        yield ("server_received_bytes_total",), self._received
        yield from ((("server_items_total", fate), count) for fate, count in [*self.jobs.counts.items()])
        yield from ((("server_looks_total", fate), count) for fate, count in [*self.jobs.looks.items()])
        for (what, reason), count in [*self.ingest.counts.items()]:
            yield (f"server_{what}_total", reason), count
        if self._push is not None:
            yield from ((("server_otlp_pushes_total", result), count) for result, count in self._push.counts.items())


def _ns(span: timedelta) -> int:
    return span // timedelta(microseconds=1) * 1000


def _tell(job: Job, began_ns: int, ended_ns: int) -> None:
    if job.server.metrics is None:
        return
    from trainwarden.app.metrics import vitals

    # checkpoints lie where the job runs: not known here
    job.server.metrics.turned(began_ns, ended_ns, vitals(job.server, None))


def _serve(serving: Serving, config: MetricsConfig, say: Callable[[str], None]) -> Callable[[], None]:
    """Answer Prometheus; what ends it. Raises ConfigError: a server that cannot be looked at is not started."""
    try:
        listening = Listening(serving, config)
    except OSError as error:
        raise ConfigError(f"metrics.listen: cannot listen on {config.listen}: {error.strerror or error}") from error
    say(f"metrics are at http://{listening.address}/metrics")
    return listening.close
