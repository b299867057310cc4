"""Incidents in, plans out: what may be done now, by whose leave, one plan a job at a time. Pure: no clock, no I/O.

An incident is planned when a finding of its cause is final, the loudest first. What stands against a plan is a guard
(policy.py): it makes the plan wait, or refuses it. A refused plan still leaves, in mode observe and with the reason
(Plan.why), so that the ledger has it; it is not tried again until its incident changes or comes back, or a person
resumes. While a plan runs everything else waits; what was restarted by then needs no plan of its own. A plan that has
done nothing yet is withdrawn when its incident is over, its verdict has changed, or something louder has come.

All is decided at ticks: of incidents several may change at once (two become one), and an outcome tells no time. Only
what a person says is passed on at once.

Commands: command.approve and command.deny name a plan. command.stop_all switches all actions off until command.stop_all
with plan "resume", which also closes the breaker. Stopping is always heard; what allows something must not be past its
expires_ns. An attempt that is being stopped by anybody else than a plan is a person's business: nothing is planned.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from trainwarden.core.model import (
    Event,
    Finding,
    Incident,
    Instruction,
    JobId,
    Json,
    Outcome,
    Plan,
    Rung,
    Start,
    State,
    Stimulus,
    Tell,
    Tick,
)
from trainwarden.remediation.budgets import ns_of
from trainwarden.remediation.guards import UNTIL_RESUMED, UNTIL_REVISED, Guards
from trainwarden.remediation.plans import BY_PLAN, DONE, EFFECTS, LEAVES_OUT, Facts, ladder, rungs_ns
from trainwarden.remediation.policy import Policy
from trainwarden.remediation.trouble import Running, Trouble

RESUME: Final = "resume"
"""The plan that command.stop_all names to switch actions on again."""

KEPT: Final = 5000
"""Open incidents and numbers of plans that are remembered: as many as alerts keeps."""

_NEWS: Final = frozenset({"attempt.started", "attempt.stopping", "hello", "command.stop_all"})
"""Kinds of events that may change what is planned."""

_PLAIN: Final = ("now_ns", "attempt", "fence", "due_ns", "news", "halted")
"""Attributes that a snapshot holds as they are."""


class Repairs:
    """The machine that decides what is done about one job."""

    def __init__(self, policy: Policy, job: JobId) -> None:
        self._policy, self._job = policy, job
        self.refusals: Counter[str] = Counter()
        """By guard: plans refused; `command`: commands that meant nothing (any more)."""
        self._now_ns = self._attempt = self._fence = 0
        self._due_ns: int | None = None
        self._news = False
        """Whether anything that matters came since the last tick."""
        self._guards = Guards(policy)
        self._skip: tuple[tuple[int, int], ...] = ()
        self._troubles: dict[str, Trouble] = {}
        """By incident, those that are not resolved."""
        self._numbers: dict[str, int] = {}
        """By incident: plans made."""
        self._running: Running | None = None
        self._halted = ""
        """Who stops the running attempt."""

    def handle(self, stimulus: Stimulus) -> Sequence[Instruction]:
        """Take the next stimulus, in order, and say what is to be done about it."""
        match stimulus:
            case Incident() if stimulus.job == self._job:
                self._take(stimulus)
            case Outcome():
                self._follow(stimulus)
            case Finding():
                self._pass_time(stimulus.seen_ns)
            case Event():
                self._pass_time(stimulus.seen_ns)
                return self._hear(stimulus) if stimulus.job in (None, self._job) else []
            case Tick():
                self._pass_time(stimulus.seen_ns)
                self._news = False
                return [*self._withdrawn(), *self._planned()]
        return []

    def due_ns(self) -> int | None:
        """At once when there is news; else when a plan that waits may start."""
        return self._now_ns if self._news else self._due_ns

    def _pass_time(self, seen_ns: int) -> None:
        self._now_ns = max(self._now_ns, seen_ns)
        self._guards.budgets.pass_time(self._now_ns)
        if self._running is not None and self._running.end is not None:
            self._finish(self._running, self._running.end)

    # what is heard

    def _take(self, incident: Incident) -> None:
        self._news = True
        known = self._troubles.pop(incident.id, None)
        if incident.state == "resolved":
            return
        trouble = Trouble.of(incident, self._attempt) if known is None else known.revised(incident, UNTIL_REVISED)
        culprit = incident.culprit
        if culprit is not None and culprit.kind == "rank" and trouble.struck_in == self._attempt:
            trouble.slot = self._guards.slots.of_rank(culprit.id)
        self._troubles[incident.id] = trouble
        if len(self._troubles) > KEPT:
            self._troubles.pop(next(iter(self._troubles)))

    def _hear(self, event: Event) -> list[Tell]:
        data = event.data
        self._news |= event.kind in _NEWS
        match event.kind:
            case "attempt.started":
                self._begin(_whole(data["attempt"]))
                self._fence = max(self._fence, _whole(data["term"]))
                self._guards.slots.know(_texts(data.get("slots")))
            case "hello" if _whole(data["attempt"]) >= self._attempt:
                self._begin(_whole(data["attempt"]))
                self._guards.slots.seat(_whole(data["rank"]), str(data["slot"]), _whole(data["world_size"]))
            case "attempt.stopping" if _whole(data["attempt"]) >= self._attempt:
                return self._stopping(event, str(data["by"]))
            case "command.stop_all":
                return self._switch(event)
            case "command.approve" | "command.deny":
                return self._decided(event)
        return []

    def _begin(self, attempt: int) -> None:
        if attempt > self._attempt:
            self._attempt, self._halted = attempt, ""
            self._guards.slots.begin()

    def _stopping(self, event: Event, by: str) -> list[Tell]:
        if by.startswith(BY_PLAN):
            return []
        self._halted = by
        return self._tell(event, "stop_all", {"who": by, "why": "the job is being stopped"})

    def _switch(self, event: Event) -> list[Tell]:
        if event.data["plan"] != RESUME:
            self._guards.stop_all = f"{event.data['who']}: {event.data['why']}"
            return self._tell(event, "stop_all", event.data)
        if not self._allows(event):
            return []
        self._guards.resume(self._now_ns)
        for trouble in self._troubles.values():
            if trouble.settled in UNTIL_RESUMED:
                trouble.settled = ""
        return []

    def _decided(self, event: Event) -> list[Tell]:
        verb = event.kind.removeprefix("command.")
        run = self._running
        if run is None or event.data["plan"] != run.plan.id or not run.listens:
            self.refusals["command"] += 1
            return []
        return self._tell(event, verb, event.data) if verb == "deny" or self._allows(event) else []

    def _allows(self, event: Event) -> bool:
        valid = _whole(event.data["expires_ns"]) > self._now_ns
        self.refusals["command"] += not valid
        return valid

    def _tell(self, event: Event, verb: str, said: Mapping[str, Json]) -> list[Tell]:
        run = self._running
        if run is None or not run.listens:
            return []
        run.dismissed |= verb != "approve"
        message = {"verb": verb, **{key: said.get(key) for key in ("who", "why", "expires_ns")}}
        return [Tell(key=f"{event.source}/{event.seq}", plan=run.plan.id, message=message)]

    # the running plan

    def _follow(self, outcome: Outcome) -> None:
        run = self._running
        if run is None or outcome.plan != run.plan.id:
            return
        if outcome.index == -1:
            run.end, self._news = outcome, True
        elif run.plan.mode != "observe":
            run.tried |= outcome.result != "refused"
            rung = run.plan.ladder[outcome.index]
            if outcome.result in DONE:
                run.reached |= {rung.goal}
                self._adopt(rung)

    def _adopt(self, rung: Rung) -> None:
        """What the job runs without, it runs without from now on."""
        if rung.goal == "running":
            self._guards.slots.leave_out(_texts(rung.args["without"]))
            self._skip = _pairs(rung.args["skip"])

    def _finish(self, run: Running, end: Outcome) -> None:
        self._running = None
        plan, verb = run.plan, str(end.found.get("verb", ""))
        if plan.mode == "observe":
            return
        if verb == "withdraw" or not (run.tried or end.retryable):
            self._guards.budgets.give_back(plan.id)
            if end.retryable and not verb:  # refused from outside (a switch, a journal): not at every tick again
                self._guards.budgets.rest(plan.rule, self._now_ns)
        else:
            failed, reached = end.result in ("failed", "expired"), end.result in DONE
            self._guards.budgets.settle(plan.rule, failed=failed, reached=reached, now_ns=self._now_ns)
        trouble = self._troubles.get(plan.incident)
        if trouble is None or verb == "withdraw":
            return
        if end.retryable:
            trouble.attempt, trouble.retry = self._attempt, trouble.retry or bool(run.reached & EFFECTS)
        else:
            trouble.settled = verb or end.result

    def _withdrawn(self) -> list[Tell]:
        run = self._running
        if run is None or not run.listens or run.dismissed or run.reached & EFFECTS:
            return []
        why = self._pointless(run.plan)
        if not why:
            return []
        run.dismissed = True
        message: dict[str, Json] = {"verb": "withdraw", "who": "trainwarden", "why": why, "expires_ns": None}
        return [Tell(key=f"{run.plan.id}/withdraw", plan=run.plan.id, message=message)]

    def _pointless(self, plan: Plan) -> str:
        trouble = self._troubles.get(plan.incident)
        if trouble is None:
            return "its incident is over"
        if not self._is_ripe(trouble):
            return "its incident is not certain any more, or the job was started anew"
        if self._ladder(trouble) != plan.ladder:
            return f"the verdict was revised: {trouble.incident.reason}"
        for other in self._ripe():
            rule = self._policy.rules[other.incident.kind]
            louder = other.incident.tier > trouble.incident.tier and rule.mode != "observe"
            if louder and self._guards.first(other, self._now_ns, but=plan.id) is None:
                return f"{other.incident.kind} is louder: {other.incident.reason}"
        return ""

    # the next plan

    def _planned(self) -> list[Start]:
        self._due_ns = None
        for trouble in self._ripe() if self._running is None else ():
            rule = self._policy.rules[trouble.incident.kind]
            guard = self._guards.first(trouble, self._now_ns)
            waits_ns = 0 if guard is None else guard.until_ns - self._now_ns
            if rule.mode == "observe":
                trouble.settled = "observe"
                return [self._start(trouble, "observe", "" if guard is None else f"it would be refused: {guard.why}")]
            if guard is None:
                return [self._start(trouble, rule.mode)]
            if waits_ns <= ns_of(self._policy.limits.patience):
                self._due_ns = min(guard.until_ns, self._due_ns or guard.until_ns)
            elif trouble.refuse(guard.name):
                self.refusals[guard.name] += 1
                return [self._start(trouble, "observe", f"refused: {guard.why}")]
        return []

    def _ripe(self) -> list[Trouble]:
        """What can be planned, the loudest first."""
        ripe = [trouble for trouble in self._troubles.values() if self._is_ripe(trouble)]
        return sorted(ripe, key=lambda one: (-one.incident.tier, one.incident.onset_ns, one.incident.id))

    def _is_ripe(self, trouble: Trouble) -> bool:
        if trouble.settled or self._halted or trouble.incident.kind not in self._policy.rules:
            return False
        if not (trouble.certain or trouble.retry):
            return False
        here = trouble.incident.kind in LEAVES_OUT and self._guards.slots.used(trouble.slot)
        return here or trouble.attempt >= self._attempt

    def _ladder(self, trouble: Trouble) -> tuple[Rung, ...]:
        without = self._guards.without(trouble, self._now_ns)
        facts = Facts(job=self._job, attempt=self._attempt, without=without, skip=self._skip)
        return ladder(trouble.incident, facts, self._policy.rules[trouble.incident.kind].rungs)

    def _start(self, trouble: Trouble, mode: Literal["observe", "approve", "act"], why: str = "") -> Start:
        incident, rungs = trouble.incident, self._ladder(trouble)
        rule = self._policy.rules[incident.kind]
        waits_ns = ns_of(rule.approval) if mode == "approve" else 0
        plan = Plan(
            id=f"{incident.id}/plan-{self._number(incident.id)}",
            incident=incident.id,
            rule=incident.kind,
            mode=mode,
            fence=self._fence,
            deadline_ns=self._now_ns + waits_ns + rungs_ns(rungs),
            ladder=rungs,
            why=why,
        )
        self._running = Running(plan=plan)
        if mode != "observe":
            self._guards.book(trouble, plan.id, self._now_ns)
        return Start(plan=plan)

    def _number(self, incident: str) -> int:
        number = self._numbers.pop(incident, 0) + 1
        self._numbers[incident] = number
        if len(self._numbers) > KEPT:
            self._numbers.pop(next(iter(self._numbers)))
        return number

    # snapshots

    def snapshot(self) -> State:
        """Everything that decides what comes next, as JSON values."""
        return {
            **{name: getattr(self, f"_{name}") for name in _PLAIN},
            "refusals": dict(self.refusals),
            "skip": [list(batches) for batches in self._skip],
            "numbers": dict(self._numbers),
            "troubles": [trouble.snapshot() for trouble in self._troubles.values()],
            "running": None if self._running is None else self._running.snapshot(),
            "guards": self._guards.snapshot(),
        }

    def restore(self, state: State) -> None:
        """Take up what snapshot gave."""
        for name in _PLAIN:
            setattr(self, f"_{name}", state[name])
        self.refusals = Counter(state["refusals"])
        self._skip = _pairs(state["skip"])
        self._numbers = dict(state["numbers"])
        troubles = [Trouble.restored(saved) for saved in state["troubles"]]
        self._troubles = {trouble.incident.id: trouble for trouble in troubles}
        self._running = None if state["running"] is None else Running.restored(state["running"])
        self._guards.restore(state["guards"])


def _whole(value: Json) -> int:
    return value if isinstance(value, int) else 0


def _texts(value: Json) -> list[str]:
    return [str(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


def _pairs(value: Json) -> tuple[tuple[int, int], ...]:
    pairs = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return tuple((_whole(one[0]), _whole(one[1])) for one in pairs if isinstance(one, Sequence))
