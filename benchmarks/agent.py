"""What the agent of a node costs: python benchmarks/agent.py [--quick]

Gathering: one look at the rings of 8 ranks, as the agent takes it (collectors/ringglance.py): which have a new step or
detail row, and what each does, in one table. Beside it the same by a pread a piece, and the least that an agent without
rings would do: receive 8 datagrams of a step row and unpack them. CPU of the thread, medians of rounds in turns.
The goal, 4 us, was measured on a bare numpy gather; what a whole poll takes (a second look a millisecond later, checks,
frames; four times a second) is told beside it and has none.

Running: `trainwarden agent` as a process of its own with its default sources and periods, /metrics scraped every 15 s
as Prometheus does, beside 8 ranks at one step a second whose phases take their usual part of the step. CPU of the
process and its children by /proc, the median of windows that follow one another once it has settled (in its first
minute it starts readers of a driver that is not there again and again, and lets old jobs go whose rings still lie
here). Alone, and sending to a `trainwarden server`.

Goals: a look <= 4 us; running < 1 % of a core; at most 150 MB of memory. Exit status 1 if one is missed.
"""

import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import numpy as np

from trainwarden.app.own_cost import living_children_s, process_s
from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, LOSS, OPTIMIZER, attach
from trainwarden.collectors.ringfile import RingFile
from trainwarden.collectors.ringglance import Glance
from trainwarden.collectors.ringrows import STEP_IN_SUMS
from trainwarden.collectors.rings import Rings
from trainwarden.core.auth import hashed
from trainwarden.core.child import spawn
from trainwarden.core.model import JobId
from trainwarden.core.records import DETAILS_OFFSET, LIVE, LIVE_OFFSET, STEP_ROW, STEPS_OFFSET


class Closes(Protocol):
    def close(self) -> object: ...


RANKS: Final = 8
ROUNDS, WINDOWS, SECONDS, SETTLE_S, SCRAPE_S = 20, 4, 15.0, 75.0, 15.0
BURST: Final = 100
"""Calls in a row of each way in each round: warm caches, as goals were measured. All take some ten times as long on
cold ones, as after a sleep: what that comes to is in what a running agent takes."""
Way: TypeAlias = tuple[Callable[[], object] | None, Callable[[], object]]
"""(what is done before, what is measured)."""
GATHER_US, CORE_SHARE, MEMORY_MB = 4.0, 0.01, 150.0

RANKS_CODE = f"""
import os, time
from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, LOSS, OPTIMIZER, attach
for rank in range({RANKS}):
    if os.fork() == 0:
        w, due = attach(rank=rank, world_size={RANKS}), time.monotonic() + 0.003 * rank
        for step in range(1 << 30):
            w.begin(step)
            for phase, share in ((DATA, 0.05), (FORWARD, 0.3), (BACKWARD, 0.55), (OPTIMIZER, 0.1)):
                w.mark(phase)
                due += share
                time.sleep(max(0.0, due - time.monotonic()))
            w.value(LOSS, 2.5)
            w.end()
time.sleep(1 << 20)
"""


# gathering


def burst_us(before: Callable[[], object] | None, way: Callable[[], object]) -> float:
    """CPU of this thread a call; where something has to be done before each, the clock's own cost is taken off."""
    clock, times, took_ns = time.thread_time_ns, [None] * BURST, 0
    if before is None:
        began_ns = clock()
        for _ in times:
            way()
        return (clock() - began_ns) / BURST / 1e3
    for _ in times:
        before()
        began_ns = clock()
        way()
        took_ns += clock() - began_ns
    own_ns = statistics.median(-clock() + clock() for _ in times)
    return (took_ns / BURST - own_ns) / 1e3


def by_pread(folder: Path) -> Callable[[], object]:
    """The pieces that a look takes, one system call each; nothing is found out from them."""
    descriptors = [os.open(path, os.O_RDONLY) for path in sorted((folder / "bench" / "rings").iterdir())]

    def gather() -> None:
        for descriptor in descriptors:
            os.pread(descriptor, 4, STEPS_OFFSET)
            os.pread(descriptor, 4, DETAILS_OFFSET)
            os.pread(descriptor, LIVE.size, LIVE_OFFSET)

    return gather


def datagrams(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """(what 8 ranks send, what receives and unpacks it)."""
    address, row = str(folder / "socket"), bytes(STEP_ROW.size)
    here = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    here.bind(address)
    there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    there.connect(address)
    table = np.zeros((RANKS, 16), np.float32)

    def send() -> None:
        for _ in range(RANKS):
            there.send(row)

    def gather() -> None:
        rows = b"".join([here.recv(STEP_ROW.size) for _ in range(RANKS)])
        table[:] = np.frombuffer(rows, STEP_IN_SUMS)["values"]

    return send, gather


def gathering(folder: Path) -> bool:
    """Measure and print; whether the goal is met."""
    os.environ |= {"TRAINWARDEN_DIR": str(folder), "TRAINWARDEN_JOB": "bench", "TRAINWARDEN_NODE": "n1"}
    ranks = [attach(rank=rank, world_size=RANKS) for rank in range(RANKS)]
    source = Rings(folder, "n1", JobId("bench"), start_ns=time.time_ns())
    send, receive = datagrams(folder)

    def step(number: int) -> None:
        for rank in ranks:
            rank.begin(number)
            for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER):
                rank.mark(phase)
            rank.value(LOSS, 2.5)
            rank.end()

    def poll() -> None:
        source.poll(time.time_ns())

    numbers = count()
    step(next(numbers))
    poll()
    rings = [RingFile(path, os.geteuid()) for path in sorted((folder / "bench" / "rings").iterdir())]
    glance = Glance(rings)
    ways: dict[str, Way] = {
        "a look": (None, glance.look),
        "by 24 preads": (None, by_pread(folder)),
        "8 datagrams": (send, receive),
        "a poll, nothing new": (None, poll),
        "a poll, a step": (lambda: step(next(numbers)), poll),
    }
    took_us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (before, way) in random.sample([*ways.items()], len(ways)):
            took_us[name].append(burst_us(before, way))
    closing: list[Closes] = [source, glance, *rings, *ranks]
    for one in closing:
        one.close()
    middle = {name: statistics.median(values) for name, values in took_us.items()}
    for name, value in middle.items():
        print(f"{RANKS} ranks, {name:20}{value:7.1f} us {value / middle['8 datagrams']:6.2f} x 8 datagrams")
    return verdict(f"gather {RANKS} ranks, a look: us of CPU", middle["a look"], GATHER_US)


