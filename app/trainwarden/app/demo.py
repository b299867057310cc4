"""The demo: every built-in scenario on a real training, each judged by what was said, when, and about whom.

Each scenario is one `trainwarden run` in this process around one torchrun of examples/train.py. Faults from outside are
made here, by watching the step; those inside the rank by the training itself, which logs when they struck. The verdict
comes from the notices a person got, and from what the attempts and the journal say was done.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from trainwarden.app.folders import JobFolder
from trainwarden.app.repaired import read_loss, read_repaired
from trainwarden.app.run import Request, Supervisor
from trainwarden.app.wiring import acts, choose_policy, load_settings
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import JobId, Notice
from trainwarden.core.process import send
from trainwarden.rehearsal.damage import newest_published, spoil
from trainwarden.rehearsal.faults import FAULTS_VARIABLE, LOG_VARIABLE, Fault, Strike, log_strike, read_strikes, to_json
from trainwarden.rehearsal.judging import Repaired, Told, Verdict, judge
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
    repaired: Repaired
    compared: bool
    """Whether repair and loss were judged: not in a run that only observes."""
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

    def __init__(
        self, scenario: Scenario, training: Path, folder: Path, policy: str, losses: Mapping[str, str | None]
    ) -> None:
        """losses: final ones of the scenarios before, to the last bit."""
        self._policy, self._losses = choose_policy(policy), losses
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
        loss, repaired = read_loss(self._out), self._repaired()
        return Result(
            scenario=self.scenario,
            verdict=self._verdict(repaired if acts(self._policy) else None),
            repaired=repaired,
            compared=acts(self._policy),
            final_loss=None if loss is None else loss[0],
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
        """In their order: one waits for those before it."""
        due = ((n, one) for n, one in enumerate(self.scenario.faults) if one.outside and n not in self._made)
        index, fault = next(due, (0, None))
        if fault is None or not self._progress or self._progress[-1][1] < fault.at_step:
            return
        strike = Strike(fault=index, step=self._progress[-1][1], t_ns=time.time_ns(), rank=fault.rank)
        if self._make(fault):
            self._made.add(index)
            log_strike(self._strikes, strike)

    def _make(self, fault: Fault) -> bool:
        """False: it cannot be made yet."""
        if fault.kind == "checkpoint.corrupt":
            checkpoint = newest_published(self.supervisor.repair.root / "published", int(fault.number("step")))
            if checkpoint is not None:
                spoil(checkpoint)
            return checkpoint is not None
        rank = self.supervisor.ranks.get(-1 if fault.rank is None else fault.rank)
        if rank is not None:
            send(rank, SIGNALS[fault.kind])
        return rank is not None

    def _all_said(self) -> bool:
        """Whether everything expected was said, a little while ago; what expects nothing, or is repaired, runs on."""
        if acts(self._policy) or not self.scenario.expect or not self._verdict().ok:
            return False
        if self._done_ns is None:
            self._done_ns = time.time_ns()
        return time.time_ns() > self._done_ns + AFTER_S * 1e9

    def _verdict(self, repaired: Repaired | None = None) -> Verdict:
        strikes = read_strikes(self._strikes)
        return judge(self.scenario, self._listener.told, strikes, self._progress, repaired, self._losses)

    def _repaired(self) -> Repaired:
        meant = {expected.fault for expected in self.scenario.expect}
        struck_ns = min((one.t_ns for one in read_strikes(self._strikes) if one.fault in meant), default=None)
        job, loss = JobId(self.scenario.name), read_loss(self._out)
        folder = JobFolder(path=self._folder / "state" / job, job=job)
        return read_repaired(folder, struck_ns, self._progress, None if loss is None else loss[1])

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
    results: list[Result] = []
    for scenario in scenarios:
        losses = {one.scenario.name: one.repaired.final_loss for one in results}
        rehearsal = Rehearsal(scenario, training, folder, policy, losses)
        results.append(rehearsal.run(partial(look, scenario)))
        done(results[-1])
    return results


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
