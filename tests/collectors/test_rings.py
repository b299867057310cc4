"""The agent's side: every rank's rows in one frame an epoch, and nothing that a broken or hostile file could do."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from tests.collectors.world import World, events, frames, poll, rows

from trainwarden.collectors.rank import CHECKPOINT, DATA, FORWARD, LOSS, Rank
from trainwarden.collectors.rings import QUIET_POLLS
from trainwarden.core import records
from trainwarden.core.kinds import KINDS, missing_data
from trainwarden.core.model import Event, Frame
from trainwarden.core.ports import Source
from trainwarden.core.schemas import DTYPES

SLEEP = "trainwarden.collectors.rings.sleep"


def steps(w: Rank, first: int, last: int) -> None:
    for step in range(first, last + 1):
        w.begin(step)
        w.mark(FORWARD)
        w.value(LOSS, float(step))
        w.end()


def test_all_ranks_share_a_frame(world: World) -> None:
    source: Source = world.source()
    for rank in range(8):
        w = world.attach(rank, 8)
        steps(w, 1, 2)
        w.value("x", 1.0)
        with w.span(DATA):
            pass
    out = [*source.poll(time.time_ns())]
    assert [event.subject.id for event in events(out, "hello")] == [str(rank) for rank in range(8)]
    for schema in ("span", "reading", "step", "live"):
        (frame,) = frames(out, schema)
        assert frame.rows.dtype == DTYPES[frame.schema]
        assert (frame.source, frame.job, frame.epoch) == ("rings@n1", "job", 0)
        assert len(frame.rows) == (16 if schema == "step" else 8)
    seqs = [frame.seq for frame in out if isinstance(frame, Frame)]
    assert seqs == [*range(seqs[0], seqs[0] + len(seqs))]


def test_what_it_sends_can_be_recorded(world: World) -> None:
    """Every event has the data that its kind requires, all of it JSON."""
    w, source = world.attach(), world.source()
    w.begin(1)
    w.phase(CHECKPOINT, expect_s=9)
    w.note("n", float("nan"))
    w.note("checkpoint_committed", 1)
    (world.rings / "rank-7-0-0.ring").touch()
    out = poll(source)
    kinds = [one.kind for one in out if isinstance(one, Event)]
    assert kinds == ["hello", "source.blind", "mark.phase", "mark.note", "mark.checkpoint_committed"]
    for event in (one for one in out if isinstance(one, Event)):
        assert missing_data(event.kind, event.data) == ()
        assert KINDS[event.kind].of == "event"
        json.dumps(event.data, allow_nan=False)
    numbers = [one.seq for one in out if isinstance(one, Event)]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]


def test_rows_come_once_and_live_frames_at_every_poll(world: World) -> None:
    w, source = world.attach(), world.source()
    steps(w, 1, 3)
    assert rows(poll(source), "step")["step"].tolist() == [1, 2, 3]
    for _ in range(3):
        out = poll(source)
        assert [one.schema for one in out if isinstance(one, Frame)] == ["live"]
    steps(w, 4, 4)
    assert rows(poll(source), "step")["step"].tolist() == [4]


def test_live_frames_come_seldom_unless_something_is_not_finite_or_somebody_comes_or_leaves(world: World) -> None:
    source, now_ns = world.source(live_ns=10**9), 10**18
    first = world.attach(0, 2)

    def told(after_ms: int) -> int:
        nonlocal now_ns
        now_ns += after_ms * 10**6
        return len(frames([*source.poll(now_ns)], "live"))

    assert [told(0), told(250)] == [1, 0]
    second = world.attach(1, 2)
    assert [told(250), told(250)] == [1, 0]
    first.begin(1)
    assert [told(250), told(250), told(250), told(250)] == [0, 0, 1, 0]
    first.value(LOSS, math.inf)
    assert [told(250), told(250)] == [1, 0]
    second.close()
    assert [told(250), told(250), told(250)] == [1, 1, 0], "that it leaves, and who is left"


def test_it_follows_the_ring_around_its_end(world: World) -> None:
    w, source = world.attach(), world.source()
    seen: list[int] = []
    for first in range(0, 7000, 500):
        steps(w, first, first + 499)
        for frame in frames(poll(source), "step"):
            seen += frame.rows["step"].tolist()
    assert seen == [*range(7000)]


def test_rows_that_were_overwritten_are_counted_as_lost(world: World) -> None:
    w, source = world.attach(), world.source()
    steps(w, 1, 10)
    poll(source)
    steps(w, 11, 10 + 3 * records.STEP_ROWS)
    out = poll(source)
    (lost,) = events(out, "telemetry.lost")
    assert lost.data == {"from_seq": 11, "to_seq": 10 + 2 * records.STEP_ROWS, "rank": 0, "rows": "steps"}
    left = range(11 + 2 * records.STEP_ROWS, 11 + 3 * records.STEP_ROWS)
    assert rows(out, "step")["step"].tolist() == [*left]
    assert events(poll(source), "telemetry.lost") == []


def test_a_flood_of_marks_is_cut_and_told(world: World) -> None:
    w, source = world.attach(), world.source()
    for number in range(500):
        w.note("n", number)
    out = poll(source)
    assert len(events(out, "mark.note")) == 64
    assert [(event.data["from_seq"], event.data["to_seq"]) for event in events(out, "telemetry.lost")] == [(65, 500)]


def test_a_second_agent_reads_the_same(world: World) -> None:
    w, first = world.attach(), world.source()
    steps(w, 1, 100)
    one = rows(poll(first), "step")
    again = rows(poll(world.source()), "step")
    assert (one["step"] == again["step"]).all()
    assert (one["end_ns"] // 1_000_000 - again["end_ns"] // 1_000_000).max() <= 1, "the same moments, but for jitter"
    np.testing.assert_array_equal(one["values"], again["values"])


def test_times_are_unix_times(world: World) -> None:
    before_ns = time.time_ns()
    w, source = world.attach(), world.source()
    w.begin(0)
    w.value("x", 1.0)
    w.end()
    out = poll(source)
    after_ns = time.time_ns()
    for schema, name in (("step", "end_ns"), ("live", "since_ns"), ("reading", "t_ns")):
        assert before_ns - 100_000_000 < rows(out, schema)[name][0] < after_ns + 100_000_000


def test_a_detached_rank_is_told_once_and_let_go(world: World) -> None:
    w, source = world.attach(), world.source()
    steps(w, 1, 1)
    w.close()
    out = poll(source)
    assert rows(out, "live")["state"].tolist() == [records.STATES.index("detached")]
    assert rows(out, "step")["step"].tolist() == [1]
    assert [poll(source) for _ in range(QUIET_POLLS + 1)] == [[]] * (QUIET_POLLS + 1)


def attempt_file(folder: Path, attempt: int) -> str:
    path = folder / f"attempt-{attempt}.json"
    path.write_text(json.dumps({"attempt": attempt, "slots": {}}))
    return str(path)


def test_a_new_incarnation_takes_over(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = world.source()
    old = world.attach(0, 2)
    steps(old, 1, 3)
    poll(source)
    steps(old, 4, 4)
    monkeypatch.setenv("TRAINWARDEN_ATTEMPT_FILE", attempt_file(tmp_path, 1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    new = world.attach(0, 2)
    assert new.attempt == {"attempt": 1, "slots": {}}
    steps(new, 3, 3)
    out = poll(source)
    epoch = records.epoch_of(1, 2, 0)
    assert [(frame.epoch, frame.rows["step"].tolist()) for frame in frames(out, "step")] == [(0, [4]), (epoch, [3])]
    assert [frame.epoch for frame in frames(out, "live")] == [epoch]
    assert [event.epoch for event in events(out, "hello")] == [epoch]


def test_of_incarnations_that_were_over_before_only_the_newest_is_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in (0, 2, 1):
        monkeypatch.setenv("TRAINWARDEN_ATTEMPT_FILE", attempt_file(tmp_path, attempt))
        steps(world.attach(), attempt * 10, attempt * 10)
    out = poll(world.source())
    assert rows(out, "step")["step"].tolist() == [20]
    assert [event.data["attempt"] for event in events(out, "hello")] == [2]


def test_a_ring_that_was_replaced_is_read_to_its_end_and_the_new_one_after_it(world: World) -> None:
    """A script started again without `run` is the same rank of the same attempt: its lap tells the two apart."""
    source = world.source()
    first = world.attach()
    steps(first, 1, 2)
    poll(source)
    steps(first, 3, 3)
    first.close()
    second = world.attach()
    steps(second, 1, 1)
    out = poll(source)
    assert [(frame.epoch, frame.rows["step"].tolist()) for frame in frames(out, "step")] == [(0, [3]), (1, [1])]
    assert [event.data["lap"] for event in events(out, "hello")] == [1]


def test_before_the_first_rank_there_is_nothing(world: World) -> None:
    source = world.source()
    assert poll(source) == []
    world.attach()
    assert len(rows(poll(source), "live")) == 1
