"""PyTorch, by hand: where a rank's own backward ends, for loops that mark their phases themselves (watch() needs no
such hook, and works with a communication hook of the script's own).

DDP hides its wait for the others inside loss.backward(): gradients are reduced in buckets while the rest of backward
still runs, and backward returns when the last reduction is done. What a rank does by itself ends when it hands over its
last bucket; from there on it waits.
"""

from typing import TYPE_CHECKING

from trainwarden.collectors.rank.rank import Rank
from trainwarden.collectors.rank.words import WAIT

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def ddp_comm_hook(w: Rank, model: "DistributedDataParallel") -> None:
    """Mark WAIT at the end of each own backward. Gradients are averaged as DDP does without a hook.

    The results are the same to the last bit where the number of ranks is a power of two: the hook divides by it, DDP
    itself multiplies by its reciprocal. With gradient accumulation only the backward that reduces is marked (DDP calls
    no hook inside no_sync()).
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    # Not as text: DDP refuses a hook whose annotations are not these very types.
    def hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced = allreduce_hook(group, bucket)
        if bucket.is_last() and not torch.compiler.is_compiling():
            w.mark(WAIT)
        return reduced

    model.register_comm_hook(model.process_group, hook)
