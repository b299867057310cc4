"""watch() of strategies: real process groups of gloo, in processes forked from this one."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.collectors.world import World, events, poll, rows

from trainwarden.app.wiring import Settings, build_line
from trainwarden.collectors.rank import Rank
from trainwarden.collectors.rank.watching import watch
from trainwarden.core.model import Finding, Tick
from trainwarden.core.records import FEATURES, PHASES

torch = pytest.importorskip("torch")
nn = torch.nn
for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"):
    pytest.importorskip(name)  # here, and not in each of the forked ranks

Work = Callable[[Rank, int, bool], Any]
"""Trains on one rank, watched or not; gives the module whose weights are to be compared."""


def on_ranks(
    world: World, folder: Path, ranks: int, work: Work, *, watched: bool = True, clock: str = "wall"
) -> list[int]:
    """Fork the ranks; each leaves its weights in `folder`."""

    def run(rank: int) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        w = world.attach(rank, ranks, clock=clock)
        dist.init_process_group("gloo", init_method=f"file://{folder}/{watched}", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        module = work(w, rank, watched)
        weights = [getattr(weight, "_local_tensor", weight).detach() for weight in module.parameters()]
        torch.save(weights, folder / f"{watched}-{rank}.pt")
        w.close()
        dist.barrier()
        os._exit(0)  # not through what the fork brought along, nor through the end of a group that DDP still holds

    return [world.fork(partial(run, rank)) for rank in range(ranks)]


def both_ways(world: World, folder: Path, work: Work) -> list[Any]:
    """Two ranks without and with watch(): the same bits; what the watched ones told."""
    source = world.source()
    for watched in (False, True):
        assert [world.wait(pid) for pid in on_ranks(world, folder, 2, work, watched=watched)] == [0, 0]
    for rank in range(2):
        plain, ours = (torch.load(folder / f"{watched}-{rank}.pt") for watched in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    return poll(source)


def column(found: Any, feature: str) -> Any:
    return found["values"][:, FEATURES.index(feature)]


def sharded(w: Rank, rank: int, watched: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if watched:
        watch(w, model, optimizer)
    for step in range(1, 4):
        w.begin(step)
        model(torch.full((4, 16), step + rank / 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        w.end()
    return model


def test_fully_sharded_ranks_say_that_own_work_is_hidden(world: World, tmp_path: Path) -> None:
    out = both_ways(world, tmp_path, sharded)
    newest = {event.data["rank"]: event.data["blind"] for event in events(out, "hello")}
    assert set(newest) == {0, 1}
    for blind in newest.values():
        assert "own_work" in str(blind)
        assert "FSDP2" in str(blind)
    found = rows(out, "step")
    watched = found[found["lap"] == found["lap"].max()]
    assert (column(watched, "forward_s") > 0).all()
    assert (column(watched, "backward_s") > 0).all()


MICRO_BATCHES = 4


def pipelined(w: Rank, rank: int, watched: bool, *, interleaved: bool) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    places = (rank, rank + 2) if interleaved else (rank,)
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    stages: list[Any] = [PipelineStage(modules[at], at, 4 if interleaved else 2, torch.device("cpu")) for at in places]
    loss = nn.functional.mse_loss
    schedule: Any
    if interleaved:
        schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss)
    else:
        schedule = Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss)
    here = nn.ModuleList(modules[at] for at in places)
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
    if watched:
        watch(w, schedule, optimizer)
    inputs = (torch.ones(8, 8),) if rank == 0 else ()
    target = {"target": torch.zeros(8, 8)} if rank == 1 else {}
    for step in range(1, 4):
        w.begin(step)
        schedule.step(*inputs, **target)
        optimizer.step()
        optimizer.zero_grad()
        w.end()
    return here


@pytest.mark.parametrize("interleaved", [False, True], ids=["1F1B", "interleaved 1F1B"])
def test_each_micro_batch_of_a_schedule_is_a_span(world: World, tmp_path: Path, interleaved: bool) -> None:
    out = both_ways(world, tmp_path, partial(pipelined, interleaved=interleaved))
    spans, steps = rows(out, "span"), rows(out, "step")
    stages = 2 if interleaved else 1
    for rank in range(2):
        own = spans[(spans["rank"] == rank) & (spans["step"] == 3)]
        for kind in ("forward", "backward"):
            batches = own["mb"][own["kind"] == PHASES.index(kind)]
            found = sorted(batches[batches >= 0].tolist())  # -1: the loss, on the last stage
            assert found == sorted(list(range(MICRO_BATCHES)) * stages), (rank, kind)
    watched = steps[steps["lap"] == steps["lap"].max()]
    assert (column(watched, "wait_s") > 0).all()
    told = np.nansum([column(watched, f"{name}_s") for name in ("forward", "backward", "wait", "optimizer")], axis=0)
    assert (told <= column(watched, "step_s") * 1.001).all()
    assert events(out, "hello")[-1].data["blind"] == ["own_work"], "the wall clock's, and nothing else"


RANKS, STEPS, SLOW = 4, 36, 2
BACKWARD_S, SLOWER_S = 0.008, 0.008


class Busy(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Computes for so much CPU time on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Any, cpu_s: float) -> Any:
        ctx.cpu_s = cpu_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        end_s = time.thread_time() + ctx.cpu_s
        while time.thread_time() < end_s:
            pass
        return gradient, None


class Layers(nn.Sequential):  # type: ignore[misc, name-defined]
    def __init__(self, cpu_s: float) -> None:
        super().__init__(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))
        self.cpu_s = cpu_s

    def forward(self, x: Any) -> Any:
        return Busy.apply(super().forward(x), self.cpu_s)


def replicated(w: Rank, rank: int, watched: bool) -> Any:
    layers = Layers(BACKWARD_S + (SLOWER_S if rank == SLOW else 0))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(w, model, optimizer)
    for step in range(1, STEPS + 1):
        w.begin(step)
        model(torch.full((8, 64), float(rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        w.end()
    return model


def test_a_rank_that_is_slow_in_its_backward_under_ddp_is_named(world: World, tmp_path: Path) -> None:
    """The others wait for it inside their own backward: that is told apart without a communication hook."""
    source, line = world.source(), build_line(Settings(), world.job)
    pids = on_ranks(world, tmp_path, RANKS, replicated, clock="cpu")
    findings: list[Finding] = []
    while pids:
        now_ns = time.time_ns()
        for item in (*source.poll(now_ns), Tick(seen_ns=now_ns)):
            findings += line.feed(item)
        time.sleep(0.05)
        alive = [pid for pid in pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None]
        assert [world.wait(pid) for pid in pids if pid not in alive] == [0] * (len(pids) - len(alive))
        pids = alive
    for item in source.poll(time.time_ns()):
        findings += line.feed(item)
    findings += line.finish()
    final = [finding for finding in findings if finding.status == "final"]
    assert {str(finding.subject) for finding in final} == {f"rank:{SLOW}"}
    assert all(word in final[-1].reason for word in ("comput", "backward")), final[-1].reason
