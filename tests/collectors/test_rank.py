"""What a training script says, as the agent hears it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectors.world import World, a_world, compute, events, frames, poll, rows

import trainwarden.collectors.rank as tw
from trainwarden.collectors.rank import rank as rank_module
from trainwarden.core import records
from trainwarden.core.records import FEATURES

DATA, FORWARD, BACKWARD, OPTIMIZER, WAIT = tw.DATA, tw.FORWARD, tw.BACKWARD, tw.OPTIMIZER, tw.WAIT
LOSS, GRAD_NORM, LEARNING_RATE = tw.LOSS, tw.GRAD_NORM, tw.LEARNING_RATE
Script = Callable[[tw.Rank, "Clock"], None]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rank_module, "_clock", made)
    return made


def told(row: np.void) -> dict[str, float]:
    """The features of a step row that were seen, rounded to what a float32 of these sizes holds."""
    values = zip(FEATURES, row["values"].tolist(), strict=True)
    return {name: round(value, 4) for name, value in values if not math.isnan(value)}


def phases(*steps: tuple[Any, float]) -> Script:
    """One step that goes through phases, each for some seconds."""

    def script(w: tw.Rank, clock: Clock) -> None:
        w.begin(1)
        for phase, seconds in steps:
            w.mark(phase)
            clock.spend(seconds)
        w.end()

    return script


def accumulated(w: tw.Rank, clock: Clock) -> None:
    w.begin(1)
    for micro_batch in range(3):
        with w.span(FORWARD, mb=micro_batch):
            clock.spend(1.0)
        with w.span(BACKWARD, mb=micro_batch):
            clock.spend(2.0)
            with w.span(WAIT):
                clock.spend(0.5)
    w.mark(OPTIMIZER)
    clock.spend(0.25)
    w.end()


def everything_said(w: tw.Rank, clock: Clock) -> None:
    w.begin(1, batch=7)
    w.mark(DATA, tokens=100)
    clock.spend(1.0)
    w.mark(FORWARD, tokens=20)
    w.value(LOSS, 2.0, scope="local")
    w.value(GRAD_NORM, 3.0, scope="local")
    w.value(LOSS, 2.5, scope="global")
    w.value(GRAD_NORM, 3.5)
    w.value(LEARNING_RATE, 0.5)
    clock.spend(1.0)
    w.end()


def saved_between_steps(w: tw.Rank, clock: Clock) -> None:
    w.begin(0)
    w.end()
    w.phase(tw.CHECKPOINT, expect_s=60)
    clock.spend(30.0)
    w.mark(tw.EVAL)
    clock.spend(3.0)
    w.begin(1)
    w.mark(FORWARD)
    clock.spend(1.0)
    w.end()


def saved_within_a_step(w: tw.Rank, clock: Clock) -> None:
    w.begin(1)
    w.mark(FORWARD)
    clock.spend(1.0)
    w.phase(tw.CHECKPOINT)
    clock.spend(5.0)
    w.end()


def wait_of_ddp(w: tw.Rank, clock: Clock) -> None:
    """Backward, its hook, the optimizer, and a collective of the script's own behind it."""
    phases((BACKWARD, 2.0), (WAIT, 3.0), (OPTIMIZER, 1.0), (WAIT, 0.5))(w, clock)


