"""What a receiver of OTLP makes of the metrics it got: points under the names and labels that a scrape has."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, HistogramDataPoint, Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.web import Asked

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Point:
    """One series."""

    value: float
    start_ns: int
    """0: a gauge has none."""
    time_ns: int
    unit: str


def metrics_of(asked: Iterable[Asked]) -> list[Asked]:
    """Those requests that bring metrics."""
    return [one for one in asked if one.path == "/v1/metrics"]


def resource(asked: Asked) -> Mapping[str, str]:
    """Who sent it."""
    (one,) = ExportMetricsServiceRequest.FromString(asked.body).resource_metrics
    return {pair.key: pair.value.string_value for pair in one.resource.attributes}


def points(asked: Asked) -> Mapping[Key, Point]:
    """All of one request. Fails if a name comes twice, a series comes twice, or a sum is none that Prometheus knows."""
    (one,) = ExportMetricsServiceRequest.FromString(asked.body).resource_metrics
    (scope,) = one.scope_metrics
    assert len({metric.name for metric in scope.metrics}) == len(scope.metrics)
    found: dict[Key, Point] = {}
    for metric in scope.metrics:
        for key, point in _series(metric):
            assert key not in found
            found[key] = point
    return found


def scraped(text: str) -> Mapping[Key, float]:
    """The same of a page for Prometheus."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _series(metric: Metric) -> Iterator[tuple[Key, Point]]:
    kind = metric.WhichOneof("data")
    if kind == "histogram":
        assert metric.histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
        for told in metric.histogram.data_points:
            yield from _histogram(metric, told)
        return
    assert kind in ("gauge", "sum"), metric.name
    if kind == "sum":
        assert metric.sum.is_monotonic
        assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert (kind == "sum") == metric.name.endswith("_total")
    for one in (metric.gauge if kind == "gauge" else metric.sum).data_points:
        labels = {pair.key: pair.value.string_value for pair in one.attributes}
        point = Point(one.as_double, one.start_time_unix_nano, one.time_unix_nano, metric.unit)
        yield (metric.name, frozenset(labels.items())), point


def _histogram(metric: Metric, told: HistogramDataPoint) -> Iterator[tuple[Key, Point]]:
    labels = {pair.key: pair.value.string_value for pair in told.attributes}
    times = told.start_time_unix_nano, told.time_unix_nano, metric.unit
    assert not told.HasField("min")
    bounds = [*map(_bound, told.explicit_bounds), "+Inf"]
    for bound, count in zip(bounds, accumulate(told.bucket_counts), strict=True):
        yield (f"{metric.name}_bucket", frozenset({**labels, "le": bound}.items())), Point(count, *times)
    yield (f"{metric.name}_sum", frozenset(labels.items())), Point(told.sum, *times)
    yield (f"{metric.name}_count", frozenset(labels.items())), Point(told.count, *times)


def _bound(bound: float) -> str:
    """As exposition.BUCKETS_S are written."""
    return f"{bound:g}"
