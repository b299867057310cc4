"""The network side of a server: takes connections of agents, checks who may send what, hands on what was sent.

One thread with one asyncio loop reads and decodes for all connections; what it hands on is taken up elsewhere (writing
to disks must hold up no reader), and a connection is told by that other side what to acknowledge. Nothing grows without
bound: when too much waits to be taken up, or a connection sends more than its rate, it is not read, and the sender's
own bounded buffer decides what to drop.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias, cast

from trainwarden.app.gathering import Gathering
from trainwarden.core.auth import Grant, Tokens, is_loopback, refused
from trainwarden.core.clock import unix_ns
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.model import Event, Frame
from trainwarden.core.wire import (
    EVENTS,
    FRAME,
    HELLO,
    Asked,
    Decoder,
    Hello,
    Refusal,
    Welcome,
    ack_to_bytes,
    events_from_bytes,
    frame_of,
    heard,
    say,
)

HELLO_S: Final = 10.0
"""For a TLS handshake, and again for the hello; a host under load answers within a second or two."""
KNOWN_MAX: Final = 1000
"""(source, job) pairs of a connection that were checked and need not be checked again."""
ASKED_MAX: Final = 64
"""Looks sent to an agent of which nothing comes: more would only wait in a buffer."""
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""A host that lost its power is noticed within a minute."""

