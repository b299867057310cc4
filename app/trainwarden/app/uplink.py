"""The sending side of an agent: what sources saw goes to a server, over one connection, kept until it is acknowledged.
Where only HTTP passes, POSTs stand for the connection (posted.py).

The caller only encodes and appends; a thread connects, sends and listens. What no server takes waits in a bounded
buffer: when it is full the oldest frames go first, then the oldest events, and it is counted (the server sees the gap
in the numbers of each source and says telemetry.lost). After a cut everything that was not acknowledged is sent again.
"""

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final
from urllib.parse import urlsplit

from trainwarden.app.buffer import Buffer, Held
from trainwarden.app.ways import Stream, TooLargeError, Way
from trainwarden.core.auth import TlsFiles, is_loopback, secret
from trainwarden.core.clock import unix_ns
from trainwarden.core.codec import frame_to_bytes
from trainwarden.core.errors import ConfigError, DataError, DeliveryError
from trainwarden.core.model import Event, Frame
from trainwarden.core.net import place_of
from trainwarden.core.wire import (
    ACK,
    EVENTS,
    FRAME,
    LOOK,
    REFUSAL,
    TAKES_LOOKS,
    WELCOME,
    Asked,
    Decoder,
    Hello,
    Message,
    Refusal,
    Welcome,
    ack_from_bytes,
    events_to_bytes,
    heard,
    pack,
    say,
)

