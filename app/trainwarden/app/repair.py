"""Everything that repairs one job on this host, put together: actuators, durable plans, checkpoints, the switches.

Plans run in threads of the carrier. What they read here the main loop only replaces; what they want said goes through
announcements; how they ended is drained by the main loop at every turn.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainwarden.app.attempts import Attempts
from trainwarden.app.carrier import Carrier
from trainwarden.app.carry import Guard, Permit, Work
from trainwarden.app.evidence import Evidence
from trainwarden.app.folders import JobFolder
from trainwarden.app.history import History, own_work_ratio_R
from trainwarden.app.host import Announcements, LocalHost
from trainwarden.app.publisher import Publisher
from trainwarden.app.store import Store
from trainwarden.app.watched import Watched
from trainwarden.core.clock import unix_ns
from trainwarden.core.control import RESUME, Block, close_blocks, open_blocks, post
from trainwarden.core.errors import ActionError
from trainwarden.core.model import Checkpoint, Frame, Incident, Json, Outcome, Plan, Rung, StepMatrix
from trainwarden.core.ports import Actuator, Notifier, Witness
from trainwarden.core.records import FEATURES, attempt_of, restart_of
from trainwarden.remediation.checkpoints.dcp import DcpStore
from trainwarden.remediation.losttime import Instants, lost_s
from trainwarden.remediation.plans import next_step, paused, whole
from trainwarden.remediation.requests import Requests
from trainwarden.remediation.resumed import Origin
from trainwarden.remediation.runtimes.torchrun import Torchrun
from trainwarden.remediation.verify import Verification, VerificationConfig

STOP_ALL = "stop-all"
"""Name of the switch: a file of this name in STATE/<job>/ or STATE/ switches all actions off."""


_OF_THE_STATE = ("loss", "grad_norm", "finite", "resume")
"""Checks that speak against the checkpoint; a step time does not."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the main loop sees, replaced as a whole and read by plans."""

    watched: Watched
    live: Frame | None = None
    last: StepMatrix | None = None
    world_size: int = 0
    incidents: Mapping[str, Incident] = field(default_factory=dict)
    """The server's own; a plan begins at the very tick that opened its incident."""