# running


@contextmanager
def started(words: list[str], err: Path, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """A process group; its first process. Ended with the block."""
    with err.open("wb") as file:
        child = spawn(words, err=file, env=env)
    try:
        yield child.pid
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait()


def told(file: Path, words: str) -> str:
    """host:port that a command told behind these words."""
    until_s = time.monotonic() + 60
    while words not in (text := file.read_text()):
        assert time.monotonic() < until_s, text
        time.sleep(0.05)
    return text.partition(words)[2].split()[0].rstrip(";").removesuffix("/metrics")


@contextmanager
def eight_ranks(folder: Path) -> Iterator[None]:
    """Their rings lie below the folder."""
    environment = {**os.environ, "TRAINWARDEN_DIR": str(folder), "TRAINWARDEN_JOB": "bench", "TRAINWARDEN_NODE": "n1"}
    with started([sys.executable, "-c", RANKS_CODE], folder / "ranks.err", environment):
        yield


@contextmanager
def a_server(folder: Path) -> Iterator[list[str]]:
    """A `trainwarden server`; options of an agent that sends to it."""
    (folder / "token").write_text("bench")
    (folder / "tokens.yaml").write_text(json.dumps({"tokens": {"agents": {"n1": hashed("bench")}}}))
    err = folder / "server.err"
    words = ["server", "--tokens", str(folder / "tokens.yaml"), "--listen", "127.0.0.1:0", "--state", str(folder / "s")]
    with started([sys.executable, "-m", "trainwarden", *words], err):
        yield ["--server", told(err, "listening on "), "--token-file", str(folder / "token")]


def agent_cost(folder: Path, options: list[str], windows: int, seconds: float) -> tuple[list[float], float]:
    """(cores in each window, peak MB) of an agent with its children, its start not counted."""
    (folder / "agent.yaml").write_text(f"agent: {{rings: [{folder}]}}\nuplink: {{tls: false}}\n")
    err = folder / "agent.err"
    words = ["agent", "--node", "n1", "--config", str(folder / "agent.yaml"), "--metrics", "127.0.0.1:0", *options]
    with started([sys.executable, "-m", "trainwarden", *words], err) as pid:
        url = f"{told(err, 'metrics are at ')}/metrics"
        time.sleep(SETTLE_S)
        scrape_s, cores, page = 0.0, [], ""
        for _ in range(windows):
            before_s, began_s = used_s(pid), time.monotonic()
            while (now_s := time.monotonic()) - began_s < seconds:
                if now_s >= scrape_s:
                    scrape_s = now_s + SCRAPE_S
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        page = answer.read().decode()
                time.sleep(0.1)
            cores.append((used_s(pid) - before_s) / (time.monotonic() - began_s))
        peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line)
    jobs = next(line for line in page.splitlines() if line.startswith("trainwarden_agent_jobs "))
    if not jobs.endswith(" 1.0"):
        print(f"note: rings of other jobs are on this machine; they are followed, and cost, too: {jobs}")
    return cores, int(peak.split()[1]) / 1024


def used_s(pid: int) -> float:
    """CPU of a process and its children so far."""
    return process_s(pid) + sum(living_children_s(pid).values())


def running(folder: Path, windows: int, seconds: float) -> bool:
    """Measure and print; whether the goals are met."""
    met = True
    with a_server(folder) as options, eight_ranks(folder):
        for name, more in (("alone", []), ("sending to a server", options)):
            cores, peak = agent_cost(folder, more, windows, seconds)
            spread = f"{windows} windows of {seconds:g} s, {min(cores):.2%} to {max(cores):.2%}"
            met &= verdict(f"agent {name}: % of a core ({spread})", 100 * statistics.median(cores), 100 * CORE_SHARE)
            met &= verdict(f"agent {name}: MB of memory at most", peak, MEMORY_MB)
    return met


def verdict(what: str, got: float, goal: float) -> bool:
    """Print it: the goal is an upper limit."""
    met = got <= goal
    print(f"{what}: {got:.3g} (goal {goal:g}, {got / goal:.2f} of it) {'PASS' if met else 'FAIL'}")
    return met


def main() -> int:
    """Measure, print, and tell by the exit status whether the goals are met."""
    quick = "--quick" in sys.argv
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="trainwarden-bench.") as folder:
        met = gathering(Path(folder))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="trainwarden-bench.") as folder:
        met &= running(Path(folder), 2 if quick else WINDOWS, 10.0 if quick else SECONDS)
    return not met


if __name__ == "__main__":
    sys.exit(main())
