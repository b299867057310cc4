"""Where OTLP goes, as the sections `traces` and `metrics` of the settings both say it. Needs no extra."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal

from trainwarden.core.auth import secret
from trainwarden.core.errors import ConfigError

Telemetry = Literal["traces", "metrics"]


def check(section: Telemetry, endpoint: str, deadline: timedelta, key: str) -> None:
    """Refuse what cannot be. key: of the deadline. Raises ConfigError."""
    if endpoint not in ("", "env") and not endpoint.startswith(("https://", "http://")):
        raise ConfigError(f"{section}.otlp_endpoint: need https://..., http://... or env, got {endpoint!r}")
    if not timedelta(milliseconds=100) <= deadline <= timedelta(minutes=1):
        raise ConfigError(f"{section}.{key}: need 100ms to 1m, got {deadline.total_seconds():g}s")


def url_of(section: Telemetry, endpoint: str) -> str:
    """The full URL that is posted to; "": nowhere. Raises ConfigError for `env` with nothing there."""
    if endpoint != "env":
        return _with_path(endpoint, section)
    names = (f"OTEL_EXPORTER_OTLP_{section.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exact, base = (os.environ.get(name, "") for name in names)
    if not (exact or base):
        raise ConfigError(f"{section}.otlp_endpoint: is env, but {' and '.join(names)} are not set")
    return exact or _with_path(base, section)


def headers_of(section: Telemetry, where: str) -> Mapping[str, str]:
    """Headers beside those of the environment. Raises ConfigError, which never shows a value."""
    if not where:
        return {}
    key = f"{section}.otlp_headers"
    pairs = [part.partition("=") for part in secret(where, key).replace("\n", ",").split(",") if part.strip()]
    if any(not (name.strip() and equals) for name, equals, _ in pairs):
        raise ConfigError(f"{key}: need NAME=VALUE, a line or a comma between two, got something else in {where}")
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _with_path(url: str, section: Telemetry) -> str:
    """
    >>> _with_path("http://collector:4318", "traces"), _with_path("https://host/otlp/v1/metrics", "metrics")
    ('http://collector:4318/v1/traces', 'https://host/otlp/v1/metrics')
    """
    path = f"/v1/{section}"
    return url if not url or url.endswith(path) else url.rstrip("/") + path
