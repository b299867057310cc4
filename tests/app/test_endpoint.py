"""/metrics as Prometheus gets it: over HTTP, found by a file, of a supervisor that runs; none unless it is wanted."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.app.metrics_world import Scrape, Shown, asked, everything
from tests.app.otlp_world import points
from tests.detectors.world import JOB, START_NS
from tests.end_to_end.running import Running
from tests.fakes.web import Web, serving
from tests.remediation.plan_world import incident

from trainwarden.app.endpoint import TARGETS, Endpoint, MetricsConfig, open_endpoint
from trainwarden.app.folders import JobFolder
from trainwarden.app.wiring import load_settings
from trainwarden.core.errors import ConfigError
from trainwarden.core.signals import METRICS


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def opened(state: Path, listen: str, said: list[str]) -> Endpoint | None:
    return open_endpoint(
        MetricsConfig(listen=listen),
        JobFolder.make(state, JOB),
        started_ns=START_NS,
        fresh=timedelta(seconds=1),
        sources=["processes@n1"],
        peers=dict,
        say=said.append,
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Shown]:
    """The same over HTTP, at `address`."""
    one, endpoint = Shown(tmp_path), opened(tmp_path, "127.0.0.1:0", [])
    assert endpoint is not None
    one.metrics, one.address = endpoint.metrics, endpoint.address
    yield one
    endpoint.close()


def test_it_is_served_with_what_the_process_costs(served: Shown) -> None:
    scrape = asked(everything(served).address)
    assert scrape.names() == set(METRICS) - {"trainwarden_alertmanager_peer_up"}
    assert scrape.values["process_cpu_seconds_total", frozenset()] > 0


def test_a_port_that_is_taken_is_said_and_that_is_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        said = list[str]()
        assert opened(tmp_path, listen, said) is None
    assert said == [f"no metrics: cannot listen on {listen}: Address already in use; the run goes on without them"]
    assert not (tmp_path / TARGETS).exists()


def test_prometheus_finds_it_by_a_file_as_long_as_it_is_there(tmp_path: Path) -> None:
    said, file = list[str](), tmp_path / TARGETS / f"{JOB}.json"
    endpoint = opened(tmp_path, "0.0.0.0:0", said)
    assert endpoint is not None
    port = endpoint.address.rpartition(":")[2]
    assert said == [f"metrics are at http://0.0.0.0:{port}/metrics"]
    assert json.loads(file.read_text()) == [{"targets": [f"127.0.0.1:{port}"], "labels": {}}]
    endpoint.close()
    assert not file.exists()
    socket.create_server(("127.0.0.1", int(port))).close()  # nobody listens there any more


def test_the_file_of_another_supervisor_stays(tmp_path: Path) -> None:
    endpoint, file = opened(tmp_path, "127.0.0.1:0", []), tmp_path / TARGETS / f"{JOB}.json"
    assert endpoint is not None
    file.write_text("it took the job over")
    endpoint.close()
    assert file.read_text() == "it took the job over"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        pytest.param("listen: 9400", "metrics.listen: needs text, got 9400", id="a number"),
        pytest.param('listen: "9400"', "metrics.listen: need HOST:PORT", id="no host"),
        pytest.param("listen: 127.0.0.1:99999", "metrics.listen: need HOST:PORT", id="no port"),
        pytest.param("listen: ::1:9400", "metrics.listen: need HOST:PORT", id="no brackets"),
        pytest.param("expected_step: 0s", "metrics.expected_step: need more than 0s, got 0s", id="no time"),
        pytest.param("checkpoint_interval: 0s", "metrics.checkpoint_interval: need more than 0s, got 0s", id="never"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, text: str, refused: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"metrics:\n  {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert str(caught.value).startswith(f"{path}: {refused}")


@pytest.mark.parametrize(
    ("listen", "address"), [("[::1]:0", ("::1", 0)), ("localhost:9400", ("localhost", 9400)), ("0.0.0.0:1", None)]
)
def test_addresses_that_can_be(listen: str, address: tuple[str, int] | None) -> None:
    assert MetricsConfig(listen=listen).address == (address or ("0.0.0.0", 1))


def test_scrapes_and_the_main_loop_do_not_disturb_each_other(served: Shown) -> None:
    over, faults = threading.Event(), list[BaseException]()

    def ask() -> None:
        try:
            while not over.is_set():
                scrape = asked(served.address)
                spent = sum(scrape.rows("job_activity_seconds_total").values())
                assert spent == pytest.approx(scrape.get("job_wall_seconds_total"))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for attempt in range(1, 30):
        served.start(attempt, "plan").take(served.world().hello())
        for step in range(20):
            world = served.world()
            world.poll()
            served.take(world).close(step, step_s=0.5, loss=1.0).turn(plans_running=step)
            served.metrics.opened(incident(f"k{step % 3}"))
    over.set()
    for thread in threads:
        thread.join()
    assert faults == []


def test_without_metrics_their_library_is_not_loaded() -> None:
    code = "import sys, trainwarden.app.cli.run, trainwarden.app.run; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50).stdout
    heavy = {"prometheus_client", "trainwarden.app.metrics", "opentelemetry", "trainwarden.app.otlp_metrics"}
    assert heavy & set(loaded.split()) == set()


LIGHT = (sys.executable, str(Path(__file__).parents[1] / "end_to_end" / "light.py"), "--steps", "2000")


def test_a_run_is_shown_through_a_death_of_its_supervisor(tmp_path: Path) -> None:
    """All of it together: names that only the real parts fill, and counters that go on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = f"127.0.0.1:{port}"
    receiver = contextlib.ExitStack()
    web = receiver.enter_context(serving())
    otlp = f"otlp_endpoint: {web.url}"
    config = f"metrics: {{{otlp}, otlp_period: 1s}}\ntraces: {{{otlp}, steps: 10}}\n"
    running = Running(tmp_path, str(JOB), *LIGHT, "--nan-at", "20", config=config, more=["--metrics", listen])

    def seen(what: str, least: float, **labels: str) -> Scrape:
        def found() -> Scrape | None:
            with contextlib.suppress(OSError):
                scrape = asked(listen)
                value = scrape.get(what, **labels)
                return None if value is None or value < least else scrape
            return None

        scrape = running.until(what, found)
        assert isinstance(scrape, Scrape)
        return scrape

    try:
        seen("checkpoints_total", 1, result="published")
        before = seen("incidents_opened_total", 1, kind="loss.nonfinite")
        running.until("the steps around it, as traces", lambda: any(map(_is_of_an_incident, _spans(web))))
        running.supervisor.kill()  # of what it has not sent yet nobody hears
        running.supervisor.wait()
        running.supervisor = running.start()
        after = seen("steps_total", (before.get("steps_total", kind="new") or 0) + 20, kind="new")
        assert after.get("steps_total", kind="repeated") == 0
        assert after.get("incidents_opened_total", kind="loss.nonfinite") == 1
        assert after.get("nonfinite_steps_total", signal="loss") == 1
        seen("checkpoint_pending_saves", 0)
        assert after.rows("ranks") == {("expected",): 2, ("fresh",): 2}
        assert (after.get("notices_total", channel="jsonl", result="taken") or 0) >= 1
        assert (after.get("rows_total", fate="rows") or 0) > 40
        assert (running.state / TARGETS / f"{JOB}.json").exists()
        fallen = [
            key for key, value in before.values.items() if key[0].endswith("_total") and value > after.values[key]
        ]
        assert [key for key in fallen if key[0].startswith("trainwarden_")] == []
        running.supervisor.send_signal(signal.SIGINT)
        running.until("the first signal", lambda: "once more ends every process" in running.err.read_text())
        running.supervisor.send_signal(signal.SIGINT)
        running.wait()
        assert not (running.state / TARGETS / f"{JOB}.json").exists()
        _a_receiver_of_otlp_had_it_too(web)
    finally:
        running.end()
        receiver.close()


