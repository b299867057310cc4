"""The queries, as text, and asked of a real Prometheus that holds ten minutes of an invented job."""

import itertools
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.end_to_end.servers import PROMETHEUS, Prometheus, needs

from trainwarden.core.signals import ACTIVITIES, METRICS
from trainwarden.dashboards import queries as q
from trainwarden.dashboards.push import shipped

MINUTES, STEP_S = 10, 15
JOB, RANKS = "big", 8
BOARD = shipped()["job.json"]
real = needs(PROMETHEUS, "promtool")
SERIES_MAX = 24
"""Series that one query may give, whatever the number of ranks: plans by rule, mode and result are the most here."""
RANGE_BYTES_MAX = 64 * 1024
"""Of the answer to one query over 60 steps (performance goal 19)."""


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda: q.series("tokens"), id="a metric that is not exported"),
        pytest.param(lambda: q.series("ranks", rank="3"), id="a label that it has not"),
        pytest.param(lambda: q.newest("attempt", "tier"), id="by a label that it has not"),
        pytest.param(lambda: q.series("incident_phase_seconds"), id="a histogram without its part"),
        pytest.param(lambda: q.series("attempt", "_sum"), id="a part of what is no histogram"),
        pytest.param(lambda: q.of_ranks("perplexity"), id="a signal that no rank measures"),
    ],
)
def test_what_is_not_exported_cannot_be_asked(ask: Any) -> None:
    with pytest.raises(KeyError):
        ask()


def test_variables_are_replaced_by_what_grafana_would_put_in() -> None:
    asked = q.substituted('rate(a{job_id=~"$job_id"}[$__rate_interval]) + b[$__range:$__interval]')
    assert asked == 'rate(a{job_id=~".*"}[1m]) + b[5m:15s]'
    assert [expr for _, expr in (*q.expressions(BOARD), *q.annotations(BOARD)) if "$job" in expr or "$__" in expr] == []


def test_expressions_are_those_of_every_panel_the_folded_ones_too() -> None:
    titles = {title for title, _ in q.expressions(BOARD)}
    assert {"Doing now", "Loss", "Own CPU"} <= titles
    assert titles == {panel["title"] for panel in q.panels_of(BOARD) if panel["type"] != "text"}


