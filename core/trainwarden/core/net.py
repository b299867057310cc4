"""The only home of an HTTP client: one POST or GET with one deadline for all of it (an import test bans clients
elsewhere).

httpx bounds each single wait, so a peer that sends a byte now and then holds a caller for as long as it likes; here the
whole exchange is cancelled at the deadline, name lookup included. A URL may be a secret (chat webhooks are): messages
name scheme, host and port only, and the client's own log lines, which hold the URL, are switched off.
"""

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from trainwarden.core.errors import DeliveryError

BODY_MAX_BYTES = 64 * 1024
"""Of the answer to a POST; what comes after it is not read."""

RETRY_AFTER_MAX_S = 3600.0
"""A peer may ask for more patience; by then somebody else has to be told."""

_AGAIN = frozenset({408, 425, 429})
"""Client errors that pass by themselves: request timeout, too early, too many requests (RFC 9110, 8470, 6585)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a peer answered when it took the request (status 2xx, or one that the caller wants to read)."""

    status: int
    body: bytes


def post_json(url: str, body: bytes, headers: Mapping[str, str], deadline_s: float, also: Container[int] = ()) -> Reply:
    """POST a JSON document; the answer if it was taken. Raises DeliveryError that says whether again can help.

    also: statuses beside 2xx whose answer is wanted too.
    """
    asked = _Asked("POST", url, body, {"Content-Type": "application/json", **headers}, BODY_MAX_BYTES)
    return _exchange(asked, deadline_s, also)


def get(url: str, headers: Mapping[str, str], deadline_s: float, max_bytes: int) -> Reply:
    """GET what is there, uncompressed. Raises DeliveryError, also for an answer longer than max_bytes: half of one
    would be taken for all of it."""
    asked = _Asked("GET", url, None, {"Accept-Encoding": "identity", **headers}, max_bytes + 1)
    reply = _exchange(asked, deadline_s)
    if len(reply.body) > max_bytes:
        raise DeliveryError(f"{place_of(url)}: answered more than {max_bytes} bytes", retryable=True)
    return reply


class _Asked(NamedTuple):
    """A request, and how much of the answer is read."""

    method: str
    url: str
    body: bytes | None
    headers: Mapping[str, str]
    max_bytes: int


def _exchange(asked: _Asked, deadline_s: float, also: Container[int] = ()) -> Reply:
    import httpx  # 0.2 s and 15 MB: only for those who talk to somebody

    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    place = place_of(asked.url)
    try:
        status, retry_after, answer = _run(asked, deadline_s)
    except (TimeoutError, httpx.TimeoutException):
        raise DeliveryError(f"{place}: no answer within {deadline_s:g} s", retryable=True) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, ValueError):
        raise DeliveryError(f"{place}: not a request that can be sent", retryable=False) from None
    except (httpx.HTTPError, OSError) as error:
        raise DeliveryError(f"{place}: {str(error) or type(error).__name__}", retryable=True) from None
    if not 200 <= status < 300 and status not in also:
        retryable = status in _AGAIN or status >= 500
        wait_s = retry_after_s(retry_after, time.time()) if retryable else 0.0
        raise DeliveryError(f"{place}: answered {status}", retryable=retryable, retry_after_s=wait_s)
    return Reply(status=status, body=answer)


def retry_after_s(said: str | None, now_s: float) -> float:
    """How long a peer asks to be left alone: seconds or a date (RFC 9110, section 10.2.3); 0 for anything else.

    >>> retry_after_s("7", 0.0), retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 0.0), retry_after_s("soon", 0.0)
    (7.0, 60.0, 0.0)
    """
    wait_s = 0.0
    with contextlib.suppress(ValueError, OverflowError):
        text = (said or "").strip()
        wait_s = float(text) if text.isdecimal() else parsedate_to_datetime(text).timestamp() - now_s
    return min(max(wait_s, 0.0), RETRY_AFTER_MAX_S)


def _run(asked: _Asked, deadline_s: float) -> tuple[int, str | None, bytes]:
    """In a loop of its own, which is closed without waiting for a name lookup that hangs."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(_ask(asked, deadline_s))


@cache
def _trusted() -> ssl.SSLContext:
    """Whom TLS trusts, read once: reading it anew costs 20 ms of CPU a request, also where no TLS is spoken."""
    import httpx

    return httpx.create_ssl_context()


async def _ask(asked: _Asked, deadline_s: float) -> tuple[int, str | None, bytes]:
    import httpx

    async with (
        asyncio.timeout(deadline_s),
        httpx.AsyncClient(verify=_trusted(), timeout=None, follow_redirects=False) as client,
        client.stream(asked.method, asked.url, content=asked.body, headers=dict(asked.headers)) as reply,
    ):
        answer = bytearray()
        async for part in reply.aiter_raw():
            answer += part
            if len(answer) >= asked.max_bytes:
                break
        return reply.status_code, reply.headers.get("Retry-After"), bytes(answer[: asked.max_bytes])


def value_at(where: str) -> str:
    """A value that may stand elsewhere: `env:NAME`, `file:/PATH`, else itself. Raises DeliveryError that names the
    place, never the value."""
    kind, _, place = where.partition(":")
    if kind not in ("env", "file"):
        return where
    try:
        value = os.environ.get(place, "") if kind == "env" else Path(place).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DeliveryError(f"{where}: cannot be read: {type(error).__name__}", retryable=True) from None
    if not value:
        raise DeliveryError(f"{where}: is empty", retryable=True)
    return value


def place_of(url: str) -> str:
    """Who is talked to, without what a secret URL must not show. Raises DeliveryError.

    >>> place_of("https://user:word@hooks.example.org:8443/services/T0/secret?token=1")
    'https://hooks.example.org:8443'
    """
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        raise DeliveryError("a URL that is none: not a request that can be sent", retryable=False) from None
    return f"{parts.scheme}://{parts.hostname or ''}{port}"
