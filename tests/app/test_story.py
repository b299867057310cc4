"""What was decided, kept line by line: told once, taken up again, whatever happened to the file."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.app.story_world import KILLED, killed, world
from tests.remediation.plan_world import at, incident, outcome

from trainwarden.app.story import Story
from trainwarden.core.model import Plan, Start, Tell

OPENED = incident()
PLAN = Plan(
    id=f"{OPENED.id}/plan-1", incident=OPENED.id, rule=OPENED.kind, mode="act", fence=1, deadline_ns=at(99), ladder=()
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "story.jsonl"


def told(path: Path) -> Story:
    """An incident, its plan, what the plan was told, and how it ended."""
    story = Story(path)
    story.note(OPENED, at(6))
    story.note(Start(plan=PLAN), at(7))
    story.note(Tell(key="commands/1", plan=PLAN.id, message={"verb": "approve"}), at(8))
    story.note(outcome(PLAN.id, 0, "reached"), at(9))
    story.note(outcome(PLAN.id, -1, "reached"), at(10))
    return story


def test_a_story_is_taken_up_by_the_next_supervisor(path: Path) -> None:
    before, after = told(path), Story(path)
    assert after.incidents == before.incidents
    (story,) = after.incidents.values()
    assert (story.newest, story.opened_ns) == (OPENED, at(6))
    (plan,) = story.plans
    assert [(t_ns, one.index) for t_ns, one in plan.outcomes] == [(at(9), 0), (at(10), -1)]
    assert [t_ns for t_ns, _ in plan.told] == [at(8)]
    assert after.plan(PLAN.id) == plan
    assert [after.about(one) for one in (OPENED, Start(plan=PLAN), outcome(PLAN.id, 0, "reached"))] == [story] * 3
    assert after.failures == 0


def test_what_was_said_before_is_no_news(path: Path) -> None:
    told(path)
    text = path.read_text()
    story = Story(path)
    assert not story.note(OPENED, at(50))
    assert not story.note(Start(plan=PLAN), at(50))
    assert not story.note(outcome(PLAN.id, -1, "reached"), at(50))
    assert path.read_text() == text
    assert story.note(replace(OPENED, revision=2, state="resolved"), at(51))
    assert len(story.incidents[OPENED.id].revisions) == 2


def test_open_are_those_that_are_not_over(path: Path) -> None:
    story = told(path)
    assert story.open == {OPENED.id: OPENED}
    story.note(replace(OPENED, revision=2, state="resolved"), at(11))
    assert Story(path).open == {}
    story.note(replace(OPENED, revision=3, state="reopened"), at(12))
    assert Story(path).open[OPENED.id].revision == 3


def test_a_line_that_a_crash_cut_short_does_not_take_the_next_one_with_it(path: Path) -> None:
    told(path)
    text = path.read_text()
    path.write_text(text[:-20])
    story = Story(path)
    assert story.failures == 1
    assert story.note(outcome(PLAN.id, -1, "failed"), at(20)), "its end was lost with the line"
    again = Story(path)
    assert [one.result for _, one in again.incidents[OPENED.id].plans[0].outcomes] == ["reached", "failed"]
    assert again.failures == 1


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", '{"t_ns": 1}', '{"t_ns": "x", "said": {}}', '{"t_ns": 1, "said": {"type": "Nothing"}}', "\x00"],
)
def test_a_line_that_cannot_be_read_is_counted_and_passed_over(path: Path, line: str) -> None:
    told(path)
    path.write_text(line + "\n" + path.read_text())
    story = Story(path)
    assert story.failures == 1
    assert list(story.incidents) == [OPENED.id]


def test_a_file_that_cannot_be_written_is_counted_and_the_rest_goes_on(path: Path) -> None:
    path.mkdir()
    story = told(path)
    assert story.failures == 5
    assert story.open == {OPENED.id: OPENED}
    assert story.incidents[OPENED.id].plans[0].plan == PLAN


def test_the_story_of_the_real_machines(tmp_path: Path) -> None:
    with world(tmp_path) as one:
        one.play(6, killed())
        plan = one.told.plans[0].plan.id
        one.repair(plan, (8, "reached"), (20, "reached"), (30, "reached"))
        after = Story(tmp_path / "story.jsonl")
        assert list(after.incidents) == [KILLED]
        assert [index for _, index in ((t, o.index) for t, o in after.incidents[KILLED].plans[0].outcomes)][-1] == -1
        assert after.incidents == one.story.incidents