VALUES: Mapping[str, Sequence[str]] = {
    "quantile": ("0.5", "0.99", "1"),
    "activity": ACTIVITIES,
    "tier": ("INFO", "WARN", "ERROR", "CRITICAL"),
    "kind": ("rank.slow", "process.killed", "rank.hung"),
    "signal": ("loss", "grad_norm", "local"),
    "result": ("published", "refused"),
    "rank": [str(rank) for rank in range(50)],
    "device": ("GPU-1",),
    "source": [f"rings@n{node}" for node in range(200)],
    "phase": ("detect", "decide", "stop", "start", "load", "warm_up"),
    "rule": ("slow", "dead"),
    "mode": ("observe", "act"),
    "guard": ("budget", "breaker"),
    "channel": ("terminal", "webhook"),
    "peer": ("am-1:9093", "am-2:9093"),
    "fate": ("new", "copy", "late"),
}
STATES = {"trainwarden_ranks": ("expected", "fresh")}
OPEN = ("suspected", "confirmed", "mitigating", "recovering", "reopened")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the invented job did, second by second from its start."""

    start_s: int

    def value(self, name: str, labels: Mapping[str, str], t_s: int) -> float | None:
        """Of one series, t_s after the start; None: it is not exported then."""
        told = (labels.get("quantile"), labels.get("source", ""), labels.get("kind"))
        match name.removeprefix("trainwarden_"), told:
            case "job_start_timestamp_seconds", _:
                return self.start_s
            case named, _ if named.endswith("timestamp_seconds"):
                return self.start_s + t_s
            case "step_window_seconds", (quantile, *_):
                return {"0.5": 1.2, "0.99": 1.4, "1": 3.0}[quantile or "1"]
            case "step_expected_seconds", _:
                return 1.0
            case "ranks", _:
                return RANKS
            case "tokens_total", _:
                return 8000.0 * t_s
            case "job_wall_seconds_total", _:
                return t_s
            case "job_activity_seconds_total", _:
                return t_s * (0.94 if labels["activity"] == "training" else 0.01)
            case "incidents", _:
                return float((labels["tier"], labels["state"]) in (("WARN", "confirmed"), ("INFO", "suspected")))
            case "incidents_opened_total", (_, _, "rank.slow"):
                return 2.0 if t_s >= 300 else 1.0  # one before we looked, another after five minutes
            case "incidents_opened_total", (_, _, "rank.hung"):
                return None if t_s < 450 else 1.0  # its first incident makes the series
            case "incidents_opened_total", _:
                return 1.0  # there before we looked
            case "attempt", _:
                return 0.0 if t_s < 300 else 1.0
            case "source_up", (_, source, _):
                return float(source not in ("rings@n7", "rings@n70", "rings@n170"))
            case "rank_own_work_ratio", _:
                return 1.0 + int(labels["rank"]) / 100
        return float(t_s) if METRICS[name].type != "gauge" else 1.0

    def samples(self) -> Iterator[str]:
        """All of it as OpenMetrics text with timestamps: the job, and a second one that must not be seen."""
        for name, metric in METRICS.items():
            known = {**VALUES, "state": STATES.get(name, OPEN)}
            parts = ("_sum", "_count") if metric.type == "histogram" else ("",)
            cells = itertools.product(*(known.get(label, ("1",)) for label in metric.labels))
            for part, cell in itertools.product(parts, cells):
                yield from self._series(name, part, dict(zip(metric.labels, cell, strict=True)))
        yield from self._series("trainwarden_heartbeat_timestamp_seconds", "", {}, "other")
        for t_s in range(0, MINUTES * 60 + 1, STEP_S):
            yield f"process_cpu_seconds_total{{{TARGET}}} {0.02 * t_s} {self.start_s + t_s}"

    def _series(self, name: str, part: str, labels: Mapping[str, str], job: str = JOB) -> Iterator[str]:
        told = ",".join(f'{label}="{value}"' for label, value in {"job_id": job, **labels}.items())
        for t_s in range(0, MINUTES * 60 + 1, STEP_S):
            if (value := self.value(name, labels, t_s)) is not None:
                yield f"{name}{part}{{{told},{TARGET}}} {value} {self.start_s + t_s}"


TARGET = 'instance="h:9464",job="trainwarden"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A Prometheus, and the last moment of which it knows."""

    server: Prometheus
    end_s: int

    def panel(self, title: str, after_s: int = 0) -> list[dict[str, Any]]:
        """What the first query of a panel gives."""
        return self.server.query(EXPRESSIONS[title][0], self.end_s + after_s)

    def value(self, title: str) -> float:
        """Of a panel with one."""
        (one,) = self.panel(title)
        return float(one["value"][1])


def _of_big(board: Mapping[str, Any]) -> dict[str, list[str]]:
    """Title -> queries, with the one job picked."""
    found: dict[str, list[str]] = {}
    for title, expr in q.expressions(json.loads(json.dumps(board).replace("$job_id", JOB))):
        found.setdefault(title, []).append(expr)
    return found


