"""Where the metrics of a job are served or sent, and how Prometheus finds them: STATE/_targets/JOB.json (file_sd).

All jobs below STATE are one line of Prometheus' configuration, whatever their ports: `files: [STATE/_targets/*.json]`
(it takes a `*` in the last part of a path only). No job's name begins with `_`.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainwarden.app.folders import JobFolder
from trainwarden.app.otlp_target import check, headers_of, url_of
from trainwarden.core.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from trainwarden.app.metrics import JobMetrics
    from trainwarden.app.otlp_metrics import Push
    from trainwarden.app.repair import Repair
    from trainwarden.app.server import Server

TARGETS: Final = "_targets"
SAVE_NS: Final = 10_000_000_000
"""Between two saves where nobody asks, as for the line's state."""

_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]+)):(\d{1,5})")
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """What Prometheus may ask for, and what is sent to a receiver of OTLP."""

    listen: str = ""
    """HOST:PORT where /metrics is served, to everybody who can reach it; port 0: any free one. Empty: nothing listens,
    since a port taken unasked could be one that the training wants."""

    otlp_endpoint: str = ""
    """URL of a receiver of OTLP over HTTP, to which everything that `/metrics` shows is sent too, under the same names;
    `/v1/metrics` is added if it does not end so. `env`: what OTEL_EXPORTER_OTLP_METRICS_ENDPOINT or
    OTEL_EXPORTER_OTLP_ENDPOINT says. Empty: nothing is sent, even where these are set. Needs the extra `server`.
    Certificates come from the environment, as for traces."""

    otlp_headers: str = ""
    """`file:/PATH` or `env:NAME` with NAME=VALUE lines (or commas between): headers for the receiver, a token mostly.
    They come on top of OTEL_EXPORTER_OTLP_HEADERS."""

    otlp_period: timedelta = timedelta(seconds=15)
    """Between two sendings."""

    otlp_deadline: timedelta = timedelta(seconds=5)
    """For one sending, with all its tries; and how long the end of a run may wait for the last one."""

    def __post_init__(self) -> None:
        check("metrics", self.otlp_endpoint, self.otlp_deadline, "otlp_deadline")
        if not timedelta(seconds=1) <= self.otlp_period <= timedelta(hours=1):
            raise ConfigError(f"metrics.otlp_period: need 1s to 1h, got {self.otlp_period.total_seconds():g}s")
        if self.listen and (not _ADDRESS.fullmatch(self.listen) or self.address[1] > 65535):
            raise ConfigError(f"metrics.listen: need HOST:PORT, such as 127.0.0.1:9400, got {self.listen!r}")

    @property
    def address(self) -> tuple[str, int]:
        """Of `listen`, which is not empty."""
        found = _ADDRESS.fullmatch(self.listen)
        assert found is not None
        return found[1] or found[2], int(found[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig(ExportConfig):
    """The same for a job, with what its steps and checkpoints are measured against."""

    expected_step: timedelta | None = None
    """How long a step should take; unset: the lowest median of 64 steps in a row that this job has had."""

    checkpoint_interval: timedelta | None = None
    """How far apart checkpoints should be; unset: the median of the last eight."""

    def __post_init__(self) -> None:
        ExportConfig.__post_init__(self)
        for name in ("expected_step", "checkpoint_interval"):
            span: timedelta | None = getattr(self, name)
            if span is not None and span <= timedelta(0):
                raise ConfigError(f"metrics.{name}: need more than 0s, got {span.total_seconds():g}s")


class Listening:
    """A collector of prometheus_client, and what this process itself costs, at an address."""

    def __init__(self, collector: "Collector", config: ExportConfig) -> None:
        """config: it names an address. Raises OSError where that cannot be had."""
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        host, port = config.address
        self._served, self._thread = start_http_server(port, host, registry)
        self.port = self._served.server_port
        self.address = joined(host, self.port)

    def close(self) -> None:
        """Nothing listens any more."""
        self._served.shutdown()
        self._served.server_close()
        self._thread.join()


class Endpoint:
    """The metrics of one job while they are shown: served, sent, or both."""

    def __init__(self, metrics: "JobMetrics", listening: Listening | None, push: "Push | None") -> None:
        self.metrics, self._listening, self._push = metrics, listening, push
        self.address = "" if listening is None else listening.address
        """Empty: nothing listens."""
        self._targets, self._told, self._saved_ns = Path(), "", 0
        if push is not None:
            push.start(lambda: [(metrics.since_ns, metrics.collect())])

    def announce(self, host: str, targets: Path) -> None:
        """Let Prometheus find what listens."""
        if self._listening is None:
            return
        self._targets = targets
        target = joined(_ANYWHERE.get(host, host), self._listening.port)
        self._told = json.dumps([{"targets": [target], "labels": {}}])
        with contextlib.suppress(OSError):  # found by file or not: it is served
            targets.parent.mkdir(mode=0o755, exist_ok=True)
            draft = targets.with_suffix(".new")
            draft.write_text(self._told)
            draft.rename(targets)

    def turned(self, server: "Server", repair: "Repair", began_ns: int, ended_ns: int) -> None:
        """A turn of the main loop is over."""
        from trainwarden.app.metrics import vitals

        self.metrics.turned(began_ns, ended_ns, vitals(server, repair.publisher.saves))
        if began_ns >= self._saved_ns + SAVE_NS:
            self._saved_ns = began_ns
            self.metrics.save()

    def close(self) -> None:
        """Nothing listens any more, and nobody is sent here; what another supervisor wrote stays. The last values are
        on their way to the receiver."""
        if self._push is not None:
            self._push.end()
        if self._listening is not None:
            self._listening.close()
        self.metrics.save()
        with contextlib.suppress(OSError):
            if self._listening is not None and self._targets.read_text() == self._told:
                self._targets.unlink()


def open_endpoint(
    config: MetricsConfig,
    folder: JobFolder,
    *,
    started_ns: int,
    fresh: timedelta,
    sources: Iterable[str],
    peers: Callable[[], Mapping[str, bool]],
    say: Callable[[str], None],
    push: "Push | None" = None,
    exported: Callable[[], Mapping[tuple[str, ...], int]] = dict,
) -> Endpoint | None:
    """Show a job's metrics (arguments: as JobMetrics), if an address is named and can be had, or they are sent.

    An address that cannot is said, and that is all: the training comes first.
    """
    if not config.listen and push is None:
        return None
    from trainwarden.app.metrics import JobMetrics

    metrics = JobMetrics(
        folder.job,
        config,
        folder.path / "metrics.json",
        started_ns=started_ns,
        fresh_ns=fresh // timedelta(microseconds=1) * 1000,
        sources=sources,
        peers=peers,
        exported=exported,
    )
    listening = None
    try:
        listening = Listening(metrics, config) if config.listen else None
    except OSError as error:
        say(f"no metrics: cannot listen on {config.listen}: {error.strerror or error}; the run goes on without them")
    if listening is None and push is None:
        return None
    endpoint = Endpoint(metrics, listening, push)
    if listening is not None:
        say(f"metrics are at http://{listening.address}/metrics")
        endpoint.announce(config.address[0], folder.path.parent / TARGETS / f"{folder.job}.json")
    return endpoint


def open_push(config: ExportConfig, instance: str, say: Callable[[str], None]) -> "Push | None":
    """What sends metrics; None: nothing does. instance: names this process among all of ours, again after a restart.

    Raises ConfigError, also for packages that are not there.
    """
    url, headers = url_of("metrics", config.otlp_endpoint), headers_of("metrics", config.otlp_headers)
    if not url:
        return None
    try:
        from trainwarden.app.otlp_metrics import Push, otlp_exporter
    except ImportError as error:
        need = f"needs opentelemetry, which is not here ({error}): pip install 'trainwarden[server]'"
        raise ConfigError(f"metrics.otlp_endpoint: {need}") from error
    period_s, deadline_s = config.otlp_period.total_seconds(), config.otlp_deadline.total_seconds()
    return Push(otlp_exporter(url, headers, deadline_s), instance, say, period_s=period_s, deadline_s=deadline_s)


def joined(host: str, port: int) -> str:
    """HOST:PORT.

    >>> joined("::1", 9485)
    '[::1]:9485'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
