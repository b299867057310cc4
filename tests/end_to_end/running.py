"""A `trainwarden run` as a user starts it, and what it says, for the tests of this folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    def __init__(self, folder: Path, job: str, *command: str, config: str = "", cli: str = CLI) -> None:
        self.folder, self.job, self._cli = folder, job, cli
        self.path = folder / "state" / job
        self._config = folder / "config.yaml"
        self._config.write_text(config or "{}\n")
        self._command = command
        self.supervisor = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        """Start a (further) supervisor for the job."""
        options = ["--job", self.job, "--state", str(self.folder / "state"), "--config", str(self._config)]
        self.out, self.err = self.folder / "stdout", self.folder / "stderr"
        env = dict(os.environ)  # not what a C library (readline) put into our environment behind Python's back
        with self.out.open("ab") as out, self.err.open("ab") as err:
            return subprocess.Popen([self._cli, "run", *options, "--", *self._command], stdout=out, stderr=err, env=env)

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
        raise AssertionError(f"no {what} within {timeout_s} s; {self.story()}")

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

    def step(self) -> int:
        """The newest step that rank 0 printed, or -1."""
        steps = [line.split()[1] for line in _tail(self.path / "attempt/1/out.log").splitlines() if line[:5] == "step "]
        return int(steps[-1]) if steps else -1

    def rank(self, number: int) -> ProcessId:
        """The process of a rank, from its hello."""
        (file,) = (self.path / "hello").glob(f"rank-{number}-*.json")
        told = json.loads(file.read_text())
        return ProcessId(pid=told["pid"], start_time=told["start_time"])

    def launcher(self) -> ProcessId:
        """The launcher's process."""
        told = json.loads((self.path / "attempt/1/keeper.json").read_text())
        return ProcessId(pid=told["launcher_pid"], start_time=told["launcher_start_time"])

    def end(self) -> None:
        """Leave nothing running, whatever the test did."""
        if self.supervisor.poll() is None:
            self.supervisor.kill()
            self.supervisor.wait()
        for file in self.path.glob("attempt/*/keeper.json"):
            told = json.loads(file.read_text())
            for pid in (*descendants(told["pid"]), told["launcher_pid"], told["pid"]):
                process = identify(pid)
                if process is not None and alive(process):
                    os.kill(pid, signal.SIGKILL)


def _tail(file: Path) -> str:
    try:
        return file.read_text(errors="replace")[-6000:]
    except OSError:
        return "(absent)"
