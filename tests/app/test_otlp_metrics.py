"""Metrics on the wire of OTLP: what a scrape shows, no more and no less, to receivers good and bad."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from prometheus_client import CollectorRegistry, generate_latest
from tests.app.metrics_world import Shown, everything
from tests.app.otlp_world import Key, Point, points, resource, scraped
from tests.app.served import Node, tokens_file, until
from tests.app.test_otlp import absent, endless, silent
from tests.app.test_readings import Node as Hardware
from tests.detectors.world import START_NS
from tests.fakes.web import Web, serving

from trainwarden.app import otlp_metrics
from trainwarden.app.endpoint import MetricsConfig, open_push
from trainwarden.app.otlp import resource_of
from trainwarden.app.otlp_metrics import Push, Starts, Told, metrics_data
from trainwarden.app.readings import AGENT_METRICS
from trainwarden.app.serving import SERVER_METRICS, ServerConfig, Serving
from trainwarden.app.wiring import Settings
from trainwarden.core.errors import ConfigError
from trainwarden.core.readings import READINGS
from trainwarden.core.signals import METRICS, ucum


@pytest.fixture(autouse=True)
def no_sdk_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine; and the level that is given to the SDK's log does not stay."""
    for name in ("ENDPOINT", "METRICS_ENDPOINT", "HEADERS", "METRICS_HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "level", logging.NOTSET)


def opened(url: str, said: list[str] | None = None, **settings: Any) -> Push:
    push = open_push(MetricsConfig(otlp_endpoint=url, **settings), "n1/job", ([] if said is None else said).append)
    assert push is not None
    return push


def sent(web: Web, told: Told) -> Mapping[Key, Point]:
    """What a receiver has after one sending of these."""
    push = opened(web.url)
    push.start(lambda: told)
    push.end()
    push.close()
    assert push.counts == {"taken": 1, "failed": 0}
    return points(web.asked[-1])


# the same as a scrape


def test_a_receiver_has_every_family_value_and_label_of_a_scrape(tmp_path: Path) -> None:
    shown = everything(Shown(tmp_path))
    with serving() as web:
        found = sent(web, [(shown.metrics.since_ns, shown.metrics.collect())])
        (asked,) = web.asked
    page = scraped(generate_latest(shown.registry).decode())
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name, _ in page} == set(
        METRICS
    )
    assert {key: point.value for key, point in found.items() if not key[0].startswith("process_")} == page
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= {name for name, _ in found}
    told = resource(asked)
    assert (told["service.name"], told["service.instance.id"]) == ("trainwarden", "n1/job")


def test_all_jobs_of_a_server_are_one_resource_and_each_family_comes_once(tmp_path: Path) -> None:
    serving_ = Serving(
        ServerConfig(host="127.0.0.1", port=0, state=tmp_path / "s", tokens=tokens_file(tmp_path)), print
    )
    serving_.jobs.on_open = serving_._measure
    registry = CollectorRegistry()
    registry.register(serving_)
    for job in ("a", "b"):
        node = Node("n0", job, [0], 1)
        serving_.jobs.take("life", [*node.hellos(), *node.steps(1, 5)], time.time_ns(), of_node=True)
    serving_.jobs.tick(time.time_ns())
    with serving() as web:
        found = sent(web, serving_.told())
    page = scraped(generate_latest(registry).decode())
    serving_.jobs.close()
    assert {key: point.value for key, point in found.items() if not key[0].startswith("process_")} == page
    assert {dict(labels).get("job_id") for _, labels in found} == {"a", "b", None}


def test_counters_count_since_the_job_began_whoever_watches_it(tmp_path: Path) -> None:
    shown = everything(Shown(tmp_path))
    with serving() as web:
        before = sent(web, [(shown.metrics.since_ns, shown.metrics.collect())])
        shown.begin()  # the next supervisor
        after = sent(web, [(shown.metrics.since_ns, shown.metrics.collect())])
    before = {key: point for key, point in before.items() if not key[0].startswith("process_")}
    counters = [key for key in before if key[0].endswith(("_total", "_bucket", "_sum", "_count"))]
    assert len(counters) > 50
    assert {before[key].start_ns for key in counters} == {START_NS}
    assert [key for key in counters if after[key].start_ns != START_NS or after[key].value < before[key].value] == []
    assert {one.start_ns for key, one in before.items() if key not in counters} == {0}


