"""Hooks of training frameworks: two ranks of gloo in processes forked from this one."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.collectors.world import World, frames, poll

from trainwarden.collectors.rank import BACKWARD, FORWARD, WAIT, Rank
from trainwarden.collectors.rank.hooks.torch import ddp_comm_hook
from trainwarden.core.records import FEATURES

torch = pytest.importorskip("torch")
RANKS = 2


class Counting:
    """Passes on what a recorder is told, and counts the waits."""

    def __init__(self, w: Rank) -> None:
        self.w, self.waits = w, 0

    def mark(self, phase: int) -> None:
        self.waits += phase == WAIT
        self.w.mark(phase)  # type: ignore[arg-type]


def trained(w: Rank, rank: int, store: Path, *, hooked: bool) -> None:
    """Three steps of a model in several buckets; the last weights go to a file."""
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
    counting = Counting(w)
    if hooked:
        ddp_comm_hook(counting, model)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        w.begin(step)
        with model.no_sync():
            model(torch.full((8, 64), float(rank + step))).square().mean().backward()
        w.mark(FORWARD)
        loss = model(torch.full((8, 64), rank - step / 3)).square().mean()
        w.mark(BACKWARD)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.end()
    torch.save([parameter.detach() for parameter in model.parameters()], f"{store}-{rank}.pt")
    assert counting.waits == (3 if hooked else 0), "once a step: at the last bucket, and not inside no_sync()"
    w.close()
    dist.barrier()  # and out: destroying a group that DDP still holds can hang (PyTorch 2.13)


def in_two_processes(world: World, work: Callable[[int], None]) -> None:
    pids = [world.fork(partial(work, rank)) for rank in range(RANKS)]
    assert [world.wait(pid) for pid in pids] == [0, 0]


def test_the_ddp_hook_marks_the_end_of_own_backward_and_changes_no_bit(world: World, tmp_path: Path) -> None:
    def work(rank: int, *, hooked: bool) -> None:
        trained(world.attach(rank, RANKS), rank, tmp_path / f"store-{hooked}", hooked=hooked)

    source = world.source()
    for hooked in (False, True):
        in_two_processes(world, partial(work, hooked=hooked))
    for rank in range(RANKS):
        plain, ours = (torch.load(tmp_path / f"store-{hooked}-{rank}.pt") for hooked in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    frame = frames(poll(source), "step")[-1]
    assert sorted(zip(frame.rows["rank"].tolist(), frame.rows["step"].tolist(), strict=True)) == [
        (rank, step) for rank in range(RANKS) for step in range(3)
    ]
    assert (frame.rows["values"][:, FEATURES.index("wait_s")] > 0).all()
    assert (frame.rows["values"][:, FEATURES.index("backward_s")] > 0).all()
