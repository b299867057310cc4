"""What watching costs a real training: examples/train.py itself, its model, its step, its collector calls.

    .venv/bin/python benchmarks/real_loop.py            # under 4 minutes on two cores; exit status 1 on FAIL

1. Share: the CPU time of the collector's calls of one step over the job's CPU time of one step. The calls are recorded
   from a real step and replayed in a loop (the loop's own cost is counted against us); the job is four ranks over gloo.
2. A/B: blocks of steps with the collector and with a no-op take turns inside one process. One rank's share of the work
   is enough here: with four ranks on two cores each would wait for the others most of the time, and what the collector
   adds to a rank's step would drown in that. The hook and the all-reduce are on the way all the same (a group of one).
   Order inside a pair is drawn; the upper limit is a bootstrap's, of the median of the pairs' log ratios.
3. Loss: after the four ranks' run, with and without the collector, to the last bit.
"""

import argparse
import importlib
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # DDP needs it: loaded once here, not in every rank
import torch.distributed as dist

from trainwarden.collectors.rank import Rank, attach
from trainwarden.rehearsal.injection import Faults

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
train = importlib.import_module("train")

RANKS = 4
WARM_UP_STEPS, STEPS = 5, 30
REPLAYED_STEPS = 20_000
BLOCK_STEPS = 3
SHARE_LIMIT, SLOWDOWN_LIMIT = 0.003, 0.02  # docs/architecture.md: goals in the real loop
FORK = multiprocessing.get_context("fork")


class Switch:
    """A recorder that can be changed under a running training: the loop and the hook hold this."""

    def __init__(self, w: Any) -> None:
        self.use(w)

    def use(self, w: Any) -> None:
        self.begin, self.mark, self.value, self.phase, self.end = w.begin, w.mark, w.value, w.phase, w.end


@dataclass(frozen=True, slots=True)
class Tape:
    """Takes down the calls of a step instead of obeying them."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((method, args, kwargs))


def recorder(on: bool) -> Rank:
    os.environ["TRAINWARDEN"] = "1" if on else "0"
    w = attach(clock="cpu")  # as the example does
    assert bool(w.why_off) != on, w.why_off
    return w


def join(store: Path, rank: int, ranks: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def steps(training: Any, first: int, count: int) -> float:
    """Runs the loop of the example; gives the last loss."""
    loss = math.nan
    for step in range(first, first + count):
        training.w.begin(step, step)
        loss = training.step(step, step)
        training.w.end()
    return loss


# the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank measured."""

    cpu_s: float
    """Process CPU time a step."""
    wall_s: float
    """A step."""
    loss: float


def be_rank(rank: int, store: Path, on: bool, told: Connection) -> None:
    join(store, rank, RANKS)
    training = train.Training(0, recorder(on), Faults({}))
    steps(training, 1, WARM_UP_STEPS)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    loss = steps(training, 1 + WARM_UP_STEPS, STEPS)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    told.send(Job(cpu_s=cpu_s / STEPS, wall_s=wall_s / STEPS, loss=loss))
    dist.barrier()
    os._exit(0)  # nothing to save; an orderly exit of gloo takes its time