def test_a_counter_of_hardware_counts_since_it_was_first_seen_or_fell() -> None:
    hardware, starts = Hardware(), Starts()
    seen = []
    for value, replays in ((100.0, 7.0), (130.0, 7.0), (4.0, 7.0), (9.0, 8.0)):
        hardware.now_ns += 10**9
        hardware.tell(("device:G", "gpu_energy_joules", value), ("device:G", "gpu_pcie_replays", replays))
        (data,) = metrics_data([(None, hardware.readings.collect())], resource_of(), hardware.now_ns, starts)
        found = {one.name: one.data.data_points[0] for one in data.resource_metrics[0].scope_metrics[0].metrics}
        energy, other = found["trainwarden_gpu_energy_joules_total"], found["trainwarden_gpu_pcie_replays_total"]
        seen.append((energy.start_time_unix_nano, other.start_time_unix_nano))
    first, second = hardware.now_ns - 3 * 10**9, hardware.now_ns - 2 * 10**9
    assert seen == [(first, first), (first, first), (second, first), (second, first)]
    starts.forget(hardware.now_ns + 1)
    assert starts._seen == {}


def test_units_are_those_of_the_names_and_only_a_ratio_has_the_unit_one() -> None:
    tables = [*METRICS, *SERVER_METRICS, *AGENT_METRICS, *(one.metric for one in READINGS.values())]
    assert [name for name in tables if ucum(name) == "1" and not name.endswith("_ratio")] == []
    words = {"seconds": "s", "bytes": "By", "celsius": "Cel", "watts": "W", "joules": "J", "hertz": "Hz"}
    for one in READINGS.values():
        expected = {**words, "bytes/s": "By/s", "ratio": "1", "lanes": "{lanes}", "ticks": "{ticks}"}.get(one.unit)
        assert expected is None or ucum(one.metric) == expected, one.name
    assert ucum("trainwarden_steps_total") == "{steps}"
    assert ucum("trainwarden_build_info") == ""


def test_a_large_page_goes_in_several_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_metrics, "POINTS_A_REQUEST", 50)
    shown = everything(Shown(tmp_path))
    with serving() as web:
        sent(web, [(shown.metrics.since_ns, shown.metrics.collect())])
        parts = [points(asked) for asked in web.asked]
    assert len(parts) > 2
    together = {key for part in parts for key in part if not key[0].startswith("process_")}
    assert together == set(scraped(generate_latest(shown.registry).decode()))


# when, and to whom


def test_it_is_sent_every_period_and_once_more_at_the_end(tmp_path: Path) -> None:
    shown, said = everything(Shown(tmp_path)), list[str]()
    with serving() as web:
        push = opened(web.url, said)
        push._period_s = 0.05
        push.start(lambda: [(shown.metrics.since_ns, shown.metrics.collect())])
        until("three sendings", lambda: len(web.asked) >= 3)
        shown.turn(plans_running=7)
        push.end()
        asked = len(web.asked)
        shown.turn(plans_running=9)  # it is nobody's business any more
        push.close()
        values = [one.value for key, one in points(web.asked[-1]).items() if key[0] == "trainwarden_plans_running"]
        assert values == [7]
        assert len(web.asked) <= asked + 2
    assert said == []
    times = [next(iter(points(one).values())).time_ns for one in web.asked]
    assert sorted(times) == times


@pytest.mark.parametrize("receiver", [silent, endless, absent])
def test_a_receiver_that_does_not_answer_delays_nobody_and_is_counted(receiver: Any) -> None:
    said = list[str]()
    with receiver() as url:
        push = opened(url, said, otlp_deadline=timedelta(milliseconds=300))
        push._period_s = 0.01
        began_s = time.monotonic()
        push.start(list)
        assert time.monotonic() - began_s < 0.3, "it waits for nobody"
        until("two failures", lambda: push.counts["failed"] >= 2)
        began_s = time.monotonic()
        push.end()
        assert time.monotonic() - began_s < 0.3, "the last values are taken at once, whatever hangs"
        push.close()
        assert time.monotonic() - began_s < 3
    assert push.counts["taken"] == 0
    assert len(said) == 1, "once, however often"
    assert "the OTLP receiver" in said[0]


