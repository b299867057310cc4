"""Broken and hostile files: refused with their reason, once, and nobody else suffers."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectors.world import World, a_world, events, frames, poll, rows

from trainwarden.collectors.hellos import MAX_BYTES
from trainwarden.collectors.rank import DATA, FORWARD, LOSS, Rank
from trainwarden.core import records
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Frame
from trainwarden.core.schemas import DTYPES

SLEEP = "trainwarden.collectors.rings.sleep"


def steps(w: Rank, first: int, last: int) -> None:
    for step in range(first, last + 1):
        w.begin(step)
        w.mark(FORWARD)
        w.value(LOSS, float(step))
        w.end()


def header(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<I", value))


def broken_file(change: Callable[[Path], object]) -> Callable[[World], object]:
    """Another rank's ring, with something done to it."""

    def make(world: World) -> object:
        world.attach(1, 2)
        return change(world.rings / "rank-1-0-0.ring")

    return make


def other_file(make: Callable[[Path], object]) -> Callable[[World], object]:
    return lambda world: make(world.rings / "rank-1-0-0.ring")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(broken_file(lambda path: header(path, 0, 7)), "no ring: its first bytes", id="wrong magic"),
        pytest.param(broken_file(lambda path: header(path, 8, 2)), "upgrade the agent", id="newer version"),
        pytest.param(broken_file(lambda path: header(path, 8, 0)), "contradicts itself", id="version 0"),
        pytest.param(broken_file(lambda path: header(path, 20, 9)), "contradicts itself", id="another number of rows"),
        pytest.param(broken_file(lambda path: header(path, 36, 99)), "none that can be", id="unknown clock"),
        pytest.param(broken_file(lambda path: header(path, 44, 1)), "none that can be", id="rank beyond the world"),
        pytest.param(broken_file(lambda path: header(path, 48, 9)), "its header says", id="name and header differ"),
        pytest.param(broken_file(lambda path: os.truncate(path, 5000)), "its size is not", id="cut short"),
        pytest.param(broken_file(lambda path: os.truncate(path, 1 << 21)), "at most 1048576", id="too large"),
        pytest.param(other_file(lambda path: path.touch()), "no ring: its first bytes", id="empty"),
        pytest.param(other_file(lambda path: path.write_bytes(bytes(1 << 20))), "no ring", id="zeros"),
        pytest.param(other_file(lambda path: path.symlink_to("rank-0-0-0.ring")), "symbolic links", id="symbolic link"),
        pytest.param(other_file(os.mkfifo), "not a regular file", id="FIFO"),
        pytest.param(other_file(Path.mkdir), "not a regular file", id="folder"),
    ],
)
def test_what_is_no_ring_is_refused_once_and_the_others_are_read(
    world: World, spoil: Callable[[World], object], why: str
) -> None:
    w, source = world.attach(0, 2), world.source()
    spoil(world)
    for step in range(3):
        steps(w, step, step)
        out = poll(source)
        assert rows(out, "step")["step"].tolist() == [step]
        blind = [str(event.data["why"]) for event in events(out, "source.blind")]
        assert len(blind) == (step == 0)
        assert all(text.startswith("rank-1-0-0.ring: ") and why in text for text in blind), blind
        assert rows(out, "live")["rank"].tolist() == [0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_ring_of_another_user_is_refused(world: World) -> None:
    world.attach()
    os.chown(world.rings / "rank-0-0-0.ring", 12345, -1)
    os.chown(world.root / "job" / "hello" / "rank-0-0-0-0.json", 12345, -1)
    out = poll(world.source())
    whys = [str(event.data["why"]) for event in events(out, "source.blind")]
    assert len(out) == len(whys) == 2
    assert all("belongs to user 12345, the job to user 0" in why for why in whys)


def test_a_ring_cut_short_under_the_reader_is_let_go(world: World) -> None:
    """Had it been mapped, this would be SIGBUS, and the end of the agent."""
    w, other, source = world.attach(0, 2), world.attach(1, 2), world.source()
    steps(w, 0, 0)
    poll(source)
    os.truncate(world.rings / "rank-0-0-0.ring", 4096)
    steps(other, 0, 0)
    out = poll(source)
    (blind,) = events(out, "source.blind")
    assert "become shorter" in str(blind.data["why"])
    assert rows(out, "step")["rank"].tolist() == [1]
    assert rows(poll(source), "live")["rank"].tolist() == [1]
    w.let_go("its file is gone: a store would be SIGBUS")


def test_a_ring_cut_short_between_the_two_looks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    w, source = world.attach(), world.source()
    steps(w, 0, 0)
    path = world.rings / "rank-0-0-0.ring"
    monkeypatch.setattr(SLEEP, lambda seconds: os.truncate(path, 4096))
    assert frames(poll(source), "step") == []
    assert len(events(poll(source), "source.blind")) == 1
    w.let_go("its file is gone")


def test_bytes_that_change_between_the_looks_do_not_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    w, source = world.attach(), world.source()
    steps(w, 0, 4)
    at = records.STEPS_OFFSET + 2 * records.STEP_ROW.size + 40
    with (world.rings / "rank-0-0-0.ring").open("r+b", buffering=0) as file, monkeypatch.context() as patch:
        patch.setattr(SLEEP, lambda seconds: os.pwrite(file.fileno(), b"\x77", at))
        assert rows(poll(source), "step")["step"].tolist() == [0, 1]
    assert rows(poll(source), "step")["step"].tolist() == [2, 3, 4]


def spoilt_hello(**changed: Any) -> str:
    hello = {
        **{"rank": 1, "world_size": 2, "coords": {}, "slot": "n1:1", "device": "n1:1", "node": "n1", "pid": 7},
        **{"start_time": 9, "uid": 0, "ring": "r", "clock": "cpu", "blind": [], "attempt": 0, "restart": 0, "lap": 0},
        "versions": {},
    }
    return json.dumps({**hello, **changed})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("", "Expecting value", id="empty"),
        pytest.param("[]", "no object", id="a list"),
        pytest.param("{}", "lacks rank, world_size", id="nothing in it"),
        pytest.param(spoilt_hello(rank=0), "not those of its name", id="another rank"),
        pytest.param(spoilt_hello(world_size=1), "world_size", id="a rank beyond the world"),
        pytest.param(spoilt_hello(pid="7"), "pid: expected a whole number, got '7'", id="text for a number"),
        pytest.param(spoilt_hello(pid=1 << 31), "no process has number 2147483648", id="a number no process has"),
        pytest.param(spoilt_hello(pid=True), "pid: expected a whole number", id="true for a number"),
        pytest.param(spoilt_hello(start_time=-1), "start_time: expected", id="negative"),
        pytest.param(spoilt_hello(node=3), "node: expected text", id="a number for text"),
        pytest.param(spoilt_hello(coords={"dp": "0"}), "coords", id="coords that are no numbers"),
        pytest.param(spoilt_hello(blind="x"), "blind", id="blind is no list"),
        pytest.param("[" * 60_000, "nested too deeply", id="nested without end"),
        pytest.param(" " * (MAX_BYTES + 1), "more than", id="too large"),
    ],
)
def test_a_broken_hello_is_refused_once(world: World, text: str, why: str) -> None:
    world.attach(0, 2)
    (world.root / "job" / "hello" / "rank-1-0-0-0.json").write_text(text)
    source = world.source()
    out = [*poll(source), *poll(source)]
    assert [event.subject.id for event in events(out, "hello")] == ["0"]
    (blind,) = events(out, "source.blind")
    assert why in str(blind.data["why"])


