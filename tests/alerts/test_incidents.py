"""One cause, one incident, one tier; people hear what they would act on, once."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from trainwarden.alerts.incidents import Incidents, IncidentsConfig
from trainwarden.alerts.routes import RoutesConfig
from trainwarden.core.model import (
    Epoch,
    Event,
    Evidence,
    Finding,
    Incident,
    Instruction,
    JobId,
    Look,
    Notice,
    Outcome,
    Plan,
    Rung,
    Start,
    Stimulus,
    Subject,
    Tick,
    Tier,
)

JOB = JobId("train-3")
ALONE = RoutesConfig(critical=("jsonl",), error=("jsonl",), warn=("jsonl",), info=("jsonl",))
"""One channel, so that a notice is said once in these tests."""


def at(t_s: float) -> int:
    return int((1_000_000 + t_s) * 1e9)


def rank(number: int) -> Subject:
    return Subject(kind="rank", id=str(number))


def found(kind: str, who: int = 2, onset_s: float = 10.0, seen_s: float | None = None, **changes: object) -> Finding:
    base = Finding(
        id=f"{kind}/{JOB}/0/rank:{who}/0",
        revision=0,
        status="final",
        kind=kind,
        subject=rank(who),
        suspects=((rank(who), 1.0),),
        job=JOB,
        epoch=Epoch(0),
        onset_ns=at(onset_s),
        onset_step=100,
        seen_ns=at(onset_s + 0.4 if seen_s is None else seen_s),
        confidence=1.0,
        reason=f"rank {who} has {kind}",
        evidence=(),
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # fields by name


def revised(finding: Finding, seen_s: float, **changes: object) -> Finding:
    newer = {"revision": finding.revision + 1, "seen_ns": at(seen_s)} | changes
    return replace(finding, **newer)  # type: ignore[arg-type]  # fields by name


def fed(machine: Incidents, *stimuli: Stimulus) -> list[Instruction]:
    return [instruction for stimulus in stimuli for instruction in machine.handle(stimulus)]


def machine() -> Incidents:
    return Incidents(IncidentsConfig(routes=ALONE))


def incidents(instructions: Sequence[Instruction]) -> list[Incident]:
    return [one for one in instructions if isinstance(one, Incident)]


def told(instructions: Sequence[Instruction]) -> list[tuple[str, str, str]]:
    notices = [one for one in instructions if isinstance(one, Notice)]
    return [(one.change, one.incident.kind, str(one.incident.culprit)) for one in notices]


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("process.killed", Tier.ERROR),
        ("process.oom", Tier.ERROR),
        ("process.failed", Tier.ERROR),
        ("process.unknown", Tier.ERROR),
        ("rank.hung", Tier.ERROR),
        ("rank.slow", Tier.WARN),
        ("loss.nonfinite", Tier.CRITICAL),
    ],
)
def test_a_final_finding_opens_one_confirmed_incident_of_its_tier(kind: str, tier: Tier) -> None:
    opened = incidents(fed(machine(), found(kind)))
    assert [(one.kind, one.tier, one.state, one.culprit) for one in opened] == [(kind, tier, "confirmed", rank(2))]


DEATH = found("process.killed", 2, 10.0)
HANG = found("rank.hung", 1, 10.0, 16.0, status="provisional")
SLOW = found("rank.slow", 3, 8.0, 12.0)
NAN = found("loss.nonfinite", 0, 10.0)


@pytest.mark.parametrize(
    ("stimuli", "verdicts"),
    [
        pytest.param([DEATH, found("process.killed", 3, 10.2)], ["process.killed rank:2"], id="deaths follow a death"),
        pytest.param(
            [DEATH, found("process.killed", 3, 9.0, 11.0)],
            ["process.killed rank:3"],
            id="an earlier death is the cause, though seen later",
        ),
        pytest.param([DEATH, HANG], ["process.killed rank:2"], id="a death explains the stall"),
        pytest.param(
            [DEATH, found("rank.hung", 1, 9.5, 16.0)],
            ["process.killed rank:2"],
            id="the peers of a killed rank entered their phase before the kill",
        ),
        pytest.param(
            [HANG, found("process.killed", 2, 11.0, 16.5)],
            ["process.killed rank:2"],
            id="a death seen after the stall, but before the stall was seen, is its cause",
        ),
        pytest.param(
            [HANG, found("process.killed", 1, 20.0)], ["rank.hung rank:1"], id="a watchdog kills after a hang"
        ),
        pytest.param([HANG, found("rank.slow", 3, 12.0, 17.0)], ["rank.hung rank:1"], id="a hang explains slowness"),
        pytest.param(
            [found("rank.slow", 3, 12.0, 17.0), replace(HANG, status="final")],
            ["rank.hung rank:1"],
            id="the same in the other order",
        ),
        pytest.param(
            [SLOW, HANG], ["rank.slow rank:3", "rank.hung rank:1"], id="slow before the hang is its own cause"
        ),
        pytest.param([SLOW, found("rank.slow", 1, 9.0)], ["rank.slow rank:3", "rank.slow rank:1"], id="two slow ranks"),
        pytest.param([NAN, found("loss.nonfinite", 1, 10.0)], ["loss.nonfinite rank:0"], id="a NaN spreads"),
        pytest.param(
            [NAN, found("process.failed", 0, 10.1)], ["loss.nonfinite rank:0"], id="a script gives up at a NaN"
        ),
        pytest.param(
            [NAN, DEATH], ["loss.nonfinite rank:0", "process.killed rank:2"], id="a kill is not a NaN's doing"
        ),
        pytest.param(
            [NAN, found("process.failed", 0, 10.1), found("rank.hung", 1, 10.2, 16.0)],
            ["loss.nonfinite rank:0"],
            id="what follows from what follows",
        ),
        pytest.param(
            [replace(DEATH, epoch=Epoch(7)), replace(HANG, epoch=Epoch(9))],
            ["process.killed rank:2"],
            id="a lap is no other start of the ranks",
        ),
        pytest.param(
            [DEATH, found("process.killed", 1, 30.0, id="x", epoch=Epoch(1 << 32))],
            ["process.killed rank:2", "process.killed rank:1"],
            id="another epoch is another trouble",
        ),
        pytest.param(
            [DEATH, found("process.killed", 1, 11.0, id="x", job=JobId("other"))],
            ["process.killed rank:2", "process.killed rank:1"],
            id="another job is another trouble",
        ),
    ],
)
def test_one_cause_is_one_incident(stimuli: list[Stimulus], verdicts: list[str]) -> None:
    newest = {one.id: one for one in incidents(fed(machine(), *stimuli))}
    assert [f"{one.kind} {one.culprit}" for one in newest.values() if one.state != "resolved"] == verdicts


def test_the_incident_keeps_its_id_when_the_culprit_is_revised() -> None:
    said = fed(machine(), DEATH, found("process.killed", 3, 9.0, 11.0))
    assert {one.id for one in incidents(said)} == {"process.killed.train-3.0.rank-2.0"}
    assert told(said) == [("opened", "process.killed", "rank:2"), ("updated", "process.killed", "rank:3")]
    assert incidents(said)[-1].onset_ns == at(9.0)


def test_folded_incidents_are_resolved_as_part_of_the_other() -> None:
    slow = found("rank.slow", 3, 12.0, 17.0)
    said = fed(machine(), slow, replace(HANG, status="final"))
    assert told(said) == [
        ("opened", "rank.slow", "rank:3"),
        ("escalated", "rank.hung", "rank:1"),
    ], "the older incident goes on with its id and the worse tier"
    assert len({one.id for one in incidents(said)}) == 1


def test_a_finding_that_explains_two_incidents_makes_them_one() -> None:
    said = fed(
        machine(), found("rank.slow", 3, 12.0, 13.0), found("rank.slow", 0, 12.0, 14.0), replace(HANG, status="final")
    )
    newest = {one.id: one for one in incidents(said)}
    first, second = newest.values()
    assert (first.state, first.kind, first.victims) == ("confirmed", "rank.hung", (rank(0), rank(3)))
    assert (second.state, second.reason) == ("resolved", f"part of incident {first.id}: rank 0 has rank.slow")
    assert [change for change, _, _ in told(said)] == ["opened", "opened", "escalated", "resolved"]


# what people hear


def test_a_provisional_death_or_hang_is_said_at_once_a_provisional_straggler_is_only_recorded() -> None:
    for kind, changes in (("process.killed", ["opened"]), ("rank.hung", ["opened"]), ("rank.slow", [])):
        said = fed(machine(), found(kind, status="provisional"))
        assert [one.state for one in incidents(said)] == ["suspected"]
        assert [change for change, _, _ in told(said)] == changes, kind


def test_a_straggler_is_said_when_it_is_certain() -> None:
    doubtful = found("rank.slow", status="provisional")
    said = fed(machine(), doubtful, revised(doubtful, 14.0, status="final"))
    assert told(said) == [("opened", "rank.slow", "rank:2")]


def test_a_suspicion_withdrawn_before_anybody_heard_of_it_is_not_said() -> None:
    doubtful = found("rank.slow", status="provisional")
    said = fed(machine(), doubtful, revised(doubtful, 14.0, status="withdrawn"))
    assert [one.state for one in incidents(said)] == ["suspected", "resolved"]
    assert told(said) == []


@pytest.mark.parametrize("over", ["cleared", "withdrawn"])
def test_a_cleared_finding_resolves_its_incident_with_one_notice(over: str) -> None:
    one = machine()
    said = fed(one, SLOW, revised(SLOW, 20.0, status=over), revised(SLOW, 21.0, status=over, revision=2))
    assert [change for change, _, _ in told(said)] == ["opened", "resolved"]
    assert incidents(said)[-1].state == "resolved"
    assert one.due_ns() is None


def test_the_end_of_the_attempt_resolves_nothing() -> None:
    end = Event(
        kind="attempt.ended",
        subject=Subject(kind="job", id=JOB),
        source="keeper@n1",
        seq=7,
        t_ns=at(11.0),
        seen_ns=at(11.0),
        job=JOB,
        epoch=Epoch(0),
        data={"attempt": 0, "term": 1, "by": "torchrun", "code": 1},
    )
    said = fed(machine(), DEATH, end)
    assert incidents(said)[-1].state == "confirmed"
    assert incidents(said)[-1].events == (end,)
    assert len(told(said)) == 1, "an event that is kept with the incident is no news"


def test_new_words_are_said_at_most_every_30_s() -> None:
    one = machine()
    first = revised(HANG, 17.0, reason="rank 1 hangs in data loading")
    second = revised(first, 18.0, reason="rank 1 hangs in data loading, train.py:40")
    assert len(told(fed(one, HANG, first, second))) == 1
    assert one.due_ns() == at(16.0 + 30)
    assert told(fed(one, Tick(seen_ns=at(45.9)))) == []
    said = fed(one, Tick(seen_ns=at(46.0)))
    assert told(said) == [("updated", "rank.hung", "rank:1")]
    assert [notice.incident.reason for notice in said if isinstance(notice, Notice)] == [second.reason]
    assert one.due_ns() is None


def test_new_words_after_a_silence_are_said_at_once() -> None:
    said = fed(machine(), HANG, revised(HANG, 60.0, reason="rank 1 hangs in data loading"))
    assert [change for change, _, _ in told(said)] == ["opened", "updated"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"suspects": ((rank(3), 1.0),)}, id="culprit"),
        pytest.param({"kind": "process.unknown"}, id="kind"),
        pytest.param({"status": "final"}, id="state"),
    ],
)
def test_what_people_would_act_on_is_said_at_once(changes: dict[str, object]) -> None:
    said = fed(machine(), HANG, revised(HANG, 17.0, **changes))
    assert [change for change, _, _ in told(said)] == ["opened", "updated"]


def test_a_risen_tier_is_an_escalation_on_the_channels_of_both_tiers() -> None:
    one = Incidents(IncidentsConfig(routes=RoutesConfig(warn=("mail",), critical=("pager",))))
    slow = found("rank.slow", 0)
    said = fed(one, slow, revised(slow, 14.0, kind="loss.nonfinite"), revised(slow, 15.0, revision=2, status="cleared"))
    notices = [(notice.channel, notice.change) for notice in said if isinstance(notice, Notice)]
    assert notices == [
        ("mail", "opened"),
        ("pager", "escalated"),
        ("mail", "escalated"),
        ("mail", "resolved"),
        ("pager", "resolved"),
    ]


def test_a_revision_that_changes_nothing_is_no_revision() -> None:
    one = machine()
    assert len(incidents(fed(one, DEATH))) == 1
    assert fed(one, revised(DEATH, 11.0, evidence=DEATH.evidence)) != [], "a new revision of the finding is kept"
    assert fed(one, DEATH, revised(DEATH, 11.0)) == [], "an old or equal one is not taken again"


def test_notices_name_incident_revision_and_channel() -> None:
    said = fed(Incidents(), DEATH)
    assert [notice.key for notice in said if isinstance(notice, Notice)] == [
        "process.killed.train-3.0.rank-2.0/1/terminal",
        "process.killed.train-3.0.rank-2.0/1/jsonl",
    ]


# what it says


def test_reason_victims_and_times_tell_the_story() -> None:
    death = replace(
        DEATH,
        status="provisional",
        reason="rank 2 was killed by SIGKILL",
        evidence=(Evidence(what="victims", value=[0, 1, "rank:3", "nonsense", 2]),),
    )
    said = fed(machine(), death, revised(death, 10.9, status="final"), replace(HANG, status="final"))
    last = incidents(said)[-1]
    assert last.reason == "rank 2 was killed by SIGKILL; followed by rank.hung of rank 1"
    assert last.victims == (rank(0), rank(1), rank(3))
    assert last.lost_s == {"detect": pytest.approx(0.4), "decide": pytest.approx(0.5)}
    assert last.action.startswith("restart the job from the newest verified checkpoint")
    assert "\n" not in last.reason + last.action


def test_findings_stand_by_first_abnormal_sign() -> None:
    said = fed(machine(), DEATH, found("rank.hung", 1, 9.5, 16.0), found("process.killed", 3, 11.0))
    assert [one.onset_ns for one in incidents(said)[-1].findings] == [at(9.5), at(10.0), at(11.0)]


def test_two_equal_suspects_are_no_culprit() -> None:
    undecided = replace(HANG, subject=Subject(kind="job", id=JOB), suspects=((rank(0), 0.5), (rank(1), 0.5)))
    assert incidents(fed(machine(), undecided))[0].culprit is None


def test_the_first_sight_of_a_hang_asks_for_a_look_at_all_ranks_once() -> None:
    hang = replace(HANG, evidence=(Evidence(what="members", value=[0, 1, 2, 3]),))
    said = fed(machine(), hang, revised(hang, 17.0, status="final"))
    assert said[0] == Look(key=f"look/{hang.id}", what="stack", subjects=tuple(map(rank, range(4))))
    assert sum(isinstance(one, Look) for one in said) == 1


def test_a_hang_without_members_asks_for_a_look_at_suspects_and_victims() -> None:
    waiting = replace(HANG, evidence=(Evidence(what="victims", value=[0, 2, 3]),))
    (look,) = (one for one in fed(machine(), waiting) if isinstance(one, Look))
    assert look.subjects == (rank(1), rank(0), rank(2), rank(3)), "the suspect first"


def test_a_kind_nobody_foresaw_is_a_warning() -> None:
    (opened,) = incidents(fed(machine(), found("disk.full")))
    assert (opened.tier, opened.state) == (Tier.WARN, "confirmed")


# what comes back


def test_a_trouble_that_comes_back_within_10_minutes_reopens_its_incident() -> None:
    over = revised(SLOW, 20.0, status="cleared")
    back = found("rank.slow", 3, 300.0, id="rank.slow/train-3/0/rank:3/1")
    said = fed(machine(), SLOW, over, back)
    assert [one.state for one in incidents(said)] == ["confirmed", "resolved", "reopened"]
    assert [change for change, _, _ in told(said)] == ["opened", "resolved", "opened"]
    assert len({one.id for one in incidents(said)}) == 1


def test_the_same_finding_alive_again_reopens_its_incident() -> None:
    said = fed(machine(), SLOW, revised(SLOW, 20.0, status="cleared"), revised(SLOW, 30.0, revision=2, status="final"))
    assert [one.state for one in incidents(said)] == ["confirmed", "resolved", "reopened"]


def test_after_10_minutes_it_is_a_new_incident() -> None:
    back = found("rank.slow", 3, 700.0, id="rank.slow/train-3/0/rank:3/1")
    said = fed(machine(), SLOW, revised(SLOW, 20.0, status="cleared"), back)
    assert len({one.id for one in incidents(said)}) == 2


def test_a_forgotten_finding_gets_an_incident_id_of_its_own() -> None:
    """Else its notices would carry keys that were used before, and a channel would swallow them."""
    back = revised(SLOW, 900.0, revision=2, status="final")
    said = fed(machine(), SLOW, revised(SLOW, 20.0, status="cleared"), back)
    keys = [one.key for one in said if isinstance(one, Notice)]
    assert len(keys) == len(set(keys)) == 3


def test_a_second_finding_of_the_same_trouble_joins() -> None:
    said = fed(machine(), SLOW, found("rank.slow", 3, 20.0, id="rank.slow/train-3/0/rank:3/1"))
    assert len({one.id for one in incidents(said)}) == 1


# plans


def plan(mode: str) -> Plan:
    goals = ("stopped", "running", "verified")
    return Plan(
        id="p1",
        incident="process.killed.train-3.0.rank-2.0",
        rule="r",
        mode=mode,  # type: ignore[arg-type]  # one of the modes
        fence=1,
        deadline_ns=at(100.0),
        ladder=tuple(Rung(goal=goal, target=Subject(kind="job", id=JOB), args={}, deadline_s=10.0) for goal in goals),
    )


def outcome(index: int, result: str = "reached") -> Outcome:
    return Outcome(plan="p1", index=index, result=result, reason="", retryable=False, found={})  # type: ignore[arg-type]  # one of the results


@pytest.mark.parametrize(
    ("stimuli", "states"),
    [
        pytest.param(
            [Start(plan=plan("act")), outcome(0), outcome(1), outcome(2), outcome(-1)],
            ["confirmed", "mitigating", "recovering", "resolved"],
            id="a plan that works",
        ),
        pytest.param(
            [Start(plan=plan("approve")), outcome(0), outcome(1), outcome(-1)],
            ["confirmed", "confirmed", "mitigating", "recovering", "resolved"],
            id="an approved plan acts from its first rung on",
        ),
        pytest.param(
            [Start(plan=plan("act")), outcome(0), outcome(1), outcome(-1, "failed")],
            ["confirmed", "mitigating", "recovering", "confirmed"],
            id="a plan that fails",
        ),
        pytest.param(
            [Start(plan=plan("observe")), outcome(-1, "refused")], ["confirmed", "confirmed"], id="observe only"
        ),
        pytest.param([outcome(0), outcome(-1)], ["confirmed"], id="outcomes of a plan unknown here"),
        pytest.param(
            [Start(plan=plan("act")), outcome(-1), revised(DEATH, 50.0, reason="late words")],
            ["confirmed", "mitigating", "resolved", "resolved"],
            id="late words about what a plan repaired do not reopen",
        ),
    ],
)
def test_the_state_follows_the_plan(stimuli: list[Stimulus], states: list[str]) -> None:
    assert [one.state for one in incidents(fed(machine(), DEATH, *stimuli))] == states


def test_what_a_plan_repaired_and_comes_back_reopens() -> None:
    again = found("process.killed", 2, 60.0, id="again", epoch=Epoch(1 << 32))
    said = fed(machine(), DEATH, Start(plan=plan("act")), outcome(-1), again)
    assert incidents(said)[-1].state == "reopened"
    assert incidents(said)[-1].epoch == Epoch(1 << 32)
    assert told(said)[-1][0] == "opened"


def test_a_plan_of_an_incident_that_became_part_of_another_goes_on_there() -> None:
    one = machine()
    said = fed(one, found("rank.slow", 3, 12.0, 13.0), found("rank.slow", 0, 12.0, 14.0))
    first, second = (incident.id for incident in incidents(said))
    fed(one, replace(HANG, status="final"))
    moved = incidents(fed(one, Start(plan=replace(plan("act"), incident=second))))
    assert [(incident.id, incident.state, incident.plans) for incident in moved] == [(first, "mitigating", ("p1",))]


# memory


def test_memory_is_bounded() -> None:
    one = Incidents(IncidentsConfig(routes=ALONE, kept_max=50))
    for number in range(300):
        fed(one, found("process.killed", 1, float(number), id=f"death/{number}", epoch=Epoch(number << 32)))
    assert len(one.snapshot()["cases"]) <= 51
    assert len(one.snapshot()["case_of"]) <= 51


def test_a_flapping_straggler_does_not_grow_its_incident_for_ever() -> None:
    one = machine()
    for number in range(200):
        flap = found("rank.slow", 3, 100.0 * number, id=f"flap/{number}")
        said = fed(one, flap, revised(flap, 100.0 * number + 50, status="cleared"))
    assert len(incidents(said)[-1].findings) <= 20


def test_what_is_forgotten_is_never_due() -> None:
    one = Incidents(IncidentsConfig(routes=ALONE, kept_max=1))
    fed(one, HANG, revised(HANG, 17.0, reason="in other words"))
    assert one.due_ns() is not None
    fed(one, found("process.killed", 1, 20.0, id="x", epoch=Epoch(1 << 32)), Tick(seen_ns=at(21.0)))
    assert one.due_ns() is None


def test_a_channel_that_keeps_a_state_can_ask_what_it_has_heard_of_and_is_open() -> None:
    said = machine()
    (opened,) = incidents(fed(said, DEATH))
    assert said.told("jsonl") == [opened]
    assert said.told("pager") == []
    fed(said, revised(DEATH, 30.0, status="cleared"))
    assert said.told("jsonl") == []
