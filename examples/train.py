"""A small training that really learns, watched by trainwarden. Four processes on one machine, no GPU needed:

    torchrun --nproc-per-node 4 examples/train.py --steps 80
    torchrun --nproc-per-node 4 examples/train.py --steps 80 --checkpoint-dir /tmp/nano --out /tmp/nano.json
    torchrun --nproc-per-node 4 examples/train.py --steps 80 --resume /tmp/nano/step-40 --skip 45-46,50
    trainwarden run -- torchrun --nproc-per-node 4 examples/train.py --steps 80
    TRAINWARDEN=0 torchrun --nproc-per-node 4 examples/train.py --steps 80        # the collector does nothing

The lines with `w.` are what watching takes (examples/train.md goes through them); the rest is a plain PyTorch loop. The
data is a language made of dice, so the best possible loss is known. The final loss is the same to the last bit in every
run with as many ranks, also in one that was resumed.
"""

import argparse
import gc
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import trainwarden.collectors.rank as tw
from trainwarden.collectors.rank.hooks.torch import ddp_comm_hook
from trainwarden.rehearsal.injection import Faults  # only for rehearsals; your own training does not need it

WORDS, CONTEXT, WIDTH, HEADS, LAYERS, ROWS = 64, 64, 128, 4, 2, 64  # ROWS of a global batch are shared by the ranks
HELD_OUT, EVAL_BATCHES = 1_000_000, 4  # the first batch that is only evaluated on, and how many of them
LEARNING_RATE_PEAK, WARM_UP_STEPS = 2e-3, 10


