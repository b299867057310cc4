"""Incident traces: where the time of an incident went, from its first abnormal sign to verified recovery, as spans.

A trace is made when its incident is over, from what was decided (app/story.py), so a supervisor that was killed in
between still tells it whole. Each round of an incident, from its opening or reopening until it is resolved, is a trace
of its own; the root of a reopened one links to the root of the round before:

    incident KIND     first abnormal sign until verified recovery; an event where state, tier, kind or culprit changed
      detect          until the incident was opened
      plan RULE       one for each decision, from the opening or the end of the plan before; those that only observe too
        decide        until the plan was made
        approval      in mode approve: until a person gave leave, or it ended
        rung GOAL     one for each rung that was taken

Ids are made from what they name, so exporting again gives the same ids: the incident, when it was opened (jobs of
different hosts have the same names, and so have their incidents) and the round. This module is pure and needs no
extra; app/otlp.py makes the spans.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from trainwarden.app.otlp_target import check, headers_of, url_of
from trainwarden.app.story import IncidentStory, PlanStory
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Incident, JobId, Outcome
from trainwarden.core.printable import printable
from trainwarden.core.records import attempt_of
from trainwarden.remediation.plans import DONE

if TYPE_CHECKING:
    from trainwarden.app.otlp import Traces

Attributes: TypeAlias = Mapping[str, str | bool | int | float]

TEXT_MAX: Final = 1000
"""Characters of a text: reasons hold what a job's tenant wrote, of any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesConfig:
    """Where traces of incidents and of steps go. Needs the extra `server`."""

    otlp_endpoint: str = ""
    """URL of a receiver of OTLP over HTTP (usually port 4318; 4317 is gRPC); `/v1/traces` is added if it does not end
    so. `env`: what OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says. Empty: nothing is exported,
    even where these are set: we share the environment with the training, which has them for telemetry of its own.
    Headers and certificates come from the environment (OTEL_EXPORTER_OTLP_HEADERS, ..._CERTIFICATE)."""

    otlp_headers: str = ""
    """`file:/PATH` or `env:NAME` with NAME=VALUE lines (or commas between): headers for the receiver, a token mostly.
    They come on top of those of the environment."""

    deadline: timedelta = timedelta(seconds=5)
    """For one batch of spans, tried again until then; and how long the end of a run may wait for what is left."""

    steps: int = 0
    """One of so many steps is told as a trace (100: each hundredth), and so are the steps around an incident's first
    abnormal sign; 0: none is. At most 25 spans a step, however many ranks."""

    rank: int = 0
    """Which rank is in each of these traces, beside the slowest and the median one of the step."""

    def __post_init__(self) -> None:
        check("traces", self.otlp_endpoint, self.deadline, "deadline")
        for name in ("steps", "rank"):
            if getattr(self, name) < 0:
                raise ConfigError(f"traces.{name}: need 0 or more, got {getattr(self, name)}")
        if self.steps and not self.otlp_endpoint:
            raise ConfigError(f"traces.steps: needs traces.otlp_endpoint, got {self.steps} and no receiver")

    def url(self) -> str:
        """The full URL that spans are posted to; "": nowhere. Raises ConfigError for `env` with nothing there."""
        return url_of("traces", self.otlp_endpoint)


def open_traces(config: TracesConfig, job: JobId) -> "Traces | None":
    """What exports spans; None: nothing does. Raises ConfigError, also for packages that are not there."""
    url, headers = config.url(), headers_of("traces", config.otlp_headers)
    if not url:
        return None
    try:
        from trainwarden.app.otlp import Traces, otlp_exporter
    except ImportError as error:
        raise ConfigError(
            f"traces.otlp_endpoint: needs opentelemetry, which is not here ({error}): pip install 'trainwarden[server]'"
        ) from error
    deadline_s = config.deadline.total_seconds()
    return Traces(otlp_exporter(url, headers, deadline_s), job, deadline_s)


