"""watch() in one process: which phase is open when the training's own code runs, seen from inside that code."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.collectors.world import World, events, poll, rows

from trainwarden.collectors.rank import EVAL, Rank, attach
from trainwarden.collectors.rank.watching import phase_of, watch
from trainwarden.core.records import COUNTERS, FEATURES, PHASES

torch = pytest.importorskip("torch")
tqdm = pytest.importorskip("tqdm")
nn, checkpoint = torch.nn, pytest.importorskip("torch.utils.checkpoint").checkpoint


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests of this process fork: OpenMP must have no threads then, and the compiler's progress bar starts one,
    too. The compiler begins anew."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.set_num_threads(threads)


class Told:
    """The open phase at each place of the training that asks."""

    def __init__(self, w: Rank) -> None:
        self._w = w
        self.phases: list[tuple[str, str]] = []

    def here(self, where: str) -> None:
        if not torch.compiler.is_compiling():
            phase = phase_of(self._w)
            self.phases.append((where, PHASES[phase] if phase >= 0 else "no step"))


class InBackward(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Passes on what comes, and asks when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Any, told: Told) -> Any:
        ctx.told = told
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.told.here("backward")
        return gradient, None


class Net(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, told: Told | None = None, checkpointed: dict[str, bool] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.told, self.checkpointed = told, checkpointed

    def forward(self, x: Any) -> Any:
        if self.told is not None:
            self.told.here("forward")
            x = InBackward.apply(x if x.requires_grad else x.requires_grad_(), self.told)
        x = self.first(x).tanh()
        return self.second(x) if self.checkpointed is None else checkpoint(self.second, x, **self.checkpointed)


class Asking(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """SGD that asks, too."""

    told: Told | None = None

    def step(self, closure: Any = None) -> Any:
        if self.told is not None:
            self.told.here("optimizer")
        return super().step(closure)


Call = Callable[[Any, Any], Any]


def train(w: Rank, model: Any, optimizer: Any, call: Call = lambda model, x: model(x), steps: int = 2) -> bytes:
    """A plain loop; the last weights, bit for bit."""
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        w.begin(step)
        loss = call(model, torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.end()
    return b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())


def made(told: Told | None = None, checkpointed: dict[str, bool] | None = None) -> tuple[Net, Asking]:
    torch.manual_seed(0)
    model = Net(told, checkpointed)
    return model, Asking(model.parameters(), lr=0.1)


def seconds(world_out: list[Any], feature: str) -> list[float]:
    return [float(value) for value in rows(world_out, "step")["values"][:, FEATURES.index(feature)]]


def test_each_part_of_a_step_runs_in_its_phase(world: World) -> None:
    w = world.attach()
    told = Told(w)
    model, optimizer = made(told)
    optimizer.told = told
    watch(w, model, optimizer)
    w.begin(1)
    for _ in range(2):  # gradients are accumulated
        told.here("before")
        output = model(torch.randn(4, 8))
        told.here("loss")
        output.sum().backward()
        told.here("after")
    optimizer.step()
    told.here("end")
    w.end()
    batch = [
        ("before", "other"),
        ("forward", "forward"),
        ("loss", "other"),
        ("backward", "backward"),
        ("after", "other"),
    ]
    assert told.phases == [*batch, *batch, ("optimizer", "optimizer"), ("end", "other")]


def test_the_step_row_tells_own_work_and_no_wait_without_other_ranks(world: World) -> None:
    w, source = world.attach(), world.source()
    model, optimizer = made()
    watch(w, model, optimizer)
    train(w, model, optimizer)
    out = poll(source)
    assert all(value > 0 for name in ("forward_s", "backward_s", "optimizer_s") for value in seconds(out, name))
    assert all(value == 0 or value != value for value in seconds(out, "wait_s"))


def test_announced_phases_and_what_is_no_training_are_left_alone(world: World) -> None:
    w = world.attach()
    told = Told(w)
    model, optimizer = made(told)
    watch(w, model, optimizer)
    model(torch.randn(4, 8)).sum().backward()
    w.begin(1)
    with torch.no_grad():
        model.eval()(torch.randn(4, 8))
    w.phase(EVAL)
    model.train()(torch.randn(4, 8)).sum().backward()
    assert told.phases == [
        *(("forward", "no step"), ("backward", "no step")),
        ("forward", "other"),
        *(("forward", "eval"), ("backward", "eval")),
    ]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False], ids=["the whole model", "a part of it"])
def test_recomputation_is_backward_and_changes_no_bit(world: World, reentrant: bool, whole: bool) -> None:
    w = world.attach()
    told = Told(w)
    how = {"use_reentrant": reentrant}

    def call(model: Net, x: Any) -> Any:
        return checkpoint(model, x.requires_grad_(), **how) if whole else model(x)

    plain = train(w, *made(told, None if whole else how), call=call)
    told.phases.clear()
    model, optimizer = made(told, None if whole else how)
    watch(w, model, optimizer)
    assert train(w, model, optimizer, call) == plain
    again = [("forward", "backward")] if whole else []
    assert told.phases == [("forward", "forward"), *again, ("backward", "backward")] * 2


def in_place(model: Net) -> Net:
    model.compile(fullgraph=True, backend="aot_eager")
    return model


def outside(model: Net) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("compiled", [in_place, outside])
@pytest.mark.parametrize("first", ["compile", "watch"])
def test_compiled_code_is_left_whole(world: World, compiled: Callable[[Net], Any], first: str) -> None:
    """No break, as many graphs and the same bits. What only a compiler ever sees is said to be unseen."""
    w, source = world.attach(), world.source()
    told = Told(w)
    counters = torch._dynamo.utils.counters
    model, optimizer = made()
    plain = train(w, compiled(model), optimizer, steps=5)
    graphs = dict(counters["stats"])
    torch._dynamo.reset()
    counters.clear()
    model, optimizer = made()
    if first == "watch":
        watch(w, model, optimizer)
    model = compiled(model)
    if first == "compile":
        watch(w, model, optimizer)
    assert train(w, model, optimizer, steps=5) == plain
    assert (dict(counters["graph_break"]), dict(counters["stats"])) == ({}, graphs)
    told.here("end")
    out = poll(source)
    hidden = compiled is outside and first == "watch"
    assert [value > 0 for value in seconds(out, "forward_s")[-2:]] == [not hidden] * 2
    blind = events(out, "hello")[-1].data["blind"]
    assert blind == ["own_work", *(["forward: runs inside compiled or captured code"] if hidden else [])]


def test_a_recompilation_is_an_event(world: World) -> None:
    w, source = world.attach(), world.source()
    model, optimizer = made()
    model.compile(backend="eager")
    watch(w, model, optimizer)
    train(w, model, optimizer, lambda model, x: model(x[: 2 + w._step % 2]), steps=4)
    again = events(poll(source), "mark.recompile")
    assert again
    assert {event.data["name"] for event in again} == {"forward"}


def test_a_watched_model_can_be_copied_and_saved(world: World) -> None:
    w = world.attach()
    told = Told(w)
    model, optimizer = made()
    watch(w, model, optimizer)
    average = copy.deepcopy(model)
    average.told = told
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.told = told
    w.begin(1)
    average(torch.randn(4, 8))
    loaded(torch.randn(4, 8))
    assert told.phases == [("forward", "other")] * 2


class Broken(dict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("not today")


def test_a_hook_that_fails_is_counted_and_gone(world: World) -> None:
    w, source = world.attach(), world.source()
    model, optimizer = made()
    whole = nn.Module()
    whole.inner = model
    whole.forward = lambda x: Broken(loss=model(x))
    watch(w, whole, optimizer)
    train(w, whole, optimizer, lambda model, x: model(x)["loss"])
    assert w._ring is not None
    assert w._ring._counters[COUNTERS.index("errors")] == 1
    assert whole._compiled_call_impl is None
    assert not optimizer._optimizer_step_pre_hooks
    assert [value > 0 for value in seconds(poll(source), "forward_s")] == [True, False]


def test_what_cannot_be_watched_is_left_as_it_was(world: World) -> None:
    w = world.attach()
    assert watch(w, object()) is None
    assert w._ring is not None
    assert w._ring._counters[COUNTERS.index("errors")] == 1
    off = Rank(None, why_off="off")
    model, optimizer = made()
    assert watch(off, model, optimizer) is None
    assert model._compiled_call_impl is None


class Attaching(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return attach(rank=1, world_size=2).why_off


def test_a_worker_of_a_data_loader_does_not_attach(world: World) -> None:
    (said,) = torch.utils.data.DataLoader(Attaching(), num_workers=1, batch_size=None)
    assert said == "a worker of a DataLoader"
