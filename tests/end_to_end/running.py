"""A `trainwarden run` as a user starts it, and what it says, for the tests of this folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainwarden.app.store import Store
from trainwarden.core.codec import loads
from trainwarden.core.model import Outcome
from trainwarden.core.process import ProcessId, alive, descendants, identify

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "4",
    "--max-restarts",
    "0",
]
TRAIN = str(ROOT / "examples" / "train.py")
CLI = str(Path(sys.executable).parent / "trainwarden")


class Running:
    """One or more `trainwarden run` of one job, one after the other."""

    def __init__(
        self,
        folder: Path,
        job: str,
        *command: str,
        config: str = "",
        policy: str = "",
        cli: str = CLI,
        more: Sequence[str] = (),
    ) -> None:
        """config: settings. policy: the name of a shipped one, or rules; both as they would stand in a file. more:
        options of `trainwarden run`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.job, self._cli = folder, job, cli
        self.state = folder / "state"
        self.path = self.state / job
        self._policy = policy
        if "\n" in policy:
            (folder / "policy.yaml").write_text(policy)
            self._policy = str(folder / "policy.yaml")
        self._config = folder / "config.yaml"
        self._config.write_text(config or "{}\n")
        self._command, self._more = command, tuple(more)
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self.supervisor = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        """Start a (further) supervisor for the job."""
        options = ["--job", self.job, "--state", str(self.state), "--config", str(self._config), *self._more]
        options += ["--policy", self._policy] if self._policy else []
        self.out, self.err = self.folder / "stdout", self.folder / "stderr"
        env = dict(os.environ)  # not what a C library (readline) put into our environment behind Python's back
        with self.out.open("ab") as out, self.err.open("ab") as err:
            line = [self._cli, "run", *options, "--", *self._command]
            self._supervisors.append(subprocess.Popen(line, stdout=out, stderr=err, env=env))
        return self._supervisors[-1]

    def wait(self, timeout_s: float = 60.0) -> int:
        """Exit status of the newest supervisor."""
        try:
            return self.supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; {self.story()}") from None

    def until(self, what: str, found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Poll until `found` gives something; fails with the run's own words."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if answer := found():
                return answer
            time.sleep(0.02)
        ended = self.supervisor.poll()
        raise AssertionError(f"no {what} within {timeout_s} s (supervisor: {ended}); {self.story()}")

    def story(self) -> str:
        """What was written so far, for failures."""
        return "\n".join(
            f"--- {file.name}\n{_tail(file)}" for file in (self.out, self.err, self.path / "notices.jsonl")
        )

    def notices(self, kind: str | None = None, change: str | None = None) -> list[dict[str, Any]]:
        """The notices in notices.jsonl."""
        try:
            lines = (self.path / "notices.jsonl").read_text().splitlines()
        except OSError:
            return []
        all_ = [json.loads(line) for line in lines]
        return [n for n in all_ if kind in (None, n["incident"]["kind"]) and change in (None, n["change"])]

    def tell(self, *command: str) -> str:
        """Another command of ours about this job, as a person would type it; what it prints."""
        line = [self._cli, *command, "--job", self.job, "--state", str(self.state)]
        ran = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def journal(self) -> list[Any]:
        """What was journalled so far, in order."""
        file = self.path / "journal.sqlite"
        if not file.exists():
            return []
        store = Store(file)
        try:
            return [loads(row.text) for row in store.tail()]
        finally:
            store.close()

    def outcomes(self, index: int | None = None) -> list[Outcome]:
        """How rungs and plans ended so far; index: only of these rungs, -1 of plans."""
        ends = [thing for thing in self.journal() if isinstance(thing, Outcome)]
        return [one for one in ends if index in (None, one.index)]

    def attempts(self) -> list[int]:
        """Numbers of the attempts there are."""
        return sorted(int(path.name) for path in (self.path / "attempt").glob("[0-9]*"))

    def told(self, attempt: int) -> dict[str, Any]:
        """What the ranks of an attempt were told."""
        told: dict[str, Any] = json.loads((self.path / "attempt" / str(attempt) / "attempt.json").read_text())
        return told

    def published(self) -> list[str]:
        """Names of the checkpoints that stand published."""
        return sorted(path.name for path in (self.path / "checkpoints" / "published").glob("step-*"))

    def step(self, attempt: int = 1) -> int:
        """The newest step that rank 0 of an attempt printed, or -1."""
        lines = _tail(self.path / f"attempt/{attempt}/out.log").splitlines()
        steps = [words[1] for words in map(str.split, lines) if words[:1] == ["step"] and words[1:]]
        return int(steps[-1]) if steps else -1

    def rank(self, number: int, attempt: int = 1) -> ProcessId:
        """The process of a rank, from its hello."""
        (file,) = (self.path / "hello").glob(f"rank-{number}-{attempt}-*.json")
        told = json.loads(file.read_text())
        return ProcessId(pid=told["pid"], start_time=told["start_time"])

    def launcher(self) -> ProcessId:
        """The launcher's process."""
        told = json.loads((self.path / "attempt/1/keeper.json").read_text())
        return ProcessId(pid=told["launcher_pid"], start_time=told["launcher_start_time"])

    def end(self) -> None:
        """Leave nothing running, whatever the test did."""
        for supervisor in self._supervisors:
            if supervisor.poll() is None:
                supervisor.kill()
                supervisor.wait()
        for number in self.attempts():
            told = self._keeper(number)
            if told is None:
                continue
            for pid in (*descendants(told["pid"]), told["launcher_pid"], told["pid"]):
                process = identify(pid)
                if process is not None and alive(process):
                    os.kill(pid, signal.SIGKILL)

    def _keeper(self, attempt: int) -> dict[str, int] | None:
        """Who keeps an attempt, waited for: it may have been issued just before the supervisor was ended."""
        folder = self.path / "attempt" / str(attempt)
        end_s = time.monotonic() + 5.0
        while not (folder / "keeper.json").exists() and not (folder / "exits.jsonl").exists():
            if time.monotonic() > end_s:
                return None
            time.sleep(0.02)
        try:
            told: dict[str, int] = json.loads((folder / "keeper.json").read_text())
        except FileNotFoundError:
            return None
        return told


def _tail(file: Path) -> str:
    try:
        return file.read_text(errors="replace")[-6000:]
    except OSError:
        return "(absent)"
