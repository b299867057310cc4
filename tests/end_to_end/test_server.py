"""`trainwarden server` as a process, real agents' sending sides in the test, and faults between them."""

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.metrics_world import metric_of
from tests.app.served import Node, as_sent, notices, tokens_file, until, uplink
from tests.detectors.world import World
from tests.end_to_end.running import CLI
from tests.end_to_end.servers import free_port

from trainwarden.app.serving import address_of, load_server_settings
from trainwarden.app.wiring import Settings, build_server, choose_policy
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, JobId
from trainwarden.core.recording import Recording

NODES = tuple(f"n{number}" for number in range(10))


class Served:
    """One STATE, and one server of it after the other, always at the same address."""

    def __init__(self, folder: Path, ack: str = "1s") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.state, self.log = folder, folder / "state", folder / "log"
        self.address, self._metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._config = folder / "config.yaml"
        # a starved agent is no absent one: no step closes without it
        self._config.write_text(f"server:\n  ingest: {{ack: {ack}}}\nsteps: {{grace_floor: 5s}}\n")
        self._tokens = tokens_file(folder, agents=NODES, jobs=("mine",))
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        line = [CLI, "server", "--listen", self.address, "--state", str(self.state), "--tokens", str(self._tokens)]
        before = self.said().count("listening on")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*line, "--config", str(self._config), "--metrics", self._metrics], stdout=log, stderr=log
            )
        until("server", lambda: self.said().count("listening on") > before or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()
        return self.process

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def scrape(self) -> str:
        host, port = self._metrics.split(":")
        with socket.create_connection((host, int(port)), 10) as asked:
            asked.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: asked.recv(65536), b"")).decode()

    def value(self, series: str) -> float | None:
        """Of one series, as it stands in the text."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.scrape(), re.MULTILINE)
        return None if found is None else float(found[1])

    def steps(self, job: str) -> float | None:
        return self.value(f'trainwarden_steps_total{{job_id="{job}",kind="new"}}')

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture(scope="module")
def quick() -> Iterator[Path]:
    """A folder that waits for no disk, where there is one: 50 journals sync a hundred times a second."""
    root = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=root if os.access(root, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def server(quick: Path) -> Iterator[Served]:
    with Served(quick / "server") as served:
        yield served
        assert served.end() == 0, served.said()
        assert "Traceback" not in served.said()


def in_process(state: Path, items: list[Frame | Event]) -> None:
    """The same items as `trainwarden run` takes them."""
    from trainwarden.app.store import Store  # closed below
    from trainwarden.core.process import identify

    job = JobId("alone")
    own = identify(os.getpid())
    assert own is not None
    store = Store(state / job / "journal.sqlite")
    term = store.claim(job, own.pid, own.start_time, time.time_ns())
    alone = build_server(
        Settings(),
        job=job,
        folder=state / job,
        store=store,
        fence=(job, term),
        policy=choose_policy(None),
        look=lambda look: None,
    )
    alone.ingest(items, time.time_ns())
    alone.tick(time.time_ns() + 10**9)
    store.close()


def test_a_death_opens_the_same_incident_as_it_does_under_run(server: Served, tmp_path: Path) -> None:
    world = World(4, attempt=1).begin().run_steps(2).exit(1, signal=9)
    sending = uplink(server.folder, server.address)
    sending.offer(as_sent(world, "killed"))
    said = until("incident", lambda: notices(server.state, "killed"))
    in_process(tmp_path, as_sent(world, "alone"))
    expected = notices(tmp_path, "alone")
    told = [(one["incident"]["kind"], one["incident"]["culprit"], one["incident"]["tier"]) for one in said]
    assert told == [(one["incident"]["kind"], one["incident"]["culprit"], one["incident"]["tier"]) for one in expected]
    assert told[0][:2] == ("process.killed", "rank:1")
    assert "job killed" in server.said(), "and a person at the terminal is told"
    sending.close()


def test_two_agents_of_one_job_make_whole_steps(server: Served) -> None:
    nodes = [Node("n0", "two", [0, 1], 4), Node("n1", "two", [2, 3], 4)]
    links = [uplink(server.folder, server.address, node.node) for node in nodes]
    for node, link in zip(nodes, links, strict=True):
        link.offer(node.hellos())
    for number in range(1, 31):
        for node, link in zip(nodes, links, strict=True):
            link.offer([node.step(number)])
    until("30 steps", lambda: server.steps("two") == 30)
    assert server.value('trainwarden_ranks{job_id="two",state="expected"}') == 4
    until("all rows", lambda: server.value('trainwarden_rows_total{fate="rows",job_id="two"}') == 120)
    for link in links:
        assert link.flush(10), link.counts
        link.close()


def test_fifty_jobs_go_side_by_side(server: Served) -> None:
    links = {name: uplink(server.folder, server.address, name) for name in NODES}
    jobs = [Node(NODES[number % 10], f"job-{number}", [0, 1], 2) for number in range(50)]
    for job in jobs:
        links[job.node].offer(job.hellos())
    for number in range(1, 11):
        for job in jobs:
            links[job.node].offer([job.step(number)])
    done = re.compile(r'^trainwarden_steps_total\{job_id="job-\d+",kind="new"\} 10.0$', re.MULTILINE)
    until("all steps", lambda: len(done.findall(server.scrape())) == 50)
    for link in links.values():
        assert link.flush(20), link.counts
        link.close()
    until("no link", lambda: server.value("trainwarden_server_links") == 0)
    text = server.scrape()
    assert {metric_of(name) for name in re.findall(r"^(trainwarden_step\w*)\{", text, re.MULTILINE)}
    assert text.count("# TYPE trainwarden_steps_total counter") == 1, "each family once, whatever the number of jobs"


def test_who_has_no_token_is_told_so_and_his_data_go_nowhere(server: Served) -> None:
    (server.folder / "token-wrong").write_text("secret-n0")
    wrong = uplink(server.folder, server.address, "wrong")  # the token is of node n0
    wrong.offer(Node("wrong", "stolen", [0], 1).hellos())
    until("refusal", lambda: "refused" in wrong.failing)
    assert "token is not one of node 'wrong'" in wrong.failing
    assert "secret" not in server.said()
    wrong.close(0)
    other = uplink(server.folder, server.address, "n2")
    other.offer(Node("n3", "stolen", [0], 1).hellos())
    assert other.flush(10)
    other.close()
    assert not (server.state / "stolen").exists()
    assert (server.value('trainwarden_server_refused_total{reason="grant"}') or 0) >= 1


def test_a_server_that_is_killed_goes_on_where_it_was(quick: Path) -> None:
    nodes = [Node("n0", "long", [0, 1], 4), Node("n1", "long", [2, 3], 4)]
    with Served(quick / "killed", ack="300ms") as served:
        train_through_a_kill(served, nodes)
        until("all steps", lambda: served.steps("long") == 400)
        assert not served.value('trainwarden_steps_total{job_id="long",kind="repeated"}')
        assert served.value('trainwarden_rows_total{fate="late",job_id="long"}') == 0
        assert served.end() == 0
    recording = Recording(served.state / "long" / "frames")
    items = list(recording)
    assert recording.refused == []
    seen = {(item.source, int(item.rows["step"][0])) for item in items if isinstance(item, Frame)}
    assert seen == {(f"rings@{node.node}", step) for node in nodes for step in range(1, 401)}, "nothing is lost"
    assert not [item for item in items if isinstance(item, Event) and item.kind == "telemetry.lost"]


def train_through_a_kill(served: Served, nodes: list[Node]) -> None:
    """400 steps; the server is killed at step 200 and started again at step 350: a backlog beyond the window of 64."""
    links = [uplink(served.folder, served.address, node.node) for node in nodes]
    for node, link in zip(nodes, links, strict=True):
        link.offer(node.hellos())
    for number in range(1, 401):
        if number == 150:
            until("half of it", lambda: min(link.counts.acked for link in links) > 50)
        if number == 200:
            served.end(signal.SIGKILL)
        if number == 350:
            served.start()
        for node, link in zip(nodes, links, strict=True):
            link.offer([node.step(number)])
        time.sleep(0.002)
    for link in links:
        assert link.flush(20), (link.counts, link.failing, served.said())
        assert link.counts.dropped_frames == link.counts.forgotten == 0
        assert link.counts.connects >= 2
        assert link.counts.sent > link.counts.acked, "what was not acknowledged came again"
        link.close()


def test_wrong_settings_are_refused_with_words(tmp_path: Path) -> None:
    line = [CLI, "server", "--state", str(tmp_path), "--tokens", str(tokens_file(tmp_path)), "--listen", "0.0.0.0:0"]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "--cert and --key" in ran.stderr
    with pytest.raises(ConfigError, match="--listen: need HOST:PORT"):
        address_of("nowhere")
    (tmp_path / "config.yaml").write_text("server: {ingest: {ack: 1h}, jobs: {most: 3}}\n")
    with pytest.raises(ConfigError, match=r"server\.ingest\.ack: need 100ms to 1min(.|\n)*server\.jobs\.most"):
        load_server_settings(tmp_path / "config.yaml")
    assert load_server_settings(None)[1].ack.total_seconds() == 10