Take: TypeAlias = "Callable[[Link, list[Frame | Event], int, int], None]"
"""(link, items, messages of this link so far, bytes of these); called in the network's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """What agents may do to a server."""

    ack: timedelta = timedelta(seconds=10)
    """Between two times that everything taken up is written down for good, and acknowledged."""

    rate_bytes: int = 32 * 1024 * 1024
    """A second, of one connection; more is read later. A node of 8 ranks sends some kB a second; after a cut it sends
    what its buffer kept."""

    settle: timedelta = timedelta(seconds=15)
    """After a start, how long at most the nodes that sent before are waited for, before anything is taken up: a sender
    tries again at least every 12.5 s."""

    links: int = 20_000
    """Connections at once: 12,500 nodes of 8 ranks, and some that reconnect."""

    waiting_bytes: int = 64 * 1024 * 1024
    """Decoded and not taken up yet; beyond it nothing is read."""

    plaintext: bool = False
    """Listen without TLS on an address that other hosts reach."""

    def __post_init__(self) -> None:
        if not timedelta(milliseconds=100) <= self.ack <= timedelta(minutes=1):
            raise ConfigError(f"server.ingest.ack: need 100ms to 1min, got {self.ack.total_seconds():g}s")
        for name in ("rate_bytes", "links", "waiting_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"server.ingest.{name}: need at least 1, got {getattr(self, name)}")


class Ingest:
    """start(), then ack() and freed() from any thread, close()."""

    def __init__(
        self, config: IngestConfig, tokens: Tokens, take: Take, say: Callable[[str], None], tls: ssl.SSLContext | None
    ) -> None:
        self.config, self.tokens, self.take, self.say = config, tokens, take, say
        self._tls = tls
        self.counts: Counter[tuple[str, str]] = Counter()
        """(refused, reason) and (held, reason); only the network's thread adds."""
        self.links: set[Link] = set()
        """Those whose hello was taken; changed by the network's thread only."""
        self.open = 0
        """Connections, with those that have not said hello."""
        self._waiting = 0
        self.full = False
        """Whether so much waits that nothing is read."""
        self.gathering = Gathering()
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(self.gathering)
        self.loop.set_exception_handler(lambda _loop, context: self.lost(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name="trainwarden-ingest", daemon=True)
        self._server: asyncio.Server | None = None

    def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address. Raises ConfigError."""
        if self._tls is None and not self.config.plaintext and not is_loopback(host):
            raise ConfigError(f"server.listen: need --cert and --key (or --plaintext) for {host}, got none")
        limit: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": HELLO_S}
        making = self.loop.create_server(lambda: Link(self), host, port, backlog=1024, **limit)
        try:
            self._server = self.loop.run_until_complete(making)
        except OSError as error:
            self.loop.close()
            raise ConfigError(f"server.listen: cannot listen on {host}:{port}: {error.strerror or error}") from error
        self._thread.start()
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    def ack(self, counts: Mapping["Link", int]) -> None:
        """So many messages of each link are safe."""

        def send() -> None:
            for link, count in counts.items():
                link.ack(count)

        self._soon(send)

    def renew(self, tokens: Tokens) -> None:
        """From now on these tokens hold; who came with one that does not stand for the same any more has to go."""

        def hold() -> None:
            self.tokens = tokens
            for link in [*self.links]:
                link.check(tokens)

        self._soon(hold)

    def freed(self, size: int) -> None:
        """So many bytes were taken up."""
        self._soon(lambda: self.wait(-size))

    def close(self) -> None:
        """Nothing is heard any more; what was acknowledged before is still said."""
        self._soon(lambda: self.loop.create_task(self._shut()))
        self._thread.join()
        self.loop.close()

    # the network's thread

    def wait(self, size: int) -> None:
        """So many bytes more (or less) wait to be taken up."""
        self._waiting += size
        full = self._waiting > self.config.waiting_bytes // (2 if self.full else 1)
        if full != self.full:
            self.full = full
            for link in self.links:
                link.hold("waiting", full)

    def _soon(self, what: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self.loop.call_soon_threadsafe(what)

    async def _shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in [*self.links]:
            link.end()
        await asyncio.sleep(0.05)
        for task in asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}:
            task.cancel()
        self.loop.call_soon(self.loop.stop)

    def lost(self, context: Mapping[str, Any]) -> None:
        """What asyncio could not hand to a connection: we have a bug, and the other connections go on."""
        self.counts["refused", "error"] += 1
        self.say(f"ingest: {context.get('message')}: {context.get('exception')!r}")


class Link(asyncio.Protocol):
    """One connection."""

    def __init__(self, ingest: Ingest) -> None:
        self._in = ingest
        self._decoder = Decoder(HELLO)
        self._transport: asyncio.Transport
        self._grant: Grant | None = None
        self.hello: Hello | None = None
        self._known: set[tuple[str, str | None]] = set()
        self._holds: set[str] = set()
        self._second_bytes, self._said = 0, ""
        self._asked = 0
        """Looks sent since something came."""
        self._timer: asyncio.TimerHandle | None = None
        self.refusal: tuple[str, str] | None = None
        """Reason (one word) and words, once it was refused."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast("asyncio.Transport", transport)
        self._in.open += 1
        if self._in.open > self._in.config.links:
            self.refuse(f"{self._in.config.links} connections are open: server.ingest.links", "links")
            return
        self._timer = self._in.loop.call_later(HELLO_S, self.refuse, f"no hello within {HELLO_S:g} s", "hello")
        connection = transport.get_extra_info("socket")
        if connection is None:  # a session of POSTs
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's."""
        self._in.open -= 1
        self._in.links.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        self._in.gathering.read_bytes += len(data)
        if self._transport.is_closing():
            return
        self._asked = 0
        items: list[Frame | Event] = []
        try:
            for kind, body in self._decoder.feed(data):
                if kind == FRAME:
                    self._take_frame(body, items)
                elif kind == EVENTS:
                    self._take_events(body, items)
                elif kind == HELLO and not self._welcome(body):
                    return
                elif kind not in (HELLO, FRAME, EVENTS):
                    raise DataError(f"stream: a message of kind {kind} is not for a server")
        except DataError as error:
            self.refuse(str(error), "stream")
        if self._grant is not None:
            self._in.wait(len(data))
            self._in.take(self, items, self._decoder.count, len(data))
            self._meter(len(data))

    @property
    def is_agent(self) -> bool:
        """Whether its token is bound to a node."""
        return self._grant is not None and self._grant.kind == "agent"

    @property
    def caught_up(self) -> bool:
        """Whether everything was read that waited when it connected."""
        return self.hello is not None and self._decoder.count >= self.hello.backlog

    def ack(self, count: int) -> None:
        """The first messages are safe."""
        if not self._transport.is_closing():
            self._transport.write(ack_to_bytes(count))

    def check(self, tokens: Tokens) -> None:
        """End it where the token that it came with stands for something else now."""
        if self.hello is not None and tokens.grant(self.hello.token) != self._grant:
            self.refuse("the token was revoked", "token")

    def must_be_whole(self) -> None:
        """End it where what was received ends inside a message."""
        if not self._decoder.whole and self.refusal is None:
            self.refuse("the body ends inside a message", "stream")

    def ask(self, asked: Asked) -> None:
        """Let the agent look closer (any thread)."""

        def send() -> None:
            if not self._transport.is_closing() and self._asked < ASKED_MAX:
                self._asked += 1
                self._transport.write(say(asked))

        self._in._soon(send)

    def refuse(self, why: str, reason: str) -> None:
        """Say why, and end it."""
        self.refusal = reason, why
        self._count_refused(reason, why)
        self._transport.write(say(Refusal(why=why)))
        self.end()

    def end(self) -> None:
        """Say nothing more."""
        self._transport.close()

    def hold(self, why: str, held: bool) -> None:
        """Do not read (or read again) for one of several reasons."""
        if held == (why in self._holds) or self._transport.is_closing():
            return
        (self._holds.add if held else self._holds.discard)(why)
        (self._transport.pause_reading if self._holds else self._transport.resume_reading)()

    def _welcome(self, body: bytes) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        try:
            if self._grant is not None:
                raise DataError("stream: a second hello")
            self.hello = heard(Hello, body)
        except DataError as error:
            self.refuse(str(error), "protocol")
            return False
        grant = self._in.tokens.grant(self.hello.token)
        if grant is None or (grant.kind == "agent" and grant.name != self.hello.node):
            self.refuse(f"the token is not one of node {self.hello.node[:80]!r}", "token")
            return False
        self._grant = grant
        self._in.links.add(self)
        self._transport.write(say(Welcome(ack_s=self._in.config.ack.total_seconds())))
        return True

    def _take_frame(self, body: bytes, items: list[Frame | Event]) -> None:
        try:
            frame = frame_of(body)
        except DataError as error:
            self._count_refused("frame", str(error))
            return
        key = frame.source, frame.job
        if key in self._known or self._may(frame):
            if len(self._known) < KNOWN_MAX:
                self._known.add(key)
            items.append(frame)

    def _take_events(self, body: bytes, items: list[Frame | Event]) -> None:
        for event in events_from_bytes(body):
            if isinstance(event, DataError):
                self._count_refused("event", str(event))
            elif self._may(event):
                items.append(event)

    def _may(self, item: Frame | Event) -> bool:
        assert self._grant is not None
        why = refused(self._grant, item, unix_ns())
        if why is not None:
            self._count_refused("grant", why)
        return why is None

    def _count_refused(self, reason: str, why: str) -> None:
        self._in.counts["refused", reason] += 1
        if reason != self._said:  # a peer that sends nothing else would fill the log
            self._said = reason
            node = "somebody" if self.hello is None else f"node {self.hello.node[:80]!r}"
            self._in.say(f"ingest: refused from {node}: {why}")

    def _meter(self, size: int) -> None:
        """Not more than the rate: what is too much is read in the next seconds."""
        if not self._second_bytes:
            self._in.loop.call_later(1.0, self._next_second)
        self._second_bytes += size
        if self._second_bytes > self._in.config.rate_bytes:
            self.hold("rate", True)
            self._in.counts["held", "rate"] += 1

    def _next_second(self) -> None:
        self._second_bytes = max(0, self._second_bytes - self._in.config.rate_bytes)
        self.hold("rate", self._second_bytes > self._in.config.rate_bytes)
        if self._second_bytes:
            self._in.loop.call_later(1.0, self._next_second)
