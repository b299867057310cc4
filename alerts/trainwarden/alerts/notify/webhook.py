"""Notices to a program: each as the JSON of alerts/notify/jsonl.py, posted to a URL and signed.

Delivery is at least once (a crash between the answer and its record sends again), so each request carries the notice's
key as `Idempotency-Key`. The signature covers a time stamp and the body, so that a copy of an old request can be told:

    X-Trainwarden-Signature: sha256=HEX      HEX = HMAC-SHA256(secret, TIMESTAMP + "." + BODY)
    X-Trainwarden-Timestamp: TIMESTAMP       Unix seconds

URL and secret come from the environment or a file, are read again for each notice (so they can be changed while we
run), and are never logged.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass, field
from datetime import timedelta

from trainwarden.alerts.notify.jsonl import in_json
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.core.model import Notice
from trainwarden.core.net import post_json, value_at
from trainwarden.core.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """Where notices go. Nothing is posted while `url` is empty."""

    url: str = field(default="", repr=False)
    """Where to post: a URL, or `env:NAME` or `file:/PATH` to take it from there (a chat's webhook URL is a secret)."""

    secret: str = field(default="", repr=False)
    """Key of the signature: `env:NAME` or `file:/PATH`. Empty: requests are not signed."""

    deadline: timedelta = timedelta(seconds=10)
    """For one request from name lookup to the last byte; what holds up longer is tried again."""

    def __post_init__(self) -> None:
        if self.secret and not self.secret.startswith(("env:", "file:")):
            raise ConfigError("alerts.webhook.secret: must not stand in the settings: say env:NAME or file:/PATH")
        if self.url and not self.url.startswith(("env:", "file:", "https://", "http://")):
            raise ConfigError("alerts.webhook.url: need https://..., http://..., env:NAME or file:/PATH")
        if not timedelta(milliseconds=100) <= self.deadline <= timedelta(minutes=1):
            raise ConfigError(f"alerts.webhook.deadline: need 100ms to 1m, got {self.deadline.total_seconds():g}s")


class Webhook:
    """The notifier of channel `webhook`."""

    channel = "webhook"

    def __init__(self, config: WebhookConfig, clock: Clock = unix_ns) -> None:
        self._config, self._clock = config, clock
        for key, where in (("url", config.url), ("secret", config.secret)):
            try:
                value_at(where)
            except DeliveryError as error:
                raise ConfigError(f"alerts.webhook.{key}: {error}") from None

    def notify(self, notice: Notice) -> str:
        """Post it. Raises DeliveryError; the answers 4xx are final but for 408, 425 and 429."""
        body = json.dumps(in_json(notice), allow_nan=False, sort_keys=True, separators=(",", ":")).encode()
        seconds = str(self._clock() // 10**9)
        headers = {
            "User-Agent": f"trainwarden/{__version__}",
            "Idempotency-Key": json.dumps(notice.key)[1:-1],  # ASCII, without line ends
            "X-Trainwarden-Timestamp": seconds,
        }
        if secret := value_at(self._config.secret):
            headers["X-Trainwarden-Signature"] = signature(secret, seconds, body)
        reply = post_json(value_at(self._config.url), body, headers, self._config.deadline.total_seconds())
        return f"webhook: {notice.key}: answered {reply.status}"


def signature(secret: str, seconds: str, body: bytes) -> str:
    """What a receiver computes and compares (with a comparison that takes the same time for every input).

    >>> signature("key", "0", b"{}")[:23]
    'sha256=7314351dd949aa7e'
    """
    return "sha256=" + hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
