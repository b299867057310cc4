"""What one training step costs inside the rank: python benchmarks/in_loop.py

One step is begin, four marks, loss, gradient norm, end. Its rivals do the same in the same process, in rounds that take
turns, so that a slow machine is slow for all. CPU is that of the process, per step, the median over the rounds. The
floor is the least that Python can do to record a step the same way: six clock reads, one 96-byte pack into a mapped
file, the live word (since << 6 | phase, eight bytes) at each mark, in one function without a call. prometheus_client is
what a user would pick instead: a histogram and five gauges, children cached. Exit status 1 if a target is missed.
"""

import mmap
import os
import random
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram

from trainwarden.collectors.rank import (
    BACKWARD,
    DATA,
    FORWARD,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    OPTIMIZER,
    Rank,
    attach,
)

ROUNDS: Final = 150
STEPS_A_ROUND: Final = 2000
TIMED_STEPS: Final = 100_000
WARM_UP_STEPS: Final = 3000
FLOOR_RATIO: Final = 1.6
PEER: Final = "prometheus_client"
PEER_RATIO: Final = 0.5
CPU_CLOCK_US: Final = 12.0
END_P999_US: Final = 20.0

Loop = Callable[[range], None]
"""Records one step for each number; the loop stands in it as it stands in a training script."""


def floor() -> Loop:
    """The live word in integers, as a straightforward layout has it."""
    ring, clock = _shared_memory(), time.perf_counter_ns
    live, pack = memoryview(ring)[128:136].cast("q"), struct.Struct("@Q6q4dQ").pack_into

    def loop(numbers: range) -> None:
        for number in numbers:
            begin = clock()
            live[0] = begin << 6 | 1
            data = clock()
            live[0] = data << 6 | 2
            forward = clock()
            live[0] = forward << 6 | 3
            backward = clock()
            live[0] = backward << 6 | 4
            optimizer = clock()
            live[0] = optimizer << 6 | 5
            end = clock()
            # fmt: off
            pack(
                ring, 16384 + (number & 2047) * 96, number, begin, data - begin, forward - data, backward - forward,
                optimizer - backward, end - optimizer, 2.5, 1.5, 0.0, 0.0, number,
            )
            # fmt: on
            live[0] = end << 6

    return loop


def floor_of_stamps() -> Loop:
    """The same with our own trick, a float64 stamp a phase: what is left to gain is the calls."""
    ring, clock = _shared_memory(), time.perf_counter
    live, pack = memoryview(ring)[128:232].cast("d"), struct.Struct("@Q10dQ").pack_into

    def loop(numbers: range) -> None:
        for number in numbers:
            live[1] = begin = clock()
            live[2] = data = clock()
            live[3] = forward = clock()
            live[4] = backward = clock()
            live[5] = optimizer = clock()
            live[0] = end = clock()
            at = 16384 + (number & 2047) * 96
            pack(ring, at, number, begin, data, forward, backward, optimizer, end, 2.5, 1.5, 0.0, 0.0, number)

    return loop


def ours(w: Rank) -> Loop:
    def loop(numbers: range) -> None:
        for number in numbers:
            w.begin(number)
            w.mark(DATA)
            w.mark(FORWARD)
            w.mark(BACKWARD)
            w.mark(OPTIMIZER)
            w.value(LOSS, 2.5)
            w.value(GRAD_NORM, 1.5)
            w.end()

    return loop


def ours_in_full(w: Rank) -> Loop:
    """With everything that is often given: a batch, tokens, a local loss, the learning rate."""

    def loop(numbers: range) -> None:
        for number in numbers:
            w.begin(number, number)
            w.mark(DATA)
            w.mark(FORWARD, tokens=4096)
            w.mark(BACKWARD)
            w.mark(OPTIMIZER)
            w.value(LOSS, 2.5, scope="local")
            w.value(GRAD_NORM, 1.5)
            w.value(LEARNING_RATE, 3e-4)
            w.end()

    return loop


def prometheus() -> Loop:
    registry = CollectorRegistry()
    seconds = Histogram("step_seconds", "step", ["rank", "job"], registry=registry).labels("0", "j")
    gauges = [Gauge(f"gauge_{i}", "gauge", ["rank", "job"], registry=registry).labels("0", "j") for i in range(5)]
    data, forward, backward, loss, grad_norm = gauges

    def loop(numbers: range) -> None:
        for number in numbers:
            seconds.observe(0.123)
            data.set(1.5)
            forward.set(2.5)
            backward.set(3.5)
            loss.set(4.5)
            grad_norm.set(number)

    return loop


