"""What a training script says, as the agent hears it."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectors.world import World, events, frames, make_world, poll, rows, tmpfs_folder

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
    with tmpfs_folder() as folder, pytest.MonkeyPatch.context() as patch:
        world = make_world(patch, folder)
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
        world.end()
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


@pytest.mark.parametrize(
    ("name", "scope", "flag"),
    [
        pytest.param(LOSS, "global", records.LOSS_NONFINITE, id="loss"),
        pytest.param(LOSS, None, records.LOSS_NONFINITE, id="loss, scope not said"),
        pytest.param("loss", None, records.LOSS_NONFINITE, id="loss by its name"),
        pytest.param(GRAD_NORM, "global", records.GRAD_NONFINITE, id="gradient norm"),
        pytest.param(LOSS, "local", records.LOCAL_NONFINITE, id="local loss"),
        pytest.param(GRAD_NORM, "local", records.LOCAL_NONFINITE, id="local gradient norm"),
        pytest.param(LEARNING_RATE, None, 0, id="learning rate"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"), 1e39])
def test_what_is_not_finite_is_flagged_at_once(world: World, name: Any, scope: Any, flag: int, value: float) -> None:
    w, source = world.attach(), world.source()
    w.begin(5)
    w.value(name, value, scope=scope)
    (live,) = rows(poll(source), "live")
    assert (live["step"], live["flags"]) == (5, flag), "seen before the step ends"
    w.end()
    w.begin(6)
    out = poll(source)
    assert [(row["step"], row["flags"]) for row in rows(out, "step")] == [(5, flag)]
    assert [(row["step"], row["flags"]) for row in rows(out, "live")] == [(6, 0)], "the next step is clean"


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
    for _ in range(3):
        sum(range(200_000))
    with w.span(FORWARD, mb=0):
        sum(range(200_000))
    w.end()
    out = poll(source)
    seen = told(rows(out, "step")[0])
    assert seen["cpu_s"] > 0.001
    assert seen["forward_s"] <= seen["step_s"]
    assert seen["forward_s"] == pytest.approx(seen["step_s"] - seen["runq_s"], abs=0.002)
    _, cpu_s, runq_s, device_s = rows(out, "span")[0]["values"].tolist()
    assert cpu_s > 0.0002
    assert runq_s >= 0
    assert math.isnan(device_s)
    (hello,) = events(out, "hello")
    assert (hello.data["clock"], hello.data["blind"]) == ("cpu", [])


def test_values_with_other_names_become_readings(world: World) -> None:
    w, source = world.attach(rank=2, world_size=4), world.source()
    w.begin(1)
    w.value("tokens per second", 12345.5)
    w.value("not finite", math.nan)
    w.value("tokens per second", 12346)
    (frame,) = frames(poll(source), "reading")
    found = [(frame.names[row["subject"]], frame.names[row["signal"]], float(row["value"])) for row in frame.rows]
    assert found[0] == ("rank:2", "tokens per second", 12345.5)
    assert found[1][1] == "not finite"
    assert math.isnan(found[1][2])
    assert found[2] == ("rank:2", "tokens per second", 12346.0)
    assert frame.rows["step"].tolist() == [1, 1, 1]


def test_marks_become_events(world: World) -> None:
    w, source = world.attach(rank=1, world_size=2), world.source()
    w.begin(7)
    w.phase(tw.EVAL, expect_s=600)
    w.phase(tw.CHECKPOINT)
    w.note("data shuffled", 3)
    w.note("checkpoint_committed", 6)
    out = poll(source)
    assert [event.data for event in events(out, "mark.phase")] == [
        {"phase": "eval", "expect_s": 600.0, "step": 7},
        {"phase": "checkpoint", "expect_s": None, "step": 7},
    ]
    assert [event.data for event in events(out, "mark.note")] == [{"name": "data shuffled", "value": 3.0, "step": 7}]
    (committed,) = events(out, "mark.checkpoint_committed")
    assert committed.data == {"step": 6, "path": "", "rank": 1}
    assert str(committed.subject) == "rank:1"


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


def errors(world: World) -> dict[str, int]:
    (path,) = world.rings.glob("rank-0-*[0-9].ring")
    at = records.COUNTERS_OFFSET
    counters = np.frombuffer(path.read_bytes()[at : at + 8 * len(records.COUNTERS)], np.uint64)
    return {name: int(count) for name, count in zip(records.COUNTERS, counters, strict=True) if count}


def device_tensor() -> object:
    """Whatever is done with it waits for the device: nothing may be done with it."""

    class Tensor:
        device = type("device", (), {"type": "cuda"})()
        shape = ()

        def wait(self, *_: object) -> Any:
            raise AssertionError("this would have waited for the device")

        __float__ = __bool__ = __sub__ = __eq__ = item = tolist = __len__ = wait
        __hash__ = None  # type: ignore[assignment]

    return Tensor()


def distributed_tensor() -> object:
    return type("DTensor", (), {"device": "cpu", "placements": (), "item": lambda self: 1 / 0})()


@pytest.mark.parametrize(
    ("wrong", "counted"),
    [
        pytest.param(lambda w: w.end(), {"errors": 1}, id="end without begin"),
        pytest.param(lambda w: (w.begin(1), w.begin(2)), {"errors": 1}, id="begin without end"),
        pytest.param(lambda w: w.value(LOSS, 1.0), {"errors": 1}, id="a loss between steps"),
        pytest.param(lambda w: w.value(tw.Feature(77), 1.0), {}, id="a value nobody knows is a reading"),
        pytest.param(lambda w: w.mark(tw.Phase(99)), {"errors": 1}, id="an unknown phase"),
        pytest.param(lambda w: w.mark("forward"), {"errors": 1}, id="a phase by name"),
        pytest.param(lambda w: w.begin("one"), {"errors": 1}, id="a step that is no number"),
        pytest.param(lambda w: (w.begin(1 << 40), w.end()), {"errors": 1}, id="a step that fits no row"),
        pytest.param(lambda w: w.begin(None), {"errors": 1}, id="no step"),
        pytest.param(lambda w: w.phase(tw.EVAL, expect_s="long"), {"values_refused": 1}, id="a time that is none"),
        pytest.param(lambda w: w.value(LOSS, "2.5"), {"values_refused": 1}, id="text"),
        pytest.param(lambda w: w.value(LOSS, None), {"values_refused": 1}, id="nothing"),
        pytest.param(lambda w: w.value(LOSS, 10**400), {"values_refused": 1}, id="a number beyond floats"),
        pytest.param(lambda w: w.value(LOSS, np.zeros(3)), {"values_refused": 1}, id="three numbers"),
        pytest.param(
            lambda w: w.value(LOSS, device_tensor()), {"device_tensors_refused": 1}, id="a tensor on a device"
        ),
        pytest.param(
            lambda w: w.mark(FORWARD, tokens=device_tensor()), {"device_tensors_refused": 1}, id="tokens there"
        ),
        pytest.param(lambda w: w.value(LOSS, distributed_tensor()), {"device_tensors_refused": 1}, id="distributed"),
        pytest.param(lambda w: w.note("x" * 60), {"names_dropped": 1}, id="a name too long"),
        pytest.param(lambda w: [w.note(f"n{i}") for i in range(250)], {"names_dropped": 7}, id="too many names"),
    ],
)
def test_a_wrong_call_is_counted_and_harms_nothing(
    world: World, capfd: pytest.CaptureFixture[str], wrong: Callable[[tw.Rank], object], counted: dict[str, int]
) -> None:
    w, source = world.attach(), world.source()
    w.begin(0)
    w.end()
    wrong(w)
    wrong_again = errors(world)
    w.begin(10)
    w.value(LOSS, 2.5)
    w.end()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) <= 2, "each thing is said once"
    assert all(line.startswith("trainwarden: ") for line in lines)
    assert wrong_again == counted
    row = rows(poll(source), "step")[-1]
    assert (row["step"], round(told(row)["loss"], 4)) == (10, 2.5)


def test_a_wrong_call_in_every_step_is_said_once(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    w = world.attach()
    for step in range(100):
        w.begin(step)
        w.value(LOSS, f"text {step}")
        w.end()
    assert errors(world) == {"values_refused": 100}
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(3, id="int"),
        pytest.param(np.float32(3), id="NumPy float32"),
        pytest.param(np.int64(3), id="NumPy int64"),
        pytest.param(np.array(3.0), id="NumPy array without axes"),
    ],
)
@pytest.mark.parametrize("scope", ["local", "global"])
def test_cpu_numbers_of_all_sorts_are_taken(world: World, value: Any, scope: Any) -> None:
    w, source = world.attach(), world.source()
    w.begin(0)
    w.value(LOSS, value, scope=scope)
    w.end()
    seen = told(rows(poll(source), "step")[0])
    assert seen["loss" if scope == "global" else "local_loss"] == 3.0


def test_a_tensor_on_the_cpu_is_taken(world: World) -> None:
    torch = pytest.importorskip("torch")
    w, source = world.attach(), world.source()
    w.begin(0)
    w.value(LOSS, torch.tensor(3.0, requires_grad=True))
    w.value(GRAD_NORM, torch.tensor(math.nan))
    w.end()
    (row,) = rows(poll(source), "step")
    assert told(row)["loss"] == 3.0
    assert row["flags"] == records.GRAD_NONFINITE


def test_other_threads_write_to_a_ring_of_their_own(world: World) -> None:
    import threading

    w, source = world.attach(rank=1, world_size=2), world.source()
    side = w.side()
    assert w.side() is side
    w.begin(4)

    def work(number: int) -> None:
        for i in range(40):
            side.value(f"written by {number}", i)
        side.note("checkpoint_committed", number)
        side.value("refused", "text")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = poll(source)
    (frame,) = frames(out, "reading")
    assert len(frame.rows) == 160
    assert set(frame.names) == {"rank:1", *(f"written by {number}" for number in range(4))}
    assert sorted(str(event.data["step"]) for event in events(out, "mark.checkpoint_committed")) == ["0", "1", "2", "3"]
    assert len(rows(out, "live")) == 1, "the side ring has no live block"
    w.close()
    side.value("after the end", 1)


def use_everything(w: tw.Rank) -> None:
    for step in (1, 1, 2):
        w.begin(step, batch=3)
        w.mark(FORWARD, tokens=3, contains_comm=True)
        with w.span(BACKWARD, mb=2):
            w.mark(WAIT)
        w.phase(tw.EVAL, expect_s=3)
        w.value(LOSS, 1.0)
        w.value("named", 1.0)
        w.value(LEARNING_RATE, math.nan)
        w.note("noted")
        w.end()
    w.side().value("x", 1)
    w.side().note("x")
    w.close()
    w.close()


def test_switched_off_it_leaves_no_trace(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINWARDEN", "0")
    w = world.attach(rank=99, world_size=1)
    use_everything(w)
    assert (w.why_off, w.attempt) == ("closed", None)
    assert [*world.root.iterdir()] == []
    assert capfd.readouterr().err == ""


def test_after_close_nothing_is_written(world: World) -> None:
    w = world.attach()
    w.begin(1)
    w.end()
    w.close()
    (path,) = world.rings.iterdir()
    before = path.read_bytes()
    use_everything(w)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        pytest.param({"RANK": "abc"}, "RANK: expected a whole number", id="a rank that is no number"),
        pytest.param({"RANK": "4", "WORLD_SIZE": "4"}, "RANK: expected", id="a rank beyond the world"),
        pytest.param({"TRAINWARDEN_ATTEMPT_FILE": "/no/such"}, "cannot be read", id="no attempt file"),
    ],
)
def test_who_does_not_know_itself_trains_without_us(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    environment: dict[str, str],
    said: str,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    for _ in range(2):
        w = tw.attach()
        assert said in w.why_off
        use_everything(w)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("trainwarden: no recording of this rank: ")
    assert said in line


def test_the_public_names() -> None:
    phases = {"BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "CHECKPOINT", "COMPILE", "DATA", "EVAL", "FORWARD"}
    phases |= {"OPTIMIZER", "OTHER", "WAIT"}
    values = {"LOSS", "GRAD_NORM", "LEARNING_RATE"}
    assert set(tw.__all__) == phases | values | {"Feature", "Phase", "Rank", "Scope", "Side", "attach"}
    assert all(hasattr(tw, name) for name in tw.__all__)
    public = {name for name in dir(tw.Rank) if not name.startswith("_")}
    assert public == {
        *("begin", "mark", "value", "end", "span", "phase", "note", "side", "close", "let_go", "attempt", "why_off")
    }


def test_a_bare_interpreter_will_do() -> None:
    """Neither site-packages nor the environment: only our two folders and the standard library."""
    root = Path(__file__).resolve().parents[2]
    program = f"""
import sys
sys.path += [{str(root / "core")!r}, {str(root / "collectors")!r}]
import trainwarden.core.records, trainwarden.core.identity
import trainwarden.collectors.rank, trainwarden.collectors.rank.hooks.torch
print(sorted(name for name in sys.modules if name.split(".")[0] in ("numpy", "torch", "pydantic", "yaml")))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
