"""Local gradient norms: real process groups of gloo, in processes forked from this one."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.collectors.world import World, events, poll, rows

from trainwarden.collectors.rank import Rank, watch_gradients
from trainwarden.collectors.rank.gradients import tell_gradients, watched_hook
from trainwarden.collectors.rank.watching import watch
from trainwarden.core.model import Event, Frame
from trainwarden.core.records import FEATURES, LOCAL_NONFINITE

torch = pytest.importorskip("torch")
for name in ("torch._dynamo", "torch.distributed.fsdp"):
    pytest.importorskip(name)  # here, and not in each of the forked ranks
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS = 3
SCALE = 1024.0

Out = list[Frame | Event]


def on_ranks(world: World, folder: Path, ranks: int, work: Callable[[Rank, int], None]) -> Out:
    """What the ranks told. What `work` raises fails the test."""

    def run(rank: int) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        w = world.attach(rank, ranks)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        work(w, rank)
        w.close()
        dist.barrier()
        os._exit(0)  # not through the end of a group that DDP still holds

    source = world.source()
    pids = [world.fork(partial(run, rank)) for rank in range(ranks)]
    assert [world.wait(pid) for pid in pids] == [0] * ranks
    return poll(source)


def told(out: Out, rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Local gradient norms of a rank and whether a local value was not finite, by step."""
    found = rows(out, "step")
    own = np.sort(found[found["rank"] == rank], order="step")
    return own["values"][:, FEATURES.index("local_grad_norm")], own["flags"] & LOCAL_NONFINITE != 0


def blind(out: Out) -> list[str]:
    return list(events(out, "hello")[-1].data["blind"])  # type: ignore[arg-type]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(48, 48), nn.Tanh())))


def loss(model: nn.Module, rank: int, step: int, part: int = 0) -> Any:
    return model(torch.full((4, 48), rank + part / 2 - step / 3)).square().mean() * SCALE


def own_norm(weights: list[Any], rank: int, step: int) -> float:
    """The norm of this rank's own gradient, worked out apart from the strategy."""
    model = layers()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), weights, strict=True):
            mine.copy_(theirs)
    for part in range(2):
        (loss(model, rank, step, part) / SCALE).backward()
    return float(torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()]))


class Trained:
    """Some steps of a training: weights at the end, collectives on the way, the norms to be told. `between` is called
    before each backward that reduces."""

    def __init__(self, w: Rank, rank: int, first: int, model: Any, between: Callable[[int], object] = id) -> None:
        self.norms: list[float] = []
        before = torch.distributed.group.WORLD._get_sequence_number_for_group()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / SCALE)
        ddp = isinstance(model, DistributedDataParallel)
        for step in range(STEPS):
            w.begin(first + step)
            if ddp:
                self.norms.append(own_norm([*model.parameters()], rank, step))
            with model.no_sync() if ddp else unsynchronised(model):
                loss(model, rank, step).backward()
            between(step)
            loss(model, rank, step, 1).backward()
            optimizer.step()
            optimizer.zero_grad()
            w.end()
        weights = [getattr(weight, "_local_tensor", weight) for weight in model.parameters()]
        self.weights = torch.cat([weight.detach().flatten() for weight in weights])
        self.collectives = torch.distributed.group.WORLD._get_sequence_number_for_group() - before

    def must_equal(self, other: "Trained") -> None:
        assert torch.equal(self.weights, other.weights)
        assert self.collectives == other.collectives > 0


def unsynchronised(model: Any) -> Any:
    """FSDP2's no_sync()."""

    class Off(nullcontext[None]):
        def __enter__(self) -> None:
            model.set_requires_gradient_sync(False)

        def __exit__(self, *_: object) -> None:
            model.set_requires_gradient_sync(True)

    return Off()


def replicated(bucket_cap_mb: float = 0.005) -> DistributedDataParallel:
    return DistributedDataParallel(layers(), bucket_cap_mb=bucket_cap_mb)


class Broken(Exception):
    pass


def broken_scale() -> float:
    raise Broken("no scale today")