def _a_receiver_of_otlp_had_it_too(web: Web) -> None:
    pages = [points(asked) for asked in web.asked if asked.path == "/v1/metrics"]
    steps = ("trainwarden_steps_total", frozenset({("job_id", str(JOB)), ("kind", "new")}))
    told = [page[steps] for page in pages if steps in page]
    assert len(told) >= 2
    assert len({one.start_ns for one in told}) == 1, "through the death of the supervisor"
    assert [one.value for one in told] == sorted(one.value for one in told)
    spans = _spans(web)
    roots = [span for span in spans if span.name == "step"]
    assert roots, "one of ten steps, and those around the step that was no number"
    assert all(0 < span.end_time_unix_nano - span.start_time_unix_nano < 60 * 10**9 for span in roots)
    assert all(abs(span.end_time_unix_nano / 1e9 - time.time()) < 600 for span in roots)
    assert {"rank 0", "rank 1"} & {span.name for span in spans}
    assert any(map(_is_of_an_incident, spans))


def _spans(web: Web) -> list[Span]:
    bodies = [ExportTraceServiceRequest.FromString(asked.body) for asked in web.asked if asked.path == "/v1/traces"]
    return [span for body in bodies for one in body.resource_spans for scope in one.scope_spans for span in scope.spans]


def _is_of_an_incident(span: Span) -> bool:
    return span.name == "step" and "trainwarden.incident_id" in {pair.key for pair in span.attributes}
