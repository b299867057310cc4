"""The sending side of an agent: what sources saw goes to a server, over one connection, kept until it is acknowledged.

The caller only encodes and appends; a thread connects, sends and listens. What no server takes waits in a bounded
buffer: when it is full the oldest frames go first, then the oldest events, and it is counted (the server sees the gap
in the numbers of each source and says telemetry.lost). After a cut everything that was not acknowledged is sent again.
"""

import contextlib
import os
import random
import select
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from trainwarden.core.auth import TlsFiles, is_loopback, secret
from trainwarden.core.clock import unix_ns
from trainwarden.core.codec import frame_to_bytes
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.model import Event, Frame
from trainwarden.core.wire import (
    ACK,
    EVENTS,
    FRAME,
    REFUSAL,
    WELCOME,
    Decoder,
    Hello,
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
"""Handed to the socket at once."""
IDLE_MS: Final = 100
"""Between two looks for an ack where nothing is to be sent."""
SILENT_S: Final = 30.0
"""Without a sign of the server for this long, and for three of its ack periods, the connection counts as dead: a host
that lost its power closes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkConfig:
    """Where to send, and how much to keep."""

    server: str = ""
    """HOST:PORT of `trainwarden server`; empty: nothing is sent."""

    token: str = ""
    """`env:NAME` or `file:/PATH` that holds the token of this node (or job)."""

    tls: bool = True
    """Off: plain text, refused unless the server is on loopback or `plaintext` is set."""

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

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if self.server and (not host or not port.isdecimal() or not 0 < int(port) < 65536):
            raise ConfigError(f"uplink.server: need HOST:PORT, got {self.server!r}")
        if self.server and not self.tls and not self.plaintext and not is_loopback(host.strip("[]")):
            raise ConfigError(f"uplink.tls: need true (or uplink.plaintext: true) for {self.server}, got false")
        if self.buffer_bytes < 1024 * 1024:
            raise ConfigError(f"uplink.buffer_bytes: need at least 1048576, got {self.buffer_bytes}")

    @property
    def address(self) -> tuple[str, int]:
        """Of `server`, which is not empty."""
        host, _, port = self.server.rpartition(":")
        return host.strip("[]"), int(port)


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
    waiting_bytes: int = 0
    """In the buffer now."""


@dataclass(slots=True)
class _Held:
    """One message in the buffer."""

    number: int
    message: bytes


class _Buffer:
    """Messages in the order of their numbers: first those sent and not acknowledged, then the others. No lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self.bytes = self._number = 0
        self._sent: dict[bool, deque[_Held]] = {True: deque(), False: deque()}
        """By whether they are frames: frames go first."""
        self._unsent: dict[bool, deque[_Held]] = {True: deque(), False: deque()}

    def add(self, message: bytes, *, is_frame: bool) -> list[str]:
        """Append one, and say which fields of UplinkCounts what had to go for it counts under."""
        self._number += 1
        self._unsent[is_frame].append(_Held(self._number, message))
        self.bytes += len(message)
        gone = []
        while self.bytes > self._max:
            kind = bool(self._sent[True] or self._unsent[True])
            was_sent = bool(self._sent[kind])
            self._forget((self._sent if was_sent else self._unsent)[kind])
            gone.append("forgotten" if was_sent else "dropped_frames" if kind else "dropped_events")
        return gone

    def take(self, max_bytes: int) -> list[_Held]:
        """The next messages to send, at least one if there is any; they count as sent."""
        out: list[_Held] = []
        size = 0
        while size < max_bytes and (kind := self._first(self._unsent)) is not None:
            held = self._unsent[kind].popleft()
            self._sent[kind].append(held)
            out.append(held)
            size += len(held.message)
        return out

    def acked(self, number: int) -> None:
        """All up to this one are safe."""
        for held in self._sent.values():
            while held and held[0].number <= number:
                self._forget(held)

    def rewind(self) -> int:
        """What was not acknowledged is to be sent again; how many messages wait now."""
        for kind, held in self._sent.items():
            self._unsent[kind].extendleft(reversed(held))
        self._sent = {True: deque(), False: deque()}
        return sum(map(len, self._unsent.values()))

    @property
    def all_sent(self) -> bool:
        """Whether nothing waits for its first or next sending."""
        return self._first(self._unsent) is None

    def _forget(self, held: deque[_Held]) -> None:
        self.bytes -= len(held.popleft().message)

    @staticmethod
    def _first(queues: dict[bool, deque[_Held]]) -> bool | None:
        heads = [(held[0].number, kind) for kind, held in queues.items() if held]
        return min(heads)[1] if heads else None


class Uplink:
    """offer() whatever was seen, at any time; close() once."""

    def __init__(self, config: UplinkConfig, node: str) -> None:
        """Raises ConfigError: a token that cannot be read, certificates that cannot be used."""
        self._config, self._node = config, node
        self._token = secret(config.token, "uplink.token")
        self._context = config.files.client() if config.tls else None
        self._name = f"{unix_ns()}-{os.getpid()}"
        self._buffer = _Buffer(config.buffer_bytes)
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        """Guards buffer and counts."""
        self._connection: socket.socket | None = None
        self._closing = False
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
        with self._changed:
            self._changed.wait_for(lambda: self._buffer.all_sent or bool(self.failing), deadline_s)
            self._closing = True
            self._changed.notify_all()
            if not self._buffer.all_sent and self._connection is not None:
                with contextlib.suppress(OSError):  # it may be in the middle of a send that nobody takes
                    self._connection.shutdown(socket.SHUT_RDWR)
        self._poke()
        self._thread.join(self._config.connect_s + 1.0)  # a name lookup may hang for longer: it holds nothing
        self._wake.close()

    # the thread

    def _run(self) -> None:
        failed = 0
        with self._woken:
            while not self._closing:
                try:
                    with self._connected() as connection:
                        decoder, silent_s = self._greet(connection)
                        failed = 0
                        self._serve(connection, decoder, silent_s)
                except (OSError, DataError) as error:  # ssl.SSLError is an OSError
                    failed += 1
                    self._failed(str(error) or type(error).__name__)
                wait_s = min(0.25 * 2 ** min(failed, 30), self._config.backoff_max_s) * random.uniform(0.75, 1.25)
                with self._changed:
                    self._connection = None
                    self._changed.wait_for(lambda: self._closing, wait_s)

    def _connected(self) -> socket.socket:
        host, port = self._config.address
        plain = socket.create_connection((host, port), self._config.connect_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return plain if self._context is None else self._context.wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise

    def _greet(self, connection: socket.socket) -> tuple[Decoder, float]:
        """Say who we are and hear that we are welcome, and how long the server may be silent."""
        with self._changed:
            self._connection = connection
            backlog = self._buffer.rewind()
        connection.sendall(say(Hello(node=self._node, token=self._token, uplink=self._name, backlog=backlog)))
        decoder, end_s = Decoder(WELCOME), time.monotonic() + self._config.connect_s
        while time.monotonic() < end_s:
            for kind, body in decoder.feed(_received(connection)):
                if kind != WELCOME:
                    raise DataError(f"refused: {heard(Refusal, body).why}")
                welcome = heard(Welcome, body)
                with self._changed:
                    self._counts["connects"] += 1
                    self.failing = ""
                return decoder, max(SILENT_S, 3 * welcome.ack_s)
        raise TimeoutError("no welcome")

    def _serve(self, connection: socket.socket, decoder: Decoder, silent_s: float) -> None:
        """Send and listen until we close."""
        connection.settimeout(silent_s)
        wire, heard_s = _Wire(), time.monotonic()
        while not (self._closing and self._all_sent):
            if self._readable(connection):
                heard_s = time.monotonic()
                for kind, body in decoder.feed(_received(connection)):
                    if kind == REFUSAL:
                        raise DataError(f"refused: {heard(Refusal, body).why}")
                    if kind == ACK:
                        self._take_ack(wire, ack_from_bytes(body))
            elif time.monotonic() - heard_s > silent_s:
                raise TimeoutError(f"no sign of the server for {silent_s:.0f} s")
            self._send(connection, wire)

    def _readable(self, connection: socket.socket) -> bool:
        """Whether the server said something; waits a little where there is nothing to send."""
        if isinstance(connection, ssl.SSLSocket) and connection.pending():
            return True
        poll = select.poll()  # select takes no descriptor above 1023
        for one in (connection, self._woken):
            poll.register(one, select.POLLIN)
        ready = {number for number, _ in poll.poll(IDLE_MS if self._all_sent else 0)}
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        return connection.fileno() in ready

    @property
    def _all_sent(self) -> bool:
        with self._changed:
            return self._buffer.all_sent

    def _send(self, connection: socket.socket, wire: "_Wire") -> None:
        with self._changed:
            held = self._buffer.take(SEND_BYTES)
            self._counts["sent"] += len(held)
        if held:
            wire.numbers.extend(one.number for one in held)
            connection.sendall(b"".join(one.message for one in held))
            with self._changed:
                self._changed.notify_all()

    def _take_ack(self, wire: "_Wire", count: int) -> None:
        if not wire.acked <= count <= wire.acked + len(wire.numbers):
            raise DataError(f"ack of {count} messages, {wire.acked + len(wire.numbers)} were sent")
        new, wire.acked = [wire.numbers.popleft() for _ in range(count - wire.acked)], count
        with self._changed:
            self._buffer.acked(new[-1] if new else 0)
            self._counts["acked"] += len(new)
            self._changed.notify_all()

    def _failed(self, why: str) -> None:
        with self._changed:
            self._counts["failures"] += not self._closing
            self.failing = f"{self._config.server}: {why}"
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


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(64 * 1024)
    if not data:
        raise ConnectionError("the server closed the connection")
    return data


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
