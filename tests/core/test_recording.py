"""Recordings: what goes in comes out in order, whatever happened to the disk in between."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.core.codec import dumps, frame_to_bytes
from trainwarden.core.model import Epoch, Event, Frame, JobId, Subject, Tick
from trainwarden.core.recording import Item, Recorder, Recording, read
from trainwarden.core.schemas import DTYPES

SECOND_NS = 1_000_000_000


def tick(number: int) -> Tick:
    return Tick(seen_ns=number * SECOND_NS)


def event(number: int) -> Event:
    subject = Subject(kind="source", id="rings@n0")
    at_ns = number * SECOND_NS
    return Event(
        kind="source.up", subject=subject, source="s", seq=number, t_ns=at_ns, seen_ns=at_ns, data={"why": "read"}
    )


def frame(number: int) -> Frame:
    rows = np.zeros(2, DTYPES["step"])
    rows["step"] = number
    return Frame(
        schema="step", source="rings@n0", job=JobId("nano"), epoch=Epoch(0), seq=number, sent_ns=0,
        seen_ns=number * SECOND_NS, names=("between",), rows=rows,
    )  # fmt: skip


def told(items: Iterator[Item] | list[Item]) -> list[object]:
    return [frame_to_bytes(item) if isinstance(item, Frame) else item for item in items]


def record(directory: Path, *items: Item, **settings: int) -> Recorder:
    with Recorder(directory, **settings) as recorder:
        for item in items:
            recorder.write(item)
    return recorder


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


MIXED: list[Item] = [frame(1), tick(2), event(3), tick(1), frame(4), event(5)]


def test_what_goes_in_comes_out_in_order(tmp_path: Path) -> None:
    record(tmp_path, *MIXED, rows_per_file=4)
    assert names(tmp_path) == ["00000001.parquet", "00000002.parquet"]
    assert told(read(tmp_path)) == told(MIXED)


def test_the_kind_can_be_filtered_by_other_tools(tmp_path: Path) -> None:
    record(tmp_path, *MIXED[:3])
    assert pq.read_table(tmp_path)["kind"].to_pylist() == ["frame/step", "tick", "event/source.up"]


def test_a_file_ends_after_its_seconds(tmp_path: Path) -> None:
    record(tmp_path, *map(tick, range(10)), seconds_per_file=3)
    assert [len(pq.read_table(path)) for path in sorted(tmp_path.iterdir())] == [4, 4, 2]


def test_a_file_ends_after_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwarden.core.recording.BYTES_PER_FILE", 200)
    record(tmp_path, *map(event, range(3)))
    assert len(names(tmp_path)) == 2


def test_nothing_recorded_leaves_nothing(tmp_path: Path) -> None:
    record(tmp_path / "new")
    assert list(read(tmp_path / "new")) == []


def test_the_oldest_files_go_when_the_cap_is_reached_but_never_the_newest(tmp_path: Path) -> None:
    record(tmp_path, *map(tick, range(5)), rows_per_file=1)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    record(tmp_path, *map(tick, range(5, 10)), rows_per_file=1, max_bytes=size + size // 10)
    assert [item.seen_ns // SECOND_NS for item in read(tmp_path)] == [5, 6, 7, 8, 9]
    record(tmp_path, tick(10), max_bytes=1)
    assert names(tmp_path) == ["00000011.parquet"]


def test_a_new_recorder_goes_on_with_the_numbers(tmp_path: Path) -> None:
    record(tmp_path, tick(1))
    record(tmp_path, tick(2))
    assert names(tmp_path) == ["00000001.parquet", "00000002.parquet"]
    assert list(read(tmp_path)) == [tick(1), tick(2)]


def test_a_crash_loses_the_open_file_only(tmp_path: Path) -> None:
    crashed = Recorder(tmp_path, rows_per_file=2)
    for number in range(3):
        crashed.write(tick(number))
    (tmp_path / "00000002.parquet.tmp").write_bytes(b"PAR1 half a file")
    assert list(read(tmp_path)) == [tick(0), tick(1)]
    record(tmp_path, tick(9))
    assert names(tmp_path) == ["00000001.parquet", "00000002.parquet"]
    assert list(read(tmp_path)) == [tick(0), tick(1), tick(9)]


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.parquet").write_text("mine")
    record(tmp_path, tick(1), max_bytes=1)
    assert names(tmp_path) == ["00000001.parquet", "notes.parquet"]
    assert list(read(tmp_path)) == [tick(1)]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda body: b"", id="empty"),
        pytest.param(lambda body: body[:-1], id="cut at the end"),
        pytest.param(lambda body: body[: len(body) // 2], id="cut in the middle"),
        pytest.param(lambda body: b"no parquet at all", id="another file"),
        pytest.param(lambda body: body[:100] + bytes([body[100] ^ 1]) + body[101:], id="one bit"),
    ],
)
def test_a_damaged_file_is_refused_and_the_rest_read(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    record(tmp_path, *map(event, range(6)), rows_per_file=2)
    second = tmp_path / "00000002.parquet"
    second.write_bytes(damage(second.read_bytes()))
    recording = Recording(tmp_path)
    assert list(recording) == [event(0), event(1), event(4), event(5)]
    (refused,) = recording.refused
    assert str(refused).startswith(f"{second}: ")


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"seen_ns": [1]}), tmp_path / "00000001.parquet")
    recording = Recording(tmp_path)
    assert list(recording) == []
    assert str(recording.refused[0]) == f"{tmp_path}/00000001.parquet: columns are seen_ns int64"


def test_damaged_rows_are_refused_one_by_one(tmp_path: Path) -> None:
    rows: list[tuple[int, str | None, bytes | None]] = [
        (0, "tick", dumps(tick(1)).encode()),
        (0, "tick", b'{"type":"Tick"}'),
        (0, "tick", dumps(Subject(kind="rank", id="1")).encode()),
        (0, "frame/step", b"TWFRAME9"),
        (0, None, None),
        (0, "tick", dumps(tick(2)).encode()),
    ]
    columns = dict(zip(("seen_ns", "kind", "body"), map(list, zip(*rows, strict=True)), strict=True))
    kinds = pa.schema([("seen_ns", pa.int64()), ("kind", pa.string()), ("body", pa.binary())])
    path = tmp_path / "00000001.parquet"
    pq.write_table(pa.table(columns, schema=kinds), path)
    recording = Recording(tmp_path)
    assert list(recording) == [tick(1), tick(2)]
    assert [str(error).removeprefix(f"{path}: ") for error in recording.refused] == [
        "row 1: Tick.seen_ns: missing",
        "row 2: a Subject is not recorded",
        "row 3: frame: starts with b'TWFRAME9', not b'TWFRAME1' (a newer trainwarden wrote it: upgrade this one)",
        "row 4: empty",
    ]


def test_an_unwritable_directory_is_counted_and_recording_goes_on_when_it_heals(tmp_path: Path) -> None:
    blocked = tmp_path / "frames"
    blocked.write_text("a file where the directory should be")
    recorder = record(blocked, *map(tick, range(4)), rows_per_file=2)
    assert (recorder.failures, recorder.lost_items) == (2, 4)
    assert recorder.last_error.startswith(f"{blocked}: ")
    blocked.unlink()
    recorder.write(tick(5))
    recorder.close()
    assert list(read(blocked)) == [tick(5)]


@contextmanager
def no_room(limit_bytes: int) -> Iterator[None]:
    """No file can grow beyond: what a full disk does to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_counted_and_leaves_no_half_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rows_per_file=2)
    with no_room(100):
        for number in range(3):
            recorder.write(tick(number))
    assert (recorder.failures, recorder.lost_items, names(tmp_path)) == (1, 2, [])
    recorder.close()
    assert list(read(tmp_path)) == [tick(2)]


def test_an_item_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    recorder = record(tmp_path, tick(1), Tick(seen_ns=2**63), tick(2))
    assert (recorder.failures, recorder.lost_items) == (1, 1)
    assert recorder.last_error == f"{tmp_path}: seen_ns 9223372036854775808 is out of range"
    assert list(read(tmp_path)) == [tick(1), tick(2)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_files_raise_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("recording")
    record(directory, *MIXED)
    (path,) = directory.iterdir()
    body = bytearray(path.read_bytes())
    for bit in data.draw(st.lists(st.integers(0, 8 * len(body) - 1), min_size=1, max_size=3)):
        body[bit // 8] ^= 1 << bit % 8
    path.write_bytes(body[: data.draw(st.one_of(st.just(len(body)), st.integers(0, len(body))))])
    recording = Recording(directory)
    items = told(list(recording))
    assert items == told(MIXED) or recording.refused
