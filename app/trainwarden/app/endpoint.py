"""Where /metrics of a job is served, and how Prometheus finds it: STATE/_targets/JOB.json, in the form of file_sd.

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
from trainwarden.core.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from trainwarden.app.metrics import JobMetrics
    from trainwarden.app.repair import Repair
    from trainwarden.app.server import Server

TARGETS: Final = "_targets"
SAVE_NS: Final = 10_000_000_000
"""Between two saves where nobody asks, as for the line's state."""

_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]+)):(\d{1,5})")
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """What Prometheus may ask for."""

    listen: str = ""
    """HOST:PORT where /metrics is served, to everybody who can reach it; port 0: any free one. Empty: nothing listens,
    since a port taken unasked could be one that the training wants."""

    expected_step: timedelta | None = None
    """How long a step should take; unset: the lowest median of 64 steps in a row that this job has had."""

    checkpoint_interval: timedelta | None = None
    """How far apart checkpoints should be; unset: the median of the last eight."""

    def __post_init__(self) -> None:
        if self.listen and (not _ADDRESS.fullmatch(self.listen) or self.address[1] > 65535):
            raise ConfigError(f"metrics.listen: need HOST:PORT, such as 127.0.0.1:9400, got {self.listen!r}")
        for name in ("expected_step", "checkpoint_interval"):
            span: timedelta | None = getattr(self, name)
            if span is not None and span <= timedelta(0):
                raise ConfigError(f"metrics.{name}: need more than 0s, got {span.total_seconds():g}s")

    @property
    def address(self) -> tuple[str, int]:
        """Of `listen`, which is not empty."""
        found = _ADDRESS.fullmatch(self.listen)
        assert found is not None
        return found[1] or found[2], int(found[3])


class Listening:
    """A collector of prometheus_client, and what this process itself costs, at an address."""

    def __init__(self, collector: "Collector", config: MetricsConfig) -> None:
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
    """The metrics of one job while they are served."""

    def __init__(self, metrics: "JobMetrics", listening: Listening, host: str, targets: Path) -> None:
        self.metrics, self._listening, self._targets = metrics, listening, targets
        self.address = listening.address
        self._saved_ns = 0
        target = joined(_ANYWHERE.get(host, host), listening.port)
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
        """Nothing listens any more, and nobody is sent here; what another supervisor wrote stays."""
        self._listening.close()
        self.metrics.save()
        with contextlib.suppress(OSError):
            if self._targets.read_text() == self._told:
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
) -> Endpoint | None:
    """Serve a job's metrics (arguments: as JobMetrics), if an address is named and can be had.

    An address that cannot is said, and that is all: the training comes first.
    """
    if not config.listen:
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
    )
    try:
        listening = Listening(metrics, config)
    except OSError as error:
        say(f"no metrics: cannot listen on {config.listen}: {error.strerror or error}; the run goes on without them")
        return None
    say(f"metrics are at http://{listening.address}/metrics")
    return Endpoint(metrics, listening, config.address[0], folder.path.parent / TARGETS / f"{folder.job}.json")


def joined(host: str, port: int) -> str:
    """HOST:PORT.

    >>> joined("::1", 9485)
    '[::1]:9485'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
