"""The same messages as on the stream, where only HTTP passes: POST /v1/frames.

A session is a connection cut into requests. Its bodies, one after the other, are the bytes that a sender writes on a
connection (a hello, then messages; each body ends where a message ends), and its answers are the bytes that the server
writes back (a welcome, acks, looks): all of it that came up to then. So a session is a Link of app/ingest.py, whose
transport keeps what is said for the next answer, and whatever holds of a connection holds here.

The token stands in `Authorization: Bearer` too, so that a stranger is turned away before his body is read. The header
AT says how many bytes of the session went before: a body that comes again (a proxy asked twice) is not taken again, and
where bytes are missing (another server, a session that was forgotten) the answer is 409. The sender then begins a new
session, with all that was not acknowledged, and what is known already is passed over by source and number.

An answer other than 200 says why in JSON: {"why": ...}. GET /healthz: 200 while the server takes up what is sent.
"""

import asyncio
import contextlib
import hmac
import re
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from trainwarden.app.ingest import Ingest, Link
from trainwarden.app.posted import AT, PATH, SESSION
from trainwarden.core.auth import is_loopback
from trainwarden.core.errors import ConfigError
from trainwarden.core.wire import FRAME_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn import Server

BODY_S: Final = 30.0
"""For a body to arrive; agents send at most some 300 kB at once."""
SESSION_S: Final = 60.0
"""Without a POST for so long, a session is forgotten: six of the longest pauses of an agent."""
BUSY_S: Final = 1
"""What a sender is asked to wait while he is held: a rate is counted by the second."""
STOP_S: Final = 2.0
"""For requests under way at the end."""
_STATUS: Final = {"token": 403, "links": 503}
"""Why a link was refused -> status; 400 for the rest: what was sent is wrong."""
_SESSION: Final = re.compile(r"[!-~]{8,64}")
_AT: Final = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """POSTs, beside the stream."""

    listen: str = ""
    """HOST:PORT for agents that only HTTP reaches us from, with the certificate of the stream; port 0: any free one.
    Empty: nothing listens."""

    body_bytes: int = FRAME_BYTES + SMALL_BYTES
    """Largest body; by default the largest frame fits."""

    def __post_init__(self) -> None:
        if self.body_bytes < SMALL_BYTES:
            raise ConfigError(f"server.http.body_bytes: need at least {SMALL_BYTES}, got {self.body_bytes}")


class _Outbox(asyncio.Transport):
    """The transport of a session: what is written waits for the next answer."""

    def __init__(self, gone: Callable[[], object]) -> None:
        super().__init__()
        self._gone, self._said = gone, bytearray()
        self.held = self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._said += data

    def said(self) -> bytes:
        """What was written since it was asked last."""
        said, self._said = bytes(self._said), bytearray()
        return said

    def pause_reading(self) -> None:
        self.held = True

    def resume_reading(self) -> None:
        self.held = False

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self._gone()


@dataclass(slots=True)
class _Session:
    """One sender's POSTs."""

    link: Link
    outbox: _Outbox
    timer: asyncio.TimerHandle
    taken: int = field(default=0)
    """Bytes."""


