"""What /metrics shows, sent to a receiver of OTLP as well. Imported only where it is: 0.2 s and 15 MB.

The same collectors are asked, so each family has the name and the value that a scrape of that instant has, its labels
are attributes (`job_id` among them, ADR 0005), and there is one resource a process. Counters and histograms are
cumulative since the moment at which they began to count, which a restart of ours does not change: a receiver that makes
differences of them would add all of it again.

The data is made of the SDK's own classes and handed to its exporter: instruments of the SDK would count a second time.
A thread of our own asks and sends; a receiver that is away, or answers without end, costs it its turn and nobody else.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client import ProcessCollector
from prometheus_client.samples import Sample

from trainwarden.app.otlp import quiet, resource_of
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.signals import ucum
from trainwarden.core.version import __version__

Told: TypeAlias = Iterable[tuple[int | None, Iterable[Family]]]
"""Families, and since when their counters count (Unix ns); None: that is not known (counters of hardware)."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
Point: TypeAlias = NumberDataPoint | HistogramDataPoint

POINTS_A_REQUEST: Final = 10_000
"""A request is full from here on: about 1 MB, where receivers take 4 MB and more."""


def otlp_exporter(url: str, headers: Mapping[str, str], deadline_s: float) -> MetricExporter:
    """OTLP over HTTP; deadline_s: for one request, with all its tries."""
    quiet()
    return OTLPMetricExporter(endpoint=url, headers=dict(headers), timeout=deadline_s)


class Push:
    """start(), then end() while the values may still be asked for, then close(), which alone waits. None raises."""

    def __init__(
        self,
        exporter: MetricExporter,
        instance: str,
        say: Callable[[str], None],
        *,
        period_s: float,
        deadline_s: float,
        clock: Clock = unix_ns,
    ) -> None:
        """instance: as in open_push. say: told when the receiver begins to fail, and when it takes something again."""
        self._exporter, self._say, self._clock = exporter, say, clock
        self._period_s, self._deadline_s = period_s, deadline_s
        self._resource = resource_of(**{"service.instance.id": instance})
        self._starts = Starts()
        self._process = ProcessCollector(registry=None)
        self._told: Callable[[], Told] = list
        self._asking = threading.Lock()
        self._over = threading.Event()
        self._last: Sequence[MetricsData] = ()
        self._thread = threading.Thread(target=self._run, name="trainwarden-otlp-metrics", daemon=True)
        self._sending: threading.Thread | None = None
        self._failing = False
        self.counts: Counter[str] = Counter(taken=0, failed=0)
        """Sendings."""

    def start(self, told: Callable[[], Told]) -> None:
        """told: what is to be shown; called in a thread."""
        self._told = told
        self._thread.start()

    def end(self) -> None:
        """The values of now are the last; they are sent in the background."""
        with self._asking:
            if not self._over.is_set() and self._thread.ident is not None:
                self._last = self._gather()
            self._over.set()

    def close(self) -> None:
        """Wait until the last values are taken, at most for the deadline."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(self._deadline_s)

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            with self._asking:
                requests = () if self._over.is_set() else self._gather()
            self._send(requests)
        self._send(self._last)
        self._exporter.shutdown()

    def _gather(self) -> Sequence[MetricsData]:
        """Everything at this instant; nothing where it cannot be told, which counts as failed."""
        try:
            process = [*self._process.collect()]
            start_s = next((one.samples[0].value for one in process if one.name == "process_start_time_seconds"), 0.0)
            told = [*self._told(), (int(start_s * 1e9), process)]
            return metrics_data(told, self._resource, self._clock(), self._starts)
        except Exception as error:  # a help: no fault of it may end the thread, or what waits for its last values
            self._count(f"our own fault: {error!r}")
            return ()

    def _send(self, requests: Sequence[MetricsData]) -> None:
        """One after another, in a thread: the exporter's own deadline is one for each read, so it is not relied on."""
        if not requests:
            return
        if self._sending is not None and self._sending.is_alive():
            self._count("it does not answer")
            return
        taken = list[bool]()

        def send() -> None:
            taken.append(all(self._exporter.export(one) is MetricExportResult.SUCCESS for one in requests))

        self._sending = threading.Thread(target=send, name="trainwarden-otlp-send", daemon=True)
        self._sending.start()
        self._sending.join(self._deadline_s)
        self._count("" if taken == [True] else "it does not take them")

    def _count(self, why: str) -> None:
        self.counts["failed" if why else "taken"] += 1
        if bool(why) != self._failing:
            self._failing = bool(why)
            self._say(f"metrics to the OTLP receiver: {why}; tried again" if why else "the OTLP receiver takes metrics")


