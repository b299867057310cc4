"""The stream between agents and a server: however it is cut, whatever is in it."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.app.served import step_frame

from trainwarden.core.codec import frame_from_bytes, frame_to_bytes
from trainwarden.core.errors import DataError
from trainwarden.core.model import Event, Frame, JobId, Look, Subject
from trainwarden.core.schemas import LIVE
from trainwarden.core.wire import (
    ACK,
    EVENTS,
    EVENTS_BYTES,
    FRAME,
    FRAME_BYTES,
    HELLO,
    LOOK,
    PROTOCOL,
    WELCOME,
    Asked,
    Decoder,
    Hello,
    Message,
    Refusal,
    Welcome,
    ack_from_bytes,
    ack_to_bytes,
    events_from_bytes,
    events_to_bytes,
    frame_of,
    heard,
    pack,
    say,
)

GREETING = Hello(node="n1", token="t", uplink="u")
FUTURE = 77
"""A kind that this version does not know."""


def raw(kind: int, body: bytes) -> bytes:
    return struct.pack("<2sHI", b"TW", kind, len(body)) + body


def taken(pieces: list[bytes], first: int = HELLO) -> tuple[list[Message], str, int, int]:
    """Messages, how it ended, and what was counted."""
    decoder, out = Decoder(first), list[Message]()
    try:
        for piece in pieces:
            for message in decoder.feed(piece):
                out.append(message)
    except DataError as error:
        return out, str(error), decoder.count, decoder.skipped
    return out, "", decoder.count, decoder.skipped


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    at = sorted({min(place, len(stream)) for place in places})
    return [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]


messages = st.lists(st.builds(raw, st.sampled_from([FRAME, EVENTS, FUTURE, ACK]), st.binary(max_size=40)), max_size=8)


@settings(max_examples=200)
@given(messages, st.binary(max_size=30), st.lists(st.integers(0, 500), max_size=20))
def test_any_cut_of_a_stream_gives_the_same(parts: list[bytes], tail: bytes, places: list[int]) -> None:
    stream = say(GREETING) + b"".join(parts) + tail
    assert taken(cut(stream, places)) == taken([stream])
    assert taken([stream[at : at + 1] for at in range(len(stream))]) == taken([stream])


@settings(max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_garbage_is_a_data_error_or_nothing(data: bytes, greeted: bool) -> None:
    decoder = Decoder(HELLO)
    try:
        list(decoder.feed(say(GREETING) if greeted else b""))
        list(decoder.feed(data))
    except DataError:
        with pytest.raises(DataError):
            list(decoder.feed(b"TW"))


def test_messages_come_back_and_unknown_ones_are_counted() -> None:
    parts = [pack(FRAME, b"f"), raw(FUTURE, b"x" * 1000), pack(EVENTS, b"e"), raw(FUTURE, b"")]
    out, error, count, skipped = taken([say(GREETING), *parts])
    assert [kind for kind, _ in out] == [HELLO, FRAME, EVENTS]
    assert (error, count, skipped) == ("", 4, 2), "an ack counts what was not understood too"


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n", "starts with b'GE'", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01", "starts with", id="TLS on a plain port"),
        pytest.param(pack(FRAME, b""), "begins with a message of kind 4", id="no hello"),
        pytest.param(say(Refusal(why="x")), "begins with a message of kind 3", id="a refusal to a server"),
        pytest.param(struct.pack("<2sHI", b"TW", HELLO, 1 << 17), "at most 65536", id="a huge hello"),
        pytest.param(
            say(GREETING) + struct.pack("<2sHI", b"TW", FRAME, FRAME_BYTES + 1), "at most 16777216", id="a huge frame"
        ),
        pytest.param(
            say(GREETING) + struct.pack("<2sHI", b"TW", FUTURE, 0xFFFFFFFF), "at most 16777216", id="a huge unknown"
        ),
        pytest.param(say(GREETING) + pack(FRAME, b"f")[:-1] + pack(FRAME, b"f"), "starts with", id="a byte is missing"),
    ],
)
def test_what_is_no_stream_of_ours_is_refused_with_words(stream: bytes, words: str) -> None:
    _, error, _, _ = taken([stream])
    assert words in error


def test_a_look_comes_back_and_has_a_limit() -> None:
    def asked(ranks: int) -> Asked:
        subjects = tuple(Subject(kind="rank", id=str(rank)) for rank in range(ranks))
        return Asked(job=JobId("j"), look=Look(key="k", what="dump", subjects=subjects))

    ((kind, body),) = Decoder(LOOK).feed(say(asked(1024)))
    assert (kind, heard(Asked, body)) == (LOOK, asked(1024))
    with pytest.raises(DataError, match="message of kind 7"):
        say(asked(5000))
    with pytest.raises(DataError, match=r"Look\.what: expected one of stack, dump, got 'kill'"):
        heard(Asked, b'{"job": "j", "look": {"key": "k", "what": "kill", "subjects": []}}')


def test_no_more_than_a_message_is_held() -> None:
    decoder = Decoder(HELLO)
    list(decoder.feed(say(GREETING)))
    list(decoder.feed(struct.pack("<2sHI", b"TW", FUTURE, FRAME_BYTES)))
    for _ in range(64):
        list(decoder.feed(b"x" * 100_000))
    assert sum(map(len, decoder._parts)) == 0, "what is passed over is not kept"


def test_what_is_said_is_heard() -> None:
    assert heard(Hello, say(GREETING)[8:]) == GREETING
    assert heard(Welcome, say(Welcome(ack_s=0.5))[8:]) == Welcome(ack_s=0.5)
    assert heard(Refusal, say(Refusal(why="no"))[8:]) == Refusal(why="no")
    assert "secret" not in repr(Hello(node="n", token="secret", uplink="u"))
    assert ack_from_bytes(ack_to_bytes(2**40)[8:]) == 2**40
    with pytest.raises(DataError, match="3 bytes"):
        ack_from_bytes(b"123")


@pytest.mark.parametrize(("spoken", "older"), [(PROTOCOL - 1, "sender"), (PROTOCOL + 1, "receiver")])
def test_another_protocol_is_refused_and_says_who_is_older(spoken: int, older: str) -> None:
    body = json.dumps({"protocol": spoken, "from a later version": 1}).encode()
    with pytest.raises(DataError, match=rf"protocol {spoken} was spoken.*upgrade.*the {older} of this hello"):
        heard(Hello, body)


def test_keys_of_a_newer_release_are_ignored_and_missing_ones_are_named() -> None:
    said = {"node": "n", "token": "t", "uplink": "u", "protocol": PROTOCOL}
    assert heard(Hello, json.dumps({**said, "new": [1]}).encode()).node == "n"
    del said["token"]
    with pytest.raises(DataError, match=r"Hello\.token: missing"):
        heard(Hello, json.dumps(said).encode())


@settings(max_examples=200)
@given(st.binary(max_size=80))
def test_no_body_is_more_than_a_data_error(body: bytes) -> None:
    for read in (lambda one: heard(Hello, one), frame_of, ack_from_bytes, lambda one: list(events_from_bytes(one))):
        try:
            read(body)
        except DataError:
            continue


def test_one_bad_event_of_a_batch_spoils_no_other() -> None:
    event = Event(
        kind="source.up", subject=Subject(kind="source", id="a"), source="a@n", seq=1, t_ns=1, seen_ns=1, data={}
    )
    tick = b'{"seen_ns":1,"type":"Tick"}'
    body = b"\n".join([events_to_bytes([event]), b"{", tick, events_to_bytes([event, event])])
    assert [type(one) for one in events_from_bytes(body)] == [Event, DataError, DataError, Event, Event]


def test_what_no_receiver_takes_is_not_packed() -> None:
    with pytest.raises(DataError, match="at most"):
        pack(EVENTS, bytes(EVENTS_BYTES + 1))


# the quick way to read a frame gives what the other gives, or the same words


def frames() -> st.SearchStrategy[Frame]:
    whole = st.integers(-(2**63), 2**63 - 1)
    text = st.text(max_size=8)
    return st.builds(_frame, text, st.none() | text, st.none() | whole, whole, st.lists(text, max_size=3), whole)


def _frame(source: str, job: str | None, epoch: int | None, seq: int, names: list[str], phase: int) -> Frame:
    rows = np.zeros(2, LIVE)
    rows["phase"] = phase % 4
    made = step_frame(1, [0], source=source, job=None, seq=seq)
    return Frame(
        schema="live",
        source=source,
        job=None if job is None else JobId(job),
        epoch=epoch,  # type: ignore[arg-type]
        seq=seq,
        sent_ns=made.sent_ns,
        seen_ns=seq,
        names=tuple(names),
        rows=rows,
    )


def either(body: bytes) -> tuple[object, ...]:
    return _outcome(frame_of, body), _outcome(frame_from_bytes, body)


def _outcome(read: object, body: bytes) -> object:
    try:
        frame = read(body)  # type: ignore[operator]
    except DataError as error:
        return str(error)
    fields = ("schema", "source", "job", "epoch", "seq", "sent_ns", "seen_ns", "names")
    return [*(getattr(frame, name) for name in fields), frame.rows.tobytes()]


@settings(max_examples=200)
@given(frames(), st.integers(0, 400), st.binary(max_size=3))
def test_the_quick_way_reads_what_the_other_reads(frame: Frame, at: int, dirt: bytes) -> None:
    body = frame_to_bytes(frame)
    for one in (body, body[:at] + dirt + body[at + len(dirt) :], body[:at]):
        quick, slow = either(one)
        assert quick == slow


def test_a_usual_frame_is_read_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    body = frame_to_bytes(step_frame(7, range(8), source="rings@n1", job=JobId("train-3"), seq=9))
    monkeypatch.setattr("trainwarden.core.wire.frame_from_bytes", None)
    assert frame_of(body).rows["step"].tolist() == [7] * 8


def test_only_a_server_may_refuse_first() -> None:
    assert taken([say(Refusal(why="x"))], WELCOME)[1] == ""
