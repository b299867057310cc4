"""Traces on the wire: to a receiver, to one that is slow, away or hung, and by which settings."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.app.story_world import KILLED, killed, world
from tests.fakes.web import serving
from tests.remediation.plan_world import JOB, at

from trainwarden.app.otlp import Traces
from trainwarden.app.story import IncidentStory
from trainwarden.app.traces import TracesConfig, open_traces
from trainwarden.core.errors import ConfigError

END_S = 100.0


@pytest.fixture
def repaired(tmp_path: Path) -> IncidentStory:
    with world(tmp_path) as one:
        one.play(6, killed())
        one.repair(f"{KILLED}/plan-1", (7, "reached"), (9, "reached"), (12, "reached"))
        return one.told


@pytest.fixture
def no_sdk_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine; and the level that otlp.py gives to the SDK's log does not stay."""
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "level", logging.NOTSET)


def opened(**settings: Any) -> Traces:
    traces = open_traces(TracesConfig(**settings), JOB)
    assert traces is not None
    return traces


@pytest.mark.usefixtures("no_sdk_settings")
@pytest.mark.parametrize("by", ["settings", "environment"])
def test_an_otlp_receiver_gets_the_tree(repaired: IncidentStory, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with serving() as web:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", web.url if by == "environment" else "http://elsewhere:1")
        traces = opened(otlp_endpoint="env" if by == "environment" else web.url)
        traces.export(repaired, at(END_S))
        assert traces.close() == ""
        (asked,) = web.asked
    assert (asked.path, asked.headers["X-Token"]) == ("/v1/traces", "secret")
    (resource,) = ExportTraceServiceRequest.FromString(asked.body).resource_spans
    assert "trainwarden" in [
        one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
    ]
    (scope,) = resource.scope_spans
    spans = scope.spans
    name_of = {span.span_id: span.name for span in spans}
    assert [(span.name, name_of.get(span.parent_span_id)) for span in spans] == [
        ("incident process.killed", None),
        ("detect", "incident process.killed"),
        ("plan process.killed", "incident process.killed"),
        *((name, "plan process.killed") for name in ("decide", "rung stopped", "rung running", "rung verified")),
    ]
    assert (len({span.trace_id for span in spans}), len({span.span_id for span in spans})) == (1, 7)
    assert (spans[0].start_time_unix_nano, spans[0].end_time_unix_nano) == (at(5), at(12))


@contextmanager
def silent() -> Iterator[str]:
    """Takes connections (the kernel does) and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def endless() -> Iterator[str]:
    """Answers with one byte now and then: a timeout of each single read never comes."""
    over = threading.Event()

    def answer() -> None:
        with server.accept()[0] as client:
            client.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while not over.wait(0.02):
                client.sendall(b"y")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join()


@contextmanager
def absent() -> Iterator[str]:
    """Nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@pytest.mark.usefixtures("no_sdk_settings")
@pytest.mark.parametrize("receiver", [silent, endless, absent])
def test_a_receiver_that_does_not_answer_holds_up_the_end_only_for_its_deadline(
    repaired: IncidentStory, receiver: Any
) -> None:
    with receiver() as url:
        traces = opened(otlp_endpoint=url, deadline=timedelta(milliseconds=500))
        began_s = time.monotonic()
        traces.export(repaired, at(END_S))
        assert time.monotonic() - began_s < 0.5, "export waits for nobody"
        assert traces.close() == "7 of 7 spans were not taken by the receiver"
        assert time.monotonic() - began_s < 5, "well below the 30 s of the SDK, on a loaded machine too"


@pytest.mark.usefixtures("no_sdk_settings")
def test_a_receiver_that_refuses_is_told(repaired: IncidentStory) -> None:
    with serving() as web:
        web.status = 404
        traces = opened(otlp_endpoint=web.url)
        traces.export(repaired, at(END_S))
        assert traces.close() == "7 of 7 spans were not taken by the receiver"


# settings


@pytest.mark.usefixtures("no_sdk_settings")
def test_nothing_is_exported_unless_the_settings_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is the training's too."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert open_traces(TracesConfig(), JOB) is None


@pytest.mark.usefixtures("no_sdk_settings")
@pytest.mark.parametrize(
    ("said", "environment", "url"),
    [
        pytest.param("http://c:4318", {}, "http://c:4318/v1/traces", id="a base"),
        pytest.param("http://c:4318/", {}, "http://c:4318/v1/traces", id="a base with a slash"),
        pytest.param("https://c/otlp/v1/traces", {}, "https://c/otlp/v1/traces", id="in full"),
        pytest.param("env", {"ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces", id="the environment's base"),
        pytest.param("env", {"ENDPOINT": "http://c", "TRACES_ENDPOINT": "http://d/x"}, "http://d/x", id="for traces"),
    ],
)
def test_where_spans_go(said: str, environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert TracesConfig(otlp_endpoint=said).url() == url


@pytest.mark.usefixtures("no_sdk_settings")
def test_the_environment_is_asked_and_says_nothing() -> None:
    with pytest.raises(ConfigError, match=r"is env, but OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and .* are not set"):
        open_traces(TracesConfig(otlp_endpoint="env"), JOB)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"otlp_endpoint": "collector:4317"},
            "traces.otlp_endpoint: need https://..., http://... or env, got 'collector:4317'",
        ),
        ({"deadline": timedelta(0)}, "traces.deadline: need 100ms to 1m, got 0s"),
        ({"deadline": timedelta(hours=1)}, "traces.deadline: need 100ms to 1m, got 3600s"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TracesConfig(**settings)
    assert str(error.value) == message


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trainwarden.app.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainwarden\[server\]'"):
        open_traces(TracesConfig(otlp_endpoint="http://127.0.0.1:1"), JOB)


def test_the_process_s_own_tracing_is_not_touched(repaired: IncidentStory) -> None:
    traces = Traces(InMemorySpanExporter(), JOB, deadline_s=10)
    traces.export(repaired, at(END_S))
    assert traces.close() == ""
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"
