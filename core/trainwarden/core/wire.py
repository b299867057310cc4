"""What goes over one connection from those who see to a server: messages with a length, acknowledged by count.

A message is MAGIC, its kind (u2), the length of its body (u4), all little-endian, and the body:

hello    first of all, JSON: who sends, and the token that lets him
welcome  the answer, JSON: how often the server acknowledges
refusal  the other answer, also later, JSON: why; then the connection ends
frame    core/codec.frame_to_bytes
events   core/codec.dumps, one event a line
ack      u8: so many messages after the hello, understood or not, will never be asked for again
look     to an agent whose hello says that it takes looks, JSON: which ranks of which job to look closer at

A kind that is not known is passed over and counted: a newer peer sent it. hello and refusal stay readable for every
version. What was sent and not acknowledged is sent again on the next connection, so that each message comes at least
once; the receiver knows a frame or event by its source and number.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from trainwarden.core.codec import FRAME_MAGIC, NAMED, dumps, frame_from_bytes, loads
from trainwarden.core.errors import DataError
from trainwarden.core.fromjson import decoder
from trainwarden.core.model import Epoch, Event, Frame, JobId, Look
from trainwarden.core.schemas import DTYPES
from trainwarden.core.version import __version__

PROTOCOL: Final = 1
"""Another number is refused: what may differ between releases of one protocol are kinds of message, and JSON keys."""

MAGIC: Final = b"TW"
HELLO, WELCOME, REFUSAL, FRAME, EVENTS, ACK, LOOK = range(1, 8)
TAKES_LOOKS: Final = "look"
"""In a hello."""

SMALL_BYTES: Final = 64 * 1024
FRAME_BYTES: Final = 16 * 1024 * 1024
"""190,000 step rows."""
EVENTS_BYTES: Final = 4 * 1024 * 1024

_CAPS: Final[Mapping[int, int]] = {
    HELLO: SMALL_BYTES,
    WELCOME: SMALL_BYTES,
    REFUSAL: SMALL_BYTES,
    FRAME: FRAME_BYTES,
    EVENTS: EVENTS_BYTES,
    ACK: 8,
    LOOK: SMALL_BYTES,
}
_HEAD: Final = struct.Struct("<2sHI")
_COUNT: Final = struct.Struct("<Q")

Message: TypeAlias = tuple[int, bytes]
"""A kind and a body."""


def pack(kind: int, body: bytes) -> bytes:
    """A message as it is sent. Raises DataError for a body that no receiver takes."""
    if len(body) > _CAPS[kind]:
        raise DataError(f"message of kind {kind}: {len(body)} bytes, at most {_CAPS[kind]}")
    return _HEAD.pack(MAGIC, kind, len(body)) + body


class Decoder:
    """Bytes of one connection in, messages out, however the bytes are cut; holds at most one message and one piece.

    >>> [*Decoder(HELLO).feed(pack(HELLO, b"{}"))]
    [(1, b'{}')]
    """

    def __init__(self, first: int) -> None:
        """first: the kind that the first message has to be."""
        self.count = 0
        """Messages after the first that have gone by, known or not: what an ack counts."""
        self.skipped = 0
        """Of these, those of a kind that is not known."""
        self._first: int | None = first
        self._head_part = b""
        """Of a header that is not whole."""
        self._kind, self._missing = 0, 0
        """Of the message that is not whole; a kind that is not known is passed over and kept nowhere."""
        self._parts: list[memoryview] = []
        """Of its body: copied once, when the last is there."""
        self._broken = ""

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete; to be exhausted. Raises DataError where the stream is garbage,
        and at every call after that: nothing behind it can be told apart."""
        if self._broken:
            raise DataError(self._broken)
        if self._head_part:
            data, self._head_part = self._head_part + data, b""
        at, end = 0, len(data)
        if self._missing:
            at = min(self._missing, end)
            self._missing -= at
            if self._kind in _CAPS:
                self._parts.append(memoryview(data)[:at])
            if self._missing:
                return
            if self._kind in _CAPS:
                body, self._parts = b"".join(self._parts), []
                self._went_by()
                yield self._kind, body
            else:
                self._went_by(skipped=1)
        while end - at >= _HEAD.size:
            magic, kind, length = _HEAD.unpack_from(data, at)
            if magic != MAGIC or self._first is not None or length > _CAPS.get(kind, FRAME_BYTES):
                self._check(magic, kind, length)
            at += _HEAD.size
            if end - at < length:
                self._kind, self._missing = kind, length - (end - at)
                self._parts = [memoryview(data)[at:]] if kind in _CAPS else []
                return
            if kind in _CAPS:
                self._went_by()
                yield kind, data[at : at + length]
            else:
                self._went_by(skipped=1)
            at += length
        self._head_part = data[at:]

    @property
    def whole(self) -> bool:
        """Whether no message is half there."""
        return not self._missing and not self._head_part

    def _went_by(self, skipped: int = 0) -> None:
        self.count += self._first is None
        self.skipped += skipped
        self._first = None

    def _check(self, magic: bytes, kind: int, length: int) -> None:
        if magic != MAGIC:
            self._broken = f"stream: a message starts with {magic!r}, not {MAGIC!r}"
        elif self._first not in (None, kind) and (self._first, kind) != (WELCOME, REFUSAL):
            self._broken = f"stream: begins with a message of kind {kind}, not {self._first}"
        elif length > _CAPS.get(kind, FRAME_BYTES):
            self._broken = (
                f"stream: a message of kind {kind} has {length} bytes, at most {_CAPS.get(kind, FRAME_BYTES)}"
            )
        if self._broken:
            raise DataError(self._broken)


# bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who sends."""

    node: str
    token: str = field(repr=False)
    uplink: str
    """One sender's life: numbers of its sources only grow while this stays the same."""
    backlog: int = 0
    """Messages that wait as this is said: sent on an earlier connection and not acknowledged there, or never sent."""
    takes: tuple[str, ...] = ()
    """What the server may send beside acks: TAKES_LOOKS. An older sender takes nothing."""
    protocol: int = PROTOCOL
    software: str = __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """That the hello was taken."""

    ack_s: float
    """An ack comes at least so often, also if nothing was sent: a server that is silent for much longer is gone."""
    protocol: int = PROTOCOL
    software: str = __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the connection ends."""

    why: str
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a server asks of the agent of one node: a look at ranks of one job. The same key again is the same look."""

    job: JobId
    look: Look


Said = TypeVar("Said", Hello, Welcome, Refusal, Asked)


def say(thing: Hello | Welcome | Refusal | Asked) -> bytes:
    """The whole message. Raises DataError for a look at more ranks than a node has."""
    kind = {Hello: HELLO, Welcome: WELCOME, Refusal: REFUSAL, Asked: LOOK}[type(thing)]
    return pack(kind, json.dumps(asdict(thing), sort_keys=True).encode())


def heard(cls: type[Said], body: bytes) -> Said:
    """What `say` said. Raises DataError, for another protocol too: it says who has to be upgraded."""
    name = cls.__name__.lower()
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: not JSON: {error}") from error
    spoken = said.get("protocol") if isinstance(said, dict) else None
    if cls is not Refusal and type(spoken) is int and spoken != PROTOCOL:
        older, newer = ("sender", "receiver") if spoken < PROTOCOL else ("receiver", "sender")
        raise DataError(
            f"{name}: protocol {spoken} was spoken, protocol {PROTOCOL} is understood here: upgrade the older side"
            f" (the {older} of this {name}; its {newer} is newer)"
        )
    thing: Said = decoder(cls)(said, name)
    return thing


def ack_to_bytes(count: int) -> bytes:
    """The whole message."""
    return pack(ACK, _COUNT.pack(count))


def ack_from_bytes(body: bytes) -> int:
    """How many messages. Raises DataError."""
    if len(body) != _COUNT.size:
        raise DataError(f"ack: {len(body)} bytes, not {_COUNT.size}")
    return int(_COUNT.unpack(body)[0])


def events_to_bytes(events: Iterable[Event]) -> bytes:
    """The body of a message."""
    return "\n".join(map(dumps, events)).encode()


def events_from_bytes(body: bytes) -> Iterator[Event | DataError]:
    """Each event, or why one is none: the others are good all the same."""
    for line in body.split(b"\n"):
        try:
            event = loads(line)
        except DataError as error:
            yield error
            continue
        yield event if isinstance(event, Event) else DataError(f"a {type(event).__name__} is not sent as an event")


# Frames: what codec.frame_to_bytes writes is in canonical form, so its header can be read by one expression, three
# times as fast as JSON with each value checked; whatever does not match goes the slow way, which says what is wrong.

_INT: Final = rb"(0|-?(?:[1-8]\d{18}|[1-9]\d{0,17}))"  # Unix nanoseconds first: else each is tried at every length
_TEXT: Final = rb'"([ !#-\[\]-~]*)"'
_CANONICAL: Final = re.compile(
    rb'\{"epoch":(?:null|%b),"job":(?:null|%b),"row_bytes":%b,"rows":%b,"schema":%b,"seen_ns":%b,"sent_ns":%b,'
    rb'"seq":%b,"source":%b,"names":(\[.*\])\}' % (_INT, _TEXT, _INT, _INT, _TEXT, _INT, _INT, _INT, _TEXT)
)
_AT: Final = len(FRAME_MAGIC)
_LENGTH: Final = struct.Struct("<I")
_BY_BYTES: Final[Mapping[bytes, tuple[Any, Any]]] = {name.encode(): (name, dtype) for name, dtype in DTYPES.items()}
_NAMES_CACHED_BYTES: Final = 4096


def frame_of(body: bytes) -> Frame:
    """As codec.frame_from_bytes. Raises DataError."""
    found = None
    if body.startswith(FRAME_MAGIC) and len(body) >= _AT + 4:
        at = _AT + 4 + _LENGTH.unpack_from(body, _AT)[0]
        found = _CANONICAL.fullmatch(body, _AT + 4, at)
    if found is None:
        return frame_from_bytes(body)
    epoch, job, row_bytes, rows, schema, seen_ns, sent_ns, seq, source, names = found.groups()
    name, dtype = _BY_BYTES.get(schema, (None, None))
    count = int(rows)
    if name is None or int(row_bytes) != dtype.itemsize or count <= 0 or len(body) != at + count * dtype.itemsize:
        return frame_from_bytes(body)
    rows_N = np.frombuffer(body, dtype, count, at)
    known = _names(names) if len(names) <= _NAMES_CACHED_BYTES else _names.__wrapped__(names)
    if known is None:
        return frame_from_bytes(body)
    for column in NAMED[name]:
        if rows_N[column].max() >= len(known):
            return frame_from_bytes(body)
    return Frame(
        schema=name,
        source=source.decode(),
        job=None if job is None else JobId(job.decode()),
        epoch=None if epoch is None else Epoch(int(epoch)),
        seq=int(seq),
        sent_ns=int(sent_ns),
        seen_ns=int(seen_ns),
        names=known,
        rows=rows_N,
    )


@lru_cache(maxsize=1024)
def _names(text: bytes) -> tuple[str, ...] | None:
    """A source sends the same names again and again. None: they are none."""
    try:
        names: tuple[str, ...] = decoder(tuple[str, ...])(json.loads(text), "")
    except (ValueError, RecursionError):  # DataError is a ValueError
        return None
    return names
