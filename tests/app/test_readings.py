"""/metrics of a node: names as the table says, nothing stale, nothing made up, and not too much of it."""

import math
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trainwarden.app.endpoint import MetricsConfig
from trainwarden.app.isolation import SourceState
from trainwarden.app.readings import AGENT_METRICS, LABELS, Fares, Readings, serve
from trainwarden.collectors.readingframes import ReadingFrames
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, JobId, Json, Subject
from trainwarden.core.readings import READINGS

START_NS = 1_700_000_000 * 10**9
S = 10**9
GPU = "GPU-5c0b6a2e"


class Node:
    """What sources tell, and what a scrape shows at a moment."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.readings = Readings("n1", lambda: self.now_ns)
        self.frames: dict[str, ReadingFrames] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self.readings)

    def tell(self, *rows: tuple[str, str, float], source: str = "nvml@n1") -> None:
        frames = self.frames.setdefault(source, ReadingFrames(source, start_ns=0))
        self.readings.take(frames(rows, self.now_ns))

    def found(self, uuid: str = GPU, index: int = 3) -> Event:
        data: dict[str, Json] = {"uuid": uuid, "pci": "0000:9b:00", "index": index, "name": "H100", "driver": "570.86"}
        subject = Subject(kind="device", id=uuid)
        return Emitter("nvml@n1", job=None, start_ns=0)("device.found", subject, now_ns=self.now_ns, data=data)

    def scrape(self) -> Mapping[str, dict[tuple[tuple[str, str], ...], float]]:
        shown: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                key = tuple(sorted(sample.labels.items()))
                assert key not in shown.setdefault(sample.name, {}), f"twice: {sample}"
                shown[sample.name][key] = sample.value
        return shown

    def value(self, name: str) -> float | None:
        found = list(self.scrape().get(f"trainwarden_{name}", {}).values())
        return found[0] if found else None


@pytest.fixture
def node() -> Node:
    return Node()


def subjects(of: str, count: int) -> Sequence[str]:
    match of:
        case "device":
            return [f"device:GPU-{place}" for place in range(count)]
        case "link":
            return [f"link:n1/mlx5_{place}/1" for place in range(count)]
    return ["node:n1"]


def test_every_reading_is_shown_under_the_name_and_labels_of_the_table(node: Node) -> None:
    node.tell(*((subjects(one.of, 1)[0], one.name, 7.0) for one in READINGS.values()))
    shown = node.scrape()
    for reading in READINGS.values():
        (labels,) = shown[reading.metric]
        assert tuple(dict(labels)) == tuple(sorted(LABELS[reading.of])), reading.metric
        assert shown[reading.metric][labels] == 7.0
    assert {name for name in shown if name.startswith("trainwarden_")} <= {
        *(reading.metric for reading in READINGS.values()),
        *AGENT_METRICS,
    }


def test_a_gpu_has_its_uuid_and_index_and_an_info(node: Node) -> None:
    node.readings.take([node.found()])
    node.tell((f"device:{GPU}", "gpu_power_watts", 412.5), (f"link:{GPU}/nvlink-4", "nvlink_up", 1))
    shown = node.scrape()
    who = (("gpu", "3"), ("node", "n1"), ("uuid", GPU))
    assert shown["trainwarden_gpu_power_watts"] == {who: 412.5}
    assert shown["trainwarden_nvlink_up"] == {(("link", "nvlink-4"), ("node", "n1"), ("uuid", GPU)): 1}
    (info,) = shown["trainwarden_gpu_info"]
    assert set(who) < set(info)
    assert dict(info)["driver"] == "570.86"


def test_a_slot_without_a_uuid_has_its_index(node: Node) -> None:
    node.tell(("device:n1:2", "gpu_power_watts", 90))
    assert list(node.scrape()["trainwarden_gpu_power_watts"]) == [(("gpu", "2"), ("node", "n1"), ("uuid", ""))]


def test_a_counter_is_shown_as_it_is_told_resets_too(node: Node) -> None:
    for value in (255.0, 256.0, 3.0):
        node.tell(("link:n1/mlx5_0/1", "port_link_downs", value))
        assert node.value("port_link_downs_total") == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_shown(node: Node, value: float) -> None:
    node.tell(("node:n1", "node_load_1m", value))
    assert node.value("node_load_1m") is None


def test_a_name_that_is_not_in_the_table_is_not_shown(node: Node) -> None:
    node.tell(("node:n1", "node_mood", 1.0))
    assert not [name for name in node.scrape() if "mood" in name]


def test_readings_of_a_job_are_its_tenants_and_not_shown(node: Node) -> None:
    frames = ReadingFrames("rings@n1", start_ns=0)([("node:n1", "node_load_1m", 1.0)], node.now_ns)

    node.readings.take([replace(frame, job=JobId("j")) for frame in frames])
    assert node.value("node_load_1m") is None


def test_a_value_that_is_not_told_again_vanishes_after_three_periods(node: Node) -> None:
    for _ in range(3):
        node.tell(("node:n1", "node_load_1m", 1.0))
        node.now_ns += 5 * S
    node.now_ns += 10 * S  # 15 s after the last word
    assert node.value("node_load_1m") == 1.0
    node.now_ns += 2 * S
    assert node.value("node_load_1m") is None
    node.tell(("node:n1", "node_load_1m", 2.0))
    assert node.value("node_load_1m") == 2.0, "it comes back with its source"


def test_a_value_read_seldom_stays_as_long_as_its_own_periods(node: Node) -> None:
    """One source reads temperatures every second and error counters every quarter of a minute."""
    for second in range(31):
        node.tell((f"device:{GPU}", "gpu_temperature_celsius", 60))
        if second % 15 == 0:
            node.tell((f"device:{GPU}", "gpu_pcie_replays", 4))
        node.now_ns += S
    node.now_ns += 20 * S
    assert node.value("gpu_temperature_celsius") is None
    assert node.value("gpu_pcie_replays_total") == 4


def test_where_two_sources_tell_the_same_the_better_one_is_shown_while_it_lasts(node: Node) -> None:
    def both(seconds: int) -> None:
        for _ in range(seconds):
            node.tell((f"device:{GPU}", "gpu_power_watts", 400))
            node.tell((f"device:{GPU}", "gpu_power_watts", 390), source="dcgm@n1")
            node.now_ns += S

    both(3)
    assert node.value("gpu_power_watts") == 400
    node.now_ns += 5 * S  # nvml hangs
    node.tell((f"device:{GPU}", "gpu_power_watts", 391), source="dcgm@n1")
    assert node.value("gpu_power_watts") == 391
    both(1)
    assert node.value("gpu_power_watts") == 400


def test_sources_that_are_not_up_are_told_with_their_age(node: Node) -> None:
    node.readings.fares = Fares(
        turn_ns=START_NS,
        sources=(
            SourceState(name="nvml@n1", word="blind", age_s=12.5, why="no answer", raised=2),
            SourceState(name="host@n1", word="up", age_s=0.2, dropped=7),
            SourceState(name="mounts@n1", word="stale", age_s=90),
        ),
        jobs=2,
        items=100,
        dropped=1,
        unsent_bytes=4096,
    )
    shown = node.scrape()
    assert {dict(key)["source"]: value for key, value in shown["trainwarden_source_up"].items()} == {
        "nvml@n1": 0,
        "host@n1": 1,
        "mounts@n1": 0,
    }
    ages = shown["trainwarden_source_answer_age_seconds"]
    assert {dict(key)["source"]: value for key, value in ages.items()} == {"nvml@n1": 12.5, "mounts@n1": 90}
    for name, value in (("jobs", 2), ("items_total", 100), ("source_failures_total", 2), ("dropped_items_total", 8)):
        assert node.value(f"agent_{name}") == value
    assert node.value("agent_unsent_bytes") == 4096


def test_a_node_has_what_it_has_and_at_most_twenty_series_more(node: Node) -> None:
    rows = [(who, one.name, 1.0) for one in READINGS.values() for who in subjects(one.of, 8)]
    sources = [f"{name}@n1" for name in ("jobs", "nvml", "dcgm", "kernel-log", "infiniband", "host", "pcie", "mounts")]
    node.readings.fares = Fares(
        sources=[SourceState(name=name, word="up", age_s=0) for name in sources], unsent_bytes=0
    )
    node.tell(*rows)
    assert sum(map(len, node.scrape().values())) - len(rows) <= 20


def test_a_source_that_invents_subjects_is_held_to_a_bound(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwarden.app.readings.SERIES_MAX", 50)
    node.tell(*((f"device:GPU-{number}", "gpu_power_watts", 1.0) for number in range(100)))
    assert len(node.scrape()["trainwarden_gpu_power_watts"]) == 50


def test_it_is_served_with_our_own_cpu_and_memory(node: Node) -> None:
    node.tell(("node:n1", "node_load_1m", 0.5))
    listening = serve(node.readings, MetricsConfig(listen="127.0.0.1:0"))
    address, close = listening.address, listening.close
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        assert 'trainwarden_node_load_1m{node="n1"} 0.5' in text
        assert "process_resident_memory_bytes" in text
        with pytest.raises(ConfigError, match="cannot listen on"):
            serve(node.readings, MetricsConfig(listen=address))
    finally:
        close()


def test_the_page_of_signals_says_what_the_tables_say() -> None:
    root = Path(__file__).resolve().parents[2]
    spec = spec_from_file_location("signals_page", root / ".ci" / "signals.py")
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (root / "docs" / "signals.md").read_text() == made.page(), "run `make docs`"