def test_under_ddp_each_rank_tells_the_norm_of_its_own_accumulated_gradient_and_no_bit_changes(
    world: World, tmp_path: Path
) -> None:
    """Three ranks: their mean is no exact division, so a hook that reduced otherwise than DDP would show."""
    ranks = 3

    def work(w: Rank, rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        plain = Trained(w, rank, 0, replicated())
        model = replicated()
        assert watch_gradients(w, model, scale=scaler)
        watch(w, model)
        watched = Trained(w, rank, 10, model)
        watched.must_equal(plain)
        assert plain.collectives > STEPS, "several buckets"
        torch.save(watched.norms, tmp_path / f"{rank}.pt")
        model = replicated()
        assert watch_gradients(w, model, scale=broken_scale)
        Trained(w, rank, 20, model).must_equal(plain)

    out = on_ranks(world, tmp_path, ranks, work)
    for rank in range(ranks):
        norms, nonfinite = told(out, rank)
        assert norms[STEPS : 2 * STEPS].tolist() == pytest.approx(torch.load(tmp_path / f"{rank}.pt"), rel=1e-5)
        assert np.isnan(norms[:STEPS]).all(), "not watched"
        assert np.isnan(norms[2 * STEPS :]).all(), "our part failed, the training went on"
        assert not nonfinite.any()
    assert "local_grad_norm" in blind(out)
    assert "no scale today" in str(blind(out))


def test_hooks_of_the_script_reduce_as_they_did(world: World, tmp_path: Path) -> None:
    hooks: list[Any] = [
        (default_hooks.fp16_compress_hook, lambda: None),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: None),
        (powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
    ]

    def work(w: Rank, rank: int) -> None:
        norms = []
        for index, (hook, state) in enumerate(hooks):
            whole = hook is powerSGD_hook.powerSGD_hook  # over gloo, its reductions of two buckets overtake each other
            models = [replicated(25 if whole else 0.005) for _ in range(2)]
            models[0].register_comm_hook(state(), hook)
            models[1].register_comm_hook(state(), watched_hook(w, hook, scale=lambda: SCALE))
            plain, watched = (Trained(w, rank, 10 * index + at, one) for at, one in zip((0, 5), models, strict=True))
            watched.must_equal(plain)
            norms += [[float("nan")] * STEPS, watched.norms]
        torch.save(norms, tmp_path / f"{rank}.pt")
        with pytest.raises(TypeError, match="BF16 all reduce"):  # DDP looks at the hook as if we were not there
            replicated().register_comm_hook(None, watched_hook(w, default_hooks.bf16_compress_hook))

    out = on_ranks(world, tmp_path, 2, work)
    for rank in range(2):
        expected = np.concatenate(torch.load(tmp_path / f"{rank}.pt"))
        np.testing.assert_allclose(told(out, rank)[0], expected, rtol=1e-5)


BAD = 1


def test_a_nan_has_the_name_of_its_rank_before_the_reduction_spreads_it(world: World, tmp_path: Path) -> None:
    def work(w: Rank, rank: int) -> None:
        flags = []

        def hook(state: Any, bucket: Any) -> Any:
            flags.append((bucket.is_last(), w._flags & LOCAL_NONFINITE))
            return default_hooks.allreduce_hook(state, bucket)

        hook.__annotations__.clear()  # DDP accepts none, or its own
        model = replicated()
        model.register_comm_hook(None, watched_hook(w, hook))
        poisoned = model.module[-2].weight.register_hook(lambda gradient: gradient * float("nan"))
        if rank != BAD:
            poisoned.remove()
        trained = Trained(w, rank, 0, model)
        assert trained.weights.isnan().any(), "by now everybody has it"
        first = next(flag for last, flag in flags if last)
        assert bool(first) == (rank == BAD), "told ahead of the last reduction"

    out = on_ranks(world, tmp_path, 2, work)
    for rank in range(2):
        norms, nonfinite = told(out, rank)
        assert nonfinite[0] == np.isnan(norms[0]) == (rank == BAD)


def sharded(**more: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = layers()
    fully_shard([model[0], model[2]], mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def test_under_fsdp2_the_unsharded_gradient_is_seen_and_no_bit_changes(world: World, tmp_path: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def work(w: Rank, rank: int) -> None:
        plain = Trained(w, rank, 0, sharded())
        model = sharded()
        assert watch_gradients(w, model, scale=lambda: SCALE)
        whole: list[list[Any]] = []
        watched = Trained(w, rank, 10, model, lambda _: whole.append([one.full_tensor() for one in model.parameters()]))
        assert torch.equal(watched.weights, plain.weights)
        gathers = STEPS * len([*model.parameters()])  # the test's own, full_tensor()
        assert watched.collectives == plain.collectives + gathers
        torch.save([own_norm(weights, rank, step) for step, weights in enumerate(whole)], tmp_path / f"{rank}.pt")
        assert watch_gradients(w, model), "again: nothing more is done"
        for first, scale in ((20, None), (40, lambda: SCALE)):
            spoilt = sharded()
            assert watch_gradients(w, spoilt, scale=scale)
            if rank == BAD:
                spoilt[-2].register_full_backward_hook(lambda *_: (torch.full((4, 48), float("nan")),))
            Trained(w, rank, first, spoilt)
        halves = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        assert watch_gradients(w, halves)
        Trained(w, rank, 50, halves)

    out = on_ranks(world, tmp_path, 2, work)
    for rank in range(2):
        norms, nonfinite = told(out, rank)
        assert norms[STEPS : 2 * STEPS].tolist() == pytest.approx(torch.load(tmp_path / f"{rank}.pt"), rel=1e-5)
        assert np.isnan(norms[:STEPS]).all(), "not watched"
        assert nonfinite[2 * STEPS] == (rank == BAD), "the others have it a step later"
        assert not nonfinite[3 * STEPS :].any(), "with a loss scale it may be an overflow, which is routine"
        assert np.isnan(norms[3 * STEPS]) == (rank == BAD)
        assert np.isnan(norms[4 * STEPS :]).all(), "float16: divided ahead of us"
    assert "float16" in str(blind(out))


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class TwoWays(nn.Module):
    """The head is not used by a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = self.middle(self.stem(x))
        return self.head(x) if len(x) > 1 else x


def test_the_norm_is_told_without_a_last_bucket(world: World, group: None) -> None:
    source, w, model = world.source(), world.attach(), TwoWays()
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=0.005, find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    assert watch_gradients(w, ddp)
    expected = []
    for step, batch in enumerate((2, 2, 1, 2)):
        w.begin(step)
        ddp(torch.ones(batch, 48)).square().sum().backward()
        w.end()
        expected.append(float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])))
        model.zero_grad(set_to_none=False)
    norms, _ = told(poll(source), 0)
    assert norms.tolist() == pytest.approx(expected, rel=1e-5)


def builtin(model: Any) -> None:
    model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)


@pytest.mark.parametrize(
    "register", [builtin, lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook)]
)
def test_where_ddp_has_a_hook_already_it_is_left_there(
    world: World, group: None, capfd: pytest.CaptureFixture[str], register: Callable[[Any], None]
) -> None:
    source, w, model = world.source(), world.attach(), replicated()
    register(model)
    assert not watch_gradients(w, model)
    assert "takes one: register watched_hook(w, HOOK) in its place" in capfd.readouterr().err
    assert "local_grad_norm" in blind(poll(source))
    loss(model, 0, 0).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_model_that_nobody_reduces_is_blind_and_one_whose_collector_is_off_is_left_alone(
    world: World, group: None
) -> None:
    source, w = world.source(), world.attach()
    assert not watch_gradients(w, layers())
    assert "how Sequential reduces gradients" in str(blind(poll(source)))
    w.close()
    model = replicated()
    assert not watch_gradients(w, model)
    assert not model._comm_hooks
    hook = default_hooks.fp16_compress_hook
    assert watched_hook(w, hook) is hook
    tell_gradients(w, [torch.ones(1)])


def test_buckets_of_the_shape_of_megatrons_are_told_by_hand(world: World) -> None:
    """A stand-in: Megatron needs a GPU. Its DDP has buffers, of buckets, each with its flat grad_data."""
    buckets = [SimpleNamespace(grad_data=torch.full((size,), 3.0 * SCALE)) for size in (7, 9)]
    ddp = SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets[:1]), SimpleNamespace(buckets=buckets[1:])])
    source, w = world.source(), world.attach()
    for step, (bad, scale) in enumerate(((0.0, lambda: SCALE), (float("inf"), lambda: SCALE), (0.0, None))):
        w.begin(step)
        buckets[1].grad_data[0] += bad
        tell_gradients(w, (bucket.grad_data for buffer in ddp.buffers for bucket in buffer.buckets), scale=scale)
        w.end()
    norms, nonfinite = told(poll(source), 0)
    assert norms[0] == 12.0
    assert np.isnan(norms[1]), "with a loss scale it may be an overflow"
    assert nonfinite.tolist() == [False, False, True]


def test_between_steps_nothing_is_told(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    w = world.attach()
    tell_gradients(w, [torch.ones(1)])
    assert not capfd.readouterr().err
