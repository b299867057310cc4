"""The webhook: what a receiver gets, that it can check who sent it, and that secrets stay where they are."""

import hashlib
import hmac
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.fakes.web import Web, serving

from trainwarden.alerts.notify.jsonl import in_json
from trainwarden.alerts.notify.webhook import Webhook, WebhookConfig
from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.core.model import Incident, JobId, Notice, Subject, Tier

SECRET = "s3cret-k3y"
NOW_NS = 1_800_000_000_000_000_000
INCIDENT = Incident(
    id="death.train-3.0.rank-2.0",
    revision=1,
    state="confirmed",
    tier=Tier.ERROR,
    kind="process.killed",
    culprit=Subject(kind="rank", id="2"),
    victims=(),
    job=JobId("train-3"),
    epoch=None,
    onset_ns=10**18,
    findings=(),
    events=(),
    reason="rank 2 was killed by SIGKILL, \u00e9 \ud800",
    action="restart the job",
    plans=(),
    lost_s={},
)
NOTICE = Notice(key="death.train-3.0.rank-2.0/1/webhook", channel="webhook", change="opened", incident=INCIDENT)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    with serving() as one:
        yield one


def hook(web: Web, secret: str = "env:HOOK_SECRET") -> Webhook:
    return Webhook(WebhookConfig(url=web.url, secret=secret), clock=lambda: NOW_NS)


def test_the_body_is_the_notice_as_the_file_has_it(web: Web) -> None:
    assert hook(web).notify(NOTICE) == f"webhook: {NOTICE.key}: answered 200"
    (asked,) = web.asked
    assert json.loads(asked.body) == json.loads(json.dumps(in_json(NOTICE)))
    assert asked.headers["Idempotency-Key"] == NOTICE.key


def test_a_receiver_can_check_who_sent_it_and_when(web: Web) -> None:
    hook(web).notify(NOTICE)
    (asked,) = web.asked
    seconds = asked.headers["X-Trainwarden-Timestamp"]
    signed = hmac.new(SECRET.encode(), seconds.encode() + b"." + asked.body, hashlib.sha256).hexdigest()
    assert asked.headers["X-Trainwarden-Signature"] == f"sha256={signed}"
    assert seconds == str(NOW_NS // 10**9)
    assert SECRET not in str(asked)


def test_without_a_secret_nothing_is_signed(web: Web) -> None:
    hook(web, secret="").notify(NOTICE)
    assert "X-Trainwarden-Signature" not in web.asked[0].headers


def test_a_secret_can_be_changed_while_we_run(web: Web, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("first\n")
    notifier = hook(web, secret=f"file:{file}")
    notifier.notify(NOTICE)
    file.write_text("second\n")
    notifier.notify(NOTICE)
    assert web.asked[0].headers["X-Trainwarden-Signature"] != web.asked[1].headers["X-Trainwarden-Signature"]
    file.unlink()
    with pytest.raises(DeliveryError, match=f"file:{file}: cannot be read: FileNotFoundError") as caught:
        notifier.notify(NOTICE)
    assert caught.value.retryable


def test_a_key_that_no_header_could_hold_is_escaped(web: Web) -> None:
    hook(web).notify(Notice(key="a\nb\u00e9", channel="webhook", change="opened", incident=INCIDENT))
    assert web.asked[0].headers["Idempotency-Key"] == "a\\nb\\u00e9"


def test_a_receiver_that_is_busy_is_asked_again_later(web: Web) -> None:
    web.status, web.headers = 429, {"Retry-After": "30"}
    with pytest.raises(DeliveryError, match=f"{web.url}: answered 429") as caught:
        hook(web).notify(NOTICE)
    assert (caught.value.retryable, caught.value.retry_after_s) == (True, 30.0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"url": "https://x", "secret": SECRET}, r"secret: must not stand in the settings"),
        ({"url": "gopher://x"}, r"url: need https"),
        ({"url": "https://x", "deadline": timedelta(hours=1)}, r"deadline: need 100ms to 1m, got 3600s"),
    ],
    ids=["a secret in the open", "another protocol", "too patient"],
)
def test_settings_that_are_refused(config: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"alerts.webhook.{words}") as caught:
        WebhookConfig(**config)  # type: ignore[arg-type]  # one field is no text
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("where", ["env:NOT_SET_ANYWHERE", "file:/not/there"])
def test_a_secret_that_is_not_there_is_told_at_the_start(where: str) -> None:
    with pytest.raises(ConfigError, match=f"alerts.webhook.secret: {where}: "):
        Webhook(WebhookConfig(url="https://x", secret=where))


def test_settings_do_not_show_their_secrets() -> None:
    assert "hidden" not in repr(WebhookConfig(url="https://x/hidden", secret="env:hidden"))