class Starts:
    """Since when each series of a counter counts whose beginning nobody knows: first seen, or since it fell."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Labels], tuple[int, int, float]] = {}
        """Start, when it was last seen, its value then."""

    def since(self, name: str, labels: Labels, value: float, now_ns: int) -> int:
        """Unix ns. The first point lasts no time, as the OpenTelemetry data model wants it."""
        start_ns, last_ns, last = self._seen.get((name, labels), (now_ns, now_ns, value))
        start_ns = last_ns if value < last else start_ns
        self._seen[name, labels] = start_ns, now_ns, value
        return start_ns

    def forget(self, now_ns: int) -> None:
        """Series that are gone."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen[1] == now_ns}


def metrics_data(told: Told, resource: Resource, now_ns: int, starts: Starts) -> Sequence[MetricsData]:
    """Families of several tellers as requests, each family once; of a series that two tell (`build_info`) the first."""
    found: dict[str, tuple[Family, dict[Labels, Point]]] = {}
    for since_ns, families in told:
        for family in families:
            _, points = found.setdefault(family.name, (family, {}))
            for labels, point in _points(family, since_ns, now_ns, starts):
                points.setdefault(labels, point)
    starts.forget(now_ns)
    requests: list[list[Metric]] = [[]]
    size = 0
    for family, points in found.values():
        if size >= POINTS_A_REQUEST:
            requests.append([])
            size = 0
        size += len(points)
        requests[-1].append(_metric(family, [*points.values()]))
    scope = InstrumentationScope("trainwarden", __version__)
    scopes = (ScopeMetrics(scope=scope, metrics=metrics, schema_url="") for metrics in requests)
    return [MetricsData([ResourceMetrics(resource=resource, scope_metrics=[one], schema_url="")]) for one in scopes]


def _metric(family: Family, points: list[Any]) -> Metric:
    name, cumulative = family.name, AggregationTemporality.CUMULATIVE
    data: Gauge | Sum | Histogram = Gauge(points)
    if family.type == "histogram":
        data = Histogram(points, cumulative)
    elif family.type == "counter":
        name = f"{name}_total"  # as a query names it: receivers that translate names leave it alone
        data = Sum(points, cumulative, is_monotonic=True)
    return Metric(name=name, description=family.documentation, unit=ucum(name), data=data)


def _points(family: Family, since_ns: int | None, now_ns: int, starts: Starts) -> Iterator[tuple[Labels, Point]]:
    if family.type == "histogram":
        yield from _histograms(family, since_ns or now_ns, now_ns)
        return
    for sample in family.samples:
        labels, value, start_ns = tuple(sample.labels.items()), float(sample.value), 0
        if family.type == "counter":
            start_ns = starts.since(family.name, labels, value, now_ns) if since_ns is None else since_ns
        yield labels, NumberDataPoint(dict(labels), start_ns, now_ns, value)


def _histograms(family: Family, since_ns: int, now_ns: int) -> Iterator[tuple[Labels, Point]]:
    parts: dict[Labels, list[Sample]] = {}
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        parts.setdefault(labels, []).append(sample)
    for labels, samples in parts.items():
        buckets = [(float(one.labels["le"]), int(one.value)) for one in samples if "le" in one.labels]
        bounds, counts = [bound for bound, _ in buckets[:-1]], [0, *(count for _, count in buckets)]
        yield (
            labels,
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=since_ns,
                time_unix_nano=now_ns,
                count=counts[-1],
                sum=next(float(one.value) for one in samples if one.name.endswith("_sum")),
                bucket_counts=[after - before for before, after in pairwise(counts)],
                explicit_bounds=bounds,
                min=None,  # type: ignore[arg-type]  # not known, and optional on the wire
                max=None,  # type: ignore[arg-type]
            ),
        )