def test_hellos_tell_no_more_than_they_should(world: World) -> None:
    world.attach(0, 2)
    (world.root / "job" / "hello" / "rank-1-0-0-0.json").write_text(spoilt_hello(surprise="x" * 1000))
    hello = events(poll(world.source()), "hello")[1]
    assert set(hello.data) == set(KINDS["hello"].data)


def test_a_tenant_who_breaks_things_all_the_time_is_not_heard_for_ever(world: World) -> None:
    world.attach(0, 2)
    source = world.source()
    told = 0
    for number in range(100):
        (world.rings / f"rank-{number}-0-1.ring").touch()
        told += len(events(poll(source), "source.blind"))
    assert told == 64


@given(data=st.data())
@settings(max_examples=100)
def test_no_bytes_whatever_get_the_reader_into_trouble(data: st.DataObject) -> None:
    """Random bytes anywhere behind the header, between the looks too: no exception, no warning, no half row."""
    details = records.DETAILS_OFFSET
    places = st.one_of(
        st.integers(records.LIVE_OFFSET, records.NAMES_OFFSET + 800),
        st.integers(records.STEPS_OFFSET, records.STEPS_OFFSET + 24 * records.STEP_ROW.size),
        st.integers(details, details + 6 * records.DETAIL_ROW.size),
        st.integers(records.LIVE_OFFSET, records.FILE_BYTES - 64),
    )
    spoils = st.lists(st.tuples(places, st.binary(min_size=1, max_size=64)), max_size=12)
    with a_world() as world, pytest.MonkeyPatch.context() as patch:
        w, source = world.attach(), world.source()
        path = world.rings / "rank-0-0-0.ring"

        def spoil(_: float = 0.0) -> None:
            with path.open("r+b", buffering=0) as file:
                for at, noise in data.draw(spoils):
                    os.pwrite(file.fileno(), noise, at)

        steps(w, 1, 20)
        w.note("n")
        w.value("x", 1.0)
        with w.span(DATA):
            spoil()
        patch.setattr(SLEEP, spoil)
        for turn in range(3):
            for one in source.poll(time.time_ns() + turn * 3_000_000_000):
                if isinstance(one, Frame):
                    check_rows(one, path)
                else:
                    json.dumps(one.data, allow_nan=False)
            steps(w, 100 + turn, 100 + turn)


def check_rows(frame: Frame, path: Path) -> None:
    """Numbers that index names do, and each step row is one whose head equals its tail in the file."""
    assert frame.rows.dtype == DTYPES[frame.schema]
    for column in {"live": ("phase",), "span": ("kind",), "reading": ("subject", "signal")}.get(frame.schema, ()):
        assert (frame.rows[column] < len(frame.names)).all()
    if frame.schema == "step":
        words = np.frombuffer(path.read_bytes(), "<u4")
        area = words[records.STEPS_OFFSET // 4 : records.DETAILS_OFFSET // 4].reshape(-1, records.STEP_ROW.size // 4)
        whole = area[area[:, 0] == area[:, -1]]
        assert set(frame.rows["step"].tolist()) <= set(whole[:, 1].astype(np.int32).tolist())


@given(at=st.integers(0, records.HEADER.size - 1), noise=st.binary(min_size=1, max_size=24))
@settings(max_examples=100)
def test_no_header_whatever_gets_the_reader_into_trouble(at: int, noise: bytes) -> None:
    with a_world() as world:
        w, source = world.attach(), world.source()
        steps(w, 1, 3)
        with (world.rings / "rank-0-0-0.ring").open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), noise[: records.LIVE_OFFSET - at], at)
        out = poll(source)
        assert len(events(out, "source.blind")) + len(frames(out, "step")) == 1
