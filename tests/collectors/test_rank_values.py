"""Numbers and names that a script gives, right ones and wrong ones."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.collectors.world import World, events, frames, poll, rows

import trainwarden.collectors.rank as tw
from trainwarden.collectors.rank import FORWARD, GRAD_NORM, LEARNING_RATE, LOSS
from trainwarden.core import records
from trainwarden.core.records import FEATURES


def told(row: np.void) -> dict[str, float]:
    """The features of a step row that were seen."""
    values = zip(FEATURES, row["values"].tolist(), strict=True)
    return {name: round(value, 4) for name, value in values if not math.isnan(value)}


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


def errors(world: World) -> dict[str, int]:
    (path,) = world.rings.glob("rank-0-*[0-9].ring")
    at = records.COUNTERS_OFFSET
    counters = np.frombuffer(path.read_bytes()[at : at + 8 * len(records.COUNTERS)], np.uint64)
    return {name: int(count) for name, count in zip(records.COUNTERS, counters, strict=True) if count}


def device_tensor(kind: str = "xpu") -> object:
    """Whatever is done with it waits for the device: nothing may be done with it. (CUDA: test_rank_pending.py.)"""

    class Tensor:
        device = type("device", (), {"type": kind})()
        shape = ()

        def wait(self, *_: object) -> Any:
            raise AssertionError("this would have waited for the device")

        __float__ = __bool__ = __sub__ = __eq__ = item = tolist = __len__ = wait
        __hash__ = None  # type: ignore[assignment]

    return Tensor()


def distributed_tensor() -> object:
    part = type("Partial", (), {"is_partial": lambda self: True})()
    return type("DTensor", (), {"device": "cpu", "placements": (part,), "item": lambda self: 1 / 0})()


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
            lambda w: w.mark(FORWARD, tokens=device_tensor("cuda")), {"device_tensors_refused": 1}, id="tokens on CUDA"
        ),
        pytest.param(lambda w: w.note("n", device_tensor("cuda")), {"device_tensors_refused": 1}, id="a note on CUDA"),
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