class Language:
    """Sequences in which each word is followed by one of four, with uneven odds: a random Markov chain."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        dice = torch.Generator().manual_seed(seed)
        self.followers = torch.stack([torch.randperm(WORDS, generator=dice)[:4] for _ in range(WORDS)])
        self.odds = nn.functional.normalize(torch.rand(WORDS, 4, generator=dice).square() + 0.02, p=1)
        self._steps = self.odds.cumsum(1)[:, :3].contiguous()

    def entropy_nats(self) -> float:
        """The best possible loss per word: entropy of the next word, averaged over how often each word comes."""
        moves = torch.zeros(WORDS, WORDS).scatter_(1, self.followers, self.odds)
        share = torch.linalg.matrix_power(moves, 256)[0]
        return float((share * -(self.odds * self.odds.log()).sum(1)).sum())

    def batch(self, index: int) -> Tensor:
        """The global batch of this index, ROWS x (CONTEXT + 1) words; depends on nothing but seed and index."""
        dice = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        words = torch.empty(CONTEXT + 1, ROWS, dtype=torch.long)
        words[0] = torch.randint(WORDS, (ROWS,), generator=dice)
        throws = torch.rand(CONTEXT, ROWS, 1, generator=dice)
        for t in range(CONTEXT):
            words[t + 1] = self.followers[words[t], (throws[t] > self._steps[words[t]]).sum(1)]
        return words.T.contiguous()


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward net, both added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_a(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm_b(x))


class Nano(nn.Module):
    """A transformer that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.word(words) + self.place.weight[: words.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Training:
    """The model, its optimizer and its data on one rank."""

    def __init__(self, seed: int, w: tw.Rank, faults: Faults) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.w, self.faults = w, faults
        self.language = Language(seed)
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(Nano(), bucket_cap_mb=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE_PEAK)
        self._settle_buckets()
        ddp_comm_hook(w, self.model)

    def _settle_buckets(self) -> None:
        """One backward before the first step. DDP lays its buckets out anew after it, and their layout decides in
        which order gradients are added up: without it a resumed run would differ in the last bits."""
        self.loss(self.share(0)).backward()
        self.model.zero_grad()

    def share(self, batch: int) -> Tensor:
        """This rank's sequences of a batch."""
        return self.language.batch(batch)[self.rank :: self.world_size]

    def loss(self, words: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Mean over all words but the first of each sequence; `weight` is one number a sequence."""
        scores = self.model(words[:, :-1])
        return (cross_entropy(scores.transpose(1, 2), words[:, 1:], reduction="none") * weight).mean()

    def step(self, step: int, batch: int) -> float:
        """One optimizer step; gives the loss averaged over all ranks."""
        w, faults = self.w, self.faults
        w.mark(tw.DATA)
        faults.before_step(step)
        words = self.share(batch)
        weight = faults.batch(batch, torch.ones(len(words), 1))
        w.mark(tw.FORWARD, tokens=words[:, 1:].numel())
        with faults.slowed("forward"):
            loss = self.loss(words, weight)
        w.value(tw.LOSS, loss.item(), scope="local")  # ahead of any collective: told even if the others never come
        w.mark(tw.BACKWARD)
        with faults.slowed("backward"):
            loss.backward()  # the hook marks WAIT when this rank has done its own part
        w.mark(tw.OPTIMIZER)
        self._update(step)
        w.mark(tw.WAIT)
        mean = self._mean_over_ranks(loss)
        w.value(tw.LOSS, mean)
        return mean

    def _update(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = rate = LEARNING_RATE_PEAK * min(1.0, step / WARM_UP_STEPS)
        self.w.value(tw.LEARNING_RATE, rate)
        self.w.value(tw.GRAD_NORM, nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _mean_over_ranks(self, loss: Tensor) -> float:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world_size

    def evaluate(self) -> float:
        """Mean loss over batches that are never trained on. Legally long, so it is announced."""
        self.w.phase(tw.EVAL, expect_s=60)
        self.faults.in_phase("eval")
        with torch.no_grad():
            losses = [self.loss(self.share(HELD_OUT + index)) for index in range(EVAL_BATCHES)]
        return self._mean_over_ranks(torch.stack(losses).mean())

    def save(self, directory: Path, step: int, next_batch: int) -> None:
        """Everything a later run needs to go on to the same bits. Legally long, so it is announced."""
        self.w.phase(tw.CHECKPOINT, expect_s=60)
        self.faults.in_phase("checkpoint")
        folder = directory / f"step-{step}"
        dcp.save(self._state(step, next_batch), checkpoint_id=folder)
        self.w.committed(step, folder, data_position=next_batch)  # this rank's part is written, and signed

    def load(self, checkpoint: Path) -> tuple[int, int]:
        """Take a saved state over; gives its step and the batch that comes next."""
        state = self._state(0, 0)
        dcp.load(state, checkpoint_id=checkpoint)
        found = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **found)
        return state["step"], state["next_batch"]

    def _state(self, step: int, next_batch: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step, "next_batch": next_batch}


def batches(first: int, skip: Sequence[range]) -> Iterator[int]:
    """Batch indices in order, without the skipped ones: those are never used, nothing takes their place."""
    return (index for index in itertools.count(first) if not any(index in part for part in skip))


def ranges(text: str) -> list[range]:
    """What --skip means: "45-46,50" is batches 45, 46 and 50."""
    ends = [part.split("-") for part in text.split(",") if part]
    return [range(int(part[0]), int(part[-1]) + 1) for part in ends]


def train(args: argparse.Namespace) -> None:
    """The whole run on one rank. What it makes is gone when it returns."""
    w = tw.attach(clock="cpu")  # without a GPU, the scheduler tells own work from a busy machine
    told = w.attempt or {}  # under `trainwarden run`: what this attempt starts from, skips, and where it may save
    resume, folder = told.get("checkpoint") or args.resume, told.get("staging") or args.checkpoint_dir
    skip = [*args.skip, *(range(first, last + 1) for first, last in told.get("skip", ()))]
    training = Training(args.seed, w, Faults.from_environment())
    done, next_batch = training.load(Path(resume)) if resume else (0, 1)
    loss = math.nan
    say(f"best possible loss {training.language.entropy_nats():.4f}")
    for step, batch in zip(range(done + 1, args.steps + 1), batches(next_batch, skip), strict=False):
        w.begin(step, batch)
        loss = training.step(step, batch)
        if step % 10 == 0:
            say(f"step {step} loss {loss:.4f}")
        if step % args.eval_every == 0:
            say(f"step {step} held-out loss {training.evaluate():.4f}")
        if folder and step % args.checkpoint_every == 0:
            training.save(Path(folder), step, batch + 1)
        asked = w.end()  # the same on every rank
        if asked is not None and asked.name == "checkpoint" and folder:
            training.save(Path(folder), step, batch + 1)
        elif asked is not None and asked.name == "stop":
            break
    w.close()
    dist.barrier()
    say(f"final step={args.steps} loss={loss.hex()} ({loss:.6f})")
    if args.out and dist.get_rank() == 0:
        found = {"step": args.steps, "loss": loss if math.isfinite(loss) else None, "hex": loss.hex()}
        args.out.write_text(json.dumps(found))


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="the run ends after this optimizer step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=ranges, default=[], help="batches never to use, as 45-46,50 (inclusive)")
    parser.add_argument("--eval-every", type=int, default=25, help="steps")
    parser.add_argument("--checkpoint-dir", type=Path, help="no checkpoints without it")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from, as DIR/step-40")
    parser.add_argument("--out", type=Path, help="rank 0 writes step and loss there as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    train(args)
    gc.collect()  # DDP is full of cycles, and destroying a group that DDP still holds can hang or abort (PyTorch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
