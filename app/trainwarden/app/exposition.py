"""From numbers to the families of prometheus_client, by the rows of a table of metrics."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from trainwarden.core.signals import METRICS, Metric

Key: TypeAlias = tuple[str, ...]
"""A metric without `trainwarden_`, and the values of its labels. Of a histogram: also the bucket's bound, or `sum`."""

QUANTILES: Final = ("0.5", "0.99", "1")
PHASES: Final = ("detect", "decide", "stop", "start", "load", "warm_up")
BUCKETS_S: Final = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
"""From what a detection or a decision takes here (1 s is the goal for a death, 2 s beyond its budget for a hang) to
starts and loads of large jobs (ten minutes are a good recovery, half an hour is the bar of `no progress`)."""


def families(
    values: Iterable[tuple[Key, float | None]], table: Mapping[str, Metric] = METRICS, job: Key = ()
) -> Iterator[Family]:
    """Every metric that has a value, in the order of the table; a value that is None or not finite is none."""
    found: dict[str, dict[Key, float]] = {}
    for (name, *labels), value in values:
        if value is not None and math.isfinite(value):
            found.setdefault(f"trainwarden_{name}", {})[tuple(labels)] = value
    for name, metric in table.items():
        if name in found:
            yield family_of(metric, found[name], job if metric.of_job else ())


def quantiles(name: str, values: NDArray[Any]) -> Iterator[tuple[Key, float]]:
    """Exact, of the values that are numbers; none if there are none."""
    known = values[np.isfinite(values)]
    if len(known):
        found = np.quantile(known, [float(quantile) for quantile in QUANTILES])
        yield from (((name, quantile), float(value)) for quantile, value in zip(QUANTILES, found, strict=True))


def family_of(metric: Metric, values: Mapping[Key, float], job: Key = ()) -> Family:
    """One metric; values by the values of its labels. job: the value of `job_id`, if it has that."""
    labels = ("job_id",) * len(job) + metric.labels
    if metric.type == "histogram":
        return _histogram(HistogramMetricFamily(metric.name, metric.meaning, labels=labels), job, values)
    made = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    family = made(metric.name, metric.meaning, labels=labels)
    for one, value in values.items():
        family.add_metric((*job, *one), value)
    return family


def _histogram(family: HistogramMetricFamily, job: Key, values: Mapping[Key, float]) -> Family:
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    for *one, part in values:
        if part == "sum":
            sums = np.cumsum([values.get((*one, bound), 0) for bound in bounds]).tolist()
            family.add_metric((*job, *one), list(zip(bounds, sums, strict=True)), values[*one, part])
    return family