def read_before_the_step(w: tw.Rank, clock: Clock) -> None:
    w.mark(DATA)
    clock.spend(4.0)
    w.begin(1)
    w.end()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(
            phases((DATA, 1.0), (FORWARD, 2.0), (BACKWARD, 4.0), (OPTIMIZER, 0.5)),
            {"step_s": 7.5, "data_s": 1.0, "forward_s": 2.0, "backward_s": 4.0, "optimizer_s": 0.5},
            id="a plain step",
        ),
        pytest.param(phases((FORWARD, 2.0)), {"step_s": 2.0, "forward_s": 2.0}, id="one phase: the others are unseen"),
        pytest.param(phases(), {"step_s": 0.0}, id="no phase at all"),
        pytest.param(
            phases((OPTIMIZER, 1.0), (DATA, 2.0)), {"step_s": 3.0, "optimizer_s": 1.0, "data_s": 2.0}, id="backwards"
        ),
        pytest.param(
            phases((FORWARD, 1.0), (BACKWARD, 2.0), (FORWARD, 1.0), (BACKWARD, 2.0)),
            {"step_s": 6.0, "forward_s": 2.0, "backward_s": 4.0},
            id="phases entered twice are added",
        ),
        pytest.param(
            phases((tw.BACKWARD_INPUT, 1.0), (tw.BACKWARD_WEIGHT, 2.0), (tw.COMPILE, 9.0), (tw.OTHER, 1.0)),
            {"step_s": 13.0, "backward_s": 3.0},
            id="backward in two parts; compile and other are only in the step",
        ),
        pytest.param(
            wait_of_ddp, {"step_s": 6.5, "backward_s": 2.0, "wait_s": 3.5, "optimizer_s": 1.0}, id="waits are taken out"
        ),
        pytest.param(
            accumulated,
            {"step_s": 10.75, "forward_s": 3.0, "backward_s": 6.0, "wait_s": 1.5, "optimizer_s": 0.25},
            id="micro-batches with a wait inside",
        ),
        pytest.param(
            everything_said,
            {
                **{"step_s": 2.0, "data_s": 1.0, "forward_s": 1.0, "tokens": 120.0, "loss": 2.5, "grad_norm": 3.5},
                **{"local_loss": 2.0, "local_grad_norm": 3.0, "learning_rate": 0.5},
            },
            id="all values",
        ),
        pytest.param(
            saved_between_steps,
            {"step_s": 1.0, "forward_s": 1.0, "checkpoint_s": 30.0, "eval_s": 3.0},
            id="what is done between steps counts into the next",
        ),
        pytest.param(saved_within_a_step, {"step_s": 6.0, "forward_s": 1.0, "checkpoint_s": 5.0}, id="saved in a step"),
        pytest.param(read_before_the_step, {"step_s": 0.0, "data_s": 4.0}, id="data read before the step"),
    ],
)
def test_what_a_step_tells(world: World, clock: Clock, script: Script, expected: dict[str, float]) -> None:
    w, source = world.attach(), world.source()
    script(w, clock)
    row = rows(poll(source), "step")[-1]
    assert (row["rank"], row["step"], told(row)) == (0, 1, expected)
    assert row["batch"] == (7 if script is everything_said else 1)


@given(
    marks=st.lists(
        st.tuples(
            st.sampled_from([DATA, FORWARD, BACKWARD, WAIT, OPTIMIZER, tw.EVAL, tw.BACKWARD_INPUT, tw.OTHER]),
            st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        ),
        max_size=8,
    )
)
def test_both_ways_through_a_step_tell_the_same(marks: list[tuple[Any, float]]) -> None:
    """A batch of its own sends a step the long way from its beginning."""
    clock = Clock()
    with a_world() as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_module, "_clock", clock)
        w, source = world.attach(), world.source()
        for step, batch in ((1, None), (2, 2)):
            w.begin(step, batch)
            clock.spend(0.125)
            for phase, seconds in marks:
                w.mark(phase)
                clock.spend(seconds)
            w.end()
        short, long = (told(row) for row in rows(poll(source), "step"))
    assert short == long
    spent = sum(value for name, value in short.items() if name != "step_s")
    other = 0.125 + sum(seconds for phase, seconds in marks if phase == tw.OTHER)
    assert short["step_s"] == spent + other


def test_many_steps_go_the_short_way_and_back(world: World, clock: Clock) -> None:
    """A long step now and then leaves nothing behind in the short ones after it."""
    w, source = world.attach(), world.source()
    for step in range(50):
        w.begin(step, step + 1000 if step % 7 == 0 else None)
        w.mark(FORWARD, tokens=5 if step % 5 == 0 else None)
        clock.spend(1.0)
        w.value(LOSS, float(step))
        w.end()
        if step % 11 == 0:
            w.phase(tw.CHECKPOINT)
            clock.spend(2.0)
    for row in rows(poll(source), "step"):
        step = int(row["step"])
        expected: dict[str, float] = {"step_s": 1.0, "forward_s": 1.0, "loss": float(step)}
        if step % 5 == 0:
            expected["tokens"] = 5.0
        if step % 11 == 1:
            expected["checkpoint_s"] = 2.0
        assert (told(row), row["batch"]) == (expected, step + 1000 if step % 7 == 0 else step)


