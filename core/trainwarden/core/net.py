"""The only home of an HTTP client: one POST or GET with one deadline for all of it, or POSTs over one connection that
is kept (an import test bans clients elsewhere).

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
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from trainwarden.core.errors import DeliveryError

if TYPE_CHECKING:
    from httpx import AsyncClient

BODY_MAX_BYTES = 64 * 1024
"""Of the answer to a POST; what comes after it is not read."""

POSTED_MAX_BYTES = 1024 * 1024
"""Of an answer that Poster reads: acks and looks of a second or two."""

RETRY_AFTER_MAX_S = 3600.0
"""A peer may ask for more patience; by then somebody else has to be told."""

_AGAIN = frozenset({408, 425, 429})
"""Client errors that pass by themselves: request timeout, too early, too many requests (RFC 9110, 8470, 6585)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a peer answered when it took the request (status 2xx, or one that the caller wants to read)."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    """How long the peer asks to be left alone; 0: it does not."""


def post_json(url: str, body: bytes, headers: Mapping[str, str], deadline_s: float, also: Container[int] = ()) -> Reply:
    """POST a JSON document; the answer if it was taken. Raises DeliveryError that says whether again can help.

    also: statuses beside 2xx whose answer is wanted too.
    """
    asked = _Asked("POST", url, body, {"Content-Type": "application/json", **headers}, BODY_MAX_BYTES)
    return _exchange(asked, deadline_s, also)


def get(
    url: str,
    headers: Mapping[str, str],
    deadline_s: float,
    max_bytes: int,
    *,
    ca: Path | None = None,
    method: Literal["GET", "POST"] = "GET",
) -> Reply:
    """GET what is there, uncompressed. Raises DeliveryError, also for an answer longer than max_bytes: half of one
    would be taken for all of it. ca: whom TLS believes instead of those that the system believes. method: POST, with
    nothing in it, where a server gives its answers to that alone."""
    asked = _Asked(method, url, None, {"Accept-Encoding": "identity", **headers}, max_bytes + 1)
    reply = _exchange(asked, deadline_s, run=None if ca is None else partial(_run, tls=_believing(ca)))
    if len(reply.body) > max_bytes:
        raise DeliveryError(f"{place_of(url)}: answered more than {max_bytes} bytes", retryable=True)
    return reply


class Poster:
    """POSTs to one URL, over a connection that is kept where it can be. One thread calls post() and close()."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        """tls: whom https believes; None: whom the system believes."""
        import httpx

        _hush()
        self._url, self._headers = url, headers
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(verify=tls or _trusted(), timeout=None, follow_redirects=False)
        self._asking: asyncio.Task[_Answer] | None = None

    def post(self, body: bytes, headers: Mapping[str, str], deadline_s: float) -> Reply:
        """The answer, whatever its status. Raises DeliveryError where there is none, or a longer one than
        POSTED_MAX_BYTES: half of one would be taken for all of it."""
        asked = _Asked("POST", self._url, body, {**self._headers, **headers}, POSTED_MAX_BYTES + 1)
        try:
            reply = _exchange(asked, deadline_s, range(100, 600), self._run)
        except asyncio.CancelledError:
            raise DeliveryError(f"{place_of(self._url)}: given up", retryable=True) from None
        if len(reply.body) > POSTED_MAX_BYTES:
            raise DeliveryError(f"{place_of(self._url)}: answered more than {POSTED_MAX_BYTES} bytes", retryable=True)
        return reply

    def end(self) -> None:
        """Let a post() that waits raise; from any thread."""

        def give_up() -> None:
            if self._asking is not None:
                self._asking.cancel()

        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(give_up)

    def close(self) -> None:
        """Nothing more."""
        with contextlib.suppress(Exception):  # what cannot be closed in order is closed all the same
            self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    def _run(self, asked: "_Asked", deadline_s: float) -> "_Answer":
        self._asking = self._loop.create_task(_ask(self._client, asked, deadline_s))
        return self._loop.run_until_complete(self._asking)


_Answer: TypeAlias = tuple[int, str | None, bytes]
"""Status, Retry-After, body."""


class _Asked(NamedTuple):
    """A request, and how much of the answer is read."""

    method: str
    url: str
    body: bytes | None
    headers: Mapping[str, str]
    max_bytes: int


def _hush() -> None:
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _exchange(
    asked: _Asked,
    deadline_s: float,
    also: Container[int] = (),
    run: Callable[[_Asked, float], _Answer] | None = None,
) -> Reply:
    import httpx  # 0.2 s and 15 MB: only for those who talk to somebody

    _hush()
    place = place_of(asked.url)
    try:
        status, retry_after, answer = (run or _run)(asked, deadline_s)
    except (TimeoutError, httpx.TimeoutException):
        raise DeliveryError(f"{place}: no answer within {deadline_s:g} s", retryable=True) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, ValueError):
        raise DeliveryError(f"{place}: not a request that can be sent", retryable=False) from None
    except (httpx.HTTPError, OSError) as error:
        raise DeliveryError(f"{place}: {str(error) or type(error).__name__}", retryable=True) from None
    retryable = status in _AGAIN or status >= 500
    wait_s = retry_after_s(retry_after, time.time()) if retryable else 0.0
    if not 200 <= status < 300 and status not in also:
        raise DeliveryError(f"{place}: answered {status}", retryable=retryable, retry_after_s=wait_s)
    return Reply(status=status, body=answer, retry_after_s=wait_s)


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


def _run(asked: _Asked, deadline_s: float, tls: ssl.SSLContext | None = None) -> _Answer:
    """In a loop of its own, which is closed without waiting for a name lookup that hangs."""

    async def once() -> _Answer:
        import httpx

        async with httpx.AsyncClient(verify=tls or _trusted(), timeout=None, follow_redirects=False) as client:
            return await _ask(client, asked, deadline_s)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(once())


@cache
def _trusted() -> ssl.SSLContext:
    """Whom TLS trusts, read once: reading it anew costs 20 ms of CPU a request, also where no TLS is spoken."""
    import httpx

    return httpx.create_ssl_context()


def _believing(ca: Path) -> ssl.SSLContext:
    """Certificates that one file's authorities have signed. Raises DeliveryError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # SSLError is one
        raise DeliveryError(f"{ca}: cannot be used: {error.strerror or error}", retryable=True) from None


async def _ask(client: "AsyncClient", asked: _Asked, deadline_s: float) -> _Answer:
    async with (
        asyncio.timeout(deadline_s),
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
