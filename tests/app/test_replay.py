"""A recording, gone through again: the same findings however it was cut, jobs apart, what is broken named."""

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.detectors.world import JOB, START_NS, World
from typer.testing import CliRunner

from trainwarden.app.cli.commands import _app, run_commands
from trainwarden.app.cli.record import size_bytes
from trainwarden.app.replay import replay
from trainwarden.app.wiring import Settings
from trainwarden.collectors.files.recordings import Recordings, RecordingsConfig
from trainwarden.core.codec import dumps, frame_to_bytes, loads
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Finding, Frame, Incident, JobId, Tick
from trainwarden.core.recording import Recorder, Recording
from trainwarden.detectors.budgets import HangConfig

Item = Frame | Event | Tick


def story() -> list[Item]:
    """A rank is killed; in the next attempt a rank stands still."""
    world = World(4).begin().run_steps(4)
    world.exit(2, signal=9).run(2)
    world.silent.clear()
    world.new_attempt().begin().run_steps(30).stop(1).run(16)
    return [one for one in world.items if isinstance(one, Frame | Event | Tick)]


STORY = story()


def found(items: Sequence[Item]) -> list[str]:
    return [dumps(one) for one in replay(items, Settings())]


FOUND = found(STORY)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with Recorder(tmp_path / "rec", rows_per_file=300) as recorder:
        for item in STORY:
            recorder.write(item)
    return tmp_path / "rec"


def test_what_happened_is_found_again() -> None:
    things = [loads(line) for line in FOUND]
    kinds = [one.kind for one in things if isinstance(one, Finding) and one.status == "final"]
    assert kinds[0] == "process.killed"
    assert "rank.hung" in kinds
    last = {one.id: one for one in things if isinstance(one, Incident)}
    assert {(one.kind, str(one.culprit)) for one in last.values()} >= {
        ("process.killed", "rank:2"),
        ("rank.hung", "rank:1"),
    }


def test_a_recording_on_disk_gives_what_was_found_live(recording: Path) -> None:
    assert [dumps(one) for one in replay(Recording(recording), Settings())] == FOUND


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_into_frames_does_not_matter(seed: int) -> None:
    """Every frame of two ranks is, or is not, cut into one a rank; bit-equal findings. (Random recordings, at the level
    of steps: tests/core/test_steps_replay.py.)"""
    draw = random.Random(seed)
    cut: list[Item] = []
    for item in STORY:
        if not isinstance(item, Frame) or draw.random() < 0.5:
            cut.append(item)
            continue
        cut += [replace(item, rows=rows) for rows in np.split(item.rows, [1])]
    assert len(cut) > len(STORY)
    assert found(cut) == FOUND


def test_jobs_of_one_recording_are_kept_apart() -> None:
    """What one tenant's ranks do is no business of another's; what is of no job goes to both."""

    def of(job: str, items: Sequence[Item]) -> list[Item]:
        return [one if isinstance(one, Tick) else replace(one, job=JobId(job)) for one in items]

    calm = [one for one in World(2).begin().run_steps(20).items if isinstance(one, Frame | Event | Tick)]
    both = sorted(
        [*STORY, *of("calm", [one for one in calm if not isinstance(one, Tick)])], key=lambda one: one.seen_ns
    )
    things = [loads(line) for line in found(both)]
    assert [dumps(one) for one in things if isinstance(one, Finding) and one.job == JOB] == [
        line for line in FOUND if isinstance(loads(line), Finding)
    ]
    assert {one.job for one in things if isinstance(one, Incident)} >= {JOB}


def test_settings_of_today_count() -> None:
    patient = replace(Settings(), hang=HangConfig(step=timedelta(hours=1), floor=timedelta(hours=1)))
    kinds = {one.kind for one in replay(STORY, patient)}
    assert "rank.hung" not in kinds
    assert "process.killed" in kinds


# the commands


def test_the_command_tells_each_revision_as_json(recording: Path) -> None:
    done = CliRunner().invoke(_app, ["replay", str(recording), "--json"])
    assert done.exit_code == 0
    assert done.stdout.splitlines() == FOUND


def test_the_command_shows_a_table_and_what_it_passed_over(recording: Path) -> None:
    (recording / "00000002.parquet").write_bytes(b"PAR1 torn")
    done = CliRunner().invoke(_app, ["replay", str(recording)], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "process.killed" in done.stdout
    assert "passed over" in done.stderr
    assert "00000002.parquet" in done.stderr


def test_what_is_no_recording_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["trainwarden", "replay", str(tmp_path / "gone")])
    with pytest.raises(SystemExit) as ended:
        run_commands()
    assert ended.value.code == 2


@pytest.mark.parametrize("text", ["12", "0MiB", "1MB", "-3GiB", "1.5GiB", ""])
def test_a_size_without_its_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--size"):
        size_bytes(text)


# a recording as a source


def test_a_recording_is_played_at_its_own_pace(recording: Path) -> None:
    begin_ns = START_NS + 10**15
    source = Recordings(RecordingsConfig(folder=recording, speed=2.0), node="n1", start_ns=begin_ns)
    first_ns = STORY[0].seen_ns
    played: list[Frame | Event] = []
    for half_seconds in range(400):
        now_ns = begin_ns + half_seconds * 500_000_000
        played += source.poll(now_ns)
        due = [one for one in STORY if one.seen_ns - first_ns <= half_seconds * 10**9 and not isinstance(one, Tick)]
        assert len(played) == len(due)
        if source.over:
            break
    assert source.over
    for one, was in zip(played, (item for item in STORY if not isinstance(item, Tick)), strict=True):
        assert one.seen_ns == begin_ns + (was.seen_ns - first_ns) // 2
        then = replace(one, seen_ns=was.seen_ns)
        if isinstance(then, Frame) and isinstance(was, Frame):
            assert frame_to_bytes(then) == frame_to_bytes(was)
        elif isinstance(then, Event) and isinstance(was, Event):
            assert dumps(then) == dumps(was)


def test_a_recording_that_is_not_there_is_blind(tmp_path: Path) -> None:
    source = Recordings(RecordingsConfig(folder=tmp_path / "gone"), node="n1", start_ns=START_NS)
    (blind,) = source.poll(START_NS)
    assert isinstance(blind, Event)
    assert blind.kind == "source.blind"
    assert list(source.poll(START_NS + 1)) == []