def run_job(folder: Path, on: bool) -> list[Job]:
    """What each of the four ranks measured."""
    pipes = [FORK.Pipe(duplex=False) for _ in range(RANKS)]
    store = folder / f"store-{on}"
    ranks = [FORK.Process(target=be_rank, args=(rank, store, on, pipes[rank][1])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for _, there in pipes:
        there.close()  # so that a rank that failed is the end of its pipe
    jobs = [here.recv() for here, _ in pipes]
    for process in ranks:
        process.join()
    return jobs


# the collector


def alone(told: Connection, folder: Path, pairs: int) -> None:
    """One rank's share of the work in a process of its own."""
    join(folder / "store-alone", 0, 1)
    tape, switch = Tape(), Switch(recorder(on=False))
    training = train.Training(0, switch, Faults({}))
    training.world_size = RANKS  # it takes every fourth sequence, as a rank of four does
    steps(training, 1, WARM_UP_STEPS)
    switch.use(tape)
    steps(training, WARM_UP_STEPS + 1, 1)
    told.send((replayed_cpu_s(recorder(on=True), tape), log_ratios(training, switch, pairs)))
    os._exit(0)


def replayed_cpu_s(w: Rank, tape: Tape) -> float:
    """CPU seconds of the collector's calls of one step."""
    begin, *calls, end = [(getattr(w, method), args, kwargs) for method, args, kwargs in tape.calls]
    start_s = time.process_time()
    for step in range(1, REPLAYED_STEPS + 1):
        begin[0](step, step)
        for call, args, kwargs in calls:
            call(*args, **kwargs)
        end[0]()
    cpu_s = time.process_time() - start_s
    w.close()
    return cpu_s / REPLAYED_STEPS


def log_ratios(training: Any, switch: Switch, pairs: int) -> list[float]:
    """log(time of a block with / time of its neighbour without), one a pair."""
    on, off = recorder(on=True), recorder(on=False)
    order = np.random.default_rng(0).integers(2, size=pairs)
    step, found = WARM_UP_STEPS + 2, []
    for on_first in order:
        took_s = {}
        for w in (on, off) if on_first else (off, on):
            switch.use(w)
            start_s = time.perf_counter()
            steps(training, step, BLOCK_STEPS)
            took_s[w is on] = time.perf_counter() - start_s
            step += BLOCK_STEPS
        found.append(math.log(took_s[True] / took_s[False]))
    return found


def median_and_upper(log_ratio_P: Sequence[float]) -> tuple[float, float]:
    """Relative slowdown: the median over the pairs, and its one-sided upper 95 % limit."""
    ratio_P = np.expm1(np.asarray(log_ratio_P))
    draws = np.random.default_rng(0).choice(ratio_P, size=(4000, len(ratio_P)))
    return float(np.median(ratio_P)), float(np.quantile(np.median(draws, axis=1), 0.95))


# the report


def line(what: str, figure: str, limit: str = "", ok: bool | None = None) -> bool:
    print(f"  {what:<34}{figure:>24}  {limit:<12}{'' if ok is None else 'PASS' if ok else 'FAIL'}", flush=True)
    return ok is not False


def report(folder: Path, pairs: int) -> bool:
    here, there = FORK.Pipe(duplex=False)
    off, on = run_job(folder, on=False), run_job(folder, on=True)
    job_cpu_s = sum(one.cpu_s for one in off) / RANKS
    print(f"examples/train.py, {RANKS} ranks by gloo, {STEPS} steps")
    line("CPU of a step on one rank", f"{1e3 * job_cpu_s:.1f} ms")
    line("steps a second", f"{1 / off[0].wall_s:.1f}")
    same = off[0].loss.hex() == on[0].loss.hex()
    ok = line("final loss with and without", f"{on[0].loss.hex()}", "same bits", same)
    process = FORK.Process(target=alone, args=(there, folder, pairs))
    process.start()
    there.close()
    calls_cpu_s, found = here.recv()
    process.join()
    share = calls_cpu_s / job_cpu_s
    line("CPU of the collector in a step", f"{1e6 * calls_cpu_s:.1f} us")
    ok &= line(
        "its share of the step's CPU", f"{100 * share:.3f} %", f"<= {100 * SHARE_LIMIT:g} %", share <= SHARE_LIMIT
    )
    median, upper = median_and_upper(found)
    print(f"{pairs} pairs of blocks of {BLOCK_STEPS} steps, one process")
    line("slowdown, median of the pairs", f"{100 * median:+.2f} %")
    line("noise of a pair (sd)", f"{100 * float(np.std(found)):.1f} %")
    fine = upper <= SLOWDOWN_LIMIT
    return line("its upper 95 % limit", f"{100 * upper:+.2f} %", f"<= {100 * SLOWDOWN_LIMIT:g} %", fine) and ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="of blocks in the A/B")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trainwarden-bench-", dir="/dev/shm"))
    os.environ["TRAINWARDEN_DIR"] = str(folder)
    try:
        return 0 if report(folder, args.pairs) else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
