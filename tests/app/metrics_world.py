"""A job under metrics, and what a scrape says of it, checked against the table."""

import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.detectors.world import JOB, START_NS, World, step_matrix, topology
from tests.remediation.plan_world import incident, outcome

from trainwarden.app.endpoint import MetricsConfig
from trainwarden.app.folders import JobFolder
from trainwarden.app.metrics import JobMetrics, Vitals
from trainwarden.app.publisher import Saves
from trainwarden.core.model import Event, Frame, Plan, Tick
from trainwarden.core.records import CAPTURED, FEATURES, LOSS_NONFINITE, epoch_of
from trainwarden.core.signals import METRICS
from trainwarden.detectors.straggler import OwnWorkSeen

PLAN = Plan(id="p", incident="i", rule="rank.slow", mode="act", fence=1, deadline_ns=0, ladder=())


class Scrape:
    """What was answered. Fails if any of it is not as the table says."""

    def __init__(self, text: str) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.values, f"twice: {key}"
                self.values[key] = sample.value
                if sample.name.startswith("trainwarden_"):
                    metric = METRICS[metric_of(sample.name)]
                    also = {"job_id"} if metric.of_job else set[str]()
                    also |= {"le"} if sample.name.endswith("_bucket") else set()
                    assert sample.labels.keys() == {*metric.labels, *also}, sample.name
                    assert np.isfinite(sample.value), sample.name

    def get(self, name: str, **labels: str) -> float | None:
        """One value of the job, named without `trainwarden_`; None: it has no series."""
        return self.values.get((f"trainwarden_{name}", frozenset({**labels, "job_id": str(JOB)}.items())))

    def names(self) -> set[str]:
        return {metric_of(name) for name, _ in self.values if name.startswith("trainwarden_")}

    def rows(self, name: str) -> dict[tuple[str, ...], float]:
        """All series of a metric, by the values of its own labels."""
        order = METRICS[f"trainwarden_{name}"].labels
        found = {one: value for (full, one), value in self.values.items() if full == f"trainwarden_{name}"}
        return {tuple(dict(one)[label] for label in order): value for one, value in found.items()}


def metric_of(sample: str) -> str:
    """The row of the table that a sample belongs to."""
    stems = (sample, *(sample.removesuffix(end) for end in ("_bucket", "_sum", "_count")))
    return next(stem for stem in stems if stem in METRICS)


class Shown:
    """A job under metrics: what a main loop would tell, and what a scrape then says."""

    def __init__(self, state: Path, config: MetricsConfig | None = None) -> None:
        self.folder, self.config = JobFolder.make(state, JOB), config or MetricsConfig()
        self.peers: dict[str, bool] = {}
        self.now = Vitals()
        self.now_ns, self.attempt, self.address = START_NS, 1, ""
        self.begin()

    def begin(self) -> None:
        """A supervisor's life."""
        self.metrics = JobMetrics(
            JOB,
            self.config,
            self.folder.path / "metrics.json",
            started_ns=START_NS,
            fresh_ns=10**9,
            sources=["processes@n1"],
            peers=lambda: self.peers,
        )
        self.registry = CollectorRegistry()
        self.registry.register(self.metrics)

    def world(self, ranks: int = 4) -> World:
        return World(ranks, attempt=self.attempt, start_ns=self.now_ns)

    def take(self, world: World) -> "Shown":
        for item in world.items:
            assert isinstance(item, Frame | Event | Tick)
            self.metrics.take(item)
        return self

    def start(self, attempt: int = 1, by: str = "run") -> "Shown":
        self.attempt = attempt
        return self.take(self.world().event("attempt.started", None, attempt=attempt, term=1, by=by)).turn()

    def close(self, step: int, ranks: int = 4, flags: list[int] | None = None, **values: ArrayLike) -> "Shown":
        """A step closes, a second after what was before."""
        self.now_ns += 10**9
        where = topology(ranks, epoch=epoch_of(self.attempt, 0, 0))
        told = {name: np.broadcast_to(np.asarray(value, float), ranks) for name, value in values.items()}
        self.metrics.step(step_matrix(where, step, told, flags_R=flags, seen_ns=self.now_ns))
        return self

    def turn(self, **changed: object) -> "Shown":
        self.now = replace(self.now, **changed)  # type: ignore[arg-type]  # fields by name
        self.metrics.turned(self.now_ns, self.now_ns + 2_000_000, self.now)
        return self

    def scrape(self) -> Scrape:
        return Scrape(generate_latest(self.registry).decode())


def asked(address: str) -> Scrape:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return Scrape(reply.read().decode())


def everything(shown: Shown) -> Shown:
    """All that can be told at once."""
    shown.start().take(shown.world().hello())
    features: dict[str, ArrayLike] = dict.fromkeys(FEATURES, 0.5)
    for step in range(1, 70):
        shown.close(step, 4, [LOSS_NONFINITE, CAPTURED, 0, 0], **features)
    world = shown.world()
    world.poll()
    shown.take(world)
    shown.take(shown.world().event("source.blind", None, why="no kernel log"))
    shown.metrics.opened(incident())
    shown.metrics.started(PLAN)
    shown.metrics.ended(PLAN, outcome("p", -1, "reached"))
    shown.metrics.recovered({"detect": 0.4, "stop": 3.0, "load": 4000.0})
    shown.peers = {"http://am:9093": True, "http://am2:9093": False}
    own_work = OwnWorkSeen(ratio_R=np.array([1.0, 1.7, np.nan, 0.9]), device_R=("a", "b", "c", "d"), blind=False)
    counts = {
        ("rows_total", "late"): 3,
        ("plan_refusals_total", "budget"): 1,
        ("notices_total", "jsonl", "taken"): 2,
        ("checkpoints_total", "published"): 2,
        ("recording_lost_items_total",): 0,
        ("otlp_spans_total", "taken"): 2,
        ("otlp_pushes_total", "failed"): 1,
    }
    saves = Saves(pending=1, published=2, last_step=60, times_ns=(START_NS, START_NS + 30 * 10**9))
    return shown.turn().turn(counts=counts, saves=saves, own_work=own_work, plans_running=1)
