"""Findings in, incidents and notices out: one cause, one incident, one tier. Pure: no clock, no I/O, no thread.

Each new finding opens a case of its own; then cases of one job and epoch become one when a finding of the one explains
the cause of the other (the older keeps its id, so a culprit is revised, never reported twice). A trouble that comes
back soon reopens its incident. Many ranks accused of the same at once, with nothing in common, accuse the measurement.
Time is what the stimuli say, so a replay of the same stimuli gives the same instructions.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from trainwarden.alerts.case import Case
from trainwarden.alerts.casebook import Casebook
from trainwarden.alerts.mass import Crowd, MassConfig, counts
from trainwarden.alerts.routes import RoutesConfig
from trainwarden.alerts.saved import event_from, plan_from
from trainwarden.alerts.telling import Teller
from trainwarden.alerts.tiers import Tiers, row_of, standard_tiers
from trainwarden.alerts.verdict import named_in, start_of
from trainwarden.core.codec import dumps
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import (
    Event,
    Finding,
    Incident,
    Instruction,
    Look,
    Outcome,
    Plan,
    Start,
    State,
    Stimulus,
    Tick,
)

TOLD_EVENTS = frozenset({"process.exit", "launcher.failure", "oom.kill", "stack", "attempt.ended"})
"""Kinds of events that an incident keeps."""

EVENTS_MAX = 64
"""Events that one incident keeps, the first ones, and that are remembered for an incident still to come, the last."""

EVENT_LEAD_NS = 10_000_000_000
"""How long before an incident's onset an event may have happened to belong to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentsConfig:
    """What people hear, and how often."""

    routes: RoutesConfig = field(default_factory=RoutesConfig)
    """Channels by tier."""

    mass: MassConfig = field(default_factory=MassConfig)
    """When many findings at once mean that we are wrong."""

    update_every: timedelta = timedelta(seconds=30)
    """Between two notices of one incident that only refine its words."""

    reopen_within: timedelta = timedelta(minutes=10)
    """A resolved incident whose trouble comes back within this time is reopened; later it is a new one."""

    kept_max: int = 5000
    """Incidents kept in mind; beyond that the oldest are forgotten, resolved ones first. More than 3 % of the largest
    job (100,000 ranks), or a mass alarm in it would never be seen as one."""

    def __post_init__(self) -> None:
        for name in ("update_every", "reopen_within"):
            if getattr(self, name) < timedelta(0):
                raise ConfigError(f"alerts.incidents.{name}: need 0 or more, got {getattr(self, name)}")
        if self.kept_max < 1:
            raise ConfigError(f"alerts.incidents.kept_max: need at least 1, got {self.kept_max}")


