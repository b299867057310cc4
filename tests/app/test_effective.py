"""The wall time of a job, split: each instant once, whatever comes in whatever order."""

import json
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.detectors.world import START_NS, World, live_frame, step_matrix, topology

from trainwarden.app.effective import LAG_NS, PATIENCE, TimeSplit
from trainwarden.core.model import Epoch, Event, Frame, StepMatrix, Tick
from trainwarden.core.records import PHASES, epoch_of
from trainwarden.core.schemas import LIVE
from trainwarden.core.signals import ACTIVITIES

LAG_S = LAG_NS / 1e9
MARKED = {"data_s": 0.1, "forward_s": 0.3, "backward_s": 0.4, "optimizer_s": 0.1, "wait_s": 0.1}
"""A step of one second, all of whose phases are marked."""


class Job:
    """Makes what a split is fed. Times are seconds since the first attempt's start."""

    def __init__(self, split: TimeSplit | None = None) -> None:
        self.split = split or TimeSplit()
        self.now_s, self.epoch = 0.0, epoch_of(1, 0, 0)

    @property
    def now_ns(self) -> int:
        return START_NS + round(self.now_s * 1e9)

    def event(self, kind: str, **data: int | str) -> None:
        world = World(start_ns=self.now_ns, attempt=self.epoch >> 32)
        world.restart = self.epoch >> 16 & 0xFFFF
        event = world.event(kind, None, term=1, code=0, **data).items[0]
        assert isinstance(event, Event)
        self.split.feed(event)

    def start(self, attempt: int = 1, by: str = "run") -> "Job":
        self.epoch = epoch_of(attempt, 0, 0)
        self.event("attempt.started", attempt=attempt, by=by)
        return self

    def end(self) -> "Job":
        self.event("attempt.ended", attempt=self.epoch >> 32, by="keeper")
        return self

    def hello(self, epoch: int) -> "Job":
        self.epoch = epoch
        world = World(start_ns=self.now_ns, attempt=epoch >> 32)
        world.restart = epoch >> 16 & 0xFFFF
        event = world.hello([0]).items[0]
        assert isinstance(event, Event)
        self.split.feed(event)
        return self

    def pass_(self, seconds: float) -> "Job":
        """Ticks, four a second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 0.25, until_s)
            self.split.feed(Tick(seen_ns=self.now_ns))
        return self

    def close(self, step: int, **values: float) -> bool:
        """A step of two ranks closes now; what is not given is not told."""
        row = step_matrix(
            topology(2, epoch=self.epoch), step, {name: [value] * 2 for name, value in values.items()},
            seen_ns=self.now_ns,
        )  # fmt: skip
        return self.split.feed(row)

    def steps(self, first: int, last: int, step_s: float = 1.0, **values: float) -> "Job":
        """One after the other, without a pause."""
        for step in range(first, last + 1):
            self.pass_(step_s).close(step, step_s=step_s, **values)
        return self

    def doing(self, phase: str, seconds: float) -> "Job":
        """Rank 1 says at each poll that it is in a phase, rank 0 that it waits."""
        since_ns, until_s = self.now_ns, self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 0.1, until_s)
            rows = np.zeros(2, LIVE)
            rows["rank"], rows["since_ns"] = [0, 1], since_ns
            rows["phase"] = [PHASES.index("wait"), PHASES.index(phase)]
            self.split.feed(live_frame(rows, source="r", epoch=Epoch(self.epoch), seq=1, seen_ns=self.now_ns))
        return self

    def spent(self) -> dict[str, float]:
        """All of it; what is zero but for the rounding of float32 is left out."""
        self.split.settle()
        return {name: seconds for name, seconds in self.split.seconds().items() if seconds > 1e-3}


def near(**spent: float) -> object:
    return pytest.approx(spent, abs=LAG_S + 0.01)


@pytest.mark.parametrize(
    ("job", "spent"),
    [
        pytest.param(
            lambda: Job().start().pass_(4).steps(1, 10),
            {"starting": 4 - LAG_S, "training": 10, "other": LAG_S},
            id="what lies before the first step is the start",
        ),
        pytest.param(
            lambda: Job().start().steps(1, 10).end().pass_(3).start(2, "plan").pass_(2).steps(6, 12),
            {"training": 12, "repeated": 5, "interrupted": 3, "starting": 2 - LAG_S, "other": LAG_S},
            id="steps that are done again are repeated, between attempts it is interrupted",
        ),
        pytest.param(
            lambda: Job().start().steps(1, 5).pass_(8).end().pass_(1),
            {"training": 5, "interrupted": 9},
            id="from the last step on it is interrupted, if the attempt ends",
        ),
        pytest.param(
            lambda: Job().start().steps(1, 5).pass_(8),
            {"training": 5, "other": 8},
            id="a step that is under way is nothing yet",
        ),
        pytest.param(
            lambda: Job().start().steps(1, 3).pass_(2).steps(4, 6),
            {"training": 6, "other": 2},
            id="a pause that nobody explains is other",
        ),
        pytest.param(
            lambda: Job().start().pass_(5).end().pass_(1),
            {"starting": 5, "interrupted": 1},
            id="an attempt that never made a step was starting",
        ),
        pytest.param(
            lambda: Job().start().steps(1, 5).hello(epoch_of(1, 1, 0)).pass_(3).steps(4, 6),
            {"training": 6, "repeated": 2, "starting": 3 - LAG_S, "other": LAG_S},
            id="a launcher's own restart is a start too",
        ),
        pytest.param(
            lambda: Job().start().steps(1, 5).hello(epoch_of(1, 0, 1)).steps(3, 6),
            {"training": 6, "repeated": 3},
            id="a lap is none",
        ),
    ],
)
def test_where_the_time_goes(job: Callable[[], Job], spent: dict[str, float]) -> None:
    assert job().spent() == pytest.approx(spent, abs=0.01)


@pytest.mark.parametrize(
    ("pass_s", "row", "training_s"),
    [
        pytest.param(6, {"step_s": 6.0, **MARKED, "checkpoint_s": 5.0}, 1, id="inside a step"),
        pytest.param(6, {"step_s": 1.0, **MARKED, "checkpoint_s": 5.0}, 1, id="before a step"),
        pytest.param(6, {"step_s": 6.0, "checkpoint_s": 5.0}, 1, id="inside a step without marks"),
        pytest.param(
            6, {"step_s": 1.0, "checkpoint_s": 5.0}, 0, id="before one without marks, the step's time is lost"
        ),
        pytest.param(6, {"step_s": 4.0, **MARKED, "checkpoint_s": 5.0}, 1, id="half inside"),
    ],
)
def test_a_checkpoint_is_not_training(pass_s: float, row: dict[str, float], training_s: float) -> None:
    job = Job().start().steps(1, 5)
    job.pass_(pass_s).close(6, **row)
    assert job.spent() == near(training=5 + training_s, checkpoint=5.0, **{"other": 1.0} if not training_s else {})


def test_ranks_that_wait_for_the_one_that_saves_do_not_train() -> None:
    job = Job().start().pass_(6)
    waits = {"step_s": [6.0, 6.0], "forward_s": [1.0, 1.0], "wait_s": [0.0, 5.0], "checkpoint_s": [5.0, np.nan]}
    job.split.feed(step_matrix(topology(2, epoch=job.epoch), 1, waits, seen_ns=job.now_ns))
    assert job.spent() == near(training=1.0, checkpoint=5.0)


def test_steps_that_are_seen_together_share_the_time_that_passed() -> None:
    job = Job().start()
    for poll in range(20):
        job.pass_(1.0)
        for step in range(10):
            job.close(10 * poll + step, step_s=0.09)
    assert job.spent() == near(training=18.0, other=2.0)
    assert job.split.steps_new == 200


def test_a_long_evaluation_counts_while_it_lasts_and_only_once() -> None:
    job = Job().start().steps(1, 5).doing("eval", 600)
    assert job.split.seconds()["evaluation"] == pytest.approx(599, abs=0.2)
    assert job.split.wall_s == pytest.approx(605, abs=2)
    job.pass_(1).close(6, step_s=1.0, **MARKED, eval_s=600.0)
    assert job.spent() == near(training=6.0, evaluation=600.0)


def test_short_checkpoints_are_taken_from_the_rows_alone() -> None:
    job = Job().start()
    for step in range(1, 50):
        job.doing("checkpoint", 0.05).pass_(0.2).close(step, step_s=0.2, forward_s=0.2, checkpoint_s=0.05)
    assert job.spent()["checkpoint"] == pytest.approx(49 * 0.05, abs=0.01)


def test_a_hang_counts_as_interrupted_when_patience_is_over_and_no_step_takes_it_back() -> None:
    job = Job().start().steps(1, 5).pass_(PATIENCE.total_seconds() + 100)
    assert job.split.seconds()["interrupted"] == pytest.approx(100, abs=1)
    job.close(6, step_s=160.0)
    assert job.spent() == near(training=5 + 60, interrupted=100.0)


def test_steps_that_are_long_are_waited_for_three_times_as_long() -> None:
    job = Job().start().pass_(50).steps(1, 3, 50.0).steps(4, 6, 140.0)
    assert job.spent()["training"] == pytest.approx(3 * 50 + 3 * 140, abs=1)


def test_a_report_can_wait_for_ever() -> None:
    job = Job(TimeSplit(timedelta(days=9999))).start().steps(1, 5).pass_(900).steps(6, 6).pass_(500).end()
    assert job.spent() == near(training=6.0, other=900.0, interrupted=500.0)


@pytest.mark.parametrize(
    ("away_s", "wall_s"),
    [pytest.param(20, 40, id="short: what was done meanwhile counts"), pytest.param(3600, 21, id="long: nobody knows")],
)
def test_a_supervisor_that_was_away(away_s: float, wall_s: float) -> None:
    job = Job().start().steps(1, 10)
    restored = TimeSplit()
    restored.restore(json.loads(json.dumps(job.split.snapshot())))
    assert restored.seconds() == job.split.seconds()
    job.split, job.now_s = restored, job.now_s + away_s
    job.start(by="take-over")
    assert not job.close(10, step_s=1.0), "its line tells the last steps again"
    for step in range(11, 11 + round(away_s)):
        job.close(step, step_s=1.0)
    job.steps(11 + round(away_s), 20 + round(away_s))
    assert restored.steps_new == 20 + away_s
    assert restored.highest_step == 20 + away_s
    job.spent()
    assert restored.wall_s == pytest.approx(wall_s, abs=1.1)


def test_what_ranks_make_up_counts_for_no_more_than_the_time_that_passed() -> None:
    job = Job().start()
    for step, seconds in enumerate((np.inf, -5.0, 1e30, np.nan, -np.inf)):
        job.pass_(1).close(step, step_s=seconds, checkpoint_s=seconds, eval_s=seconds)
    job.spent()
    assert job.split.wall_s == pytest.approx(5.0)
    assert min(job.split.seconds().values()) >= 0


def test_the_last_steps_of_an_attempt_may_come_after_its_end() -> None:
    job = Job().start().steps(1, 5).pass_(1).end()
    job.close(6, step_s=1.0)  # closed by the end itself: in the same instant
    assert job.pass_(1).spent() == near(training=6.0, interrupted=1.0)


KINDS = st.sampled_from(["tick", "step", "again", "checkpoint", "live", "start", "take-over", "end", "hello", "settle"])


@given(st.lists(st.tuples(KINDS, st.floats(0, 90), st.integers(0, 3)), max_size=40))
def test_each_instant_counts_once_and_no_counter_falls(acts: list[tuple[str, float, int]]) -> None:
    job = Job().start()
    began_s, step, before, counted = 0.0, 0, dict.fromkeys(ACTIVITIES, 0.0), 0
    for kind, seconds, number in acts:
        job.now_s += seconds
        match kind:
            case "tick":
                job.split.feed(Tick(seen_ns=job.now_ns))
            case "step" | "checkpoint":
                step += 1 + number
                counted += job.close(step, step_s=seconds * number, **{"eval_s": 7.0} if kind == "checkpoint" else {})
            case "again":
                counted += job.close(step, step_s=1.0)
            case "live":
                job.doing("eval", number)
            case "start":
                job.start((job.epoch >> 32) + 1, "plan")
                step = max(0, step - number)
            case "take-over":
                job.start(job.epoch >> 32, "plan")
            case "end":
                job.end()
            case "hello":
                job.hello(job.epoch + (1 << 16))
            case "settle":
                job.split.settle()
        now = dict(job.split.seconds())
        assert all(now[name] >= before[name] for name in ACTIVITIES)
        assert sum(now.values()) == pytest.approx(job.split.wall_s)
        assert job.split.wall_s <= job.now_s - began_s + 1e-6
        before = now
    job.split.feed(Tick(seen_ns=job.now_ns))
    job.split.settle()
    assert job.split.wall_s == pytest.approx(job.now_s - began_s, abs=1e-6)
    assert job.split.steps_new + job.split.steps_repeated == counted


@given(st.lists(st.tuples(KINDS, st.floats(0, 90), st.integers(0, 3)), max_size=30), st.integers(0, 30))
def test_a_restored_split_goes_on_as_if_nothing_had_happened(acts: list[tuple[str, float, int]], cut: int) -> None:
    items: list[StepMatrix | Event | Tick | Frame] = []

    class Kept(TimeSplit):
        def feed(self, item: StepMatrix | Frame | Event | Tick) -> bool:
            items.append(item)
            return super().feed(item)

    job = Job(Kept()).start()
    for number, (_, seconds, _) in enumerate(acts):
        job.pass_(min(seconds, 2)).close(number, step_s=seconds)
    first, second = TimeSplit(), TimeSplit()
    for item in items[:cut]:
        first.feed(item)
    second.restore(json.loads(json.dumps(first.snapshot())))
    for item in items[cut:]:
        first.feed(item)
        second.feed(item)
    assert second.snapshot() == first.snapshot()
