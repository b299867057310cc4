"""Incidents as traces: the real machines decide, the story keeps it, the spans tell it; then on the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.app.story_world import KILLED, killed, world
from tests.remediation.plan_world import (
    JOB,
    JOB_SUBJECT,
    at,
    attempt,
    command,
    incident,
    outcome,
    policy,
    rank,
)

from trainwarden.app.otlp import Traces
from trainwarden.app.story import IncidentStory, PlanStory
from trainwarden.app.traces import SpanPlan, is_over, spans_of
from trainwarden.core.model import Plan, Rung, Tier

END_S = 100.0


def exported(*stories: IncidentStory, lost_s: Mapping[str, float] | None = None) -> Sequence[ReadableSpan]:
    """What opentelemetry makes of them."""
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, JOB, deadline_s=10)
    for story in stories:
        traces.export(story, at(END_S), lost_s)
    assert traces.close() == ""
    return exporter.get_finished_spans()


def tree(spans: Sequence[ReadableSpan]) -> list[str]:
    """Each span below its parent: its name, its time and what is wrong with it."""
    lines: list[str] = []

    def tell(parent: int | None, indent: str) -> None:
        for span in spans:
            if (span.parent.span_id if span.parent else None) == parent:
                wrong = "" if span.status.is_unset else f" {span.status.status_code.name}: {span.status.description}"
                lines.append(f"{indent}{span.name} {seconds(span.start_time)}-{seconds(span.end_time)}{wrong}")
                tell(span.context.span_id, f"{indent}  ")

    tell(None, "")
    return lines


def seconds(t_ns: int | None) -> str:
    assert t_ns is not None
    return f"{(t_ns - at(0)) / 1e9:g}"


def said(spans: Sequence[ReadableSpan], name: str, *keys: str) -> list[Any]:
    """Attributes of the spans of this name."""
    found = [one.attributes or {} for one in spans if one.name == name]
    return [tuple(one.get(f"trainwarden.{key}") for key in keys) for one in found]


# trees


def test_a_repaired_death_is_one_tree_from_the_first_sign_to_the_verified_recovery(tmp_path: Path) -> None:
    with world(tmp_path) as one:
        one.play(6, killed())
        one.repair(f"{KILLED}/plan-1", (7, "already"), (9, "reached"), (12, "reached"))
        assert is_over(one.told)
        spans = exported(one.told, lost_s={"detect": 1.0, "load": 2.5})
    assert tree(spans) == [
        "incident process.killed 5-12",
        "  detect 5-6",
        "  plan process.killed 6-12",
        "    decide 6-6",
        "    rung stopped 6-7",
        "    rung running 7-9",
        "    rung verified 9-12",
    ]
    root = spans[0]
    assert root.attributes == {
        "trainwarden.job_id": "train-3",
        "trainwarden.incident_id": KILLED,
        "trainwarden.round": 0,
        "trainwarden.state": "resolved",
        "trainwarden.kind": "process.killed",
        "trainwarden.tier": "ERROR",
        "trainwarden.culprit": "rank:2",
        "trainwarden.attempt": 1,
        "trainwarden.reason": one.told.newest.reason,
        "trainwarden.action": one.told.newest.action,
        "trainwarden.lost_s.detect": 1.0,
        "trainwarden.lost_s.load": 2.5,
    }
    assert [(event.name, seconds(event.timestamp)) for event in root.events] == [
        ("confirmed", "6"),
        ("mitigating", "6"),
        ("recovering", "9"),
        ("resolved", "12"),
    ]
    assert said(spans, "plan process.killed", "plan_id", "rule", "mode", "why", "result") == [
        (f"{KILLED}/plan-1", "process.killed", "act", None, "reached")
    ]
    assert said(spans, "rung stopped", "goal", "target", "result", "reason") == [
        ("stopped", "job:train-3", "already", "it already")
    ]
    resource = root.resource.attributes
    assert (resource["service.name"], resource["trainwarden.job_id"]) == ("trainwarden", "train-3")
    assert resource["service.version"]


def test_a_plan_that_only_observed_is_told_as_one_and_is_no_error(tmp_path: Path) -> None:
    with world(tmp_path, policy("observe")) as one:
        one.play(6, killed())
        one.repair(f"{KILLED}/plan-1", (6.5, "refused"), (6.5, "refused"), (6.5, "refused"))
        spans = exported(one.told)
    assert tree(spans) == [
        "incident process.killed 5-100 ERROR: not recovered",
        "  detect 5-6",
        "  plan process.killed 6-6.75",
        "    decide 6-6",
        "    rung stopped 6-6.5",
        "    rung running 6.5-6.5",
        "    rung verified 6.5-6.5",
    ]
    assert said(spans, "plan process.killed", "mode", "result") == [("observe", "refused")]


def test_a_plan_that_a_guard_refused_says_why_nothing_was_done(tmp_path: Path) -> None:
    with world(tmp_path, policy(min_confidence=0.99)) as one:
        one.play(6, killed())
        one.play(7, outcome(f"{KILLED}/plan-1", -1, "refused"))
        spans = exported(one.told)
    why = "refused: confidence 0.98 is less than 0.99"
    assert tree(spans) == [
        "incident process.killed 5-100 ERROR: not recovered",
        "  detect 5-6",
        f"  plan process.killed 6-7 ERROR: {why}",
        "    decide 6-6",
    ]
    assert said(spans, "plan process.killed", "mode", "why") == [("observe", why)]


def test_a_failed_rung_is_followed_by_the_second_plan(tmp_path: Path) -> None:
    with world(tmp_path, policy(cool_down=timedelta(seconds=10))) as one:
        one.play(6, killed())
        one.repair(f"{KILLED}/plan-1", (7, "reached"), (9, "failed"))
        one.play(20)
        one.repair(f"{KILLED}/plan-2", (21, "already"), (22, "reached"), (25, "reached"))
        spans = exported(one.told)
    assert tree(spans) == [
        "incident process.killed 5-25",
        "  detect 5-6",
        "  plan process.killed 6-9.25 ERROR: failed: so",
        "    decide 6-6",
        "    rung stopped 6-7",
        "    rung running 7-9 ERROR: failed: it failed",
        "  plan process.killed 9.25-25",
        "    decide 9.25-20",
        "    rung stopped 20-21",
        "    rung running 21-22",
        "    rung verified 22-25",
    ]


def test_the_wait_for_a_person_is_visible(tmp_path: Path) -> None:
    with world(tmp_path, policy("approve", approval=timedelta(seconds=30))) as one:
        one.play(6, killed())
        one.play(16, command("approve", 16, f"{KILLED}/plan-1"))
        one.repair(f"{KILLED}/plan-1", (17, "reached"), (18, "reached"), (19, "reached"))
        spans = exported(one.told)
    assert tree(spans)[2:6] == [
        "  plan process.killed 6-19",
        "    decide 6-6",
        "    approval 6-16",
        "    rung stopped 16-17",
    ]
    assert said(spans, "approval", "who", "why") == [("Ada", "I know")]


def test_so_is_one_that_nobody_ended(tmp_path: Path) -> None:
    with world(tmp_path, policy("approve", approval=timedelta(seconds=30))) as one:
        one.play(6, killed())
        one.play(36, outcome(f"{KILLED}/plan-1", -1, "expired", reason="nobody approved it in time"))
        spans = exported(one.told)
    assert tree(spans)[2:] == [
        "  plan process.killed 6-36 ERROR: expired: nobody approved it in time",
        "    decide 6-6",
        "    approval 6-36",
    ]


def test_a_plan_that_runs_when_the_run_ends_did_not_end(tmp_path: Path) -> None:
    with world(tmp_path) as one:
        one.play(6, killed())
        one.play(7, outcome(f"{KILLED}/plan-1", 0, "reached"))
        assert not is_over(one.told)
        spans = exported(one.told)
    assert tree(spans)[2:] == [
        "  plan process.killed 6-100 ERROR: did not end",
        "    decide 6-6",
        "    rung stopped 6-7",
    ]


def test_a_trouble_that_comes_back_is_a_trace_of_its_own_linked_to_the_one_before(tmp_path: Path) -> None:
    with world(tmp_path) as one:
        one.play(6, killed())
        one.repair(f"{KILLED}/plan-1", (7, "reached"), (9, "reached"), (12, "reached"))
        first = exported(one.told, lost_s={"detect": 1.0})
        one.play(15, *attempt(2, 15))
        again = incident("process.killed", attempt=2).findings[0]
        one.play(31, replace(again, onset_ns=at(30), seen_ns=at(31)))
        one.play(32, replace(again, onset_ns=at(30), seen_ns=at(32), revision=1, status="cleared"))
        assert one.told.newest.onset_ns == at(5), "now the first death is shown as the cause"
        one.repair(f"{KILLED}/plan-2", (32, "reached"), (33, "reached"), (34, "reached"))
        both = exported(one.told, lost_s={"detect": 20.0})
    assert ids(both[: len(first)]) == ids(first), "exported again it is the same"
    second = both[len(first) :]
    assert tree(second) == [
        "incident process.killed 30-34",
        "  detect 30-31",
        "  plan process.killed 31-34",
        "    decide 31-31",
        "    rung stopped 31-32",
        "    rung running 32-33",
        "    rung verified 33-34",
    ]
    assert not {trace_id for trace_id, _ in ids(second)} & {trace_id for trace_id, _ in ids(first)}
    assert [link.context.span_id for link in second[0].links] == [first[0].context.span_id]
    assert second[0].events[0].name == "reopened"
    key = "lost_s.detect"
    assert said(both, "incident process.killed", "round", key) == [(0, 1.0), (1, 20.0)]


def test_rounds_that_are_over_are_told_once_a_life(tmp_path: Path) -> None:
    with world(tmp_path, policy("approve")) as one:
        one.play(6, killed())
        one.play(8, killed(revision=1, status="cleared", seen_ns=at(8)))
        assert one.told.newest.state == "resolved"
        assert not is_over(one.told), "its plan is still to be withdrawn"
        one.play(8.25, outcome(f"{KILLED}/plan-1", -1, "refused", reason="withdraw", found={"verb": "withdraw"}))
        assert is_over(one.told)
        spans = exported(one.told, one.told)
    assert tree(spans) == [
        "incident process.killed 5-8",
        "  detect 5-6",
        "  plan process.killed 6-8 ERROR: refused: withdraw",
        "    decide 6-6",
        "    approval 6-8",
    ]


def test_words_of_the_job_are_made_harmless(tmp_path: Path) -> None:
    with world(tmp_path) as one:
        one.play(6, killed(reason="\x1b[2J\udc80" + "x" * 5000))
        spans = exported(one.told)
    (reason,) = said(spans, "incident process.killed", "reason")[0]
    assert reason.startswith("\\x1b[2J\\udc80xxx")
    assert len(reason) < 1100


# ids


def ids(spans: Sequence[ReadableSpan]) -> list[tuple[int, int]]:
    return [(span.context.trace_id, span.context.span_id) for span in spans]


def test_equal_incidents_of_jobs_of_one_name_have_their_own_traces(tmp_path: Path) -> None:
    """Jobs are numbered on each host alone, so the first death of the first job has the same id everywhere."""
    found = []
    for t_s in (6.0, 6.5):
        (tmp_path / str(t_s)).mkdir()
        with world(tmp_path / str(t_s)) as one:
            one.play(t_s, killed(seen_ns=at(t_s)))
            found.append(exported(one.told)[0].context.trace_id)
    assert len(set(found)) == 2


TIMES = st.integers(0, 40).map(lambda t_s: at(float(t_s)))
GOALS = ("stopped", "running", "verified")
STATES = ("suspected", "confirmed", "mitigating", "recovering", "resolved", "reopened")


@st.composite
def stories(draw: st.DrawFn) -> IncidentStory:
    """Whatever can stand in a story file, with times in any order."""
    story = IncidentStory()
    for revision in range(draw(st.integers(1, 6))):
        now = incident(revision=revision, state=draw(st.sampled_from(STATES)), onset_ns=draw(TIMES))
        now = replace(now, tier=draw(st.sampled_from(Tier)), epoch=draw(st.sampled_from((None, now.epoch))))
        story.revisions.append((draw(TIMES), replace(now, culprit=draw(st.sampled_from((None, rank(1)))))))
    for number in range(draw(st.integers(0, 3))):
        rungs = [Rung(goal=goal, target=JOB_SUBJECT, args={}, deadline_s=1) for goal in GOALS]
        plan = Plan(
            id=f"plan-{number}",
            incident="i",
            rule="r",
            mode=draw(st.sampled_from(("observe", "approve", "act"))),
            fence=1,
            deadline_ns=0,
            ladder=tuple(rungs),
        )
        results = draw(st.lists(st.sampled_from(("reached", "already", "failed", "refused", "expired")), max_size=4))
        indices = [0, 1, 2, -1] if len(results) == 4 else range(len(results))
        ended = [(draw(TIMES), outcome(plan.id, i, result)) for i, result in zip(indices, results, strict=False)]
        story.plans.append(PlanStory(plan=plan, started_ns=draw(TIMES), outcomes=ended))
    return story


@given(stories(), TIMES)
def test_any_story_gives_spans_that_lie_in_each_other_under_ids_of_their_own(story: IncidentStory, end_ns: int) -> None:
    spans = spans_of(story, end_ns)
    assert spans == spans_of(story, end_ns)
    by_path: dict[tuple[str, ...], SpanPlan] = {}
    for span in spans:
        assert span.path not in by_path
        by_path[span.path] = span
        parent = by_path.get(span.path[:-1], span)
        assert len(span.path) == 1 or parent is not span, "a parent comes first"
        assert 0 <= parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns
        assert all(span.start_ns <= change.t_ns <= span.end_ns for change in span.changes)
    roots = [span for span in spans if len(span.path) == 1]
    assert [span.after for span in roots] == ["", *(span.path[0] for span in roots[:-1])]
    assert [a.end_ns <= b.start_ns for a, b in pairwise(roots)] == [True] * (len(roots) - 1)
    assert len(spans) == 2 * len(roots) + sum(
        2 + (one.plan.mode == "approve") + sum(rung.index >= 0 for _, rung in one.outcomes) for one in story.plans
    )


def test_what_cannot_be_told_ends_nothing_but_itself(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, JOB, deadline_s=10)
    traces.export(IncidentStory(), at(END_S))
    with world(tmp_path) as one:
        one.play(6, killed())
        traces.export(one.told, at(END_S))
    assert traces.close() == "IndexError: list index out of range"
    assert len(exporter.get_finished_spans()) == 4
