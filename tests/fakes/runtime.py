"""A light runtime: jobs that are plain child processes, behind the actuator's port. Real effects, counted in a file.

A job's attempt is a shell that sleeps. What happens to it is written down by itself, one line each, so that what is
counted is the world and not what we believe of it. All other goals are a line in the same file: effect and proof are
one write. `hold` is called just before and just after each effect.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trainwarden.core.child import spawn
from trainwarden.core.errors import ActionError
from trainwarden.core.model import Json, Rung, Subject
from trainwarden.core.process import ProcessId, alive, identify

SCRIPT = """
mkdir "$1" || exit 3
trap 'trap "" TERM; echo "$2 stopped" >> "$3"; kill $!; exit 0' TERM
echo "$2 running" >> "$3"
echo $$ > "$1/pid.new" && mv "$1/pid.new" "$1/pid"
sleep 600 & wait
"""
"""Making the folder is the claim: of two that start the same attempt, one runs. The pid is told last."""

STARTS_S = 20.0
GOALS = ("evidence_collected", "checkpoint_taken", "stopped", "running", "verified")


class Children:
    """The actuator. check: raises FencedError when the fence is over."""

    goals = frozenset(GOALS)

    def __init__(
        self,
        folder: Path,
        check: Callable[[int], None] = lambda fence: None,
        hold: Callable[[str, str, str], None] = lambda point, job, goal: None,
    ) -> None:
        self._folder, self._check, self._hold = folder, check, hold
        self.pursued: list[tuple[str, str, int]] = []

    @property
    def effects(self) -> list[str]:
        """`<job> <goal>`, in the order in which they happened."""
        path = self._folder / "effects"
        return path.read_text().splitlines() if path.exists() else []

    def reached(self, rung: Rung) -> bool | None:
        job = rung.target.id
        if rung.goal == "stopped":
            process = self._process(job, rung.args["attempt"])
            return process is None or not alive(process)
        if rung.goal == "running":
            process = self._process(job, rung.args["attempt"])
            return process is not None and alive(process)
        return f"{job} {rung.goal}" in self.effects

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        job, goal = rung.target.id, rung.goal
        self.pursued.append((job, goal, fence))
        self._hold("before", job, goal)
        self._check(fence)
        if goal == "stopped":
            self._stop(job, rung.args["attempt"])
        elif goal == "running":
            self.begin(job, rung.args["attempt"])
        else:
            self._append(f"{job} {goal}")
        self._hold("after", job, goal)
        return {"fence": fence}

    def begin(self, job: str, attempt: Json) -> None:
        """Start an attempt and wait until it says that it runs."""
        folder = self._folder / f"{job}-{attempt}"
        spawn(["/bin/sh", "-c", SCRIPT, "sh", str(folder), job, str(self._folder / "effects")])
        self._until(lambda: (folder / "pid").exists(), f"{job}: attempt {attempt} does not start")

    def _stop(self, job: str, attempt: Json) -> None:
        process = self._process(job, attempt)
        if process is not None:
            os.kill(process.pid, signal.SIGTERM)
            self._until(lambda: not alive(process), f"{job}: attempt {attempt} does not stop")

    def _process(self, job: str, attempt: Json) -> ProcessId | None:
        with contextlib.suppress(OSError, ValueError):
            return identify(int((self._folder / f"{job}-{attempt}" / "pid").read_text()))
        return None

    def _append(self, line: str) -> None:
        file = os.open(self._folder / "effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)

    def _until(self, so: Callable[[], bool], otherwise: str) -> None:
        end_s = time.monotonic() + STARTS_S
        while not so():
            if time.monotonic() > end_s:
                raise ActionError(otherwise, retryable=True)
            time.sleep(0.01)


class Scripted:
    """An actuator of one goal that does what it is told: `reached` pops an answer, the last one stays."""

    def __init__(self, *answers: bool | None, pursue: Exception | Mapping[str, Json] | None = None) -> None:
        self.goals = frozenset({"running"})
        self._answers, self._pursue = list(answers), pursue
        self.calls: list[str] = []

    def reached(self, rung: Rung) -> bool | None:
        self.calls.append("reached")
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        self.calls.append(f"pursue {fence}")
        if isinstance(self._pursue, Exception):
            raise self._pursue
        return self._pursue or {}


def ladder(job: str, deadline_s: float = 30.0, goals: tuple[str, ...] = GOALS) -> tuple[Rung, ...]:
    """From attempt 1, which runs, to attempt 2."""
    args: Mapping[str, Mapping[str, Json]] = {"stopped": {"attempt": 1}, "running": {"attempt": 2}}
    target = Subject(kind="job", id=job)
    return tuple(Rung(goal=goal, target=target, args=args.get(goal, {}), deadline_s=deadline_s) for goal in goals)


@contextlib.contextmanager
def ended_after(folder: Path) -> Iterator[None]:
    """End every attempt below this folder when the block is left."""
    try:
        yield
    finally:
        for file in folder.glob("*/pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.killpg(pid := int(file.read_text()), signal.SIGKILL)
            with contextlib.suppress(ChildProcessError, ValueError):  # ours only if we began it
                os.waitpid(pid, 0)
