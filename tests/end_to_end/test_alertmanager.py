"""Incidents to real Alertmanagers, and on to a webhook: who is paged, how often, and what survives a restart."""

import json
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.servers import ALERTMANAGER, Server, free_port, needs
from tests.fakes.web import Web, serving

from trainwarden.alerts.notify.alertmanager import Alertmanager, AlertmanagerConfig
from trainwarden.core.model import Incident, JobId, Notice, Subject, Tier

pytestmark = needs(ALERTMANAGER)

CONFIG = """
route: {{receiver: hook, group_by: [incident], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: hook, webhook_configs: [{{url: "{url}", send_resolved: true}}]}}]
"""
ALONE = ("--cluster.listen-address=",)
SETTINGS: dict[str, Any] = {"resend": timedelta(milliseconds=300), "deadline": timedelta(seconds=4)}
"""What fires would end by itself after 16 s: no machine is loaded so much."""
INCIDENT = Incident(
    id="hang.train-3.0.rank-1.0",
    revision=1,
    state="confirmed",
    tier=Tier.ERROR,
    kind="rank.hung",
    culprit=None,
    victims=(),
    job=JobId("train-3"),
    epoch=None,
    onset_ns=1_800_000_000_250_000_000 - 2 * 365 * 86_400 * 10**9,
    findings=(),
    events=(),
    reason='nothing moves: \x1b[2J{{ .Labels }} "\u00e9"',
    action="restart the job",
    plans=(),
    lost_s={},
)
WORSE = replace(
    INCIDENT, revision=2, tier=Tier.CRITICAL, culprit=Subject(kind="rank", id="1"), reason="rank 1 is stopped"
)


def notice(incident: Incident, change: str = "opened") -> Notice:
    key = f"{incident.id}/{incident.revision}/alertmanager"
    return Notice(key=key, channel="alertmanager", change=change, incident=incident)  # type: ignore[arg-type]


OVER = notice(replace(INCIDENT, revision=3, state="resolved"), "resolved")


