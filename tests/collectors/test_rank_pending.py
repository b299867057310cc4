"""Values and times of a device: they arrive late, on the step that they belong to, and the training never waits.

The device is a stand-in behind the protocol that torch.cuda is used through; the last tests ask a real one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.collectors.world import World, events, frames, poll, rows

from trainwarden.collectors.rank import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    OPTIMIZER,
    OTHER,
    WAIT,
    Rank,
    watch,
    watch_gradients,
)
from trainwarden.collectors.rank import device as device_module
from trainwarden.collectors.rank import pending as pending_module
from trainwarden.core import records
from trainwarden.core.model import Event, Frame, StepMatrix
from trainwarden.core.records import DEVICE_TIMED, FEATURES
from trainwarden.core.steps import StepAssembler, StepsConfig

torch = pytest.importorskip("torch")

KIND = "stand-in"


@dataclass(eq=False)
class Mark:
    """An event of the stand-in."""

    queued: int = -1
    """Its place in the queue."""


@dataclass
class Slot:
    number: float = math.nan


class Device:
    """A device with one stream: a queue of work, which is done when the test says so. Never to be waited for."""

    def __init__(self) -> None:
        self.work_s = 0.0
        """How long what was queued so far takes."""
        self.captured = False
        self.broken = ""
        """The call that raises."""
        self.calls: list[str] = []
        self.made = {"slots": 0, "event": 0}
        self._queue: list[tuple[Mark, float, Callable[[], None]]] = []
        self._done = 0

    # the test's side

    def busy(self, seconds: float) -> None:
        """The script queues a kernel."""
        self.work_s += seconds

    def run(self, count: int | None = None) -> None:
        """The device comes to the next `count` events, or to the end of its queue."""
        end = len(self._queue) if count is None else self._done + count
        for _, _, effect in self._queue[self._done : end]:
            effect()
        self._done = end

    def _log(self, call: str) -> None:
        self.calls.append(call)
        assert not (self.captured and call != "capturing"), f"{call} breaks the capture"
        if call == self.broken:
            raise RuntimeError(f"CUDA error in {call}")

    # the collector's side

    def capturing(self) -> bool:
        self._log("capturing")
        return self.captured

    def slots(self, count: int) -> Sequence[Slot]:
        self._log("slots")
        self.made["slots"] += count
        return [Slot() for _ in range(count)]

    def event(self) -> Mark:
        self._log("event")
        self.made["event"] += 1
        return Mark()

    def copy(self, slot: Slot, tensor: "Tensor", event: Mark) -> None:
        self._log("copy")
        slot.number = math.nan

        def arrive() -> None:
            slot.number = tensor.number

        self._push(event, arrive)

    def record(self, event: Mark) -> None:
        self._log("record")
        self._push(event, lambda: None)

    def done(self, event: Mark) -> bool:
        self._log("done")
        return event.queued < self._done

    def elapsed_s(self, first: Mark, last: Mark) -> float:
        self._log("elapsed_s")
        assert max(first.queued, last.queued) < self._done, "the real one raises"
        return self._queue[last.queued][1] - self._queue[first.queued][1]

    def read(self, slot: Slot) -> float:
        self._log("read")
        return float(np.float32(slot.number))

    def synchronize(self) -> None:
        raise AssertionError("the training thread waited for the device")

    def _push(self, event: Mark, effect: Callable[[], None]) -> None:
        assert event.queued < self._done, "an event is used again before the device has come to it"
        event.queued = len(self._queue)
        self._queue.append((event, self.work_s, effect))


@dataclass
class Tensor:
    """A number on the stand-in; to look at it is to wait."""

    number: float
    elements: int = 1
    device: Any = field(default_factory=lambda: type("device", (), {"type": KIND})())

    def numel(self) -> int:
        return self.elements

    def wait(self, *_: object) -> Any:
        raise AssertionError("this would have waited for the device")

    __float__ = __bool__ = item = tolist = __len__ = wait


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    for kind in (KIND, "cuda"):
        monkeypatch.setitem(device_module.DEVICES, kind, lambda: made)
    yield made
    assert not made.captured


def train(w: Rank, step: int, loss: object = None, grad_norm: object = None) -> None:
    w.begin(step)
    w.mark(FORWARD)
    if loss is not None:
        w.value(LOSS, loss)
    w.mark(BACKWARD)
    w.mark(OPTIMIZER)
    if grad_norm is not None:
        w.value(GRAD_NORM, grad_norm)
    w.end()


def told(out: list[Frame | Event], *names: str) -> dict[int, tuple[float, ...]]:
    """The values of the step rows, by step, in the order in which they came."""
    if not frames(out, "step"):
        return {}
    found = rows(out, "step")
    columns = [FEATURES.index(name) for name in names]
    return {int(row["step"]): tuple(round(float(x), 4) for x in row["values"][columns]) for row in found}


def flags(out: list[Frame | Event]) -> list[tuple[int, int]]:
    return [(int(row["step"]), int(row["flags"])) for row in rows(out, "step")]


def live(out: list[Frame | Event]) -> tuple[int, int]:
    (row,) = rows(out, "live")
    return int(row["step"]), int(row["flags"])


def counted(world: World) -> dict[str, int]:
    (path,) = world.rings.glob("rank-0-*[0-9].ring")
    at = records.COUNTERS_OFFSET
    counts = np.frombuffer(path.read_bytes()[at : at + 8 * len(records.COUNTERS)], np.uint64)
    return {name: int(count) for name, count in zip(records.COUNTERS, counts, strict=True) if count}


# values


def test_a_value_comes_with_its_step_however_late(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    for step in range(4):
        train(w, step, Tensor(2.0 + step))
    assert told(poll(source), "loss") == {}, "no row goes without its number, and none overtakes"
    device.run(1)
    w.begin(4)
    assert told(poll(source), "loss") == {0: (2.0,)}
    device.run()
    w.end()
    found = told(poll(source), "loss")
    assert [found[step] for step in (1, 2, 3)] == [(3.0,), (4.0,), (5.0,)]
    assert math.isnan(found[4][0])
    assert counted(world) == {}


def test_all_the_rest_of_a_row_is_as_it_was_at_the_end_of_its_step(world: World, device: Device) -> None:
    w, source = world.attach(clock="cpu"), world.source()
    w.begin(3, batch=77)
    w.mark(FORWARD, tokens=4096, contains_comm=True)
    w.value("loss", Tensor(2.5), scope="local")
    w.value(LOSS, 1.5)
    w.value(LEARNING_RATE, 0.25)
    w.value("grad_norm", Tensor(9.0), scope="local")
    w.end()
    w.begin(4)
    device.run()
    w.end()
    first = rows(poll(source), "step")[0]
    assert (first["step"], first["batch"], first["flags"]) == (3, 77, records.CONTAINS_COMM)
    names = ("tokens", "loss", "local_loss", "local_grad_norm", "learning_rate")
    assert [float(first["values"][FEATURES.index(name)]) for name in names] == [4096, 1.5, 2.5, 9.0, 0.25]
    assert first["values"][FEATURES.index("forward_s")] > 0


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        pytest.param([Tensor(1.0), Tensor(2.0)], 2.0, id="two of the device"),
        pytest.param([1.0, Tensor(2.0)], 2.0, id="the device's after a float"),
        pytest.param([Tensor(2.0), 1.0], 1.0, id="a float after the device's"),
        pytest.param([Tensor(math.nan), Tensor(2.0)], 2.0, id="a NaN first"),
        pytest.param([Tensor(2.0), Tensor(math.nan)], math.nan, id="a NaN last"),
    ],
)
@pytest.mark.parametrize("scope", ["global", "local"])
def test_the_value_given_last_counts(world: World, device: Device, given: list[Any], seen: float, scope: Any) -> None:
    w, source = world.attach(), world.source()
    w.begin(0)
    for value in given:
        w.value(LOSS, value, scope=scope)
    device.run()
    w.end()
    column = "loss" if scope == "global" else "local_loss"
    ((found,),) = told(poll(source), column).values()
    assert found == pytest.approx(seen, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "scope", "flag"),
    [
        pytest.param(LOSS, None, records.LOSS_NONFINITE, id="loss"),
        pytest.param(GRAD_NORM, "global", records.GRAD_NONFINITE, id="gradient norm"),
        pytest.param(GRAD_NORM, "local", records.LOCAL_NONFINITE, id="local gradient norm"),
    ],
)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_there_is_flagged_on_its_step_and_seen_at_once(
    world: World, device: Device, name: Any, scope: Any, flag: int, number: float
) -> None:
    w, source = world.attach(), world.source()
    w.begin(5)
    w.value(name, Tensor(number), scope=scope)
    w.end()
    w.begin(6)
    assert live(poll(source)) == (6, 0)
    device.run()
    w.end()
    out = poll(source)
    assert flags(out) == [(5, flag), (6, 0)]
    assert live(out) == (6, flag), "whether or not the other ranks' rows ever come"
    w.begin(7)
    assert live(poll(source)) == (7, flag), "an agent that polls seldom has one step to see it"
    w.end()
    w.begin(8)
    out = poll(source)
    assert (live(out), flags(out)) == ((8, 0), [(7, 0)])


def test_what_may_be_an_overflow_of_a_loss_scale_is_not_told_unless_it_is_finite(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    for step, norm in enumerate((math.inf, 2.0)):
        w.begin(step)
        w._value(GRAD_NORM, Tensor(norm), "local", flagged=False)
        w.end()
    device.run()
    w.begin(2)
    out = poll(source)
    assert flags(out) == [(0, 0), (1, 0)]
    assert live(out) == (2, 0)
    told = rows(out, "step")["values"][:, FEATURES.index("local_grad_norm")]
    assert np.isnan(told[0])
    assert told[1] == 2.0


def test_the_closed_step_has_the_loss_of_the_device(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    out = poll(source)
    for step in range(3):
        train(w, step, Tensor(2.0 + step), Tensor(math.nan if step == 1 else 1.0))
        out += poll(source)
    device.run()
    w.close()
    out += poll(source)
    assembler = StepAssembler(world.job, StepsConfig())
    closed = [one for item in out for one in assembler.feed(item)] + assembler.finish()
    steps = [one for one in closed if isinstance(one, StepMatrix)]
    assert [one.step for one in steps] == [0, 1, 2]
    assert [float(one.values_FR[FEATURES.index("loss"), 0]) for one in steps] == [2.0, 3.0, 4.0]
    assert [int(one.flags_R[0]) for one in steps] == [0, records.GRAD_NONFINITE, 0]
    assert not any(one.partial for one in steps)


def test_rows_that_were_held_back_go_round_the_ring_like_all_others(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    found: dict[int, tuple[float, ...]] = {}
    for step in range(2 * records.STEP_ROWS):
        train(w, step, Tensor(float(step)))
        if step % 2:
            device.run()
        if step % 1000 == 999:
            found |= told(poll(source), "loss")
    w.close()
    found |= told(poll(source), "loss")
    assert found == {step: (float(step),) for step in range(2 * records.STEP_ROWS)}


def test_values_with_other_names_become_readings_of_their_step(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    w.begin(3)
    w.value("aux loss", Tensor(0.5))
    w.end()
    w.value("after it", Tensor(0.25))
    w.begin(4)
    assert frames(poll(source), "reading") == []
    device.run()
    w.end()
    (frame,) = frames(poll(source), "reading")
    found = [(frame.names[row["signal"]], int(row["step"]), float(row["value"])) for row in frame.rows]
    assert found == [("aux loss", 3, 0.5), ("after it", 3, 0.25)]


@pytest.mark.parametrize(
    ("value", "count"),
    [
        pytest.param(Tensor(1.0, elements=2), {"values_refused": 1}, id="two numbers"),
        pytest.param(Tensor(1.0, elements=0), {"values_refused": 1}, id="none"),
        pytest.param(
            Tensor(1.0, device=type("device", (), {"type": "xpu"})()), {"device_tensors_refused": 1}, id="elsewhere"
        ),
    ],
)
def test_what_is_no_number_there_is_refused(world: World, device: Device, value: Any, count: dict[str, int]) -> None:
    w, source = world.attach(), world.source()
    w.begin(0)
    w.value(LOSS, value)
    w.end()
    assert counted(world) == count
    assert len(told(poll(source), "loss")) == 1


def test_a_value_of_no_step_is_told_of_none(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    train(w, 0)
    w.value(LOSS, Tensor(5.0))
    device.run()
    train(w, 1)
    assert counted(world) == {"errors": 1}
    assert all(math.isnan(loss) for (loss,) in told(poll(source), "loss").values())


def test_a_step_without_an_end_takes_its_values_along(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    w.begin(0)
    w.value(LOSS, Tensor(math.nan))
    w.begin(0)
    w.value(GRAD_NORM, Tensor(1.0))
    device.run()
    w.end()
    out = poll(source)
    assert flags(out) == [(0, 0)]
    assert math.isnan(told(out, "loss")[0][0])
    assert counted(world) == {"errors": 1}


def test_a_lap_ends_the_wait(world: World, device: Device) -> None:
    """Rows of a lap that is over would be refused as old."""
    w, source = world.attach(), world.source()
    train(w, 7, Tensor(1.0))
    train(w, 7, Tensor(2.0))
    device.run()
    w.begin(8)
    out = poll(source)
    laps = [
        (int(row["step"]), int(row["lap"]), float(row["values"][FEATURES.index("loss")])) for row in rows(out, "step")
    ]
    assert laps == [(7, 0, pytest.approx(math.nan, nan_ok=True)), (7, 1, 2.0)]
    assert counted(world) == {"device_dropped": 1}


# what there is not enough of, and what may not be done


def test_a_full_pool_drops_and_counts_and_is_used_again(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    w.begin(0)
    for number in range(pending_module.SLOTS + 3):
        w.value(f"n{number % 5}", Tensor(float(number)))
    assert counted(world) == {"device_dropped": 3}
    w.end()
    device.run()
    for step in range(1, 200):
        train(w, step, Tensor(float(step)))
        device.run()
    w.begin(200)
    (frame,) = frames(out := poll(source), "reading")
    assert frame.rows["value"].tolist() == [*range(pending_module.SLOTS)]
    assert told(out, "loss")[199] == (199.0,)
    assert counted(world) == {"device_dropped": 3}
    assert device.made == {"slots": pending_module.SLOTS, "event": pending_module.SLOTS}


def test_a_device_that_falls_far_behind_costs_its_numbers_not_the_rows(
    world: World, device: Device, capfd: pytest.CaptureFixture[str]
) -> None:
    w, source = world.attach(clock="device"), world.source()
    late = 40 - pending_module.HELD_ROWS
    for first in range(0, 400, 40):  # what came too late is free again, or the pools would be empty after two rounds
        for step in range(first, first + 40):
            train(w, step, Tensor(float(step)))
        device.run()
    assert counted(world) == {"device_dropped": 10 * 2 * late}, "a value and the times of each"
    assert len(capfd.readouterr().err.splitlines()) == 1
    w.begin(400)
    found = told(poll(source), "loss")
    assert [*found] == [*range(400)]
    assert [step for step, (loss,) in found.items() if not math.isnan(loss)] == [
        step for step in range(400) if step % 40 >= late
    ]
    assert all(math.isnan(loss) or loss == step for step, (loss,) in found.items())


def test_during_a_capture_nothing_is_asked_of_the_device(world: World, device: Device) -> None:
    w, source = world.attach(clock="device"), world.source()
    train(w, 0, Tensor(1.0))
    device.run()
    device.captured = True
    train(w, 1, Tensor(2.0))
    assert told(poll(source), "loss") == {}, "not even whether it is done"
    assert counted(world) == {"device_dropped": 2}, "a value, and the step's times"
    device.captured = False
    train(w, 2, Tensor(3.0))
    device.run()
    w.begin(3)
    out = poll(source)
    assert [flag for _, flag in flags(out)] == [DEVICE_TIMED, records.CAPTURED, DEVICE_TIMED]
    assert [loss for (loss,) in told(out, "loss").values()] == [1.0, pytest.approx(math.nan, nan_ok=True), 3.0]


def test_the_first_value_during_a_capture_makes_no_pool(world: World, device: Device) -> None:
    w = world.attach()
    w.begin(0)
    device.captured = True
    w.value(LOSS, Tensor(1.0))
    assert set(device.calls) == {"capturing"}
    device.captured = False
    w.value(LOSS, Tensor(1.0))
    assert device.made["slots"] == pending_module.SLOTS
    w.end()


@pytest.mark.parametrize("call", ["capturing", "slots", "event", "copy", "record", "done", "elapsed_s", "read"])
def test_a_device_that_fails_is_counted_said_once_and_costs_no_row(
    world: World, device: Device, capfd: pytest.CaptureFixture[str], call: str
) -> None:
    w, source = world.attach(clock="device"), world.source()
    device.broken = call
    for step in range(40):
        train(w, step, Tensor(1.0))
        device.run()
    w.close()
    assert [*told(poll(source), "loss")] == [*range(40)]
    assert counted(world)["errors"] >= 1
    broken, *more = capfd.readouterr().err.splitlines()
    assert broken == f"trainwarden: RuntimeError: CUDA error in {call} (the training goes on)"
    assert len(more) <= 1


def test_a_forked_child_leaves_the_device_alone(world: World, device: Device) -> None:
    w, source = world.attach(clock="device"), world.source()
    train(w, 0, Tensor(1.0))
    w.begin(1)
    before = len(device.calls)

    def child() -> None:
        w.value(LOSS, Tensor(3.0))
        w.end()
        train(w, 2, Tensor(3.0))
        w.close()
        assert len(device.calls) == before

    assert world.wait(world.fork(child)) == 0
    device.run()
    w.end()
    assert told(poll(source), "loss")[0] == (1.0,)


def test_at_the_end_all_rows_are_written(world: World, device: Device) -> None:
    w, source = world.attach(), world.source()
    train(w, 0, Tensor(1.0))
    train(w, 1, Tensor(2.0))
    device.run(1)
    w.close()
    found = told(poll(source), "loss")
    assert found[0] == (1.0,)
    assert math.isnan(found[1][0])


def test_without_a_device_nothing_of_it_is_touched(world: World, device: Device) -> None:
    w = world.attach()
    train(w, 0, 1.0, np.float32(2.0))
    assert device.calls == []


# distributed tensors


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of one process."""
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "s"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def distributed_tensor(mesh: Any, placement: str) -> Any:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements = {"replicated": Replicate(), "sharded": Shard(0), "partial": Partial()}
    return DTensor.from_local(torch.tensor([4.0], requires_grad=True), mesh, [placements[placement]])


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_of_a_distributed_tensor_the_local_part_is_taken(world: World, mesh: Any, placement: str) -> None:
    w, source = world.attach(), world.source()
    train(w, 0, distributed_tensor(mesh, placement))
    assert told(poll(source), "loss") == {0: (4.0,)}


