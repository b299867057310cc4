"""Slow ranks on real processes: four ranks forked from this one, on however few cores there are, through real rings.

The ranks wait for each other at the end of their backward, as in DDP. What a rank does is a given amount of CPU time
(or of sleep), so that a busy machine changes wall times and waits, but not the work.
"""

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainwarden.app.wiring import Settings, build_line
from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, OPTIMIZER, WAIT, attach
from trainwarden.collectors.rings import Rings
from trainwarden.core.model import Finding, JobId, Tick

RANKS, STEPS = 4, 36
WORK_S: Mapping[str, float] = {"data": 0.001, "forward": 0.006, "backward": 0.012, "optimizer": 0.002}
JOB = JobId("slow-ranks")
FORK = mp.get_context("fork")
BARRIER = FORK.Barrier(RANKS)  # one for all tests: its shared memory stays open for the life of the process

Slowness = Callable[[int, str], None]
"""What else a rank does in a phase."""


def busy(cpu_s: float) -> None:
    """Compute for so much CPU time of this thread."""
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def healthy(rank: int, phase: str) -> None:
    """Nothing else."""


def computing(rank: int, phase: str) -> None:
    if rank == 2:
        busy(0.6 * WORK_S[phase])


def sleeping(rank: int, phase: str) -> None:
    if rank == 2:
        time.sleep(0.6 * WORK_S[phase])


def slow_in_backward(rank: int, phase: str) -> None:
    if rank == 2 and phase == "backward":
        busy(WORK_S[phase])


def train(rank: int, slowness: Slowness, meet: Callable[[], object]) -> None:
    """One rank of the job, in a process of its own."""
    w = attach(rank=rank, world_size=RANKS, job=JOB, clock="cpu")
    assert not w.why_off, w.why_off
    meet()
    for step in range(1, STEPS + 1):
        w.begin(step)
        for name, phase in (("data", DATA), ("forward", FORWARD), ("backward", BACKWARD)):
            w.mark(phase)
            busy(WORK_S[name])
            slowness(rank, name)
        w.mark(WAIT)
        meet()
        w.mark(OPTIMIZER)
        busy(WORK_S["optimizer"])
        slowness(rank, "optimizer")
        w.end()
    w.close()
    os._exit(0)  # not through pytest's own exit handlers, which the fork brought along


def watch(folder: Path, slowness: Slowness) -> list[Finding]:
    """Run the job and feed its rings to a line until all ranks have ended."""
    ranks = [FORK.Process(target=train, args=(rank, slowness, BARRIER.wait)) for rank in range(RANKS)]
    rings, line = Rings(folder, "n1", JOB, start_ns=time.time_ns()), build_line(Settings(), JOB)
    for process in ranks:
        process.start()
    findings: list[Finding] = []
    while any(process.is_alive() for process in ranks):
        now_ns = time.time_ns()
        for item in (*rings.poll(now_ns), Tick(seen_ns=now_ns)):
            findings += line.feed(item)
        time.sleep(0.1)
    findings += line.finish()
    rings.close()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    return findings


@pytest.mark.parametrize(
    ("slowness", "words"),
    [
        pytest.param(computing, ("comput",), id="slow by computing"),
        pytest.param(sleeping, ("stall",), id="slow by sleeping"),
        pytest.param(slow_in_backward, ("comput", "backward"), id="slow in backward only"),
    ],
)
def test_the_slow_rank_is_named_with_its_reason(ring_root: Path, slowness: Slowness, words: tuple[str, ...]) -> None:
    final = [finding for finding in watch(ring_root, slowness) if finding.status == "final"]
    assert {str(finding.subject) for finding in final} == {"rank:2"}
    assert all(word in final[-1].reason for word in words), final[-1].reason


def test_healthy_ranks_are_left_alone_beside_a_busy_neighbour(ring_root: Path) -> None:
    neighbour = FORK.Process(target=busy, args=(600.0,))
    neighbour.start()
    try:
        findings = watch(ring_root, healthy)
    finally:
        neighbour.kill()
        neighbour.join()
    assert [finding.reason for finding in findings if finding.status == "final"] == []
