"""Every number that is measured or exported: one of the three tables that join the components.

`SIGNALS` is what ranks measure: a signal's id is its place and never changes. `METRICS` is what `/metrics` shows, by
Prometheus' conventions: base units, counters end in `_total`. Dashboards and alert rules may name only what stands
here. Every series of a job carries the label `job_id` (`job` is Prometheus' own). Per-rank series are not exported:
a signal is shown as a rollup of the newest closed step over its ranks, by `quantile`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from trainwarden.core.records import FEATURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One row."""

    id: int
    name: str
    unit: str
    metric: str
    """Prometheus name of its per-step rollup."""
    cardinality: Literal["job", "node", "device", "rank"]
    """What one series stands for when the signal is exported."""


_UNITS = {"tokens": "tokens", "learning_rate": "1"}


def _row(number: int, name: str) -> Signal:
    unit = "seconds" if name.endswith("_s") else _UNITS.get(name, "1")
    stem = name.removesuffix("_s") + ("_seconds" if unit == "seconds" else "")
    metric = f"trainwarden_step_{stem.removeprefix('step_')}"
    return Signal(id=number, name=name, unit=unit, metric=metric, cardinality="job")


SIGNALS: Mapping[str, Signal] = {name: _row(number, name) for number, name in enumerate(FEATURES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported metric."""

    name: str
    """As a query names it: a counter with `_total`, a histogram without `_bucket`."""
    type: Literal["gauge", "counter", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    """Beside `job_id`."""
    of_job: bool = True
    """Whether its series carry `job_id`."""


_UCUM: Final = {
    "bytes_per_second": "By/s",
    "seconds": "s",
    "bytes": "By",
    "ratio": "1",
    "celsius": "Cel",
    "watts": "W",
    "joules": "J",
    "hertz": "Hz",
}


def ucum(name: str) -> str:
    """The unit of an exported metric as OpenTelemetry writes it, by the last words of its name: of what is counted an
    annotation; "" where there is none. Only ratios have the unit 1: receivers add `_ratio` to the names of others.

    >>> ucum("trainwarden_turn_seconds_total"), ucum("trainwarden_incidents_opened_total"), ucum("trainwarden_attempt")
    ('s', '{incidents}', '')
    """
    name = name.removesuffix("_total")
    for ending, unit in _UCUM.items():
        if name.endswith(f"_{ending}"):
            return unit
    counted = (word for word in reversed(name.split("_")[1:]) if word.endswith("s") and not word.endswith("ss"))
    return next((f"{{{word}}}" for word in counted), "")


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=f"trainwarden_{name}", type="gauge", meaning=meaning, labels=labels)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name=f"trainwarden_{name}_total", type="counter", meaning=meaning, labels=labels)


ACTIVITIES: Final = ("training", "repeated", "checkpoint", "evaluation", "starting", "interrupted", "other")
"""What an instant of a job's wall time was spent on; exactly one each.

training: steps that were new; repeated: steps that had closed before; checkpoint, evaluation: what ranks said they did
outside or inside a step (it is not counted as training too); starting: from an attempt's start to its first step;
interrupted: from an attempt's last step to its end, from there to the next attempt, and while no step closes for much
longer than steps take; other: the rest. How it is counted, and how far it lags behind: app/effective.py."""

_ROWS = (
    # is it alive, does it move
    _gauge("heartbeat_timestamp_seconds", "when the supervisor last looked at its sources (Unix time)"),
    _gauge("job_start_timestamp_seconds", "when the job was last started by anybody but a plan (Unix time)"),
    _gauge("attempt", "number of the attempt that is watched"),
    _gauge("ranks", "ranks of the job: `state` is `expected` (world size) or `fresh` (heard of just now)", "state"),
    _gauge("last_progress_timestamp_seconds", "when any rank last entered another phase or step (Unix time)"),
    _gauge("last_step", "the newest step that has closed"),
    _gauge("last_step_timestamp_seconds", "when the newest step closed (Unix time)"),
    _gauge("last_new_step_timestamp_seconds", "when a step closed that no attempt had reached before (Unix time)"),
    _counter("steps", "closed steps: `kind` is `new` or `repeated`", "kind"),
    _counter("tokens", "tokens of all closed steps, repeated ones too; ranks of one data-parallel place count once"),
    # how fast
    _gauge(
        "step_window_seconds",
        "wall time of a step on its slowest rank, without checkpoint and evaluation: exact quantiles of the newest 100",
        "quantile",
    ),
    _gauge("step_expected_seconds", "the setting metrics.expected_step, else the job's own best median of 64 steps"),
    _gauge(
        "rank_own_work_ratio",
        "own work of a rank over that of its peers (median of a window): only the five slowest ranks",
        "rank",
        "device",
    ),
    _counter("job_wall_seconds", "wall time of the job while it was watched, but for the step that is under way"),
    _counter("job_activity_seconds", "the same time by what it was spent on (core.signals.ACTIVITIES)", "activity"),
    # does it learn
    _counter(
        "nonfinite_steps", "closed steps with a value that is NaN or infinite: loss, grad_norm or local", "signal"
    ),
    # could it go back
    _gauge("checkpoint_last_step", "step of the newest published checkpoint"),
    _gauge("checkpoint_last_timestamp_seconds", "when the newest published checkpoint was written (Unix time)"),
    _gauge("checkpoint_interval_seconds", "the setting metrics.checkpoint_interval, else the median of the last eight"),
    _gauge("checkpoint_pending_saves", "checkpoints that ranks have begun to save and that are not published yet"),
    _counter("checkpoints", "checkpoints by `result`: published or refused", "result"),
    # what is wrong, what is done
    _gauge("incidents", "incidents that are not resolved", "tier", "state"),
    _counter("incidents_opened", "incidents ever opened, by the kind they were opened with", "kind"),
    Metric(
        name="trainwarden_incident_phase_seconds",
        type="histogram",
        meaning="how long each phase of a verified recovery took: detect, decide, stop, start, load, warm_up",
        labels=("phase",),
    ),
    _gauge("plans_running", "plans under way, those that wait for a person too"),
    _counter("plans", "plans that have ended", "rule", "mode", "result"),
    _counter("plan_refusals", "plans that were refused, by guard", "guard"),
    # are we well
    _gauge("source_up", "1: the source can be read; 0: it is blind", "source"),
    _gauge("journal_writable", "1: decisions can be written down; 0: they cannot, so nothing is done"),
    _gauge("notices_undelivered", "notices that wait for another try"),
    _counter("notices", "tries to hand a notice to a channel: `result` is `taken` or `failed`", "channel", "result"),
    _gauge("alertmanager_peer_up", "1: the peer took the alerts last sent; 0: it did not", "peer"),
    _counter("rows", "rows of ranks by what became of them (core.steps.StepCounters)", "fate"),
    _counter("recording_lost_items", "items that could not be recorded"),
    _counter(
        "otlp_spans",
        "spans for the OTLP receiver by `result`: taken, failed (not taken in time), dropped (too many waited)",
        "result",
    ),
    _counter("otlp_pushes", "sendings of metrics to the OTLP receiver: `result` is `taken` or `failed`", "result"),
    _gauge("frame_lag_seconds", "from sending to receiving of the newest frame"),
    _counter("turns", "turns of the supervisor's loop"),
    _counter("turn_seconds", "wall time spent in them"),
    Metric(
        name="trainwarden_build_info",
        type="gauge",
        meaning="always 1: which version watches",
        labels=("version",),
        of_job=False,
    ),
)

METRICS: Mapping[str, Metric] = {
    row.name: row
    for row in (
        *_ROWS,
        *(
            Metric(
                name=signal.metric,
                type="gauge",
                meaning=f"{signal.name} of the newest closed step over its ranks: quantile 0.5, 0.99 and 1",
                labels=("quantile",),
            )
            for signal in SIGNALS.values()
        ),
    )
}
"""By name."""