class Repair:
    """One job's repairs."""

    def __init__(
        self,
        *,
        folder: JobFolder,
        term: int,
        attempts: Attempts,
        witness: Witness,
        seen: Seen,
        exact: bool,
        attached: bool,
        broken: Guard,
        notifiers: Mapping[str, Notifier],
        say: Callable[[str], None],
    ) -> None:
        self.seen, self.announcements = seen, Announcements()
        self.recovered: Callable[[Mapping[str, float]], None] | None = None
        """Told where the time of a verified recovery went."""
        self._folder, self._term = folder, term
        self._store = Store(folder.path / "journal.sqlite")
        self.root = folder.path / "checkpoints"
        self.history = History(missed=seen.watched.attempt.number if attached else -1)
        self.publisher = Publisher(self.root, folder.job, self._check, say)
        self._say = say
        self._lost: dict[str, Instants] = {}
        """By plan: when what happened."""
        self._started: dict[str, Plan] = {}
        """By id, those that have not ended."""
        self._plans: dict[int, Plan] = {}
        """By the attempt that they start."""
        host = LocalHost(
            folder=folder,
            attempts=attempts,
            checkpoints=self.root,
            announcements=self.announcements,
            watched=lambda: self.seen.watched,
            live=lambda: self.seen.live,
            world_size=lambda: self.seen.world_size,
            check=self._check,
        )
        actuators: Sequence[Actuator] = (
            Evidence(witness, folder.path / "evidence", lambda: self.seen.world_size),
            Requests(self._blocks, self._published, self._step_s, self._check),
            Torchrun(host),
            _WhileItLives(
                Verification(self.history, self._origin, own_work_ratio_R, VerificationConfig(exact=exact)), seen
            ),
        )
        work = Work(
            actuators={goal: actuator for actuator in actuators for goal in actuator.goals},
            guard=Permit(self._store, folder.job, switches=self.switches, also=[broken]),
            next_step=next_step,
            whole=whole,
            settle=self._settle,
        )
        self.carrier = Carrier(folder.path, term, work, notifiers)

    @property
    def switches(self) -> tuple[Path, Path]:
        """Files that switch all actions off: of this job, of all jobs below STATE."""
        return self._folder.path / STOP_ALL, self._folder.path.parent / STOP_ALL

    def note(self, matrix: StepMatrix) -> None:
        """A step has closed."""
        self.seen.last = matrix
        self.seen.world_size = len(matrix.seen_R)
        self.history.add(matrix)
        self.publisher.note(matrix)

    def start(self, plan: Plan) -> None:
        """Carry a plan out."""
        incident = self.seen.incidents.get(plan.incident)
        onset_ns = unix_ns() if incident is None else incident.onset_ns
        opened_ns = None if incident is None else onset_ns + int(incident.lost_s.get("detect", 0.0) * 1e9)
        self._lost[plan.id] = Instants(onset_ns=onset_ns, noticed_ns=opened_ns, planned_ns=unix_ns())
        for rung in plan.ladder:
            if rung.goal == "running":
                self._plans[int(str(rung.args["attempt"]))] = plan
        if plan.mode == "approve":
            self._say(f"plan {plan.id} waits for a person: trainwarden approve {plan.id} --job {self._folder.job}")
        self._started[plan.id] = plan
        self.carrier.start(plan)

    def look(self, now_ns: int) -> list[Outcome]:
        """At every turn: publish what can be, and how rungs and plans ended since."""
        attempt = self.seen.watched.attempt.number
        self.publisher.look(attempt, self.seen.world_size, {"world_size": self.seen.world_size}, now_ns)
        outcomes = self.carrier.drain()
        for outcome in outcomes:
            self._distrust(outcome)
            self._account(outcome)
            self._say_end(outcome)
        return outcomes

    def began(self, hello_ns: int) -> None:
        """The attempt that a plan issued has said its first hello."""
        plan = self._plans.get(self.seen.watched.attempt.number)
        if plan is not None and plan.id in self._lost:
            started_ns = self.seen.watched.started_ns
            self._lost[plan.id] = replace(self._lost[plan.id], started_ns=started_ns, hello_ns=hello_ns)

    def close(self) -> None:
        """Leave everything where it stands."""
        self.carrier.close()
        self.publisher.close()
        self._store.close()

    def _distrust(self, outcome: Outcome) -> None:
        """A checkpoint from which the training did not resume as recorded is not to be taken again."""
        plan = self._started.get(outcome.plan)
        if plan is None or outcome.index < 0 or plan.ladder[outcome.index].goal != "verified":
            return
        name = self.publisher.in_use
        if outcome.result == "failed" and name is not None and any(one in outcome.reason for one in _OF_THE_STATE):
            DcpStore(self.root, self._folder.job).mark(name, "distrusted", outcome.reason[:500])

    def _say_end(self, outcome: Outcome) -> None:
        """How a plan ended, unless it was only written down."""
        if outcome.index != -1:
            return
        self._lost.pop(outcome.plan, None)
        plan = self._started.pop(outcome.plan, None)
        if plan is not None and (plan.mode != "observe" or plan.why):
            self._say(f"plan {outcome.plan} is over: {outcome.result}: {plan.why or outcome.reason}")

    def _account(self, outcome: Outcome) -> None:
        """Where the time went, said and kept when a plan has been verified."""
        plan = self._started.get(outcome.plan)
        if plan is None or outcome.index < 0 or plan.id not in self._lost:
            return
        match plan.ladder[outcome.index].goal, outcome.result in ("reached", "already"):
            case "stopped", True:
                self._lost[plan.id] = replace(self._lost[plan.id], stopped_ns=unix_ns())
            case "verified", True:
                begun, normal = (outcome.found.get(key) for key in ("begun_ns", "normal_ns"))
                instants = replace(
                    self._lost.pop(plan.id),
                    begun_ns=begun if isinstance(begun, int) else None,
                    normal_ns=normal if isinstance(normal, int) else None,
                )
                spent = lost_s(instants)
                if self.recovered is not None:
                    self.recovered(spent)
                self._say(f"recovered; lost {', '.join(f'{phase} {s:.1f} s' for phase, s in spent.items())}")
                folder = self._folder.path / "evidence" / plan.incident.replace("/", "_")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "lost.json").write_text(json.dumps(spent))

    # in the threads of plans

    def _settle(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Ranks that a plan left waiting go on."""
        blocks = self._blocks() if paused(plan, outcomes) else []
        try:
            if blocks:
                post(blocks, code=RESUME)
        finally:
            close_blocks(blocks)

    def _check(self) -> None:
        self._store.check(self._folder.job, self._term)

    def _blocks(self) -> list[Block]:
        live, root = self.seen.live, self.seen.watched.attempt.ring_root
        attempt = self.seen.watched.attempt.number
        if live is None or live.epoch is None or attempt_of(live.epoch) != attempt or root is None:
            return []
        return open_blocks(root / self._folder.job / "rings", attempt, restart_of(live.epoch))

    def _published(self) -> int:
        attempt = self.seen.watched.attempt.number
        steps = [one.step for one in self._catalogue() if attempt_of(one.epoch) == attempt]
        return max(steps, default=-1)

    def _catalogue(self) -> Sequence[Checkpoint]:
        return DcpStore(self.root, self._folder.job).catalogue(self._folder.job)

    def _step_s(self) -> float:
        last = self.seen.last
        if last is None:
            return 0.0
        return float(last.values_FR[FEATURES.index("step_s")][last.seen_R].max())

    def _origin(self, rung: Rung) -> Origin:
        attempt = int(str(rung.args["attempt"]))
        plan = self._plans[attempt]
        running = next(one for one in plan.ladder if one.goal == "running")
        told = self._folder.attempt(attempt).told()
        before = running.args.get("before_ns")
        incident = self.seen.incidents.get(plan.incident)
        name = None if told["checkpoint"] is None else Path(told["checkpoint"]).name
        return Origin(
            kind=plan.rule,
            onset_ns=plan.deadline_ns if incident is None else incident.onset_ns,
            before_ns=before if isinstance(before, int) else None,
            checkpoint=next((one for one in self._catalogue() if one.name == name), None),
            skip=tuple((int(first), int(last)) for first, last in told["skip"]),
            ended=attempt == self.seen.watched.attempt.number and self.seen.watched.code == 0,
        )


class _WhileItLives:
    """Verification, which ends at once when the attempt has died: a second fault is the next plan's business."""

    goals = Verification.goals

    def __init__(self, verification: Verification, seen: Seen) -> None:
        self._verification, self._seen = verification, seen

    def reached(self, rung: Rung) -> bool | None:
        """As Verification. Raises ActionError."""
        result = self._verification.reached(rung)
        watched = self._seen.watched
        mine = watched.attempt.number == rung.args["attempt"]
        if result is None and mine and watched.processes.launcher_ended and watched.code != 0 and not watched.lives:
            raise ActionError(f"attempt {watched.attempt.number} ended before it was verified", retryable=True)
        return result

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        """As Verification."""
        return self._verification.pursue(rung, fence)

    def found(self, rung: Rung) -> Mapping[str, Json]:
        """What was found, also when it was reached at the first look."""
        return self._verification.pursue(rung, 0)
