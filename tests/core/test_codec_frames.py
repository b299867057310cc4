"""Frames as bytes: exact round trips, and refusals that say what is wrong."""

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.core.codec import FRAME_MAGIC, frame_from_bytes, frame_to_bytes
from trainwarden.core.errors import DataError
from trainwarden.core.model import Epoch, Frame, JobId, Schema
from trainwarden.core.schemas import DTYPES

INT64 = st.integers(-(2**63), 2**63 - 1)
NAMED = {"live": ("phase",), "span": ("kind",), "reading": ("subject", "signal"), "collective": ("group", "op")}


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """Any frame: rows of random bytes (NaN and all), with small integers that name something."""
    schema: Schema = draw(st.sampled_from(get_args(Schema)))
    names = tuple(draw(st.lists(st.text(max_size=8), min_size=1, max_size=5)))
    count = draw(st.integers(0, 4))
    body = draw(st.binary(min_size=count * DTYPES[schema].itemsize, max_size=count * DTYPES[schema].itemsize))
    rows = np.frombuffer(body, DTYPES[schema]).copy()
    for column in NAMED.get(schema, ()):
        rows[column] %= len(names)
    return Frame(
        schema=schema,
        source=draw(st.text(max_size=8)),
        job=draw(st.none() | st.text(max_size=8).map(JobId)),
        epoch=draw(st.none() | INT64.map(Epoch)),
        seq=draw(INT64),
        sent_ns=draw(INT64),
        seen_ns=draw(INT64),
        names=names,
        rows=rows,
    )


def live(count: int = 2) -> Frame:
    return Frame(
        schema="live", source="rings@n0", job=JobId("nano"), epoch=Epoch(0), seq=1, sent_ns=2, seen_ns=3,
        names=("between", "init"), rows=np.zeros(count, DTYPES["live"]),
    )  # fmt: skip


def told(frame: Frame) -> dict[str, object]:
    rows = {"rows": (frame.rows.dtype, frame.rows.tobytes())}
    return {name: getattr(frame, name) for name in frame.__dataclass_fields__} | rows


@settings(max_examples=200, deadline=None)
@given(frames())
def test_a_round_trip_gives_the_same_bits(frame: Frame) -> None:
    body = frame_to_bytes(frame)
    assert told(frame_from_bytes(body)) == told(frame)
    assert frame_to_bytes(frame_from_bytes(body)) == body


def test_rows_that_do_not_lie_side_by_side_are_written_too() -> None:
    rows = np.zeros(6, DTYPES["live"])
    rows["rank"] = range(6)
    back = frame_from_bytes(frame_to_bytes(replace(live(), rows=rows[::2])))
    assert back.rows["rank"].tolist() == [0, 2, 4]


def test_rows_come_back_read_only() -> None:
    assert not frame_from_bytes(frame_to_bytes(live())).rows.flags.writeable


@settings(max_examples=200, deadline=None)
@given(frames(), st.data())
def test_damaged_bytes_raise_nothing_but_data_errors(frame: Frame, data: st.DataObject) -> None:
    body = bytearray(frame_to_bytes(frame))
    body = body[: data.draw(st.one_of(st.just(len(body)), st.integers(0, len(body))))]
    for bit in data.draw(st.lists(st.integers(0, max(8 * len(body) - 1, 0)), max_size=4)) if body else []:
        body[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(DataError):
        frame_from_bytes(bytes(body))


def with_header(body: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    """The same frame with another header."""
    (length,) = struct.unpack_from("<I", body, 8)
    header = json.loads(body[12 : 12 + length])
    change(header)
    written = json.dumps(header).encode()
    return FRAME_MAGIC + struct.pack("<I", len(written)) + written + body[12 + length :]


WHOLE = frame_to_bytes(live())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b"", "frame: starts with b'', not b'TWFRAME1'", id="empty"),
        pytest.param(b"PAR1" + WHOLE, "frame: starts with b'PAR1TWFR', not b'TWFRAME1'", id="another kind of file"),
        pytest.param(WHOLE[:10], "frame: truncated after 10 bytes, before its header", id="cut before the header"),
        pytest.param(WHOLE[:20], "frame: truncated inside its header (8 of ", id="cut in the header"),
        pytest.param(WHOLE[:-1], "frame: 2 rows of 28 bytes announced, 55 bytes there", id="cut in the rows"),
        pytest.param(WHOLE + b"x", "frame: 2 rows of 28 bytes announced, 57 bytes there", id="something behind"),
        pytest.param(FRAME_MAGIC + struct.pack("<I", 2) + b"[]", "frame: header is not a mapping", id="a list"),
        pytest.param(FRAME_MAGIC + struct.pack("<I", 2) + b"\xff{", "frame: header is not JSON", id="no JSON"),
        pytest.param(
            with_header(WHOLE, lambda header: header.update(schema="pose")),
            "frame: schema: expected one of step, live, span, reading, collective, got 'pose'",
            id="unknown schema",
        ),
        pytest.param(with_header(WHOLE, lambda header: header.pop("seq")), "frame: seq missing", id="a key missing"),
        pytest.param(
            with_header(WHOLE, lambda header: header.update(epoch="1")),
            "frame: epoch: expected a whole number, got '1'",
            id="a wrong type",
        ),
        pytest.param(
            with_header(WHOLE, lambda header: header.update(row_bytes=40)),
            "frame: rows of schema live have 40 bytes, this version knows 28",
            id="rows of a newer version",
        ),
        pytest.param(
            with_header(WHOLE, lambda header: header.update(rows=-1)), "frame: -1 rows announced", id="negative"
        ),
        pytest.param(
            with_header(WHOLE, lambda header: header.update(names=[])),
            "frame: phase 0 of a live row names none of 0 names",
            id="a name that is not there",
        ),
    ],
)
def test_what_is_wrong_is_said(body: bytes, message: str) -> None:
    with pytest.raises(DataError) as refused:
        frame_from_bytes(body)
    assert str(refused.value).startswith(message)


def test_rows_of_another_schema_are_not_written() -> None:
    with pytest.raises(TypeError, match="rows are not of schema live"):
        frame_to_bytes(replace(live(), rows=np.zeros(1, DTYPES["span"])))
