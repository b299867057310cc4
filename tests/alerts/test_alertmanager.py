"""Alertmanager's notifier: what stands in a post, and that every peer is told, in time, whatever another one does."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.web import Web, serving

from trainwarden.alerts.notify.alertmanager import (
    ALERTS_MAX,
    RESOLVED_KEPT_NS,
    TEXT_MAX_CHARS,
    Alertmanager,
    AlertmanagerConfig,
    Wanted,
)
from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.core.model import Incident, JobId, Notice, Subject, Tier

NOW_NS = 1_800_000_000_000_000_000
ENDED = "2027-01-15T08:00:00.000+00:00"
"""NOW_NS, as it is posted."""
ID = "death.train-3.0.rank-2.0"
INCIDENT = Incident(
    id=ID,
    revision=1,
    state="confirmed",
    tier=Tier.ERROR,
    kind="process.killed",
    culprit=Subject(kind="rank", id="2"),
    victims=(),
    job=JobId("train-3"),
    epoch=None,
    onset_ns=NOW_NS - 10**9,
    findings=(),
    events=(),
    reason="rank 2 was killed by SIGKILL",
    action="restart the job",
    plans=(),
    lost_s={},
)
HOSTILE = "\x1b[2J\x07line one\nline two\r\u202e{{ .Labels }} \ud800 \x9b2J \u00e9"
Alerts = Sequence[Mapping[str, Any]]


def seen(wanted: Wanted, now_ns: int = NOW_NS) -> Alerts:
    """As a peer reads a post that is sent now."""
    alerts: Alerts = json.loads(json.dumps(wanted.alerts(now_ns, now_ns + 240 * 10**9)))
    return alerts


def standing(wanted: Wanted, now_ns: int = NOW_NS) -> dict[str, str]:
    """Severity of each alert -> whether it fires."""
    now = datetime.fromisoformat("2027-01-15T08:00:00+00:00").timestamp() + (now_ns - NOW_NS) / 1e9
    return {
        one["labels"]["severity"]: "firing" if datetime.fromisoformat(one["endsAt"]).timestamp() > now else "over"
        for one in seen(wanted, now_ns)
    }


# what stands in a post


def test_an_alert_has_stable_labels_and_tells_the_rest_in_annotations() -> None:
    wanted = Wanted()
    wanted.take(replace(INCIDENT, plans=("p1", "p2")), NOW_NS, over=False)
    assert seen(wanted) == [
        {
            "labels": {
                "alertname": "TrainwardenIncident",
                "incident": ID,
                "job_id": "train-3",
                "severity": "error",
            },
            "annotations": {
                "summary": "rank 2 was killed by SIGKILL",
                "description": "restart the job",
                "kind": "process.killed",
                "culprit": "rank:2",
                "tier": "ERROR",
                "state": "confirmed",
                "plans": "p1, p2",
                "runbook": "docs/runbooks/process-killed.md",
            },
            "startsAt": "2027-01-15T07:59:59.000+00:00",
            "endsAt": "2027-01-15T08:04:00.000+00:00",
        }
    ]


@given(
    st.lists(
        st.builds(
            replace,
            st.just(INCIDENT),
            revision=st.integers(1, 9),
            state=st.sampled_from(["suspected", "confirmed", "mitigating", "reopened"]),
            kind=st.sampled_from(["process.killed", "rank.hung", "nobody.foresaw"]),
            culprit=st.sampled_from([None, Subject(kind="rank", id="1")]),
            reason=st.text(max_size=20),
            onset_ns=st.integers(-(2**63), 2**63 - 1),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_revision_changes_the_labels(revisions: Sequence[Incident]) -> None:
    wanted = Wanted()
    for revision in revisions:
        wanted.take(revision, NOW_NS, over=False)
    (alert,) = seen(wanted)
    assert alert["labels"] == {
        "alertname": "TrainwardenIncident",
        "incident": ID,
        "job_id": "train-3",
        "severity": "error",
    }
    newest = reduce(lambda best, one: one if one.revision >= best.revision else best, revisions)
    assert alert["annotations"]["state"] == newest.state
    assert alert["startsAt"] <= ENDED


@pytest.mark.parametrize(
    ("tiers", "stands"),
    [
        pytest.param([Tier.INFO], {"info": "firing"}, id="info"),
        pytest.param([Tier.WARN], {"warning": "firing"}, id="warn"),
        pytest.param(
            [Tier.WARN, Tier.CRITICAL], {"warning": "over", "critical": "firing"}, id="the old one is resolved at once"
        ),
        pytest.param([Tier.CRITICAL, Tier.WARN], {"critical": "firing"}, id="never lower: that would page again"),
        pytest.param(
            [Tier.WARN, Tier.ERROR, Tier.INFO, Tier.CRITICAL],
            {"warning": "over", "error": "over", "critical": "firing"},
            id="step by step",
        ),
    ],
)
def test_severity_only_rises(tiers: Sequence[Tier], stands: Mapping[str, str]) -> None:
    wanted = Wanted()
    for number, tier in enumerate(tiers):
        wanted.take(replace(INCIDENT, revision=number, tier=tier), NOW_NS, over=False)
    assert standing(wanted) == stands
    assert seen(wanted)[-1]["annotations"]["tier"] == tiers[-1].name, "the tier it has now is told, too"
    wanted.take(replace(INCIDENT, revision=9, tier=tiers[-1]), NOW_NS, over=True)
    assert set(standing(wanted).values()) == {"over"}
    assert standing(wanted).keys() == stands.keys(), "what fired is resolved, under its own labels"


def test_what_is_over_is_told_for_a_quarter_of_an_hour_with_the_moment_it_ended() -> None:
    wanted = Wanted()
    wanted.take(INCIDENT, NOW_NS, over=False)
    wanted.take(replace(INCIDENT, revision=2), NOW_NS + 10**9, over=True)
    wanted.take(replace(INCIDENT, revision=2), NOW_NS + 5 * 10**9, over=True)  # the same notice, handed over again
    late_ns = NOW_NS + 10**9 + RESOLVED_KEPT_NS - 1
    assert [one["endsAt"] for one in seen(wanted, late_ns)] == ["2027-01-15T08:00:01.000+00:00"]
    assert seen(wanted, late_ns + 1) == []


def test_an_older_revision_changes_nothing() -> None:
    wanted = Wanted()
    wanted.take(replace(INCIDENT, revision=3, reason="new words"), NOW_NS, over=False)
    wanted.take(replace(INCIDENT, revision=2, reason="old words"), NOW_NS, over=False)
    assert seen(wanted)[0]["annotations"]["summary"] == "new words"
    wanted.take(replace(INCIDENT, revision=4), NOW_NS, over=True)
    wanted.take(replace(INCIDENT, revision=3), NOW_NS, over=False)
    assert standing(wanted) == {"error": "over"}, "what is over does not flash up"


def test_a_clock_that_is_set_back_makes_no_alert_that_ends_before_it_starts() -> None:
    wanted = Wanted()
    wanted.take(INCIDENT, NOW_NS, over=False)
    wanted.take(replace(INCIDENT, revision=2, tier=Tier.CRITICAL), NOW_NS - 10**12, over=False)
    assert [one["endsAt"] >= one["startsAt"] for one in seen(wanted, NOW_NS - 10**12)] == [True, True]


def test_a_trouble_that_came_back_fires_again() -> None:
    wanted = Wanted()
    wanted.take(INCIDENT, NOW_NS, over=False)
    wanted.take(replace(INCIDENT, revision=2), NOW_NS, over=True)
    wanted.take(replace(INCIDENT, revision=3, state="reopened"), NOW_NS, over=False)
    (alert,) = seen(wanted)
    assert (alert["annotations"]["state"], standing(wanted)) == ("reopened", {"error": "firing"})


def test_an_incident_that_only_an_earlier_supervisor_told_is_resolved_too() -> None:
    wanted = Wanted()
    wanted.take(INCIDENT, NOW_NS, over=True)
    assert standing(wanted) == {"error": "over"}


def test_only_what_is_open_stays_open() -> None:
    wanted = Wanted()
    other = replace(INCIDENT, id="other", tier=Tier.WARN)
    wanted.take(INCIDENT, NOW_NS, over=False)
    for _ in range(2):
        wanted.replace([other], NOW_NS)
        assert standing(wanted) == {"error": "over", "warning": "firing"}
    wanted.replace([INCIDENT, other], NOW_NS)
    assert standing(wanted) == {"error": "firing", "warning": "firing"}, "it knows better than what was heard before"


def test_text_of_a_tenant_can_do_nothing_and_is_cut() -> None:
    wanted = Wanted()
    incident = replace(INCIDENT, reason=HOSTILE, action="a" * 5000, job=JobId(HOSTILE), plans=("p" * 900,) * 9)
    wanted.take(incident, NOW_NS, over=False)
    (alert,) = seen(wanted)
    texts = [*alert["labels"].values(), *alert["annotations"].values()]
    assert all(text.isprintable() and len(text) <= TEXT_MAX_CHARS for text in texts)
    assert alert["annotations"]["description"].endswith("a...")
    assert "\\nline two" in alert["annotations"]["summary"]
    assert len(seen(wanted)) == 1


def test_what_is_not_known_is_left_out() -> None:
    wanted = Wanted("https://example.org/books")
    wanted.take(replace(INCIDENT, job=None, culprit=None, kind="nobody.foresaw"), NOW_NS, over=False)
    (alert,) = seen(wanted)
    assert "job_id" not in alert["labels"]
    assert {"culprit", "plans", "runbook", "runbook_url"}.isdisjoint(alert["annotations"])


def test_the_runbook_is_a_link_where_it_is_known_where_they_are() -> None:
    wanted = Wanted("https://example.org/books/")
    wanted.take(INCIDENT, NOW_NS, over=False)
    annotations = seen(wanted)[0]["annotations"]
    assert annotations["runbook_url"] == "https://example.org/books/process-killed.md"
    assert "runbook" not in annotations


def test_a_storm_is_bounded_and_what_is_not_taken_is_said() -> None:
    wanted = Wanted()
    for number in range(ALERTS_MAX):
        wanted.take(replace(INCIDENT, id=f"open-{number}"), NOW_NS, over=False)
    with pytest.raises(DeliveryError, match="1000 incidents are open there already, not taken: one more") as caught:
        wanted.take(replace(INCIDENT, id="one more"), NOW_NS, over=False)
    assert not caught.value.retryable
    wanted.take(replace(INCIDENT, id="open-7", revision=2), NOW_NS, over=False)
    for number in range(2 * ALERTS_MAX):
        wanted.take(replace(INCIDENT, id=f"over-{number}"), NOW_NS, over=True)
    names = [one["labels"]["incident"] for one in seen(wanted)]
    assert len(names) == 2 * ALERTS_MAX
    assert f"over-{2 * ALERTS_MAX - 1}" in names, "the oldest that are over go first"
    worst = [replace(INCIDENT, id=f"w-{number}", tier=Tier(number % 4)) for number in range(2 * ALERTS_MAX)]
    wanted.replace(worst, NOW_NS)
    assert {"critical", "error"} == {s for s, state in standing(wanted).items() if state == "firing"}


# to the peers


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as one:
        yield one


@pytest.fixture
def told() -> Iterator[Callable[..., Alertmanager]]:
    """told(*urls, **settings) -> a notifier that is closed in the end."""
    made: list[Alertmanager] = []

    def make(*urls: str, **settings: Any) -> Alertmanager:
        settings = {"deadline": timedelta(seconds=5), **settings}
        made.append(Alertmanager(AlertmanagerConfig(urls=urls, **settings), clock=lambda: NOW_NS))
        return made[-1]

    yield make
    for one in made:
        one.close(ended=False)


def until(what: str, holds: Callable[[], object], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)


def posts(web: Web) -> list[Alerts]:
    return [json.loads(asked.body) for asked in list(web.asked)]


def notice(change: str = "opened", **changed: Any) -> Notice:
    incident = replace(INCIDENT, **changed)
    key = f"{incident.id}/{incident.revision}/alertmanager"
    return Notice(key=key, channel="alertmanager", change=change, incident=incident)  # type: ignore[arg-type]


def test_every_peer_is_told_at_once_and_what_is_new_too(told: Callable[..., Alertmanager], web: Web) -> None:
    with serving() as other:
        notifier = told(web.url, f"{other.url}/prefix/")
        notifier.sync(())
        assert notifier.notify(notice()) == f"alertmanager: {ID}/1/alertmanager: for 2 peers"
        until("the alert", lambda: any(posts(web)) and any(posts(other)))
        notifier.notify(notice("resolved", revision=2))
        until("its end", lambda: {posts(peer)[-1][0]["endsAt"] for peer in (web, other)} == {ENDED})
        assert (web.asked[-1].path, other.asked[-1].path) == ("/api/v2/alerts", "/prefix/api/v2/alerts")
        assert web.asked[-1].headers["Content-Type"] == "application/json"
        assert notifier.peers_up == {web.url: True, other.url: True}


def test_it_is_told_again_and_again_before_it_ends(told: Callable[..., Alertmanager], web: Web) -> None:
    notifier = told(web.url, resend=timedelta(milliseconds=100))
    notifier.sync([INCIDENT])
    until("five posts", lambda: len(web.asked) >= 5)
    assert {alert["endsAt"] for post in posts(web) for alert in post} == {"2027-01-15T08:00:20.000+00:00"}
    assert notifier.failing == ""


def test_nothing_is_told_before_it_is_known_what_is_open(told: Callable[..., Alertmanager], web: Web) -> None:
    notifier = told(web.url)
    notifier.notify(notice())
    notifier.notify(notice("resolved", revision=2))
    notifier.notify(notice(id="other"))
    assert (notifier.peers_up, notifier.failing) == ({}, "")
    notifier.sync([replace(INCIDENT, id="other")])
    until("a post", lambda: web.asked)
    assert [alert["labels"]["incident"] for alert in posts(web)[0]] == [ID, "other"]
    assert posts(web)[0][0]["endsAt"] == ENDED


def test_a_url_may_hold_a_password_and_is_read_again(
    told: Callable[..., Alertmanager], web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEER", web.url.replace("http://", "http://ward:s3cret@"))
    notifier = told("env:PEER", resend=timedelta(milliseconds=100))
    notifier.sync(())
    until("a post", lambda: web.asked)
    assert web.asked[0].headers["Authorization"] == "Basic d2FyZDpzM2NyZXQ="
    assert notifier.peers_up.keys() <= {web.url}
    monkeypatch.setenv("PEER", "")
    until("words", lambda: notifier.peers_up == {web.url: False})


def test_a_peer_that_hangs_holds_up_neither_another_one_nor_the_end(
    told: Callable[..., Alertmanager], web: Web
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}"
        notifier = told(hung, web.url, deadline=timedelta(seconds=2))
        notifier.sync(())
        notifier.notify(notice())
        until("the alert", lambda: any(posts(web)))
        assert hung not in notifier.peers_up, "it has not even failed yet"
        began_s = time.monotonic()
        notifier.close()
        assert time.monotonic() - began_s < 2.0 + 3.0
        assert notifier.peers_up[web.url]
        assert any(alert["endsAt"] == "2027-01-15T09:00:00.000+00:00" for post in posts(web) for alert in post)


def test_it_says_when_nobody_takes_anything_and_when_somebody_does_again(
    told: Callable[..., Alertmanager], web: Web
) -> None:
    web.status, web.body = 503, b"s3cret"
    notifier = told(web.url, resend=timedelta(milliseconds=100), deadline=timedelta(milliseconds=300))
    notifier.sync([INCIDENT])
    until("words", lambda: notifier.failing.endswith(f" s: {web.url}: answered 503"))
    assert notifier.failing.startswith("no Alertmanager took our alerts for ")
    assert notifier.peers_up == {web.url: False}
    web.status = 200
    until("silence", lambda: not notifier.failing)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_alert_that_is_refused_does_not_take_the_others_with_it(
    told: Callable[..., Alertmanager], web: Web, status: int
) -> None:
    web.body = b"label \x1b too long"

    def judge() -> None:
        web.status = status if b'"bad"' in web.asked[-1].body else 200

    web.before = judge
    notifier = told(web.url)
    names = ["a", "b", "bad", "c", "d"]
    notifier.sync([replace(INCIDENT, id=name) for name in names])
    until("an end", lambda: notifier.peers_up == {web.url: False})
    taken = [
        alert["labels"]["incident"] for post in posts(web) if b"bad" not in json.dumps(post).encode() for alert in post
    ]
    assert sorted(taken) == ["a", "b", "c", "d"]
    began_s = time.monotonic()
    notifier.close()
    assert time.monotonic() - began_s < 4.0, "what is refused is not tried again at the end"


def test_what_is_open_when_the_job_ends_goes_on_firing_for_a_while(told: Callable[..., Alertmanager], web: Web) -> None:
    notifier = told(web.url)
    notifier.sync([INCIDENT])
    notifier.close()
    assert posts(web)[-1][0]["endsAt"] == "2027-01-15T09:00:00.000+00:00"
    with pytest.raises(DeliveryError, match="closed, not taken: other/1/alertmanager"):
        notifier.notify(notice(id="other"))


def test_who_lost_the_job_says_nothing_more(told: Callable[..., Alertmanager], web: Web) -> None:
    notifier = told(web.url)
    notifier.sync([INCIDENT])
    until("a post", lambda: web.asked)
    notifier.close(ended=False)
    assert {post[0]["endsAt"] for post in posts(web)} == {"2027-01-15T08:04:00.000+00:00"}


def test_a_peer_that_restarts_at_the_end_is_met_again(told: Callable[..., Alertmanager], web: Web) -> None:
    def judge() -> None:
        last_words = [asked for asked in web.asked if b"T09:00:00" in asked.body]
        web.status = 200 if len(last_words) > 1 else 503

    web.before = judge
    notifier = told(web.url, resend=timedelta(milliseconds=100))
    notifier.sync([INCIDENT])
    notifier.close()
    assert notifier.peers_up == {web.url: True}


def test_no_answer_makes_the_end_wait_longer_than_its_deadline(told: Callable[..., Alertmanager], web: Web) -> None:
    web.status, web.headers = 503, {"Retry-After": "60"}
    notifier = told(web.url, deadline=timedelta(seconds=0.5))
    notifier.sync([INCIDENT])
    began_s = time.monotonic()
    notifier.close()
    assert time.monotonic() - began_s < 0.5 + 4.0
    assert any(post[0]["endsAt"].startswith("2027-01-15T09:00:00") for post in posts(web))


# settings


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"urls": ("http://a", "gopher://s3cret")}, r"urls: need https://..., http://..., env:NAME or file:/PATH"),
        ({"urls": ("http://s3cret", "http://s3cret")}, r"urls: need each peer once"),
        ({"deadline": timedelta(hours=1)}, r"deadline: need 100ms to 1m, got 3600s"),
        ({"resend": timedelta(0)}, r"resend: need 100ms to 10m, got 0s"),
        ({"linger": timedelta(days=8)}, r"linger: need 0 to 7d, got 691200s"),
        ({"runbooks_url": "docs"}, r"runbooks_url: need https://... or http://..., got 'docs'"),
    ],
    ids=["another protocol", "twice", "too patient", "too eager", "for ever", "no link"],
)
def test_settings_that_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"alerts\.alertmanager\.{words}") as caught:
        AlertmanagerConfig(**config)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("env:NOT_SET_ANYWHERE", "env:NOT_SET_ANYWHERE: is empty"),
        ("file:/not/there", "file:/not/there: cannot be read: FileNotFoundError"),
        ("http://127.0.0.1:port", "a URL that is none"),
    ],
)
def test_a_peer_that_cannot_be_one_is_told_at_the_start(where: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"alerts\.alertmanager\.urls: {words}"):
        Alertmanager(AlertmanagerConfig(urls=(where,)))


def test_two_peers_behind_one_gateway_are_told_apart(
    told: Callable[..., Alertmanager], web: Web, tmp_path: Path
) -> None:
    (tmp_path / "one").write_text(f"{web.url}/one\n")
    notifier = told(f"file:{tmp_path}/one", f"{web.url}/two")
    notifier.sync(())
    until("both", lambda: notifier.peers_up == {web.url: True, f"{web.url} #2": True})


def test_settings_do_not_show_their_secrets() -> None:
    assert "hidden" not in repr(AlertmanagerConfig(urls=("https://hidden@x",)))
