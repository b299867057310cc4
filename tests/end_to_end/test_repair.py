"""A repair on a real torchrun job that goes on through three deaths of its supervisor, watched by a real Prometheus.

The job runs once; the tests of this file ask what is left of it, and what Prometheus saw meanwhile.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pytest
from tests.end_to_end.running import TORCHRUN, TRAIN, Running
from tests.end_to_end.servers import ALERTMANAGER, PROMETHEUS, Alertmanager, Prometheus, needs

from trainwarden.core.model import Event
from trainwarden.dashboards.queries import expressions

pytestmark = pytest.mark.timeout(300)

STEPS = "80"
CONFIG = """
global: {{scrape_interval: 500ms}}
scrape_configs:
  - job_name: trainwarden
    file_sd_configs: [{{files: ["{state}/_targets/*.json"], refresh_interval: 1s}}]
"""
ALERTMANAGER_CONFIG = """
route: {receiver: nobody}
receivers: [{name: nobody}]
"""
SETTINGS = """
metrics: {{listen: "127.0.0.1:0", expected_step: 150ms, checkpoint_interval: 5s}}
alerts: {{alertmanager: {{urls: [{urls}]}}}}
"""
SEEN = """
count_over_time(trainwarden_heartbeat_timestamp_seconds[20s]) > 2
and on (instance) trainwarden_plans_total{result="reached"} > 0
"""
DASHBOARD = files("trainwarden.dashboards") / "json" / "job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """The run, what both trainings wrote when they were through, and the Prometheus that watched."""

    running: Running
    loss: str
    undisturbed_loss: str
    prometheus: Prometheus | None
    alerts: Sequence[Mapping[str, Any]]
    """What fired in Alertmanager while the plan was carried out."""
    at_s: float
    """A moment after the repair, while the job still ran: what Prometheus is asked about."""


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repaired]:
    folder = tmp_path_factory.mktemp("repaired")
    (folder / "prometheus.yml").write_text(CONFIG.format(state=folder / "killed" / "state"))
    prometheus = Prometheus(folder, folder / "prometheus.yml") if shutil.which(PROMETHEUS) else None
    (folder / "alertmanager.yml").write_text(ALERTMANAGER_CONFIG)
    alertmanager = Alertmanager(folder, folder / "alertmanager.yml") if shutil.which(ALERTMANAGER) else None
    settings = SETTINGS.format(urls="" if alertmanager is None else alertmanager.url)
    training = [*TORCHRUN, TRAIN, "--steps", STEPS, "--checkpoint-every", "20", "--out"]
    out = {job: folder / f"{job}.json" for job in ("undisturbed", "killed")}
    undisturbed = Running(folder / "undisturbed", "undisturbed", *training, str(out["undisturbed"]))
    running = Running(folder / "killed", "killed", *training, str(out["killed"]), policy="demo", config=settings)
    try:
        kill_a_rank_and_three_supervisors(running)
        alerts = [] if alertmanager is None else alertmanager.alerts()
        at_s = running.until("an end of the plan in Prometheus", lambda: plan_seen(running, prometheus), 90)
        assert undisturbed.wait(90) == 0, undisturbed.story()
        assert running.wait(90) == 0, running.story()
        losses = {job: str(json.loads(file.read_text())["hex"]) for job, file in out.items()}
        yield Repaired(
            running=running,
            loss=losses["killed"],
            undisturbed_loss=losses["undisturbed"],
            prometheus=prometheus,
            alerts=alerts,
            at_s=at_s,
        )
    finally:
        running.end()
        undisturbed.end()
        for server in (prometheus, alertmanager):
            if server is not None:
                server.end()


def kill_a_rank_and_three_supervisors(running: Running) -> None:
    """A fault, and the supervisor dies at three points of its repair."""
    running.until("a published checkpoint", running.published)
    running.until("step 30", lambda: running.step() >= 30)
    os.kill(running.rank(3).pid, signal.SIGSTOP)  # torchrun waits 30 s for this one, so `stopped` is left to the plan
    os.kill(running.rank(2).pid, signal.SIGKILL)
    running.until("a stop by a plan", lambda: stopping(running), 60)
    killed_and_started_again(running)
    running.until("a second attempt", lambda: running.attempts() == [1, 2], 40)
    killed_and_started_again(running)
    running.until("steps of the second attempt", lambda: running.step(2) > 0, 40)
    assert running.outcomes(-1) == []
    killed_and_started_again(running)


def killed_and_started_again(running: Running) -> None:
    """The supervisor dies where it stands; another takes up its work."""
    running.supervisor.kill()
    running.supervisor.wait()
    running.supervisor = running.start()


def stopping(running: Running) -> bool:
    """Whether a plan has said that it stops the attempt."""
    events = [one for one in running.journal() if isinstance(one, Event) and one.kind == "attempt.stopping"]
    return any(str(one.data["by"]).startswith("plan") for one in events)


def plan_seen(running: Running, prometheus: Prometheus | None) -> float | None:
    """When Prometheus, if there is one, has looked a few times at the supervisor that knows of the plan's end."""
    known = running.outcomes(-1) and (prometheus is None or prometheus.query(SEEN))
    return time.time() if known else None


@pytest.mark.torchrun(launches=3)
def test_a_plan_goes_on_through_three_deaths_of_its_supervisor(repaired: Repaired) -> None:
    running = repaired.running
    assert running.attempts() == [1, 2]
    (end,) = running.outcomes(-1)
    assert end.result == "reached", end
    assert str(running.told(2)["checkpoint"]).split("/")[-1].startswith("step-20-"), running.told(2)
    assert repaired.loss == repaired.undisturbed_loss
    assert running.err.read_text().count("watching again") == 3


@needs(PROMETHEUS)
def test_every_panel_of_the_dashboard_has_data(repaired: Repaired) -> None:
    assert repaired.prometheus is not None
    asked = expressions(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    assert len(asked) > 20
    empty = [(title, expr) for title, expr in asked if not repaired.prometheus.query(expr, repaired.at_s)]
    assert not empty, "\n".join(f"{title}: {expr}" for title, expr in empty)


@needs(PROMETHEUS)
def test_counters_go_on_where_a_killed_supervisor_left_them(repaired: Repaired) -> None:
    """The effective ratio of a day is made of them."""
    assert repaired.prometheus is not None
    new, repeated = (
        float(repaired.prometheus.query(f'trainwarden_steps_total{{kind="{kind}"}}', repaired.at_s)[0]["value"][1])
        for kind in ("new", "repeated")
    )
    assert repeated >= 5, "steps 21 to 30 were done twice"
    assert new + repeated > 40


@needs(ALERTMANAGER)
def test_alertmanager_was_told_of_one_incident_through_all_of_it(repaired: Repaired) -> None:
    """By three supervisors, each of which was killed."""
    (alert,) = repaired.alerts
    incident = repaired.running.notices("process.killed", "opened")[0]["incident"]["id"]
    labels = {"alertname": "TrainwardenIncident", "incident": incident, "job_id": "killed", "severity": "error"}
    assert alert["labels"] == labels
    assert alert["annotations"]["culprit"] == "rank:2"
