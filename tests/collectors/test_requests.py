"""Requests to ranks: all obey at one step, or none does, whoever is stopped in between for however long."""

import json
import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainwarden.collectors.rank import FORWARD, WAIT, attach
from trainwarden.core.control import CHECKPOINT, QUIESCE, RESUME, STOP, Block, acks, close_blocks, open_blocks, post
from trainwarden.core.errors import ActionError
from trainwarden.core.manifest import read_rank_file

RANKS, REQUESTS = 4, 200
JOB = "requests"
FORK = mp.get_context("fork")
WARM = FORK.Barrier(RANKS)  # the shared memory that it brings along stays open for the life of the process


def train(rank: int, log: Path, meet: Callable[[], object]) -> None:
    """Steps in lockstep with the other ranks, as a collective would have it, until asked to stop."""
    w = attach(rank=rank, world_size=RANKS, job=JOB)
    assert not w.why_off, w.why_off
    step = 0
    with log.open("w", buffering=1) as file:
        while True:
            step += 1
            w.begin(step)
            w.mark(FORWARD)
            time.sleep(0.001)
            w.mark(WAIT)
            meet()
            asked = w.end()
            if asked is not None:
                file.write(json.dumps([asked.seq, asked.name, step]) + "\n")
                if asked.name == "stop":
                    break
    w.close()
    os._exit(0)  # not through pytest's own exit handlers, which the fork brought along


class Job:
    """Four ranks and their control blocks."""

    def __init__(self, root: Path, logs: Path) -> None:
        self.logs = [logs / f"rank-{rank}" for rank in range(RANKS)]
        meet = FORK.Barrier(RANKS).wait
        self.ranks = [FORK.Process(target=train, args=(rank, self.logs[rank], meet)) for rank in range(RANKS)]
        for process in self.ranks:
            process.start()
        rings = root / JOB / "rings"
        self.blocks: list[Block] = []
        while len(self.blocks) < RANKS or min(block.begun_step for block in self.blocks) < 1:
            self.let_go()
            self.blocks = open_blocks(rings, 0, 0)
            time.sleep(0.01)

    def settle(self, within_s: float = 20.0) -> None:
        """Wait until every rank has decided."""
        end_s = time.monotonic() + within_s
        while any(block.undecided for block in self.blocks):
            assert time.monotonic() < end_s, "deadlock: a request is not decided"
            time.sleep(0.001)

    def obeyed(self) -> list[list[tuple[int, str, int]]]:
        """What each rank did, in order."""
        return [[tuple(json.loads(line)) for line in log.read_text().splitlines()] for log in self.logs]

    def stop(self) -> None:
        """Ask for the end until all obey it."""
        while not all(block.gone for block in self.blocks):
            if not any(block.undecided for block in self.blocks):
                post(self.blocks, code=STOP)
            time.sleep(0.01)
        for process in self.ranks:
            process.join()
        self.let_go()

    def let_go(self) -> None:
        close_blocks(self.blocks)
        self.blocks = []


@pytest.fixture
def job(ring_root: Path, tmp_path: Path) -> Iterator[Job]:
    running = Job(ring_root, tmp_path)
    yield running
    for process in running.ranks:
        process.kill()
        process.join()
        process.close()
    running.let_go()


def test_200_requests_are_obeyed_by_all_at_one_step_or_by_none(job: Job) -> None:
    dice = random.Random(7)
    for _ in range(REQUESTS):
        time.sleep(dice.random() * 0.004)
        stopped = dice.choice(job.ranks) if dice.random() < 0.3 else None
        if stopped is not None:
            os.kill(stopped.pid or 0, signal.SIGSTOP)
        slow = _Slowly(job.blocks, dice) if dice.random() < 0.3 else job.blocks  # as if the requester were stopped
        post(slow, code=CHECKPOINT, lead_steps=dice.choice((0, 1, 2)))
        time.sleep(dice.random() * 0.01)
        if stopped is not None:
            os.kill(stopped.pid or 0, signal.SIGCONT)
        job.settle()
    job.stop()
    did = job.obeyed()
    assert did[0] == did[1] == did[2] == did[3]
    obeyed = [name for _, name, _ in did[0]]
    assert obeyed[-1] == "stop"
    assert 20 < len(obeyed) < REQUESTS + 1, "the test must meet both answers"


class _Slowly(list[Block]):
    """Blocks that take their time between one and the next."""

    def __init__(self, blocks: list[Block], dice: random.Random) -> None:
        super().__init__(blocks)
        self._dice = dice

    def __iter__(self) -> Iterator[Block]:
        for block in super().__iter__():
            time.sleep(self._dice.random() * 0.004)
            yield block


def test_a_quiesced_job_stands_still_and_goes_on_when_told(job: Job) -> None:
    while True:
        request = post(job.blocks, code=QUIESCE, arg=30)
        job.settle()
        if set(acks(job.blocks, request).values()) == {"obeyed"}:
            break
    steps = [block.begun_step for block in job.blocks]
    assert set(steps) == {request.at_step}
    time.sleep(0.05)
    assert [block.begun_step for block in job.blocks] == steps
    post(job.blocks, code=RESUME)
    end_s = time.monotonic() + 10
    while min(block.begun_step for block in job.blocks) <= request.at_step:
        assert time.monotonic() < end_s, "still quiesced"
        time.sleep(0.001)
    job.stop()


def test_a_quiesce_ends_by_itself_when_nobody_comes_back(job: Job) -> None:
    request = post(job.blocks, code=QUIESCE, arg=0)
    end_s = time.monotonic() + 10
    while min(block.begun_step for block in job.blocks) <= request.at_step + 1:
        assert time.monotonic() < end_s, "still quiesced"
        time.sleep(0.001)
    job.stop()


def test_a_request_to_a_job_with_a_dead_rank_is_void(job: Job) -> None:
    victim = job.ranks[3]
    os.kill(victim.pid or 0, signal.SIGSTOP)
    request = post(job.blocks, code=CHECKPOINT)
    victim.kill()
    victim.join()
    time.sleep(0.2)
    assert "obeyed" not in acks(job.blocks, request).values()


def test_the_next_request_waits_for_the_last_one(job: Job) -> None:
    os.kill(job.ranks[0].pid or 0, signal.SIGSTOP)
    post(job.blocks, code=CHECKPOINT)
    with pytest.raises(ActionError, match="have not decided"):
        post(job.blocks, code=CHECKPOINT)
    os.kill(job.ranks[0].pid or 0, signal.SIGCONT)
    job.settle()
    job.stop()


def test_a_committed_part_is_signed_by_its_rank(ring_root: Path, tmp_path: Path) -> None:
    w = attach(rank=0, world_size=1, job=JOB)
    stage = tmp_path / "step-3"
    stage.mkdir()
    (stage / "extra.bin").write_bytes(b"x" * 100)
    w.committed(3, stage, data_position=4, files=["extra.bin"])
    w.committed(3, tmp_path / "absent")  # counted, not raised
    w.close()
    signed = read_rank_file(stage, 0)
    assert (signed.step, signed.data_position) == (3, 4)
    assert signed.files["extra.bin"][0] == 100
