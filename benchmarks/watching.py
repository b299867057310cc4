"""What watching costs: CPU of `trainwarden run` (supervisor, agent, line and machines in one process) over a core.

    python benchmarks/watching.py

Four ranks, forked by a command that is not torchrun, record 8 steps a second with the collector and sleep in between,
so that the figure does not depend on what a training costs. The supervisor's CPU time is read from /proc before and
after the middle SECONDS; the start-up (imports, about a second of CPU) is not in it. Goal: at most 10 % of one core.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from trainwarden.core.child import spawn

RANKS, STEPS_PER_S, SECONDS, GOAL = 4, 8, 20, 0.10

JOB = f"""
import os, time
from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, LOSS, OPTIMIZER, attach
children = []
for rank in range({RANKS}):
    pid = os.fork()
    if pid == 0:
        w = attach(rank=rank, world_size={RANKS}, clock="cpu")
        for step in range({STEPS_PER_S} * ({SECONDS} + 8)):
            w.begin(step)
            for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER):
                w.mark(phase)
            w.value(LOSS, 1.0)
            w.end()
            time.sleep(1 / {STEPS_PER_S})
        w.close()
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Measure, print, and tell by the exit status whether the goal is met."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainwarden", "run", "--state", folder, "--job", "watched", "--"]
        supervisor = spawn([*command, sys.executable, "-c", JOB], new_session=False)
        time.sleep(4)
        before = cpu_s(supervisor.pid)
        time.sleep(SECONDS)
        used = cpu_s(supervisor.pid) - before
        code = supervisor.wait()
        ended = json.loads((Path(folder) / "watched/attempt/1/ended.json").read_text())
        assert code == ended["code"] == 0, f"the watched command failed: {ended}"
    share = used / SECONDS
    verdict = "PASS" if share <= GOAL else "FAIL"
    print(f"watching {RANKS} ranks at {STEPS_PER_S} steps/s: {share:.1%} of one core (goal {GOAL:.0%}) {verdict}")
    return verdict == "FAIL"


if __name__ == "__main__":
    sys.exit(main())