class _Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class Posting:
    """start(), close() before its Ingest is closed. Everything else happens in the network's thread of that Ingest."""

    def __init__(
        self, config: HttpConfig, ingest: Ingest, tls: ssl.SSLContext | None, healthy: Callable[[], bool]
    ) -> None:
        """healthy: whether what is sent is taken up; asked in the network's thread."""
        self._config, self._in, self._tls, self._healthy = config, ingest, tls, healthy
        self._sessions: dict[str, _Session] = {}
        self._reading = 0
        """Bytes of bodies that are not whole yet."""
        self._server: Server | None = None
        self._served: Future[None] | None = None

    def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address. Raises ConfigError."""
        try:
            import uvicorn
        except ImportError as error:
            raise ConfigError(
                f"server.http.listen: need pip install 'trainwarden[server]', got no {error.name}"
            ) from None
        if self._tls is None and not self._in.config.plaintext and not is_loopback(host):
            raise ConfigError(f"server.http.listen: need --cert and --key (or --plaintext) for {host}, got none")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"server.http.listen: cannot listen on {host}:{port}: {error.strerror or error}"
            ) from error
        config = uvicorn.Config(
            self._app(),
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",  # a stranger's garbage is no news
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=self._in.config.links,
            timeout_keep_alive=int(SESSION_S),
            timeout_graceful_shutdown=int(STOP_S),
        )
        config.load()
        config.ssl = self._tls
        self._server = uvicorn.Server(config)
        self._served = asyncio.run_coroutine_threadsafe(self._server.serve(sockets=[listening]), self._in.loop)
        address: tuple[str, int] = listening.getsockname()[:2]
        return address

    def close(self) -> None:
        """Nothing listens any more."""
        if self._server is not None and self._served is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                self._served.result(2 * STOP_S)

    # the network's thread

    def _app(self) -> "Starlette":
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def post(request: "Request") -> "Response":
            try:
                return await self._answer(request)
            except _Refused as refused:
                if refused.status in (401, 403, 413):
                    self._in.counts["refused", "http"] += 1
                return JSONResponse({"why": str(refused)}, refused.status, refused.headers)
            except Exception as error:  # our own fault: the other sessions go on
                self._in.lost({"message": "POST", "exception": error})
                return JSONResponse({"why": "our own fault"}, 500)

        async def health(request: "Request") -> "Response":
            well = self._healthy()
            return JSONResponse({"healthy": well}, 200 if well else 503)

        return Starlette(routes=[Route(PATH, post, methods=["POST"]), Route("/healthz", health, methods=["GET"])])

    async def _answer(self, request: "Request") -> "Response":
        from starlette.responses import Response

        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or self._in.tokens.grant(token.strip()) is None:
            raise _Refused(401, "need Authorization: Bearer and a token that is known", WWW_Authenticate="Bearer")
        name, at = request.headers.get(SESSION, ""), request.headers.get(AT, "")
        if not _SESSION.fullmatch(name) or not _AT.fullmatch(at):
            raise _Refused(400, f"need {SESSION} (8 to 64 characters) and {AT} (a number of bytes)")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise _Refused(415, "a body in no encoding is understood only")
        body = await self._body(request)
        session = self._session(name, int(at), token.strip())
        if body and int(at) == session.taken:
            self._take(session, body)
        elif int(at) + len(body) > session.taken:
            raise _Refused(409, f"{AT}: {session.taken} bytes of this session were taken: begin a new one")
        return Response(session.outbox.said(), media_type="application/octet-stream")

    async def _body(self, request: "Request") -> bytes:
        """All of it. Nothing is taken of a body that is cut."""
        from starlette.requests import ClientDisconnect

        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    self._reading += len(part)
                    if max(size, int(request.headers.get("content-length", 0))) > self._config.body_bytes:
                        raise _Refused(413, f"a body has at most {self._config.body_bytes} bytes", Connection="close")
                    if self._reading > max(self._in.config.waiting_bytes, self._config.body_bytes):
                        raise _Refused(503, "too many bodies at once", Retry_After=str(BUSY_S), Connection="close")
        except TimeoutError:
            raise _Refused(408, f"no whole body within {BODY_S:g} s", Connection="close") from None
        except ClientDisconnect:
            raise _Refused(400, "the body was cut") from None
        finally:
            self._reading -= size
        return b"".join(parts)

    def _session(self, name: str, at: int, token: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            if at:
                raise _Refused(409, "this session is not known (any more): begin a new one")
            session = self._begin(name)
        elif session.link.hello is not None and not hmac.compare_digest(session.link.hello.token, token):
            raise _Refused(403, "the session is of another token")
        if session.outbox.held or self._in.full:
            raise _Refused(503, "more is sent than is taken up", Retry_After=str(BUSY_S))
        session.timer.cancel()
        session.timer = self._in.loop.call_later(SESSION_S, session.link.end)
        return session

    def _begin(self, name: str) -> _Session:
        link = Link(self._in)

        def gone() -> None:
            self._sessions.pop(name, None)
            session.timer.cancel()
            self._in.loop.call_soon(link.connection_lost, None)

        session = _Session(link, _Outbox(gone), self._in.loop.call_later(SESSION_S, link.end))
        self._sessions[name] = session
        link.connection_made(session.outbox)
        return session

    def _take(self, session: _Session, body: bytes) -> None:
        """Raises _Refused; the messages before the one that is wrong are taken."""
        session.taken += len(body)
        session.link.data_received(body)
        session.link.must_be_whole()
        if session.link.refusal is not None:
            reason, why = session.link.refusal
            headers = {"Retry_After": str(BUSY_S)} if reason == "links" else {}
            raise _Refused(_STATUS.get(reason, 400), why, **headers)
