"""Whatever comes in whatever order: no illegal state, nothing said twice, and a replay says the same."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.alerts.case import TRANSITIONS, Case, IncidentState
from trainwarden.alerts.incidents import Incidents
from trainwarden.alerts.tiers import standard_tiers
from trainwarden.core.codec import dumps, loads
from trainwarden.core.errors import InvalidTransition
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import (
    Epoch,
    Event,
    Evidence,
    Finding,
    Incident,
    Instruction,
    JobId,
    Json,
    Notice,
    Outcome,
    Plan,
    Rung,
    Start,
    Stimulus,
    Subject,
    Tick,
)

SECOND = 1_000_000_000
JOBS = (JobId("a"), JobId("a"), JobId("a"), JobId("b"))
FINDING_KINDS = tuple(name for name, row in KINDS.items() if row.of == "finding")
EVENT_KINDS = ("hello", "process.exit", "stack", "attempt.ended", "source.blind")
subjects = st.builds(Subject, kind=st.just("rank"), id=st.sampled_from("0123"))
times_ns = st.integers(0, 800).map(lambda tenths: tenths * SECOND // 2)


@st.composite
def findings(draw: st.DrawFn) -> Finding:
    """Few ids, so that revisions, returns and contradictions are common."""
    kind, job = draw(st.sampled_from(FINDING_KINDS)), draw(st.sampled_from(JOBS))
    epoch = Epoch(draw(st.sampled_from((0, 0, 0, 1 << 32))))
    onset_ns = draw(times_ns)
    return Finding(
        id=f"detector/{job}/{epoch}/rank:{draw(st.integers(0, 3))}/0",
        revision=draw(st.integers(0, 20)),
        status=draw(st.sampled_from(("provisional", "final", "cleared", "withdrawn"))),
        kind=kind,
        subject=draw(subjects),
        suspects=tuple(draw(st.lists(st.tuples(subjects, st.sampled_from((0.5, 1.0))), max_size=3))),
        job=job,
        epoch=epoch,
        onset_ns=onset_ns,
        onset_step=None,
        seen_ns=onset_ns + draw(st.integers(0, 40)) * SECOND // 2,
        confidence=1.0,
        reason=draw(st.sampled_from(("this", "that"))),
        evidence=tuple(draw(st.lists(st.builds(Evidence, what=st.just("victims"), value=st.just([1, 2])), max_size=1))),
    )


@st.composite
def events(draw: st.DrawFn) -> Event:
    t_ns, job = draw(times_ns), draw(st.sampled_from(JOBS))
    kind, subject, seq = draw(st.sampled_from(EVENT_KINDS)), draw(subjects), draw(st.integers(0, 5))
    data: dict[str, Json] = {"world_size": 4, "rank": int(subject.id), "node": "n1", "device": "n1:0"}
    return Event(
        kind=kind, subject=subject, source="s", seq=seq, t_ns=t_ns, seen_ns=t_ns, job=job, epoch=Epoch(0), data=data
    )


def plan(number: int, incident: str, mode: Any) -> Plan:
    ladder = tuple(
        Rung(goal=goal, target=Subject(kind="job", id="a"), args={}, deadline_s=1.0) for goal in ("stopped", "running")
    )
    return Plan(id=f"p{number}", incident=incident, rule="r", mode=mode, fence=1, deadline_ns=10**18, ladder=ladder)


incident_ids = st.builds(
    lambda job, epoch, who: f"detector.{job}.{epoch << 32}.rank-{who}.0",
    st.just("a"),
    st.just(0),
    st.integers(0, 3),
)
plans = st.builds(plan, st.integers(0, 2), incident_ids, st.sampled_from(("observe", "approve", "act", "act")))
outcomes = st.builds(
    Outcome,
    plan=st.sampled_from(("p0", "p1", "p2")),
    index=st.integers(-1, 3),
    result=st.sampled_from(("reached", "already", "failed", "refused", "expired")),
    reason=st.just("so"),
    retryable=st.booleans(),
    found=st.just({}),
)


def numbered(story: list[Stimulus]) -> list[Stimulus]:
    """Each finding revises the one before it of the same id, unless it repeats an old revision."""
    seen, told = Counter[str](), list[Stimulus]()
    for one in story:
        if isinstance(one, Finding):
            told.append(replace(one, revision=min(one.revision, seen[one.id]) if one.revision < 2 else seen[one.id]))
            seen[one.id] += 1
        else:
            told.append(one)
    return told


stimuli = st.lists(
    st.one_of(*[findings()] * 4, events(), st.builds(Tick, seen_ns=times_ns), st.builds(Start, plan=plans), outcomes),
    min_size=10,
    max_size=50,
).map(numbered)


def all_said(machine: Incidents, story: Sequence[Stimulus]) -> list[Instruction]:
    return [one for stimulus in story for one in machine.handle(stimulus)]


def as_text(said: Sequence[Instruction]) -> list[str]:
    return [dumps(one) for one in said]


REACHABLE: dict[str, set[str]] = {
    start: set(finishes) | {last for middle in finishes for last in TRANSITIONS[middle]}
    for start, finishes in TRANSITIONS.items()
}
"""One stimulus may take two steps, as from confirmed over mitigating to recovering."""


@settings(max_examples=40, deadline=None)
@given(stimuli)
def test_no_order_of_stimuli_makes_an_illegal_state(story: list[Stimulus]) -> None:
    newest: dict[str, Incident] = {}
    for one in all_said(Incidents(), story):
        if not isinstance(one, Incident):
            continue
        before = newest.get(one.id)
        assert one.revision == (1 if before is None else before.revision + 1)
        if before is not None:
            assert one.state == before.state or one.state in REACHABLE[before.state]
        newest[one.id] = one


@settings(max_examples=40, deadline=None)
@given(stimuli)
def test_each_channel_hears_a_story_that_makes_sense(story: list[Stimulus]) -> None:
    machine, open_for, keys = Incidents(), dict[tuple[str, str], bool](), set[str]()
    for one in all_said(machine, story):
        if isinstance(one, Notice):
            place = (one.incident.id, one.channel)
            assert one.key not in keys, "nothing is said twice"
            assert (one.change == "opened") is not open_for.get(place, False), f"{one.change} of {place}"
            assert (one.change == "resolved") is (one.incident.state == "resolved")
            keys.add(one.key)
            open_for[place] = one.change != "resolved"
            tiers = standard_tiers()
            live = [finding for finding in one.incident.findings if finding.status in ("provisional", "final")]
            certain = any(f.status == "final" or tiers[f.kind].announce == "provisional" for f in live)
            assert one.change != "opened" or certain, "a mere suspicion of slowness is not said"


@settings(max_examples=40, deadline=None)
@given(stimuli)
def test_a_tick_when_due_leaves_nothing_due(story: list[Stimulus]) -> None:
    machine = Incidents()
    all_said(machine, story)
    due_ns = machine.due_ns()
    if due_ns is not None:
        assert any(isinstance(one, Notice) for one in machine.handle(Tick(seen_ns=due_ns)))
        later_ns = machine.due_ns()
        assert later_ns is None or later_ns > due_ns


@settings(max_examples=40, deadline=None)
@given(stimuli)
def test_a_replay_says_the_same(story: list[Stimulus]) -> None:
    assert as_text(all_said(Incidents(), story)) == as_text(all_said(Incidents(), story))


@settings(max_examples=40, deadline=None)
@given(stimuli, st.integers(0, 50))
def test_a_snapshot_changes_nothing(story: list[Stimulus], cut: int) -> None:
    story = [loads(dumps(one)) for one in story]  # type: ignore[misc]  # loads gives back the stimulus
    machine, resumed = Incidents(), Incidents()
    all_said(machine, story[:cut])
    resumed.restore(json.loads(json.dumps(machine.snapshot(), allow_nan=False)))
    assert resumed.due_ns() == machine.due_ns()
    assert as_text(all_said(resumed, story[cut:])) == as_text(all_said(machine, story[cut:]))


@pytest.mark.parametrize(
    ("start", "finish"),
    [(start, finish) for start in TRANSITIONS for finish in TRANSITIONS if finish not in TRANSITIONS[start]],
)
def test_an_illegal_step_raises_with_the_story(start: IncidentState, finish: IncidentState) -> None:
    case = Case(id="i", job=None, epoch=None, opened_ns=0, state=start, story=("suspected: once upon a time",))
    with pytest.raises(InvalidTransition, match=f"{start} -> {finish} .*once upon a time / {start}: because"):
        case.move(finish, "because")
    assert case.state == start