def six_reads() -> Loop:
    """One pread of schedstat at begin, each mark and end, nothing parsed."""
    fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    pread = os.pread

    def loop(numbers: range) -> None:
        for _ in numbers:
            pread(fd, 64, 0)
            pread(fd, 64, 0)
            pread(fd, 64, 0)
            pread(fd, 64, 0)
            pread(fd, 64, 0)
            pread(fd, 64, 0)

    return loop


def _shared_memory() -> mmap.mmap:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        return mmap.mmap(file.fileno(), 1 << 20)


@dataclass(slots=True)
class Candidate:
    """One way to record a step."""

    name: str
    loop: Loop
    cpu_us: list[float] = field(default_factory=list)

    def round(self, first: int) -> None:
        begin_ns = time.process_time_ns()
        self.loop(range(first, first + STEPS_A_ROUND))
        self.cpu_us.append((time.process_time_ns() - begin_ns) / STEPS_A_ROUND / 1000)

    @property
    def median_us(self) -> float:
        return statistics.median(self.cpu_us)


def measure(candidates: Sequence[Candidate]) -> None:
    """Rounds in turns, in another order each time."""
    for candidate in candidates:
        candidate.loop(range(1, WARM_UP_STEPS))
    order, first = list(candidates), WARM_UP_STEPS
    for _ in range(ROUNDS):
        random.shuffle(order)
        for candidate in order:
            candidate.round(first)
        first += STEPS_A_ROUND


def end_percentiles_us(w: Rank, first: int) -> tuple[float, float, float]:
    """Wall time of single calls of end(): p50, p99, p99.9, without what the clock itself costs."""
    clock, took_ns = time.perf_counter_ns, []
    for number in range(first, first + TIMED_STEPS):
        w.begin(number)
        w.mark(FORWARD)
        w.value(LOSS, 2.5)
        before = clock()
        w.end()
        took_ns.append(clock() - before)
    own_ns = statistics.median(-clock() + clock() for _ in range(10_000))
    took_ns.sort()
    p50, p99, p999 = (took_ns[int(TIMED_STEPS * share)] - own_ns for share in (0.5, 0.99, 0.999))
    return p50 / 1000, p99 / 1000, p999 / 1000


def main() -> int:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ |= {"TRAINWARDEN_DIR": folder, "TRAINWARDEN_JOB": "bench"}
        w = attach(rank=0, world_size=3)
        mine, least, peer = Candidate("ours", ours(w)), Candidate("floor", floor()), Candidate(PEER, prometheus())
        together = [least, Candidate("floor of stamps", floor_of_stamps()), mine, peer]
        measure(together)
        percentiles_us = end_percentiles_us(w, WARM_UP_STEPS + ROUNDS * STEPS_A_ROUND)
        w.close()
        # One after the other, since a process has one way to record: CPython adapts our code to what it is used for.
        full, scheduled = other_ways()
        for candidate in (*together, full, *scheduled):
            us, name = candidate.median_us, candidate.name
            print(f"{name:24} {us:7.3f} us {us / least.median_us:6.2f} x floor {us / peer.median_us:6.2f} x {PEER}")
        print("end(), wall time: p50 {:.2f} us, p99 {:.2f} us, p99.9 {:.2f} us".format(*percentiles_us))
        verdicts = [
            (f"ours <= {FLOOR_RATIO} x floor", mine.median_us / least.median_us, FLOOR_RATIO),
            (f"ours <= {PEER_RATIO} x {PEER}", mine.median_us / peer.median_us, PEER_RATIO),
            (f'ours, clock="cpu" <= {CPU_CLOCK_US:g} us', scheduled[0].median_us, CPU_CLOCK_US),
            (f"p99.9 of end() <= {END_P999_US:g} us", percentiles_us[2], END_P999_US),
        ]
        for what, got, limit in verdicts:
            print(f"{'PASS' if got <= limit else 'FAIL'}  {what}: {got:.3g}")
        return 0 if all(got <= limit for _, got, limit in verdicts) else 1


def other_ways() -> tuple[Candidate, tuple[Candidate, Candidate]]:
    """A step with all there is to say, and one on the CPU clock, beside the reads that it cannot do without."""
    w = attach(rank=1, world_size=3)
    full = Candidate("ours in full", ours_in_full(w))
    measure([full])
    w.close()
    w = attach(rank=2, world_size=3, clock="cpu")
    scheduled = Candidate('ours, clock="cpu"', ours(w)), Candidate("its 6 reads", six_reads())
    measure(scheduled)
    w.close()
    return full, scheduled


if __name__ == "__main__":
    sys.exit(main())