def test_what_a_rank_does_is_told_while_it_does_it(world: World, clock: Clock) -> None:
    w, source = world.attach(), world.source()
    seen = []

    def look() -> None:
        (frame,) = frames(poll(source), "live")
        (row,) = frame.rows
        seen.append((frame.names[row["phase"]], int(row["step"]), int(row["batch"]), int(row["since_ns"])))

    look()
    w.begin(3)
    clock.spend(1)
    look()
    for phase in (DATA, FORWARD, BACKWARD, WAIT, FORWARD):
        clock.spend(1)
        w.mark(phase)
        look()
    clock.spend(1)
    with w.span(WAIT):
        look()
    clock.spend(1)
    w.phase(tw.CHECKPOINT, expect_s=10)
    look()
    clock.spend(1)
    w.end()
    look()
    clock.spend(1)
    w.begin(4, 9)
    look()
    w.end()
    clock.spend(1)
    w.begin(5)
    look()
    names = ["init", "other", "data", "forward", "backward", "wait", "forward", "wait", "checkpoint", "between"]
    assert [name for name, *_ in seen] == [*names, "other", "other"]
    assert [where for _, *where, _ in seen] == [[-1, -1], *[[3, 3]] * 9, [4, 9], [5, 5]]
    since = [when for *_, when in seen]
    assert since == sorted(since)
    assert since[9] - since[2] == 7_000_000_000


def test_a_phase_that_goes_on_keeps_its_start(world: World) -> None:
    w, source = world.attach(), world.source()
    w.begin(0)
    w.mark(FORWARD)
    assert len({int(rows(poll(source), "live")["since_ns"][0]) for _ in range(20)}) == 1


def test_spans_are_told_with_their_micro_batch(world: World, clock: Clock) -> None:
    w, source = world.attach(), world.source()
    accumulated(w, clock)
    w.begin(2)
    with w.span(FORWARD, contains_comm=True):
        clock.spend(1)
    out = poll(source)
    (frame,) = frames(out, "span")
    spans = [(frame.names[row["kind"]], int(row["mb"]), float(row["values"][0])) for row in frame.rows]
    one = [("forward", 1.0), ("wait", 0.5), ("backward", 2.0)]
    expected = [(kind, -1 if kind == "wait" else mb, seconds) for mb in range(3) for kind, seconds in one]
    assert spans == [*expected, ("forward", -1, 1.0)]
    assert [int(flags) for flags in frame.rows["flags"]] == [0] * 9 + [records.CONTAINS_COMM]
    order = [one.schema for one in out if one in frames(out, "span") + frames(out, "step")]
    assert order == ["span", "step"], "a step's spans come before its row"


def test_an_error_inside_a_span_is_the_scripts_own(world: World, clock: Clock) -> None:
    w, source = world.attach(), world.source()
    w.begin(1)
    w.mark(BACKWARD)
    with pytest.raises(KeyError), w.span(FORWARD, mb=1):
        clock.spend(dict[str, float]()["theirs"])
    clock.spend(2)
    w.end()
    out = poll(source)
    assert told(rows(out, "step")[0]) == {"step_s": 2.0, "backward_s": 2.0}
    assert len(rows(out, "span")) == 1


def test_a_span_that_outlives_its_step_does_not_bend_the_next(world: World, clock: Clock) -> None:
    w, source = world.attach(), world.source()
    w.begin(1)
    span = w.span(FORWARD)
    with span:
        clock.spend(1)
        w.end()
        w.begin(2)
        w.mark(BACKWARD)
    clock.spend(1)
    w.end()
    assert told(rows(poll(source), "step")[1]) == {"step_s": 1.0, "backward_s": 1.0}


def test_the_cpu_clock_takes_out_what_others_took(world: World) -> None:
    w, source = world.attach(clock="cpu"), world.source()
    w.begin(0)
    w.mark(FORWARD)
    compute(0.03)
    with w.span(FORWARD, mb=0):
        compute(0.03)
    w.end()
    out = poll(source)
    seen = told(rows(out, "step")[0])
    assert seen["cpu_s"] > 0.02
    assert 0 < seen["forward_s"] <= seen["step_s"]
    assert seen["runq_s"] >= 0
    _, cpu_s, runq_s, device_s = rows(out, "span")[0]["values"].tolist()
    assert cpu_s > 0.01
    assert runq_s >= 0
    assert math.isnan(device_s)
    (hello,) = events(out, "hello")
    assert (hello.data["clock"], hello.data["blind"]) == ("cpu", [])


def test_a_step_number_that_does_not_grow_begins_a_lap(world: World, clock: Clock) -> None:
    w, source = world.attach(), world.source()
    for step in (1, 2, 1, 2, 2):
        w.begin(step)
        w.mark(FORWARD)
        clock.spend(1)
        w.end()
    out = poll(source)
    assert [event.data["lap"] for event in events(out, "hello")] == [0, 1, 2]
    assert [(frame.epoch, frame.rows["step"].tolist()) for frame in frames(out, "step")] == [
        (0, [1, 2]),
        (1, [1, 2]),
        (2, [2]),
    ]
    assert {row["values"][FEATURES.index("forward_s")] for row in rows(out, "step")} == {1.0}
    assert frames(out, "live")[0].epoch == 2
