"""What is asked of Prometheus: the text of every query, made from names of `core.signals.METRICS` only.

A query is for one job: each selector has job_id=~"$job_id". Series of several targets are one (a supervisor that took a
job over exports it from another place for a while): the newest gauge counts, counters are added. What has no series
stays without a value: nothing here turns the unknown into a zero.

No query gives a series for each rank, node or source: what could be many is cut to the few worst by the query itself,
so that a panel costs the same at 8 and at 100,000 ranks (performance goal 19).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainwarden.core.signals import METRICS

JOB: Final = 'job_id=~"$job_id"'
RATE: Final = "$__rate_interval"
"""Grafana's own window for rates: at least four scrapes."""
RANGE: Final = "$__range"
DAY: Final = "24h"
JUST_NOW: Final = "2m"
"""For what began: two scrapes, also of a Prometheus that scrapes once a minute (as the alert rules)."""

SUBSTITUTES: Final[Mapping[str, str]] = {"$job_id": ".*", RATE: "1m", RANGE: "5m", "$__interval": "15s"}
"""What Grafana would put in, for a check without Grafana: every job, and windows that a short run can fill."""


def series(name: str, part: str = "", **labels: str) -> str:
    """A selector of one metric of the job, named without `trainwarden_`; part: `_sum` or `_count` of a histogram.
    Raises KeyError for a metric, a part or a label that is not exported.

    >>> series("ranks", state="fresh")
    'trainwarden_ranks{job_id=~"$job_id",state="fresh"}'
    """
    metric = METRICS[f"trainwarden_{name}"]
    if unknown := set(labels) - set(metric.labels):
        raise KeyError(f"{metric.name} has no label {', '.join(sorted(unknown))}; it has {metric.labels}")
    if (metric.type == "histogram") != (part in ("_sum", "_count")):
        raise KeyError(f"{metric.name} is a {metric.type}: it has no part {part!r}")
    picked = ",".join([JOB, *(f'{label}="{value}"' for label, value in labels.items())])
    return f"{metric.name}{part}{{{picked}}}"


def newest(name: str, *by: str, **labels: str) -> str:
    """A gauge, or a counter as it stands.

    >>> newest("step_window_seconds", "quantile")
    'max by (quantile) (trainwarden_step_window_seconds{job_id=~"$job_id"})'
    """
    return f"max{_by(name, by)}({series(name, **labels)})"


def lowest(name: str) -> str:
    """A state of which the worst of all series counts."""
    return f"min({series(name)})"


def age(name: str) -> str:
    """Seconds since a timestamp."""
    return f"time() - {newest(name)}"


def per_second(name: str, *by: str) -> str:
    """How fast a counter grows."""
    return f"sum{_by(name, by)}(rate({series(name)}[{RATE}]))"


def grown(name: str, *by: str, window: str = RANGE, **labels: str) -> str:
    """By how much a counter grew in a window."""
    return f"sum{_by(name, by)}(increase({series(name, **labels)}[{window}]))"


def total(name: str, *by: str, part: str = "", **labels: str) -> str:
    """All series together, as they stand."""
    return f"sum{_by(name, by)}({series(name, part, **labels)})"


def ratio(over: str, under: str) -> str:
    """One value over another; none where the other is 0.

    >>> ratio("a", "b")
    'a / (b > 0)'
    """
    return f"{over} / ({under} > 0)"


def doing_now() -> str:
    """The activity on which most of the last moments were spent, none if nothing was counted."""
    return f"topk(1, {per_second('job_activity_seconds_total', 'activity')} > 0)"


def against_expected(quantile: str) -> str:
    """A step's time over what it is expected to take."""
    return ratio(newest("step_window_seconds", quantile=quantile), newest("step_expected_seconds"))


def tokens_per_gpu() -> str:
    """Tokens a second and rank, over all time that passed: repeated steps count, interruptions slow it down."""
    return ratio(per_second("tokens_total"), newest("ranks", state="expected"))


def effective(window: str = "") -> str:
    """Share of the wall time that closed new steps: in a window, or since the counters began."""
    if not window:
        return ratio(total("job_activity_seconds_total", activity="training"), total("job_wall_seconds_total"))
    training = grown("job_activity_seconds_total", window=window, activity="training")
    return ratio(training, grown("job_wall_seconds_total", window=window))


