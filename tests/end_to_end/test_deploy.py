"""The configuration of docker-compose.yml in real Prometheus and Alertmanager processes. What is changed for the test:
who is scraped (files beside the configuration, as on any site) and the address of the receiver."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from tests.end_to_end.servers import ALERTMANAGER, PROMETHEUS, Alertmanager, Prometheus, needs

from trainwarden.alerts.rules import load_rules, rules_text

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
RECEIVER = "http://receiver:9099"
PATIENCE_S = 45.0
"""A scrape, an evaluation and a message take 5 s, 5 s and 1 s at most; the machine may be busy."""
TOOLS = needs("promtool", "amtool")
SERVERS = needs(PROMETHEUS, ALERTMANAGER)


def lay_out(folder: Path, supervisor: str, alertmanager: str) -> Path:
    """prometheus.yml as it is in the container: rules and targets beside it."""
    shutil.copytree(DEPLOY / "prometheus", folder, ignore=shutil.ignore_patterns("targets"))
    (folder / "rules").mkdir()
    for name, text in rules_text().items():
        (folder / "rules" / name).write_text(text)
    (folder / "targets").mkdir()
    for name, target in (("trainwarden-test", supervisor), ("alertmanager", alertmanager)):
        (folder / "targets" / f"{name}.json").write_text(json.dumps([{"targets": [target]}]))
    return folder / "prometheus.yml"


def tool(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@TOOLS
def test_the_tools_take_both_configurations(tmp_path: Path) -> None:
    said = tool("promtool", "check", "config", str(lay_out(tmp_path / "prometheus", "127.0.0.1:1", "127.0.0.1:2")))
    assert f"{len(rules_text())} rule files found" in said
    assert "WARNING" not in said
    tool("amtool", "check-config", str(DEPLOY / "alertmanager" / "alertmanager.yml"))


@TOOLS
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        pytest.param(("alertname=TrainwardenDeadMan", "severity=info"), "dead-man", id="dead man"),
        pytest.param(("alertname=X", "severity=critical"), "pager", id="critical"),
        pytest.param(("alertname=X", "severity=error"), "pager", id="error"),
        pytest.param(("alertname=X", "severity=warning"), "working-hours", id="warning"),
        pytest.param(("alertname=X", "severity=info"), "record", id="info"),
        pytest.param(("alertname=X",), "pager", id="what nobody foresaw is a page"),
    ],
)
def test_a_severity_goes_to_its_receiver(labels: Sequence[str], receiver: str) -> None:
    config = f"--config.file={DEPLOY / 'alertmanager' / 'alertmanager.yml'}"
    assert tool("amtool", "config", "routes", "test", config, *labels).strip() == receiver


class Job:
    """A supervisor's /metrics, by hand: a young job that is seen, and has computed a NaN."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        gauge = Gauge("trainwarden_heartbeat_timestamp_seconds", "-", ["job_id"], registry=registry)
        gauge.labels("big").set_function(time.time)
        Gauge("trainwarden_job_start_timestamp_seconds", "-", ["job_id"], registry=registry).labels("big").set(
            time.time()
        )
        Gauge("trainwarden_source_up", "-", ["job_id", "source"], registry=registry).labels("big", "rings@n1").set(1)
        steps = Counter("trainwarden_nonfinite_steps", "-", ["job_id", "signal"], registry=registry)
        steps.labels("big", "loss").inc()
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def end(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """All of it, started; `told` is what the stand-in for the pager has printed so far."""

    prometheus: Prometheus
    alertmanager: Alertmanager
    log: Path

    @property
    def told(self) -> list[str]:
        return [line.split(maxsplit=1)[1] for line in self.log.read_text().splitlines()]


def until(what: Callable[[], bool], story: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end_s, story()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("deploy")
    log = folder / "receiver.log"
    with ExitStack() as stack:
        out = stack.enter_context(log.open("wb"))
        script = [sys.executable, str(DEPLOY / "alertmanager" / "receiver.py"), "127.0.0.1:0"]
        receiver = subprocess.Popen(script, stdout=out, stderr=out)
        stack.callback(receiver.wait)
        stack.callback(receiver.kill)
        until(lambda: "listening on" in log.read_text(), log.read_text)
        (address,) = re.findall(r"listening on (\S+)", log.read_text())
        config = folder / "alertmanager.yml"
        text = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text()
        config.write_text(text.replace(RECEIVER, f"http://{address}"))
        alertmanager = Alertmanager(folder, config)
        stack.callback(alertmanager.end)
        job = Job()
        stack.callback(job.end)
        place = alertmanager.url.removeprefix("http://")
        prometheus = Prometheus(folder, lay_out(folder / "prometheus", job.address, place))
        stack.callback(prometheus.end)
        yield Running(prometheus=prometheus, alertmanager=alertmanager, log=log)


def post(alertmanager: Alertmanager, alerts: list[dict[str, str]]) -> None:
    """Alerts with these labels, firing from now on."""
    body = json.dumps([{"labels": labels, "startsAt": datetime.now(UTC).isoformat()} for labels in alerts])
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{alertmanager.url}/api/v2/alerts", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=10):
        pass


SILENCED = [
    pytest.param("TrainwardenIncident-error", "TrainwardenIncidentOpen-error", True, id="the better page of the same"),
    pytest.param("TrainwardenIncident-warning", "TrainwardenIncidentOpen-error", False, id="a worse one has not come"),
    pytest.param("TrainwardenIncident-error", "TrainwardenJobStalled-error", True, id="why it stands"),
    pytest.param("TrainwardenIncidentOpen-error", "TrainwardenJobStalled-error", True, id="by the rule as well"),
    pytest.param("TrainwardenIncident-warning", "TrainwardenJobStalled-error", False, id="not by a slow rank"),
    pytest.param("TrainwardenIncident-critical", "TrainwardenNonFiniteLoss-critical", True, id="the NaN is known"),
    pytest.param("TrainwardenIncident-error", "TrainwardenNonFiniteLoss-critical", False, id="a NaN beside a death"),
    pytest.param("TrainwardenIncident-error", "TrainwardenCheckpointOld-warning", True, id="a hang saves nothing"),
    pytest.param("TrainwardenIncident-error", "TrainwardenCheckpointOld-critical", False, id="but not for ever"),
    pytest.param("TrainwardenCheckpointOld-critical", "TrainwardenCheckpointOld-warning", True, id="the louder one"),
    pytest.param("TrainwardenIncident-warning", "TrainwardenStepTimeHigh-warning", True, id="the slow rank is known"),
    pytest.param("TrainwardenIncident-critical", "TrainwardenNoProgress-error", False, id="repairs that do not help"),
    pytest.param("TrainwardenIncident-critical", "TrainwardenJournalUnwritable-critical", False, id="we are not well"),
]


@SERVERS
@pytest.mark.parametrize(("source", "target", "silenced"), SILENCED)
def test_one_trouble_is_one_page(
    running: Running, request: pytest.FixtureRequest, source: str, target: str, silenced: bool
) -> None:
    def labels(alert: str, job: str) -> dict[str, str]:
        name, severity = alert.split("-")
        return {"alertname": name, "severity": severity, "job_id": job}

    job = request.node.callspec.id
    beside = f"not {job}"
    post(running.alertmanager, [labels(source, job), labels(target, job), labels(target, beside)])

    def state(of: str) -> str:
        held = running.alertmanager.alerts()
        (found,) = [one["status"]["state"] for one in held if one["labels"] == labels(target, of)] or ["not there"]
        return str(found)

    until(lambda: state(job) in ("active", "suppressed"), running.alertmanager.story)
    if silenced:
        until(lambda: state(job) == "suppressed", running.alertmanager.story)
    assert (state(job), state(beside)) == ("suppressed" if silenced else "active", "active")


@SERVERS
def test_a_nan_reaches_the_pager_and_the_dead_man_his_watcher(running: Running) -> None:
    """From a real scrape to what a person reads."""

    def lines(*words: str) -> set[str]:
        return {line for line in running.told if set(words) <= set(line.split())}

    wanted = ("pager", "firing", "TrainwardenNonFiniteLoss", "job_id=big"), ("dead-man", "firing", "TrainwardenDeadMan")
    until(lambda: all(lines(*words) for words in wanted), lambda: (running.told, running.prometheus.story()))
    (page,) = lines(*wanted[0])
    assert " ".join(page.split()).startswith(
        "pager firing critical TrainwardenNonFiniteLoss job_id=big signal=loss | job big computes NaN or infinity | "
    )
    assert page.endswith("about 1. | docs/runbooks/loss-nonfinite.md")
    assert lines("TrainwardenDeadMan") == lines("TrainwardenDeadMan", "dead-man"), "nobody else is bothered by it"


@SERVERS
def test_prometheus_evaluates_every_rule_without_a_complaint(running: Running) -> None:
    groups = running.prometheus.get("/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(load_rules())
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")] == []
    assert {rule["state"] for rule in rules if rule["name"] == "TrainwardenDown"} == {"inactive"}
