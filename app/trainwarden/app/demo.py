"""The demo: every built-in scenario on a real training, each judged by what was said, when, and about whom.

Each scenario is one `trainwarden run` in this process around one torchrun of examples/train.py. Faults from outside are
made here, by watching the step and signalling the rank; those inside the rank by the training itself, which logs when
they struck. The verdict comes from the notices a person got.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from trainwarden.app.run import Request, Supervisor
from trainwarden.app.wiring import acts, choose_policy, load_settings
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import JobId, Notice
from trainwarden.core.process import send
from trainwarden.rehearsal.faults import FAULTS_VARIABLE, LOG_VARIABLE, Strike, log_strike, read_strikes, to_json
from trainwarden.rehearsal.judging import Told, Verdict, judge
from trainwarden.rehearsal.scenario import Scenario

RANKS = 4
POLL_S = 0.1
AFTER_S = 2.0
"""How long a scenario goes on after everything expected was said: for false alarms to show themselves."""
LIMIT_S = 240.0
"""No scenario takes longer: two start-ups of 15 s, 15 s of training, 12 s of legal pauses, on a machine 4x slower."""
SIGNALS = {"process.kill": signal.SIGKILL, "process.stop": signal.SIGSTOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One rehearsed scenario."""

    scenario: Scenario
    verdict: Verdict
    final_loss: float | None
    wall_s: float
    folder: Path


@dataclass(slots=True)
class Listener:
    """A notifier in the terminal's place: keeps what a person is told, and when."""

    channel: str = "terminal"
    told: list[Told] = field(default_factory=list)

    def notify(self, notice: Notice) -> str:
        """Note the moment."""
        if notice.change != "resolved":
            self.told.append(Told.of(notice.incident, time.time_ns()))
        return notice.key


def find_training() -> Path:
    """examples/train.py of the clone that this is run from. Raises ConfigError."""
    here = Path(__file__).resolve()
    for folder in (Path.cwd(), *here.parents):
        if (folder / "examples" / "train.py").is_file():
            return folder / "examples" / "train.py"
    raise ConfigError("examples/train.py not found: the demo is run from a clone of the repository (make demo)")


class Rehearsal:
    """One scenario, from launch to verdict."""

    def __init__(self, scenario: Scenario, training: Path, folder: Path, policy: str) -> None:
        self._policy = choose_policy(policy)
        self.scenario, self._folder = scenario, folder / scenario.name
        self._folder.mkdir(parents=True)
        self._strikes, self._out = self._folder / "strikes.jsonl", self._folder / "out.json"
        self._listener = Listener()
        self._progress: list[tuple[int, int]] = []
        self._made: set[int] = set()
        self._done_ns: int | None = None
        self.supervisor = Supervisor(self._request(training), self._say)

    def run(self, look: Callable[[Supervisor], None]) -> Result:
        """Run it; `look` is called after each turn (the live view)."""
        began_s = time.monotonic()
        self.supervisor.start()
        stopped = False
        while self.supervisor.turn():
            self._see_step()
            self._make_faults()
            if not stopped and (self._all_said() or time.monotonic() - began_s > LIMIT_S):
                stopped = True
                self.supervisor.stop("demo")
            look(self.supervisor)
            time.sleep(POLL_S)
        self.supervisor.finish()
        return Result(
            scenario=self.scenario,
            verdict=self._verdict(),
            final_loss=self._final_loss(),
            wall_s=time.monotonic() - began_s,
            folder=self._folder,
        )

    def _request(self, training: Path) -> Request:
        config = self._folder / "config.yaml"
        config.write_text(yaml.safe_dump(dict(self.scenario.config)))
        inside = [fault for fault in self.scenario.faults if not fault.outside]
        env = {FAULTS_VARIABLE: to_json(self.scenario.faults), LOG_VARIABLE: str(self._strikes)} if inside else {}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
        script = [str(training), *self.scenario.arguments(self._folder / "checkpoints", self._out)]
        return Request(
            job=JobId(self.scenario.name),
            command=(*torchrun, "--nproc-per-node", str(RANKS), *script),
            state=self._folder / "state",
            settings=load_settings(config),
            env=env,
            show_output=False,
            terminal=self._listener,
            policy=self._policy,
            exact=True,
        )

    def _see_step(self) -> None:
        live = self.supervisor.server.line.live
        if live is not None and len(live.rows):
            step = int(live.rows["step"].max())
            if not self._progress or step > self._progress[-1][1]:
                self._progress.append((time.time_ns(), step))

    def _make_faults(self) -> None:
        for index, fault in enumerate(self.scenario.faults):
            if not fault.outside or index in self._made or not self._progress:
                continue
            step = self._progress[-1][1]
            rank = self.supervisor.ranks.get(-1 if fault.rank is None else fault.rank)
            if step >= fault.at_step and rank is not None:
                self._made.add(index)
                log_strike(self._strikes, Strike(fault=index, step=step, t_ns=time.time_ns(), rank=fault.rank))
                send(rank, SIGNALS[fault.kind])

    def _all_said(self) -> bool:
        """Whether everything expected was said, a little while ago; what expects nothing, or is repaired, runs on."""
        if acts(self._policy) or not self.scenario.expect or not self._verdict().ok:
            return False
        if self._done_ns is None:
            self._done_ns = time.time_ns()
        return time.time_ns() > self._done_ns + AFTER_S * 1e9

    def _verdict(self) -> Verdict:
        return judge(self.scenario, self._listener.told, read_strikes(self._strikes), self._progress)

    def _final_loss(self) -> float | None:
        try:
            return float(json.loads(self._out.read_text())["loss"])
        except (OSError, ValueError, KeyError):
            return None

    def _say(self, text: str) -> None:
        with (self._folder / "said.log").open("a") as file:
            file.write(text + "\n")


def rehearse(
    scenarios: Sequence[Scenario],
    look: Callable[[Scenario, Supervisor], None],
    done: Callable[[Result], None],
    policy: str,
) -> list[Result]:
    """Run scenarios one after the other in a fresh folder below the system's temporary one."""
    training = find_training()
    folder = Path(tempfile.mkdtemp(prefix="trainwarden-demo-"))
    results = []
    for scenario in scenarios:
        rehearsal = Rehearsal(scenario, training, folder, policy)
        results.append(rehearsal.run(partial(look, scenario)))
        done(results[-1])
    return results


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