def worst_tier() -> str:
    """The highest tier of an open incident: 4 CRITICAL, 3 ERROR, 2 WARN, 1 INFO, 0 none is open."""
    tiers = {"CRITICAL": 4, "ERROR": 3, "WARN": 2, "INFO": 1}
    marked = (f"{value} * clamp_max({total('incidents', 'tier', tier=tier)}, 1)" for tier, value in tiers.items())
    return f"max({' or '.join(marked)})"


def of_ranks(signal: str) -> str:
    """A value of the newest step over its ranks, by quantile: the job's own, else the ranks' before a reduce."""
    return f"{newest(f'step_{signal}', 'quantile')} or {newest(f'step_local_{signal}', 'quantile')}"


def slowest(count: int = 5) -> str:
    """Own work over that of the peers: the slowest ranks with their devices."""
    return f"topk({count}, {newest('rank_own_work_ratio', 'rank', 'device')})"


def opened_kinds() -> str:
    """Incidents by the kind they were opened with, and the name of the kind's runbook page in a label of its own."""
    return f'label_replace({total("incidents_opened_total", "kind")}, "runbook", "$1-$2", "kind", "(.+)[.](.+)")'


def incidents_began() -> str:
    """By kind, where an incident was opened just now. `increase` misses a counter that was not 0 when it was
    first seen: such a one counts if the job itself was watched before."""
    grew = f"{grown('incidents_opened_total', 'kind', window=JUST_NOW)} > 0"
    now = total("incidents_opened_total", "kind")
    before = f"sum by (kind) ({series('incidents_opened_total')} offset {JUST_NOW})"
    watched = f"max({series('heartbeat_timestamp_seconds')} offset {JUST_NOW})"
    return f"{grew} or (({now} > 0) unless {before}) and on () {watched}"


def attempts_began() -> str:
    """Where another attempt is watched than before."""
    return f"max(changes({series('attempt')}[{JUST_NOW}])) > 0"


def mean_phase() -> str:
    """Mean length of each phase of a verified recovery, in seconds."""
    name = "incident_phase_seconds"
    return ratio(total(name, "phase", part="_sum"), total(name, "phase", part="_count"))


def blind_count() -> str:
    """How many sources cannot be read."""
    return f"sum(1 - {newest('source_up', 'source')})"


def blindest(count: int = 10) -> str:
    """Sources that cannot be read, then others."""
    return f"bottomk({count}, {newest('source_up', 'source')})"


def own_cpu() -> str:
    """CPU seconds a second of the supervisor: prometheus-client's own metric, of the targets that export the job."""
    return (
        f"sum(rate(process_cpu_seconds_total[{RATE}]) and on (job, instance) {series('heartbeat_timestamp_seconds')})"
    )


def turn() -> str:
    """Mean length of a turn of the supervisor's loop."""
    return ratio(per_second("turn_seconds_total"), per_second("turns_total"))


def jobs() -> str:
    """Grafana's question for the values of the variable job_id (not PromQL)."""
    return f"label_values({METRICS['trainwarden_heartbeat_timestamp_seconds'].name}, job_id)"


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every panel of a dashboard's JSON, those inside rows too, without the rows themselves."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def expressions(dashboard: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(panel title, PromQL) of every query of every panel, with Grafana's variables replaced by SUBSTITUTES."""
    asked = [(panel["title"], query["expr"]) for panel in panels_of(dashboard) for query in panel.get("targets", ())]
    return [(title, substituted(expr)) for title, expr in asked]


def annotations(dashboard: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, PromQL) of every annotation, as `expressions`. They have data only when something happened."""
    return [(one["name"], substituted(one["expr"])) for one in dashboard["annotations"]["list"]]


def substituted(expr: str) -> str:
    """PromQL as Prometheus is asked it."""
    for variable, value in SUBSTITUTES.items():
        expr = expr.replace(variable, value)
    return expr


def _by(name: str, labels: tuple[str, ...]) -> str:
    known = METRICS[f"trainwarden_{name}"].labels
    if unknown := set(labels) - set(known):
        raise KeyError(f"trainwarden_{name} has no label {', '.join(sorted(unknown))}; it has {known}")
    return f" by ({', '.join(labels)}) " if labels else ""