EVENTS_A_MESSAGE: Final = 100
LONG_EVENT_BYTES: Final = 32 * 1024
"""An event (a stack, mostly) that ends its batch, so that no batch is too large but by one event."""
SEND_BYTES: Final = 256 * 1024
"""Sent at once."""
SILENT_S: Final = 30.0
"""Without a sign of the server for this long, and for three of its ack periods, the connection counts as dead: a host
that lost its power closes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkConfig:
    """Where to send, and how much to keep."""

    server: str = ""
    """HOST:PORT of `trainwarden server`: one connection. Its URL (https://HOST[:PORT][/PREFIX]): POSTs, where only HTTP
    passes; a proxy of the environment (HTTPS_PROXY, NO_PROXY) is used. Empty: nothing is sent."""

    token: str = ""
    """`env:NAME` or `file:/PATH` that holds the token of this node (or job)."""

    tls: bool = True
    """Off: plain text, refused unless the server is on loopback or `plaintext` is set. A URL says it itself."""

    files: TlsFiles = field(default_factory=TlsFiles)
    """Own CA of the server's certificate; certificate and key where the server asks for one."""

    plaintext: bool = False
    """Let token and telemetry leave the host unencrypted."""

    buffer_bytes: int = 64 * 1024 * 1024
    """Kept for a server that cannot be reached: eight ranks fill it in about two hours."""

    backoff_max_s: float = 10.0
    """Longest wait between two tries to connect; the first is 0.5 s, each further one twice as long."""

    connect_s: float = 10.0
    """Deadline of a connect, of the TLS handshake and of the server's welcome, each."""

    post_s: float = 1.0
    """Between two POSTs, so that what is seen meanwhile goes together; more than 256 KiB go at once."""

    def __post_init__(self) -> None:
        if self.server:
            self._check_server()
        if self.buffer_bytes < 1024 * 1024:
            raise ConfigError(f"uplink.buffer_bytes: need at least 1048576, got {self.buffer_bytes}")
        if not 0.01 <= self.post_s <= 10.0:  # a server forgets a session after a minute
            raise ConfigError(f"uplink.post_s: need 0.01 to 10, got {self.post_s:g}")

    def _check_server(self) -> None:
        try:
            host, port, got = *self.address, self.place
        except (ValueError, DeliveryError):
            host, port, got = "", 0, "a URL that is none"
        if not host or not 0 < port < 65536 or "@" in self.server:
            raise ConfigError(f"uplink.server: need HOST:PORT or http[s]://HOST[:PORT][/PREFIX], got {got!r}")
        if not self.encrypted and not self.plaintext and not is_loopback(host):
            key, need = ("server", "https://") if self.posts else ("tls", "true")
            got = self.place if self.posts else "false"
            raise ConfigError(f"uplink.{key}: need {need} (or uplink.plaintext: true) for {self.place}, got {got}")

    @property
    def posts(self) -> bool:
        """Whether the server is spoken to by POST."""
        return self.server.startswith(("http://", "https://"))

    @property
    def place(self) -> str:
        """`server` as it may be told."""
        return place_of(self.server) if self.posts else self.server

    @property
    def encrypted(self) -> bool:
        """Whether nobody on the way can read along."""
        return self.server.startswith("https://") if self.posts else self.tls

    @property
    def certain(self) -> bool:
        """Whether nobody else can speak in the server's place."""
        return self.encrypted or is_loopback(self.address[0])

    @property
    def address(self) -> tuple[str, int]:
        """Of `server`. Raises ValueError where that is none."""
        if self.posts:
            parts = urlsplit(self.server)
            return parts.hostname or "", parts.port or (443 if self.encrypted else 80)
        host, _, port = self.server.rpartition(":")
        return host.strip("[]"), int(port) if port.isdecimal() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkCounts:
    """What became of what was offered, since the beginning."""

    offered: int = 0
    """Messages: frames, and events in batches."""
    sent: int = 0
    """Those sent again count again."""
    acked: int = 0
    dropped_frames: int = 0
    dropped_events: int = 0
    """Batches that were never sent, for want of room."""
    too_large: int = 0
    """What no receiver takes."""
    forgotten: int = 0
    """Sent, and given up before the ack: lost only if the server lost them too."""
    connects: int = 0
    failures: int = 0
    """Connections that could not be made or ended otherwise than by us."""
    not_taken: int = 0
    """Messages of the server that are nothing to an agent: a newer one sent them, or looks that are not wanted."""
    waiting_bytes: int = 0
    """In the buffer now."""


class Uplink:
    """offer() whatever was seen, at any time; close() once."""

    def __init__(self, config: UplinkConfig, node: str, on_look: Callable[[Asked], None] | None = None) -> None:
        """on_look: takes what the server asks to look at, in our thread, and never waits; None: nothing is taken, as
        from a server that could be anybody. Raises ConfigError: a token that cannot be read, certificates that cannot
        be used."""
        self._config, self._node = config, node
        self._token = secret(config.token, "uplink.token")
        self._context = config.files.client() if config.encrypted else None
        self._on_look = on_look if config.certain else None
        self._name = f"{unix_ns()}-{os.getpid()}"
        self._buffer = Buffer(config.buffer_bytes)
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        """Guards buffer and counts."""
        self._way: Way | None = None
        self._hurry, self._closing = threading.Event(), False
        self._at_once = SEND_BYTES
        self._wake, self._woken = socket.socketpair()
        self.failing = "not connected yet"
        """Why nothing is sent right now, in words; empty: all is well."""
        self._thread = threading.Thread(target=self._run, name="trainwarden-uplink", daemon=True)
        self._thread.start()

    def offer(self, items: Iterable[Frame | Event]) -> None:
        """Send these when it can be done. Never waits, never raises for what the network does."""
        messages = list(_messages(items))
        with self._changed:
            self._counts["offered"] += len(messages)
            for message, is_frame in messages:
                self._counts.update(self._buffer.add(message, is_frame=is_frame) if message else ["too_large"])
        self._poke()

    @property
    def counts(self) -> UplinkCounts:
        """As of now."""
        with self._changed:
            return UplinkCounts(**self._counts, waiting_bytes=self._buffer.bytes)

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything is acknowledged; False: it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._buffer.bytes == 0, deadline_s)

    def close(self, deadline_s: float = 2.0) -> None:
        """Send what can be sent until then, and end."""
        self._hurry.set()
        self._poke()
        with self._changed:
            self._changed.wait_for(lambda: self._buffer.all_sent or bool(self.failing), deadline_s)
            self._closing = True
            self._changed.notify_all()
            if not self._buffer.all_sent and self._way is not None:
                with contextlib.suppress(OSError):  # it may be in the middle of a send that nobody takes
                    self._way.end()
        self._poke()
        self._thread.join(self._config.connect_s + 1.0)  # a name lookup may hang for longer: it holds nothing
        self._wake.close()

    # the thread

    def _run(self) -> None:
        failed = 0
        with self._woken:
            while not self._closing:
                try:
                    with contextlib.closing(self._found()) as way:
                        decoder, early, silent_s = self._greet(way)
                        failed = 0
                        self._serve(way, decoder, early, silent_s)
                except (OSError, DataError) as error:  # ssl.SSLError is an OSError
                    failed += 1
                    self._failed(str(error) or type(error).__name__)
                wait_s = min(0.25 * 2 ** min(failed, 30), self._config.backoff_max_s) * random.uniform(0.75, 1.25)
                with self._changed:
                    self._way = None
                    self._changed.wait_for(lambda: self._closing, wait_s)

    def _found(self) -> Way:
        """A way to the server. Raises OSError."""
        if not self._config.posts:
            return Stream(self._config.address, self._context, self._config.connect_s, self._woken)
        from trainwarden.app.posted import Posted  # an HTTP client: only for those who have no other way

        return Posted(self._config, self._token, self._context, self._woken, self._hurry, self._busy)

    def _greet(self, way: Way) -> tuple[Decoder, list[Message], float]:
        """Say who we are and hear that we are welcome; what came at once with that, and how long the server may be
        silent."""
        with self._changed:
            self._way = way
            backlog = self._buffer.rewind()
        takes = () if self._on_look is None else (TAKES_LOOKS,)
        way.send(say(Hello(node=self._node, token=self._token, uplink=self._name, backlog=backlog, takes=takes)))
        decoder, end_s = Decoder(WELCOME), time.monotonic() + self._config.connect_s
        while time.monotonic() < end_s:
            for kind, body in (messages := [*decoder.feed(way.receive())])[:1]:
                if kind != WELCOME:
                    raise DataError(f"refused: {heard(Refusal, body).why}")
                welcome = heard(Welcome, body)
                with self._changed:
                    self._counts["connects"] += 1
                    self.failing = ""
                return decoder, messages[1:], max(SILENT_S, 3 * welcome.ack_s)
        raise TimeoutError("no welcome")

    def _serve(self, way: Way, decoder: Decoder, early: list[Message], silent_s: float) -> None:
        """Send and listen until we close."""
        way.patience(silent_s)
        wire, heard_s = _Wire(), time.monotonic()
        self._hear(wire, decoder, early)
        while not (self._closing and self._all_sent):
            if way.ready(wait=not self._waits(min(way.batch_bytes, self._at_once))):
                heard_s = time.monotonic()
                self._hear(wire, decoder, decoder.feed(way.receive()))
            elif time.monotonic() - heard_s > silent_s:
                raise TimeoutError(f"no sign of the server for {silent_s:.0f} s")
            self._send(way, wire)

    def _waits(self, size: int) -> bool:
        with self._changed:
            return self._buffer.holds(size)

    @property
    def _all_sent(self) -> bool:
        with self._changed:
            return self._buffer.all_sent

    def _send(self, way: Way, wire: "_Wire") -> None:
        with self._changed:
            held = self._buffer.take(self._at_once)
            self._counts["sent"] += len(held)
        wire.numbers.extend(one.number for one in held)
        if held or way.polls:
            try:
                way.send(b"".join(one.message for one in held))
            except TooLargeError:
                self._shrink(held)
                raise
            with self._changed:
                self._changed.notify_all()

    def _shrink(self, held: list[Held]) -> None:
        """Somebody on the way takes no message so large: send them one by one, and give up the one that it is."""
        self._at_once = 1 if len(held) > 1 else SEND_BYTES
        if len(held) == 1:
            with self._changed:
                self._buffer.drop(held[0])
                self._counts["too_large"] += 1

    def _busy(self, why: str) -> None:
        """The server asks for patience (empty: no more)."""
        with self._changed:
            self.failing = why and f"{self._config.place}: {why}"
            self._changed.notify_all()

    def _take_ack(self, wire: "_Wire", count: int) -> None:
        if not wire.acked <= count <= wire.acked + len(wire.numbers):
            raise DataError(f"ack of {count} messages, {wire.acked + len(wire.numbers)} were sent")
        new, wire.acked = [wire.numbers.popleft() for _ in range(count - wire.acked)], count
        with self._changed:
            self._buffer.acked(new[-1] if new else 0)
            self._counts["acked"] += len(new)
            self._changed.notify_all()

    def _hear(self, wire: "_Wire", decoder: Decoder, messages: Iterable[Message]) -> None:
        for kind, body in messages:
            if kind == REFUSAL:
                raise DataError(f"refused: {heard(Refusal, body).why}")
            if kind == ACK:
                self._take_ack(wire, ack_from_bytes(body))
            else:
                self._asked(kind, body)
        self._pass_over(decoder.skipped)
        decoder.skipped = 0

    def _asked(self, kind: int, body: bytes) -> None:
        """A look is all that a server may ask of us; one that we do not understand is a newer server's."""
        with contextlib.suppress(DataError):
            if kind == LOOK and self._on_look is not None:
                self._on_look(heard(Asked, body))
                return
        self._pass_over(1)

    def _pass_over(self, count: int) -> None:
        with self._changed:
            self._counts["not_taken"] += count

    def _failed(self, why: str) -> None:
        with self._changed:
            self._counts["failures"] += not self._closing
            self.failing = f"{self._config.place}: {why}"
            self._changed.notify_all()

    def _poke(self) -> None:
        """Let the thread look up from its select."""
        with contextlib.suppress(OSError):  # full: it is about to look
            self._wake.send(b"\0", socket.MSG_DONTWAIT)


@dataclass(slots=True)
class _Wire:
    """Messages of one connection."""

    numbers: deque[int] = field(default_factory=deque)
    """Sent and not acknowledged."""
    acked: int = 0


def _messages(items: Iterable[Frame | Event]) -> Iterator[tuple[bytes, bool]]:
    """Each frame a message, events that follow each other in batches; and whether it is a frame. b"": too large."""
    for is_frame, run in groupby(items, lambda item: isinstance(item, Frame)):
        if is_frame:
            yield from ((_packed(FRAME, frame_to_bytes(one)), True) for one in run if isinstance(one, Frame))
            continue
        lines: list[bytes] = []
        for one in run:
            lines.append(events_to_bytes([one] if isinstance(one, Event) else []))
            if len(lines) == EVENTS_A_MESSAGE or len(lines[-1]) > LONG_EVENT_BYTES:
                yield _packed(EVENTS, b"\n".join(lines)), False
                lines.clear()
        if lines:
            yield _packed(EVENTS, b"\n".join(lines)), False


def _packed(kind: int, body: bytes) -> bytes:
    try:
        return pack(kind, body)
    except DataError:
        return b""