def test_a_distributed_tensor_that_is_not_reduced_is_refused(
    world: World, mesh: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    w, source = world.attach(), world.source()
    for step in range(2):
        train(w, step, distributed_tensor(mesh, "partial"))
    assert counted(world) == {"device_tensors_refused": 2}
    assert len(told(poll(source), "loss")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "not reduced yet" in line


def test_a_collective_under_way_is_not_waited_for(world: World, mesh: Any) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    waits = AsyncCollectiveTensor(torch.tensor(4.0))
    w, source = world.attach(), world.source()
    train(w, 0, waits)
    assert counted(world) == {"device_tensors_refused": 1}
    waits.completed = True
    train(w, 1, waits)
    assert told(poll(source), "loss")[1] == (4.0,)


def test_the_local_part_of_one_on_the_device_is_copied(world: World, device: Device) -> None:
    class Placement:
        def __init__(self, partial: bool) -> None:
            self.is_partial = lambda: partial

    @dataclass
    class Distributed(Tensor):
        placements: Sequence[Placement] = (Placement(False),)

        def to_local(self) -> Tensor:
            assert not torch.is_grad_enabled()
            return Tensor(self.number + 1)

    w, source = world.attach(), world.source()
    train(w, 0, Distributed(1.0), Distributed(1.0, placements=(Placement(False), Placement(True))))
    device.run()
    w.begin(1)
    assert told(poll(source), "loss")[0] == (2.0,)
    assert counted(world) == {"device_tensors_refused": 1}


# phases timed by the device

TIMES = ("data_s", "forward_s", "backward_s", "optimizer_s", "wait_s")


def timed_step(w: Rank, device: Device, step: int) -> None:
    """Data by the host; 4 s forward in two parts, 6 s backward, 2 s wait, 1 s optimizer."""
    w.begin(step)
    w.mark(DATA)
    device.busy(0.5)
    for _ in range(2):
        w.mark(FORWARD)
        device.busy(2.0)
        w.mark(BACKWARD)
        device.busy(3.0)
    w.mark(WAIT)
    device.busy(2.0)
    w.mark(OTHER)
    device.busy(7.0)
    w.mark(OPTIMIZER)
    device.busy(1.0)
    w.end()


def test_phases_are_as_long_as_the_device_takes(world: World, device: Device) -> None:
    w, source = world.attach(clock="device"), world.source()
    timed_step(w, device, 0)
    assert told(poll(source), "loss") == {}
    w.begin(1)
    device.run()
    w.end()
    out = poll(source)
    data_s, *device_s = told(out, *TIMES)[0]
    assert 0 <= data_s < 1
    assert device_s == [4.0, 6.0, 1.0, 2.0]
    assert flags(out) == [(0, DEVICE_TIMED), (1, 0)]
    assert device.made["slots"] == 0
    (hello,) = events(poll(world.source()), "hello")
    assert (hello.data["clock"], hello.data["blind"]) == ("device", [])


def test_host_time_never_stands_in_for_device_time(world: World, device: Device) -> None:
    w, source = world.attach(clock="device"), world.source()
    device.broken = "record"
    timed_step(w, device, 0)
    device.broken = ""
    timed_step(w, device, 1)
    for _ in range(pending_module.HELD_ROWS):
        w.begin(w._step + 1)
        w.end()
    w.close()
    found = told(poll(source), *TIMES)
    assert all(math.isnan(x) for x in found[0][1:]), "an event is missing"
    assert all(math.isnan(x) for x in found[1][1:]), "the device never got there"
    assert counted(world) == {"errors": 1, "device_dropped": 1}


def test_spans_and_phases_between_steps_are_timed_too(world: World, device: Device) -> None:
    w, source = world.attach(clock="device"), world.source()
    w.mark(CHECKPOINT)
    device.busy(9.0)
    w.begin(0)
    w.mark(WAIT)
    for mb in range(2):
        device.busy(1.0)
        with w.span(FORWARD, mb=mb):
            device.busy(2.0)
        with w.span(BACKWARD, mb=mb):
            device.busy(4.0)
    w.mark(OPTIMIZER)
    w.end()
    device.run()
    w.begin(1)
    out = poll(source)
    assert told(out, "forward_s", "backward_s", "wait_s", "optimizer_s") == {0: (4.0, 8.0, 2.0, 0.0)}
    assert told(out, "checkpoint_s")[0][0] < 1, "what the host does is the host's time"


def test_a_step_of_too_many_marks_is_not_timed(world: World, device: Device) -> None:
    w, source = world.attach(clock="device"), world.source()
    w.begin(0)
    for _ in range(pending_module.MARKS):
        w.mark(FORWARD)
        w.mark(BACKWARD)
    w.end()
    timed_step(w, device, 1)
    device.run()
    w.begin(2)
    assert flags(poll(source)) == [(0, 0), (1, DEVICE_TIMED)]
    assert counted(world) == {"device_dropped": 1}


def test_events_are_used_again(world: World, device: Device) -> None:
    w = world.attach(clock="device")
    for step in range(50):
        timed_step(w, device, step)
        device.run()
    assert device.made["event"] <= 20
    assert counted(world) == {}


def test_a_plain_step_asks_little(world: World, device: Device) -> None:
    """What the host does for the device in a step: the fewer calls, the less it costs."""
    w = world.attach(clock="device")
    for step in range(3):
        device.calls.clear()
        train(w, step, Tensor(1.0), Tensor(1.0))
        device.run()
    assert sum(device.calls.count(call) for call in ("copy", "record")) == 6
    assert sum(device.calls.count(call) for call in ("event", "slots")) == 0
    assert len(device.calls) <= 26


def test_a_model_on_the_device_is_timed_there(world: World, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for the stand-in: its tensors compute nothing."""
    monkeypatch.setitem(device_module.DEVICES, "meta", lambda: device)
    model = torch.nn.Linear(4, 4, device="meta")
    w, source = world.attach(), world.source()
    poll(source)
    watched = watch(w, model, torch.optim.SGD(model.parameters()))
    (hello,) = events(poll(source), "hello")
    assert (hello.data["clock"], hello.data["blind"]) == ("device", [])
    w.begin(0)
    model(torch.ones(2, 4, device="meta"))
    device.busy(3.0)
    w.end()
    device.run()
    w.begin(1)
    out = poll(source)
    assert flags(out) == [(0, DEVICE_TIMED)]
    assert told(out, "forward_s")[0] == (0.0,)
    assert watched is not None
    watched.remove()


def test_a_step_under_way_is_not_timed(world: World, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_module.DEVICES, "meta", lambda: device)
    w, source = world.attach(), world.source()
    w.begin(0)
    w.mark(FORWARD)
    watched = watch(w, torch.nn.Linear(4, 4, device="meta"))
    w.mark(BACKWARD)
    w.mark(OPTIMIZER)
    w.end()
    timed_step(w, device, 1)
    device.run()
    w.begin(2)
    assert flags(poll(source)) == [(0, 0), (1, DEVICE_TIMED)], "half of its forward would be missing"
    assert watched is not None
    watched.remove()


def test_what_a_strategy_hides_stays_hidden(world: World, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_module.DEVICES, "meta", lambda: device)
    w, source = world.attach(), world.source()
    sharded = torch.nn.Linear(4, 4)
    sharded.weight.placements = ()  # how a DTensor is told
    watches = [watch(w, sharded), watch(w, torch.nn.Linear(4, 4, device="meta"))]
    (hello,) = events(poll(source), "hello")
    assert hello.data["clock"] == "device"
    assert "own_work" in str(hello.data["blind"])
    for watched in watches:
        assert watched is not None
        watched.remove()


def test_something_else_that_is_hidden_does_not_hide_own_work(
    world: World, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(device_module.DEVICES, "meta", lambda: device)
    w, source = world.attach(), world.source()
    assert not watch_gradients(w, torch.nn.Linear(4, 4))
    watched = watch(w, torch.nn.Linear(4, 4, device="meta"))
    (hello,) = events(poll(source), "hello")
    blind = hello.data["blind"]
    assert isinstance(blind, Sequence)
    assert "local_grad_norm" in blind
    assert "own_work" not in blind
    assert watched is not None
    watched.remove()


@pytest.mark.parametrize(("clock", "time_device"), [("cpu", True), ("wall", False)])
def test_who_chose_another_clock_keeps_it(
    world: World, device: Device, monkeypatch: pytest.MonkeyPatch, clock: Any, time_device: bool
) -> None:
    monkeypatch.setitem(device_module.DEVICES, "meta", lambda: device)
    w, source = world.attach(clock=clock), world.source()
    watched = watch(w, torch.nn.Linear(4, 4, device="meta"), time_device=time_device)
    (hello,) = events(poll(source), "hello")
    assert hello.data["clock"] == clock
    assert device.calls == []
    assert watched is not None
    watched.remove()


def test_where_torch_knows_no_cuda_the_wall_clock_is_used(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("NOT TESTED: this torch knows CUDA")
    w, source = world.attach(clock="device"), world.source()
    assert w.why_off == ""
    (hello,) = events(poll(source), "hello")
    assert (hello.data["clock"], hello.data["blind"]) == ("wall", ["own_work"])
    assert "no device clock" in capfd.readouterr().err


# a real device

NO_GPU = "NOT TESTED, LOUD: no CUDA device here: values and times of a real device were never seen by this run"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_a_real_device_is_read_without_waiting(world: World) -> None:
    w, source = world.attach(clock="device"), world.source()
    x = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(50):
            w.begin(step)
            w.mark(FORWARD)
            loss = (x @ x).sum() * 0 + step
            w.value(LOSS, loss)
            w.mark(BACKWARD)
            w.mark(OPTIMIZER)
            w.value(GRAD_NORM, torch.full((1,), math.nan if step == 30 else 1.0, device="cuda"), scope="local")
            w.end()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    w.begin(50)
    out = poll(source)
    found = told(out, "loss", "forward_s")
    came = [step for step, (loss, _) in found.items() if not math.isnan(loss)]
    assert [*found] == [*range(50)]
    assert len(came) >= 50 - 34
    assert all(found[step][0] == step and 0 <= found[step][1] < 1 for step in came)
    if 30 in came:
        assert dict(flags(out))[30] & records.LOCAL_NONFINITE
    assert "errors" not in counted(world)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_a_real_capture_is_not_broken(world: World) -> None:
    w = world.attach(clock="device")
    x = torch.randn(64, 64, device="cuda")
    w.begin(0)
    w.value(LOSS, x.sum())
    w.end()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w.begin(1)
        w.mark(FORWARD)
        y = x @ x
        w.value(LOSS, y.sum())
        w.end()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(y, x @ x)
    assert counted(world) == {"device_dropped": 2}