EXPRESSIONS = _of_big(BOARD)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A real Prometheus that holds the invented job; nothing is scraped, so nothing waits."""
    folder = tmp_path_factory.mktemp("prometheus")
    world = World(start_s=int(time.time()) - 7200)
    (folder / "job.om").write_text("\n".join([*world.samples(), "# EOF\n"]))
    (folder / "prometheus.yml").write_text("global: {}\n")
    make = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "job.om"), str(folder / "tsdb")]
    subprocess.run(make, check=True, capture_output=True, timeout=50)
    server = Prometheus(folder, folder / "prometheus.yml")
    try:
        yield Asked(server=server, end_s=world.start_s + MINUTES * 60)
    finally:
        server.end()


@real
def test_every_query_has_data_while_the_job_is_known(asked: Asked) -> None:
    silent = [
        title for title, exprs in EXPRESSIONS.items() for expr in exprs if not asked.server.query(expr, asked.end_s)
    ]
    assert silent == []


@real
def test_no_query_grows_with_ranks_or_sources(asked: Asked) -> None:
    """Here are 50 ranks and 200 sources: what is shown is bounded, in series and in bytes over 60 steps."""
    for title, exprs in EXPRESSIONS.items():
        for expr in exprs:
            assert len(asked.server.query(expr, asked.end_s)) <= SERIES_MAX, title
            times = {"start": str(asked.end_s - 590), "end": str(asked.end_s), "step": "10"}
            answer = asked.server.get("/api/v1/query_range", query=expr, **times)
            assert len(json.dumps(answer)) <= RANGE_BYTES_MAX, title


@real
def test_a_job_that_is_gone_is_no_data(asked: Asked) -> None:
    """Not a zero, not the last value: only what is asked over a day is still known six minutes later."""
    known = {title for title in EXPRESSIONS if asked.panel(title, after_s=360)}
    assert known == {"Effective training, 24 h"}


@real
@pytest.mark.parametrize(
    ("title", "value"),
    [
        pytest.param("Last progress", 0.0, id="it moved just now"),
        pytest.param("Step time / expected", 1.2, id="a fifth slower than expected"),
        pytest.param("Tokens/s per GPU", 1000.0, id="8000 tokens a second on 8 GPUs"),
        pytest.param("Effective training, 24 h", 0.94, id="94 % of a day"),
        pytest.param("Effective training, since start", 0.94, id="94 % since the start"),
        pytest.param("Worst open incident", 2.0, id="WARN is the highest that is open"),
        pytest.param("Blind sources", 3.0, id="three of 200 sources are blind"),
        pytest.param("Age / interval", 0.0, id="a checkpoint just now"),
        pytest.param("Own CPU", 0.02, id="the supervisor's own CPU by its target"),
        pytest.param("Turn", 1.0, id="a second a turn"),
    ],
)
def test_a_panel_shows_what_is(asked: Asked, title: str, value: float) -> None:
    assert asked.value(title) == pytest.approx(value, rel=1e-3)


@real
def test_names_are_shown_with_their_values(asked: Asked) -> None:
    def labels(title: str, name: str) -> list[str]:
        return [one["metric"][name] for one in asked.panel(title)]

    assert labels("Doing now", "activity") == ["training"]
    assert sorted(labels("Slowest ranks by own work", "rank")) == ["45", "46", "47", "48", "49"]
    first = sorted(asked.panel("Sources, blind ones first"), key=lambda one: float(one["value"][1]))[:3]
    assert {one["metric"]["source"] for one in first} == {"rings@n7", "rings@n70", "rings@n170"}
    assert sorted(labels("Incidents", "runbook")) == ["process-killed", "rank-hung", "rank-slow"]


@real
def test_annotations_stand_where_something_began(asked: Asked) -> None:
    """A counter that rises, one that appears, and none for what was there when we began to look."""
    began: dict[str, list[int]] = {}
    times = {"start": str(asked.end_s - 600), "end": str(asked.end_s), "step": "15"}
    for name, expr in q.annotations(json.loads(json.dumps(BOARD).replace("$job_id", JOB))):
        for one in asked.server.get("/api/v1/query_range", query=expr, **times)["data"]["result"]:
            began[one["metric"].get("kind", name)] = [int(at - asked.end_s + 600) for at, _ in one["values"]]
    assert {what: (seen[0], seen[-1] <= seen[0] + 120) for what, seen in began.items()} == {
        "rank.slow": (300, True),
        "rank.hung": (450, True),
        "attempts": (300, True),
    }