def test_a_receiver_that_comes_back_is_told_and_has_everything() -> None:
    said = list[str]()
    with serving() as web:
        web.status = 400  # not tried again by the exporter
        push = opened(web.url, said)
        push._period_s = 0.02
        push.start(list)
        until("a failure", lambda: push.counts["failed"])
        web.status = 200
        until("a success", lambda: push.counts["taken"])
        push.close()
    assert [text.partition(":")[0] for text in said] == [
        "metrics to the OTLP receiver",
        "the OTLP receiver takes metrics",
    ]


def test_a_fault_of_what_is_asked_ends_nothing() -> None:
    said = list[str]()

    class Taking(MetricExporter):
        def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: object) -> MetricExportResult:
            return MetricExportResult.SUCCESS

        def force_flush(self, timeout_millis: float = 0) -> bool:
            return True

        def shutdown(self, timeout_millis: float = 0, **_: object) -> None:
            return None

    answers: Iterator[Told] = iter(())
    push = Push(Taking(), "x", said.append, period_s=0.01, deadline_s=5)
    push.start(lambda: next(answers))
    until("a fault", lambda: push.counts["failed"])
    answers = iter([[] for _ in range(1000)])
    until("a success", lambda: push.counts["taken"])
    push.end()
    push.close()
    assert "our own fault: StopIteration" in said[0]


def test_an_end_before_the_start_is_one(tmp_path: Path) -> None:
    push = opened("http://127.0.0.1:1")
    push.end()
    push.close()
    assert sum(push.counts.values()) == 0


# settings


def test_the_environment_alone_switches_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    assert open_push(MetricsConfig(), "x", print) is None
    assert open_push(MetricsConfig(otlp_endpoint="env"), "x", print) is not None


@contextmanager
def headers(folder: Path, text: str) -> Iterator[str]:
    file = folder / "headers"
    file.write_text(text)
    yield f"file:{file}"


def test_headers_come_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-both=environment,x-one=1")
    with serving() as web, headers(tmp_path, "Authorization=Basic dXNlcjpwYXNz==\nx-both=file\n") as where:
        push = opened(web.url, otlp_headers=where)
        push.start(list)
        push.end()
        push.close()
        told = {name.lower(): value for name, value in web.asked[0].headers.items()}
    assert (told["authorization"], told["x-both"], told["x-one"]) == ("Basic dXNlcjpwYXNz==", "file", "1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"otlp_endpoint": "c:4317"}, "metrics.otlp_endpoint: need https://..., http://... or env, got 'c:4317'"),
        ({"otlp_period": timedelta(0)}, "metrics.otlp_period: need 1s to 1h, got 0s"),
        ({"otlp_deadline": timedelta(hours=1)}, "metrics.otlp_deadline: need 100ms to 1m, got 3600s"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        MetricsConfig(**settings)
    assert str(error.value) == message


def test_settings_that_name_what_is_not_there_are_refused_without_showing_it(tmp_path: Path) -> None:
    names = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT"
    with pytest.raises(ConfigError, match=f"metrics.otlp_endpoint: is env, but {names} are not set"):
        open_push(MetricsConfig(otlp_endpoint="env"), "x", print)
    with pytest.raises(ConfigError, match=r"metrics\.otlp_headers: need env:NAME or file:/PATH, got 12 characters"):
        open_push(MetricsConfig(otlp_endpoint="http://c", otlp_headers="token=secret"), "x", print)
    with headers(tmp_path, "secret") as where, pytest.raises(ConfigError, match="need NAME=VALUE") as error:
        open_push(MetricsConfig(otlp_endpoint="http://c", otlp_headers=where), "x", print)
    assert "secret" not in str(error.value)


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trainwarden.app.otlp_metrics", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainwarden\[server\]'"):
        open_push(MetricsConfig(otlp_endpoint="http://127.0.0.1:1"), "x", print)


def test_a_server_that_is_to_send_refuses_wrong_settings_at_its_start(tmp_path: Path) -> None:
    settings = Settings(metrics=MetricsConfig(otlp_endpoint="env"))
    config = ServerConfig(host="127.0.0.1", port=0, state=tmp_path, tokens=tokens_file(tmp_path), settings=settings)
    with pytest.raises(ConfigError, match=r"metrics\.otlp_endpoint"):
        Serving(config, print)