class Incidents:
    """The machine that decides what people hear."""

    def __init__(self, config: IncidentsConfig | None = None, tiers: Tiers | None = None) -> None:
        self._config = IncidentsConfig() if config is None else config
        self._tiers = standard_tiers() if tiers is None else tiers
        self._now_ns = 0
        self._book = Casebook(self._tiers)
        self._plans: dict[str, Plan] = {}
        """Plans that have not ended."""
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._crowd = Crowd(self._config.mass)
        every_ns = ns_of(self._config.update_every)
        self._teller = Teller(routes=self._config.routes, tiers=self._tiers, update_every_ns=every_ns)
        self._touched: dict[str, Case] = {}
        """By id: what this stimulus may have changed."""
        self._held: dict[str, Case] = {}
        """By id: of what people do not know the newest words."""

    def handle(self, stimulus: Stimulus) -> Sequence[Instruction]:
        """Take the next stimulus, in order, and say what is to be done about it."""
        if isinstance(stimulus, Finding | Event | Tick):
            self._now_ns = max(self._now_ns, stimulus.seen_ns)
        self._book.forget(self._now_ns - ns_of(self._config.reopen_within), self._config.kept_max)
        self._held = {name: case for name, case in self._held.items() if case in self._book}
        looks: list[Look] = []
        match stimulus:
            case Finding():
                looks = self._found(stimulus)
            case Event():
                self._happened(stimulus)
            case Start():
                self._started(stimulus.plan)
            case Outcome():
                self._ended(stimulus)
        return [*looks, *self._published()]

    def due_ns(self) -> int | None:
        """When the next held-back notice may go out."""
        due = [self._teller.due_ns(case) for case in self._held.values()]
        return min((due_ns for due_ns in due if due_ns is not None), default=None)

    def told(self, channel: str) -> Sequence[Incident]:
        """Open incidents that a channel has heard of, as they stand: for channels that keep a state."""
        return [case.shown for case in self._book if case.open and case.shown is not None and channel in case.channels]

    def snapshot(self) -> State:
        """Everything that decides what comes next, as JSON values."""
        return {
            "now_ns": self._now_ns,
            "plans": [dumps(plan) for plan in self._plans.values()],
            "events": [dumps(event) for event in self._events],
            "crowd": self._crowd.snapshot(),
            **self._book.snapshot(),
        }

    def restore(self, state: State) -> None:
        """Take up what snapshot gave."""
        self._now_ns = state["now_ns"]
        self._plans = {plan.id: plan for plan in map(plan_from, state["plans"])}
        self._events = deque(map(event_from, state["events"]), maxlen=EVENTS_MAX)
        self._crowd.restore(state["crowd"])
        self._book.restore(state)
        self._held = {case.id: case for case in self._book if self._teller.due_ns(case) is not None}

    def _found(self, finding: Finding) -> list[Look]:
        taken = self._book.take(finding)
        if taken is None:
            return []
        case, new = taken
        for event in self._events:
            self._attach(case, event)
        self._settle(case)
        if not new:
            return []
        self._count(finding)
        return self._look(finding)

    def _settle(self, case: Case) -> None:
        """Let state and company follow from the findings."""
        case.settle(self._now_ns)
        self._touch(case)
        while case.open and (pair := self._book.akin(case)):
            case = pair[0]
            self._fold(*pair)

    def _fold(self, older: Case, *others: Case) -> None:
        self._book.fold(older, others, self._now_ns)
        for case in (*others, older):
            self._touch(case)

    def _count(self, finding: Finding) -> None:
        """Fold a mass of like findings into the first incident of them."""
        if not counts(row_of(self._tiers, finding.kind), finding.subject):
            return
        if not self._crowd.too_many(finding.job, self._book.count(finding.kind)):
            return
        since_ns = self._now_ns - ns_of(self._config.mass.window)
        recent = [
            (one.finding.subject, case)
            for case in self._book.like(finding)
            for one in case.live
            if one.finding.kind == finding.kind and one.seen_ns >= since_ns
        ]
        why = self._crowd.alarm(finding.kind, finding.job, {subject for subject, _ in recent})
        if why:
            first, *others = {case.id: case for _, case in recent}.values()
            self._fold(first, *others)
            first.mass = (finding.kind, why)
            self._touch(first)

    def _look(self, finding: Finding) -> list[Look]:
        what = row_of(self._tiers, finding.kind).look
        if what is None:
            return []
        suspects = tuple(subject for subject, _ in finding.suspects) or (finding.subject,)
        named = (*named_in(finding, "members"), *suspects, *named_in(finding, "victims"))
        return [Look(key=f"look/{finding.id}", what=what, subjects=tuple(dict.fromkeys(named)))]

    def _happened(self, event: Event) -> None:
        if event.kind == "hello":
            self._crowd.note(event)
        if event.kind not in TOLD_EVENTS or event.job is None:
            return
        self._events.append(event)
        for case in self._book:
            if case.open:
                self._attach(case, event)

    def _attach(self, case: Case, event: Event) -> None:
        """Keep an event with the incident that it belongs to."""
        since_ns = case.cause(self._tiers).finding.onset_ns - EVENT_LEAD_NS
        here = event.job == case.job and start_of(event.epoch) in (None, start_of(case.epoch))
        near = here and event.t_ns >= since_ns
        if near and event not in case.events and len(case.events) < EVENTS_MAX:
            case.events += (event,)
            self._touch(case)

    def _started(self, plan: Plan) -> None:
        case = self._book.get(plan.incident)
        if case is None or plan.id in case.plans:
            return
        case.plans += (plan.id,)
        self._plans[plan.id] = plan
        self._touch(case)
        if plan.mode == "act" and case.open and case.state != "mitigating":
            case.move("mitigating", f"plan {plan.id} started")

    def _ended(self, outcome: Outcome) -> None:
        plan = self._plans.get(outcome.plan)
        if outcome.index == -1:
            self._plans.pop(outcome.plan, None)
        case = None if plan is None else self._book.get(plan.incident)
        if plan is not None and case is not None and case.open and plan.mode != "observe":
            case.follow(plan, outcome, self._now_ns)
            self._settle(case)

    def _touch(self, case: Case) -> None:
        self._touched[case.id] = case

    def _published(self) -> Iterator[Instruction]:
        for case in self._touched.values():
            if case.part_of and case.shown is None:
                continue  # folded before anybody heard of it
            revision = 0 if case.shown is None else case.shown.revision
            now = case.view(self._tiers, revision)
            if now != case.shown:
                case.shown = replace(now, revision=revision + 1)
                yield case.shown
        news = (self._touched | self._held).values()
        for case in sorted(news, key=lambda case: (not case.open, case.id)):
            yield from self._teller.tell(case, self._now_ns)
            self._hold(case)
        self._touched = {}

    def _hold(self, case: Case) -> None:
        if case in self._book and self._teller.due_ns(case) is not None:
            self._held[case.id] = case
        else:
            self._held.pop(case.id, None)


def ns_of(time: timedelta) -> int:
    """Whole nanoseconds."""
    return time // timedelta(microseconds=1) * 1000