def until(what: str, holds: Callable[[], object], within_s: float = 25.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


class Peer(Server):
    """An Alertmanager that writes down within a moment whom it has told."""

    def __init__(self, folder: Path, hook: Web, *options: str) -> None:
        folder.mkdir()
        (folder / "am.yml").write_text(CONFIG.format(url=hook.url))
        self.storage = folder / "data"
        line = [ALERTMANAGER, f"--config.file={folder / 'am.yml'}", f"--storage.path={self.storage}", *options]
        line.append("--data.maintenance-interval=100ms")
        super().__init__(folder, "am", lambda port: [*line, f"--web.listen-address=127.0.0.1:{port}"])

    def firing(self) -> list[str]:
        """Severity of what fires."""
        return [one["labels"]["severity"] for one in self.get("/api/v2/alerts")]

    def number(self, metric: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            rows = [line.split() for line in reply.read().decode().splitlines()]
        return next((float(row[-1]) for row in rows if row and row[0] == metric), 0.0)

    @property
    def remembers(self) -> bool:
        """Whether whom it told is on the disk."""
        log = self.storage / "nflog"
        return log.exists() and log.stat().st_size > 0

    @property
    def decided(self) -> float:
        """How often it looked up whether it, or its peer, has told people already: what it does last."""
        return self.number("alertmanager_nflog_queries_total")

    @property
    def told(self) -> float:
        """How often it told people."""
        return self.number('alertmanager_notifications_total{integration="webhook"}')


@contextmanager
def running(*peers: Peer) -> Iterator[None]:
    try:
        yield
    finally:
        for peer in peers:
            peer.end()


@contextmanager
def telling(*urls: str) -> Iterator[Alertmanager]:
    notifier = Alertmanager(AlertmanagerConfig(urls=urls, **SETTINGS))
    notifier.sync(())
    try:
        yield notifier
    finally:
        notifier.close(ended=False)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as one:
        yield one


def pages(hook: Web) -> list[dict[str, str]]:
    """Of each page: severity -> status."""
    told = [json.loads(asked.body) for asked in list(hook.asked)]
    return [{alert["labels"]["severity"]: alert["status"] for alert in page["alerts"]} for page in told]


def test_an_incident_pages_gets_worse_and_is_resolved_while_a_peer_hangs(tmp_path: Path, hook: Web) -> None:
    peer = Peer(tmp_path / "am", hook, *ALONE)
    silent = socket.create_server(("127.0.0.1", 0))
    with running(peer), silent, telling(f"http://127.0.0.1:{silent.getsockname()[1]}", peer.url) as notifier:
        notifier.notify(notice(INCIDENT))
        until("a page", lambda: hook.asked)
        assert [url for url, up in notifier.peers_up.items() if up] == [peer.url]
        (alert,) = json.loads(hook.asked[0].body)["alerts"]
        assert alert["labels"] == {
            "alertname": "TrainwardenIncident",
            "incident": INCIDENT.id,
            "job_id": "train-3",
            "severity": "error",
        }
        assert alert["annotations"] == {
            "summary": 'nothing moves: \\x1b[2J{{ .Labels }} "\u00e9"',
            "description": "restart the job",
            "kind": "rank.hung",
            "tier": "ERROR",
            "state": "confirmed",
            "runbook": "docs/runbooks/rank-hung.md",
        }
        assert (alert["status"], alert["startsAt"]) == ("firing", "2025-01-15T08:00:00.25Z")

        notifier.notify(notice(WORSE, "escalated"))
        until("an escalation", lambda: len(hook.asked) > 1)
        notifier.notify(OVER)
        until("an end", lambda: len(hook.asked) > 2)
        assert pages(hook)[:2] == [{"error": "firing"}, {"error": "resolved", "critical": "firing"}]
        assert pages(hook)[2] | {"error": "resolved"} == {"error": "resolved", "critical": "resolved"}
        worse = json.loads(hook.asked[1].body)["alerts"]
        assert {one["annotations"].get("culprit") for one in worse if one["status"] == "firing"} == {"rank:1"}
        silent.close()  # the end need not wait for it


def test_an_alertmanager_that_restarts_in_the_middle_fires_on_and_still_resolves(tmp_path: Path, hook: Web) -> None:
    peer = Peer(tmp_path / "am", hook, *ALONE)
    with running(peer), telling(peer.url) as notifier:
        notifier.notify(notice(INCIDENT))
        until("a page that is written down", lambda: hook.asked and peer.remembers)
        peer.kill()
        until("words", lambda: notifier.peers_up == {peer.url: False})
        peer.start()
        until("it is told again", lambda: peer.firing() == ["error"] and peer.decided)
        assert notifier.peers_up == {peer.url: True}
        assert len(hook.asked) == 1, "it knows that people know"

        peer.kill()
        shutil.rmtree(peer.storage)
        peer.start()
        until("a page, since it does not know", lambda: len(hook.asked) > 1)
        notifier.notify(OVER)
        until("an end", lambda: len(hook.asked) > 2)
        assert pages(hook) == [{"error": "firing"}, {"error": "firing"}, {"error": "resolved"}]
        assert peer.firing() == []


def test_a_pair_is_told_of_everything_and_pages_once(tmp_path: Path, hook: Web) -> None:
    ports = free_port(), free_port()
    gossip = ("--cluster.peer-timeout=2s", "--cluster.settle-timeout=1s", "--cluster.gossip-interval=50ms")
    pair = [
        Peer(
            tmp_path / f"am{port}",
            hook,
            *gossip,
            f"--cluster.listen-address=127.0.0.1:{port}",
            f"--cluster.advertise-address=127.0.0.1:{port}",
            *(f"--cluster.peer=127.0.0.1:{ports[0]}" for _ in ports[:number]),
        )
        for number, port in enumerate(ports)
    ]
    with running(*pair), telling(*(peer.url for peer in pair)) as notifier:
        until("a pair", lambda: all(len(peer.get("/api/v2/status")["cluster"]["peers"]) == 2 for peer in pair))
        notifier.notify(notice(INCIDENT))
        until("both fire", lambda: all(peer.firing() == ["error"] for peer in pair))
        until("both have decided", lambda: all(peer.decided for peer in pair))
        assert (pages(hook), sum(peer.told for peer in pair)) == ([{"error": "firing"}], 1)
        notifier.notify(OVER)
        until("an end", lambda: len(hook.asked) > 1)
        assert pages(hook)[1:] == [{"error": "resolved"}]
        until("both know", lambda: all(peer.firing() == [] for peer in pair))
