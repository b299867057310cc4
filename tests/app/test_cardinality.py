"""How many series there are, counted: at 12,500 ranks, after 50 restarts, when jobs are over, and of one node.

The rule (docs/architecture.md, Own telemetry and security): at most 2,000 series a job and 20 a node; no attempt and no
incident is a label; what has ended goes after 15 minutes.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from tests.app.metrics_world import PLAN, Shown
from tests.app.served import EPOCH, step_frame, tokens_file
from tests.app.test_readings import Node as Hardware
from tests.detectors.world import hello
from tests.remediation.plan_world import incident, outcome

from trainwarden.app.isolation import SourceState
from trainwarden.app.jobs import JobsConfig
from trainwarden.app.metrics import RESULTS
from trainwarden.app.node_sources import Name
from trainwarden.app.readings import AGENT_METRICS, Fares
from trainwarden.app.serving import SERVER_METRICS, ServerConfig, Serving
from trainwarden.app.sources_seen import SOURCES_MIN, SourcesSeen
from trainwarden.core.emit import Emitter
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Event, Frame, JobId, Json, Subject
from trainwarden.core.readings import READINGS
from trainwarden.core.records import FEATURES
from trainwarden.core.signals import METRICS, SIGNALS
from trainwarden.detectors.straggler import OwnWorkSeen
from trainwarden.remediation.guards import GUARDS

RANKS, A_NODE = 12_500, 8
NODES = -(-RANKS // A_NODE)
SOURCES = (*get_args(Name), "rings", "processes", "agent", "agent-start")
"""That tell a job something, of each node."""
MINUTE_NS = 60 * 10**9


def series(collector: Collector) -> Mapping[str, list[Mapping[str, str]]]:
    """Labels of every series, by name."""
    registry = CollectorRegistry()
    registry.register(collector)
    families: Sequence[Metric] = [*registry.collect()]
    found: dict[str, list[Mapping[str, str]]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def count(found: Mapping[str, Sequence[object]]) -> int:
    return sum(map(len, found.values()))


def limit(nodes: int) -> int:
    return 2000 + 20 * nodes


# a job under `run`


def frames_of(nodes: Sequence[str], seen_ns: int) -> Iterator[Frame]:
    """One of each source of each node."""
    empty = step_frame(0, [], source="", job=JobId("job"), seq=0)
    for node in nodes:
        for name in SOURCES:
            yield replace(empty, source=f"{name}@{node}", seen_ns=seen_ns)


def tell_all(shown: Shown, attempt: int, nodes: Sequence[str], ranks: int) -> Shown:
    """An attempt in which everything that can be told is told."""
    shown.start(attempt, "plan")
    shown.take(shown.world().event("hello", 0, **{**hello(0, ranks), "attempt": attempt}))
    for frame in frames_of(nodes, shown.now_ns):
        shown.metrics.take(frame)
    values: dict[str, ArrayLike] = {name: np.linspace(1, 2, ranks) for name in FEATURES}
    for step in range(2):
        shown.close(100 * attempt + step, ranks, None, **values)
    for kind in KINDS.values():
        if kind.of == "finding":
            shown.metrics.opened(replace(incident(kind.name), id=f"incident-of-{attempt}"))
    for guard in sorted(GUARDS):
        shown.metrics.started(replace(PLAN, id=f"plan-of-{attempt}", rule=f"{guard}.rule"))
    shown.metrics.ended(PLAN, outcome("p", -1, "reached"))
    shown.metrics.recovered({"detect": 0.4, "stop": 3.0, "load": 4000.0})
    devices = (f"GPU-{attempt}",) * ranks
    own_work = OwnWorkSeen(ratio_R=np.linspace(1, 2, ranks), device_R=devices, blind=False)
    counts = {("plan_refusals_total", guard): 1 for guard in GUARDS}
    return shown.turn(own_work=own_work, counts=counts)


def test_a_job_of_12_500_ranks_keeps_to_the_rule(tmp_path: Path) -> None:
    found = series(tell_all(Shown(tmp_path), 1, [f"node{node}" for node in range(NODES)], RANKS).metrics)
    assert len(found["trainwarden_source_up"]) == NODES * len(SOURCES) + 2, "and two of the run itself"
    assert count(found) <= limit(NODES)
    rest = count(found) - len(found["trainwarden_source_up"])
    assert rest <= 500, "whatever the number of ranks"
    assert len(found["trainwarden_rank_own_work_ratio"]) == 5
    assert all(len(found[signal.metric]) == 3 for signal in SIGNALS.values())


def test_after_fifty_restarts_there_are_as_many_and_none_names_an_attempt_or_an_incident(tmp_path: Path) -> None:
    shown, nodes = Shown(tmp_path), [f"node{node}" for node in range(10)]
    first = series(tell_all(shown, 1, nodes, 80).metrics)
    for attempt in range(2, 52):
        nodes = [*nodes[1:], f"spare{attempt}"]  # the broken one goes
        shown.now_ns += 16 * MINUTE_NS
        tell_all(shown, attempt, nodes, 80)
        if attempt % 10 == 0:
            shown.metrics.save()
            shown.begin()  # so does the supervisor, now and then
            tell_all(shown, attempt, nodes, 80)
    last = series(shown.metrics)
    assert {name: len(rows) for name, rows in last.items()} == {name: len(rows) for name, rows in first.items()}
    rows = [labels for every in last.values() for labels in every]
    assert {name for labels in rows for name in labels} & {
        "attempt",
        "incident",
        "incident_id",
        "epoch",
        "plan",
    } == set()
    assert [labels for labels in rows if any("-of-" in value for value in labels.values())] == []


def test_what_a_sender_calls_his_sources_is_held_to_a_bound_and_the_first_stay() -> None:
    sources = SourcesSeen(["run@n1"])
    for frame in frames_of([f"n{node}" for node in range(1000)], 1):
        sources.heard(frame)
    assert len([*sources.shown(2)]) == SOURCES_MIN
    sources.say("rings@n0", up=False)
    assert dict(sources.shown(2))["rings@n0"] is False
    sources.heard(replace(next(frames_of(["n1\x1b[2J\ud800"], 1)), source="run@n1"))
    assert all(name.isprintable() for name, _ in sources.shown(2))


def test_a_node_that_is_gone_is_neither_healthy_nor_blind() -> None:
    sources = SourcesSeen(["run@here"])
    for frame in frames_of(["n0", "n1"], 0):
        sources.heard(frame)
    for frame in frames_of(["n1"], 10 * MINUTE_NS):
        sources.heard(frame)
    assert len([*sources.shown(14 * MINUTE_NS)]) == 2 * len(SOURCES) + 1
    assert len([*sources.shown(16 * MINUTE_NS)]) == len(SOURCES) + 1
    assert [*sources.shown(99 * MINUTE_NS)] == [("run@here", True)]


# jobs under the server


@contextmanager
def server(folder: Path, clock: list[int]) -> Iterator[Serving]:
    config = ServerConfig(host="127.0.0.1", port=0, state=folder / "s", tokens=tokens_file(folder), jobs=JobsConfig())
    one = Serving(config, lambda _: None, lambda: clock[0])
    one.jobs.on_open = one._measure
    try:
        yield one
    finally:
        one.jobs.close()


def fed(one: Serving, clock: list[int], job: str, ranks: int = RANKS) -> None:
    """Steps of a job, told by one node of it."""
    emit, rank = Emitter("rings@n0", job=JobId(job), start_ns=clock[0]), Subject(kind="rank", id="0")
    first = emit("hello", rank, now_ns=clock[0], data={**hello(0, ranks), "attempt": 1}, epoch=EPOCH)
    one.jobs.take("life", [first], clock[0], of_node=True)
    for step in range(1, 4):
        clock[0] += 61 * 10**9 if step == 1 else 10**9
        frame = step_frame(step, range(ranks), source="rings@n0", job=JobId(job), seq=clock[0] // 1000)
        one.jobs.take("life", [frame], clock[0], of_node=True)
        one.jobs.tick(clock[0])
    from trainwarden.app.serving import _tell

    _tell(one.jobs.open[JobId(job)], clock[0], clock[0])


def of_jobs(one: Serving) -> Counter[str]:
    """Series by job; of the server itself under ""."""
    return Counter(labels.get("job_id", "") for rows in series(one).values() for labels in rows)


def test_a_server_has_so_many_a_job_and_those_of_ended_jobs_go(tmp_path: Path) -> None:
    clock = [1_800_000_000 * 10**9]
    with server(tmp_path, clock) as one:
        for job, ranks in (("a", RANKS), ("b", 1000), ("c", 8)):
            fed(one, clock, job, ranks)
        found = of_jobs(one)
        assert set(found) == {"a", "b", "c", ""}
        assert found["a"] == found["b"] == found["c"], "whatever the number of ranks"
        assert 100 < found["a"] <= limit(1)
        assert found[""] <= len(SERVER_METRICS) + 20
        assert "trainwarden_step_seconds" in series(one), "steps closed"
        begun_ns, reading = clock[0], Emitter("host@n0", job=None, start_ns=clock[0])
        for _ in range(31):  # their node lives on, and says so; c too
            clock[0] += MINUTE_NS
            alive = reading("source.up", Subject(kind="source", id="host@n0"), now_ns=clock[0], data={"why": ""})
            mine = step_frame(9, [0], source="rings@n0", job=JobId("c"), seq=clock[0] // 1000)
            one.jobs.take("life", [alive, mine], clock[0], of_node=True)
            if clock[0] < begun_ns + 12 * MINUTE_NS:
                assert set(of_jobs(one)) == {"a", "b", "c", ""}
        assert set(of_jobs(one)) == {"c", ""}, "after 15 minutes"
        one.jobs.tick(clock[0])
        assert set(one.jobs.open) == {"c"}, "and after server.jobs.idle they are over, whatever their node says"


def test_everything_that_the_server_says_of_itself_is_in_its_table(tmp_path: Path) -> None:
    clock = [1_800_000_000 * 10**9]
    with server(tmp_path, clock) as one:
        fed(one, clock, "a", 8)
        one.jobs.looks["asked"] += 1
        one.ingest.counts["refused", "token"] += 1
        one.ingest.counts["held", "rate"] += 1
        one._saved_ns = clock[0]
        own = {name for name in series(one) if name.startswith("trainwarden_server_")}
        assert own | {"trainwarden_server_otlp_pushes_total"} == set(SERVER_METRICS)
        for name in own:
            assert {frozenset(labels) for labels in series(one)[name]} == {frozenset(SERVER_METRICS[name].labels)}
        assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in series(one)} <= {
            *METRICS,
            *SERVER_METRICS,
        }


# a node


def test_a_node_of_8_gpus_8_ib_ports_and_2_nics_in_numbers() -> None:
    """The rule counts a job's series: a node's own (its hardware) are more than 20, since a GPU alone has 56 numbers,
    and each of its 18 NVLinks 8. What is more than 20 a node is hardware, and nothing else is."""
    node, gpus = Hardware(), [f"GPU-{number}" for number in range(8)]
    links = [f"link:{gpu}/nvlink-{link}" for gpu in gpus for link in range(18)]
    ib, nics = [f"link:n1/mlx5_{port}/1" for port in range(8)], ["link:n1/eth0", "link:n1/eth1"]
    who: Mapping[str, Sequence[str]] = {"device": [f"device:{gpu}" for gpu in gpus], "node": ["node:n1"]}
    counted = Counter[str]()
    for one in READINGS.values():
        subjects = who.get(one.of, links if one.name.startswith("nvlink") else [*ib, *nics])
        node.tell(*((subject, one.name, 1.0) for subject in subjects))
        counted[one.name.partition("_")[0]] += len(subjects)
    for number, gpu in enumerate(gpus):
        node.readings.take([node.found(gpu, number)])
    node.readings.fares = Fares(sources=[SourceState(name=f"{one}@n1", word="up", age_s=0) for one in get_args(Name)])
    hardware = dict(counted)
    assert count(series(node.readings)) - sum(hardware.values()) <= 30, "20, and a name (gpu_info) for each GPU"
    per_gpu, per_link, per_port = (
        sum(one.name.startswith(what) for one in READINGS.values()) for what in ("gpu_", "nvlink_", "port_")
    )
    assert hardware == {
        "gpu": 8 * per_gpu,
        "nvlink": 8 * 18 * per_link,
        "port": 10 * per_port,
        "node": sum(one.of == "node" for one in READINGS.values()),
    }
    assert 20 < count(series(node.readings)) < 2500


def test_everything_that_an_agent_says_of_itself_is_in_its_table() -> None:
    node = Hardware()
    node.readings.take([node.found()])
    blind = SourceState(name="dcgm@n1", word="blind", age_s=3, stretch=2)
    node.readings.fares = Fares(turn_ns=1, sources=[blind], unsent_bytes=7, cpu_cores=0.01, cpu_budget_cores=0.05)
    found = series(node.readings)
    assert set(found) == set(AGENT_METRICS)
    for name, rows in found.items():
        assert {frozenset(labels) for labels in rows} == {frozenset(AGENT_METRICS[name].labels)}, name


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Counting is cheap, whatever is counted: in CPU time, which a loaded machine does not change."""
    begun_s = time.process_time()
    yield
    assert time.process_time() - begun_s < 10


def test_the_tables_name_no_attempt_and_no_incident() -> None:
    tables = (*METRICS.values(), *SERVER_METRICS.values(), *AGENT_METRICS.values())
    words: set[Json | Event] = {label for one in tables for label in one.labels}
    assert words & {"attempt", "incident", "incident_id", "epoch", "plan", "step"} == set()
    assert len(RESULTS) == 5