class Change(NamedTuple):
    """An event on a root span: a revision that changed state, tier, kind or culprit."""

    t_ns: int
    name: str
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlan:
    """A span to be made."""

    name: str
    path: tuple[str, ...]
    """What it stands for, from which its ids are made: the round, then each step down to it. Its parent: path[:-1]."""
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    """Why its status is ERROR; empty: it is not."""
    changes: tuple[Change, ...] = ()
    after: str = ""
    """The round before."""

    def child(
        self, name: str, step: str, start_ns: int, end_ns: int, attributes: Attributes | None = None, error: str = ""
    ) -> "SpanPlan":
        """A span within this one. A time that lies outside (an onset was revised, a clock set back, a plan that ends
        after its incident) is moved to the edge."""
        start_ns = min(max(start_ns, self.start_ns), self.end_ns)
        end_ns = min(max(end_ns, start_ns), self.end_ns)
        path = (*self.path, step)
        return SpanPlan(
            name=name, path=path, start_ns=start_ns, end_ns=end_ns, attributes=attributes or {}, error=error
        )


def is_over(story: IncidentStory) -> bool:
    """Whether there is nothing more to wait for: resolved, and each of its plans has ended."""
    return story.newest.state == "resolved" and all(_whole(plan) is not None for plan in story.plans)


def spans_of(story: IncidentStory, end_ns: int, lost_s: Mapping[str, float] | None = None) -> Sequence[SpanPlan]:
    """Every round of an incident, parents before children.

    end_ns: of the run, for what is still open then. lost_s: seconds by phase as they were measured when the newest
    round's recovery was verified; without it, or a verification, what the incident itself says of them.
    """
    spans: list[SpanPlan] = []
    rounds = _rounds(story)
    root: SpanPlan | None = None
    for round_ in rounds:
        measured = lost_s if round_ is rounds[-1] and round_.verified_ns is not None else None
        root = _root(round_, f"{story.newest.id} {story.opened_ns} {round_.number}", root, end_ns, measured)
        spans += [root, *_inside(root, round_)]
    return spans


# rounds


class _Round(NamedTuple):
    number: int
    revisions: Sequence[tuple[int, Incident]]
    plans: list[PlanStory]

    @property
    def opened_ns(self) -> int:
        return self.revisions[0][0]

    @property
    def resolved_ns(self) -> int | None:
        return next((t_ns for t_ns, one in self.revisions if one.state == "resolved"), None)

    @property
    def verified_ns(self) -> int | None:
        """When a plan's last rung was seen to be reached."""
        return next((t_ns for plan in self.plans for t_ns, rung in _rungs(plan) if _verified(plan, rung)), None)

    def verdict(self, since_ns: int) -> Incident:
        """As it last stood while it was open. Revisions that show a cause from before this round (none of its own
        findings holds any more) are passed over."""
        stood = [one for _, one in self.revisions if one.state != "resolved" and one.onset_ns >= since_ns]
        return stood[-1] if stood else self.revisions[0][1]


def _rounds(story: IncidentStory) -> list[_Round]:
    states = [one.state for _, one in story.revisions]
    first = [0, *(at for at in range(1, len(states)) if states[at - 1] == "resolved" and states[at] != "resolved")]
    ends = [*first[1:], len(states)]
    rounds = [_Round(n, story.revisions[a:b], []) for n, (a, b) in enumerate(zip(first, ends, strict=True))]
    for plan in story.plans:
        begun = [round_.opened_ns <= plan.started_ns for round_ in rounds]
        rounds[max(sum(begun) - 1, 0)].plans.append(plan)
    return rounds


def _verified(plan: PlanStory, rung: Outcome) -> bool:
    acts = plan.plan.mode != "observe"
    return acts and rung.result in DONE and plan.plan.ladder[rung.index].goal == "verified"


def _rungs(plan: PlanStory) -> Sequence[tuple[int, Outcome]]:
    return [(t_ns, one) for t_ns, one in plan.outcomes if 0 <= one.index < len(plan.plan.ladder)]


def _whole(plan: PlanStory) -> tuple[int, Outcome] | None:
    return next((one for one in plan.outcomes if one[1].index == -1), None)


# spans


