"""A training without torch, for tests of repairs: a launcher that forks ranks, each step a pause, tiny checkpoints.

It starts in 0.2 s and obeys what every training under `trainwarden run` must obey: the attempt file (checkpoint and
staging folder), requests of w.end(), and the duty of a launcher to end all ranks when one dies. The state is one number
that depends on all steps before, so a run that lost or repeated a step ends with another loss.

Faults that only the training itself can make are arguments; all others are made by the test from outside.
"""

import argparse
import contextlib
import json
import math
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trainwarden.collectors.rank import CHECKPOINT, DATA, FORWARD, LOSS, WAIT, Rank, attach
from trainwarden.core.manifest import write_rank_file

FIRST = 4.0
"""The state before the first step."""


def after(state: float, step: int) -> float:
    """The state after one more step.

    >>> after(FIRST, 1) < FIRST
    True
    """
    return 0.99 * state + 0.001 * (step * 7919 % 13)


def final(steps: int) -> float:
    """The state after all steps of a run that nothing disturbed."""
    state = FIRST
    for step in range(1, steps + 1):
        state = after(state, step)
    return state


class Meeting:
    """Where ranks wait for each other, in the place of collectives: it hangs if one does not come."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._map = ranks, mmap.mmap(-1, 8 * ranks)

    def wait(self, rank: int, number: int) -> None:
        """Until all have come to this number."""
        struct.pack_into("@q", self._map, 8 * rank, number)
        while any(come < number for come in struct.unpack_from(f"@{self._ranks}q", self._map)):
            time.sleep(0.001)


class Training:
    """One rank."""

    def __init__(self, args: argparse.Namespace, rank: int, meeting: Meeting) -> None:
        self.args, self.rank, self.meeting = args, rank, meeting
        self.w: Rank = attach(rank=rank, world_size=args.ranks, local_rank=rank)
        assert self.w.attempt is not None, self.w.why_off
        self.told: Mapping[str, object] = self.w.attempt
        self.attempt = int(str(self.told["attempt"]))
        self.state, self.done = FIRST, 0

    def run(self) -> None:
        """All steps that are left."""
        if (checkpoint := self.told["checkpoint"]) is not None:
            saved = json.loads((Path(str(checkpoint)) / f"__{self.rank}_0.distcp").read_text())
            self.state, self.done = float.fromhex(saved["state"]), saved["step"]
        for step in range(self.done + 1, self.args.steps + 1):
            self.step(step)
        self.w.close()
        self.say(f"final {self.state.hex()}")

    def step(self, step: int) -> None:
        """One step."""
        w = self.w
        w.begin(step)
        w.mark(DATA)
        w.mark(FORWARD)
        time.sleep(self.args.step_s)
        self.state = after(self.state, step)
        w.value(LOSS, math.nan if step in self.args.nan_at else self.state)
        w.mark(WAIT)
        self.meeting.wait(self.rank, 2 * step)
        if step % self.args.every == 0:
            self.save(step)
        asked = w.end()
        self.say(f"step {step}")
        if asked is not None and asked.name == "checkpoint":
            self.save(step)
        self.die_if_told(step)

    def save(self, step: int) -> None:
        """This rank's part of a checkpoint, as torch.distributed.checkpoint would name it."""
        self.w.phase(CHECKPOINT, expect_s=1.0)
        stage = Path(str(self.told["staging"])) / f"step-{step}"
        stage.mkdir(parents=True, exist_ok=True)
        shard = stage / f"__{self.rank}_0.distcp"
        shard.write_text(json.dumps({"state": self.state.hex(), "step": step}))
        if self.rank == 0:
            names = " ".join(f"__{rank}_0.distcp" for rank in range(self.args.ranks))
            (stage / ".metadata").write_text(names)
        mine = self.attempt == 1 and self.rank == 1 and step == self.args.fault_step
        if mine and self.args.stop_in_save:
            os.kill(os.getpid(), signal.SIGSTOP)
        if mine and self.args.linger:
            linger(stage, self.rank, step, Path(self.args.linger))
        else:
            self.w.committed(step, stage, data_position=step + 1)
        self.meeting.wait(self.rank, 2 * step + 1)

    def die_if_told(self, step: int) -> None:
        """The fault that comes again in every attempt."""
        again = self.attempt >= self.args.die_from and step == self.done + self.args.die_after
        if again and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, line: str) -> None:
        """Rank 0 speaks for all."""
        if self.rank == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def linger(stage: Path, rank: int, step: int, told: Path) -> None:
    """A writer process that nobody waits for: it stops before the last thing it does, and outlives its attempt."""
    if os.fork():
        os.wait()
        return
    if os.fork():
        os._exit(0)
    os.setsid()
    told.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    with contextlib.suppress(OSError):  # the stage may be gone by now
        write_rank_file(stage, rank=rank, step=step, data_position=step + 1)
    told.with_suffix(".done").touch()
    os._exit(0)


def launch(args: argparse.Namespace) -> int:
    """Fork all ranks; when one fails all are ended, as torchrun does it."""
    meeting = Meeting(args.ranks)
    pids = []
    for rank in range(args.ranks):
        pid = os.fork()
        if pid == 0:
            Training(args, rank, meeting).run()
            sys.stdout.flush()
            sys.exit(0)
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status != 0:
            for left in pids:
                os.kill(left, signal.SIGKILL)
            return 1
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--nan-at", type=int, nargs="*", default=[], help="steps whose loss is told as NaN")
    parser.add_argument("--die-from", type=int, default=1 << 30, help="rank 1 dies in this attempt and all later ones")
    parser.add_argument("--die-after", type=int, default=3, help="steps")
    parser.add_argument("--fault-step", type=int, default=-1, help="step of the save that has a fault, in attempt 1")
    parser.add_argument("--stop-in-save", action="store_true", help="rank 1 stops between its shard and its signature")
    parser.add_argument("--linger", help="rank 1's save is left to a process that stops; its pid is written here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(launch(arguments()))
