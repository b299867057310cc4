"""Real saves of torch.distributed.checkpoint by two real ranks (gloo), blocking and not: staged, published, loaded."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.remediation.shelves import RANKS, epoch, nobody_else, put_out, store
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from trainwarden.core.errors import DataError
from trainwarden.core.manifest import write_rank_file
from trainwarden.remediation.checkpoints.folder import CheckpointFolder
from trainwarden.remediation.checkpoints.publish import close_attempt
from trainwarden.remediation.checkpoints.select import select_verified

FORK = multiprocessing.get_context("fork")
PARTS = {f"part-{rank}": torch.arange(1000.0) + rank for rank in range(RANKS)}


def be_rank(rank: int, root: Path) -> None:
    """Save step 1 and wait for it, then step 2 in the background; tell each when it is written."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=RANKS)
    for step in (1, 2):
        folder = CheckpointFolder(root).stage(epoch(1), step)
        state = {f"part-{rank}": PARTS[f"part-{rank}"] * step, "step": torch.tensor(step)}
        if step == 1:
            save(state, checkpoint_id=folder)
        else:
            pending: Any = async_save(state, checkpoint_id=folder)
            pending.result()
        write_rank_file(folder, rank=rank, step=step)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_real_save_is_published_verified_selected_and_loaded(tmp_path: Path) -> None:
    ranks = [FORK.Process(target=be_rank, args=(rank, tmp_path)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(40)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
        rank.close()
    assert codes == [0] * RANKS

    told = {step: put_out(tmp_path, step) for step in (1, 2)}
    assert {step: one.result for step, one in told.items()} == {1: "published", 2: "published"}, told
    close_attempt(tmp_path, 1, nobody_else)
    shelf = store(tmp_path)
    for step, one in told.items():
        found = shelf.verify(one.name)
        assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= found.files.keys()
        state = {"part-0": torch.zeros(1000), "part-1": torch.zeros(1000), "step": torch.tensor(0)}
        load(state, checkpoint_id=shelf.path(one.name), no_dist=True)
        assert state["step"].item() == step
        assert all(torch.equal(state[name], whole * step) for name, whole in PARTS.items())

    shard = shelf.path(told[2].name) / "__1_0.distcp"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match=rf"{shard}: other bytes"):
        shelf.verify(told[2].name)
    chosen, _ = select_verified(shelf, None)
    assert chosen is not None
    assert chosen.step == 1