def _root(
    round_: _Round, key: str, before: SpanPlan | None, end_ns: int, lost_s: Mapping[str, float] | None
) -> SpanPlan:
    since_ns = 0 if before is None else before.end_ns
    newest, verdict = round_.revisions[-1][1], round_.verdict(since_ns)
    start_ns = max(min(verdict.onset_ns, round_.opened_ns), since_ns)
    if round_.resolved_ns is not None:
        end_ns = round_.resolved_ns if round_.verified_ns is None else round_.verified_ns
    end_ns = max(end_ns, start_ns)
    spent_s = newest.lost_s if lost_s is None else lost_s
    return SpanPlan(
        name=f"incident {verdict.kind}",
        path=(key,),
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=named(
            job_id=verdict.job,
            incident_id=verdict.id,
            round=round_.number,
            state=newest.state,
            kind=verdict.kind,
            tier=verdict.tier.name,
            culprit=verdict.culprit,
            attempt=None if verdict.epoch is None else attempt_of(verdict.epoch),
            reason=verdict.reason,
            action=verdict.action,
            **{f"lost_s.{phase}": seconds for phase, seconds in spent_s.items()},
        ),
        error="" if round_.resolved_ns is not None else "not recovered",
        changes=tuple(_changes(round_, start_ns, end_ns)),
        after="" if before is None else before.path[0],
    )


def _changes(round_: _Round, start_ns: int, end_ns: int) -> Iterator[Change]:
    before: object = None
    for t_ns, one in round_.revisions:
        now = (one.state, one.tier, one.kind, one.culprit)
        if now != before:
            told = named(
                revision=one.revision, tier=one.tier.name, kind=one.kind, culprit=one.culprit, reason=one.reason
            )
            yield Change(min(max(t_ns, start_ns), end_ns), one.state, told)
        before = now


def _inside(root: SpanPlan, round_: _Round) -> Iterator[SpanPlan]:
    detect = root.child("detect", "detect", root.start_ns, round_.opened_ns)
    yield detect
    since_ns = detect.end_ns
    for one in round_.plans:
        plan = _plan(root, one, since_ns)
        yield plan
        yield from _steps(plan, one)
        since_ns = plan.end_ns


def _plan(root: SpanPlan, story: PlanStory, since_ns: int) -> SpanPlan:
    plan, whole = story.plan, _whole(story)
    end_ns, said = (root.end_ns, {}) if whole is None else (whole[0], _said(whole[1]))
    attributes = named(plan_id=plan.id, rule=plan.rule, mode=plan.mode, why=plan.why, **said)
    error = "did not end" if whole is None else _failed(whole[1])
    if plan.mode == "observe":  # that nothing was reached is meant, unless the rule would have acted (plan.why)
        error = plan.why if plan.why.startswith("refused") else ""
    return root.child(f"plan {plan.rule}", plan.id, since_ns, end_ns, attributes, error)


def _steps(plan: SpanPlan, story: PlanStory) -> Iterator[SpanPlan]:
    rungs = _rungs(story)
    decide = plan.child("decide", "decide", plan.start_ns, story.started_ns)
    yield decide
    since_ns = decide.end_ns
    if story.plan.mode == "approve":
        left_ns, words = _approved(story) or (rungs[0][0] if rungs else plan.end_ns, {})
        approval = plan.child("approval", "approval", since_ns, left_ns, named(**words))
        yield approval
        since_ns = approval.end_ns
    for t_ns, one in rungs:
        goal = story.plan.ladder[one.index].goal
        attributes = named(goal=goal, target=story.plan.ladder[one.index].target, **_said(one))
        error = "" if story.plan.mode == "observe" else _failed(one)
        rung = plan.child(f"rung {goal}", f"rung-{one.index}", since_ns, t_ns, attributes, error)
        yield rung
        since_ns = rung.end_ns


def _approved(story: PlanStory) -> tuple[int, Mapping[str, object]] | None:
    """When a person gave leave, and who and why."""
    approvals = [(t_ns, one.message) for t_ns, one in story.told if one.message["verb"] == "approve"]
    return next(((t_ns, {key: said.get(key) for key in ("who", "why")}) for t_ns, said in approvals), None)


def _said(outcome: Outcome) -> Mapping[str, str]:
    return {"result": outcome.result, "reason": outcome.reason}


def _failed(outcome: Outcome) -> str:
    return "" if outcome.result in DONE else _text(f"{outcome.result}: {outcome.reason}")


def named(**values: object) -> Attributes:
    """Attributes in our namespace; what is not known or empty is absent."""
    told = {f"trainwarden.{name}": value for name, value in values.items() if value is not None and value != ""}
    return {name: value if isinstance(value, int | float) else _text(str(value)) for name, value in told.items()}


def _text(text: str) -> str:
    return printable(text[:TEXT_MAX])
