"""Many ranks accused of the same at once, with nothing in common: the measurement is suspected, not the ranks."""

import pytest

from trainwarden.alerts.incidents import Incidents
from trainwarden.core.model import Epoch, Event, Finding, Incident, Instruction, JobId, Notice, Stimulus, Subject, Tier

JOB = JobId("train-3")
SECOND = 1_000_000_000


def rank(number: int) -> Subject:
    return Subject(kind="rank", id=str(number))


def hellos(world_size: int, ranks_per_node: int) -> list[Event]:
    return [
        Event(
            kind="hello",
            subject=rank(number),
            source="rings@n0",
            seq=number,
            t_ns=0,
            seen_ns=0,
            job=JOB,
            epoch=Epoch(0),
            data={
                "rank": number,
                "world_size": world_size,
                "node": f"n{number // ranks_per_node}",
                "device": f"g{number}",
            },
        )
        for number in range(world_size)
    ]


def accused(kind: str, number: int, t_s: float) -> Finding:
    t_ns = int(t_s * SECOND)
    return Finding(
        id=f"d/{JOB}/0/rank:{number}/0",
        revision=0,
        status="final",
        kind=kind,
        subject=rank(number),
        suspects=(),
        job=JOB,
        epoch=Epoch(0),
        onset_ns=t_ns,
        onset_step=None,
        seen_ns=t_ns,
        confidence=1.0,
        reason=f"rank {number} is slow",
        evidence=(),
    )


def outcome(
    world_size: int, ranks: list[int], *, kind: str = "rank.slow", every_s: float = 1.0, per_node: int = 8
) -> list[Incident]:
    """The incidents that are open in the end."""
    machine, newest = Incidents(), dict[str, Incident]()
    stimuli: list[Stimulus] = [
        *hellos(world_size, per_node),
        *(accused(kind, number, every_s * n) for n, number in enumerate(ranks)),
    ]
    for stimulus in stimuli:
        newest |= {one.id: one for one in machine.handle(stimulus) if isinstance(one, Incident)}
    return [one for one in newest.values() if one.state != "resolved"]


SPREAD = list(range(0, 64, 7))
"""Ten ranks on eight nodes."""


@pytest.mark.parametrize(
    ("world_size", "ranks", "options", "count"),
    [
        pytest.param(64, SPREAD[:8], {}, 8, id="8 ranks are not too many"),
        pytest.param(64, SPREAD[:9], {}, 1, id="9 ranks of 64 are"),
        pytest.param(1024, list(range(0, 300, 10)), {}, 30, id="30 of 1024 are less than 3 percent"),
        pytest.param(1024, list(range(0, 310, 10)), {}, 1, id="31 of 1024 are more than 3 percent"),
        pytest.param(64, SPREAD[:9], {"every_s": 10.0}, 9, id="but not over 80 s"),
        pytest.param(64, list(range(9)), {"per_node": 16}, 9, id="nor when all sit on one node of several"),
        pytest.param(64, list(range(9)), {"per_node": 64}, 1, id="one node that is the whole job has nothing to tell"),
    ],
)
def test_the_limit(world_size: int, ranks: list[int], options: dict[str, int], count: int) -> None:
    assert len(outcome(world_size, ranks, **options)) == count  # type: ignore[arg-type]  # options by name


def test_it_is_one_warning_without_a_culprit_that_says_why() -> None:
    (one,) = outcome(64, SPREAD)
    assert (one.kind, one.culprit, one.tier, len(one.victims)) == ("rank.slow", None, Tier.WARN, 10)
    assert one.reason == (
        "10 of 64 ranks look rank.slow within 60 s and share no node: our own measurement is suspected "
        "(ranks 0, 7, 14, 21, 28, 35, 42, 49 and 2 more)"
    )
    assert "measurement" in one.action


def test_people_hear_that_the_others_became_part_of_it() -> None:
    machine, said = Incidents(), list[Instruction]()
    stimuli: list[Stimulus] = [*hellos(64, 8), *(accused("rank.slow", number, 1.0) for number in SPREAD)]
    for stimulus in stimuli:
        said += machine.handle(stimulus)
    notices = [one for one in said if isinstance(one, Notice) and one.channel == "jsonl"]
    opened, over = ({n.incident.id for n in notices if n.change == change} for change in ("opened", "resolved"))
    assert len(opened - over) == 1
    assert len(opened) == 8, "the ninth and tenth joined without a word"


@pytest.mark.parametrize("kind", ["process.killed", "loss.nonfinite", "rank.hung"])
def test_hard_facts_and_what_spreads_by_nature_are_no_mass_alarm(kind: str) -> None:
    """A NaN reaches every rank by the all-reduce: that is one incident with its own tier, not our fault."""
    (one,) = outcome(64, SPREAD, kind=kind)
    assert one.tier >= Tier.ERROR
    assert one.culprit == rank(0)


def test_a_real_hang_is_not_hidden_by_a_mass_alarm_before_it() -> None:
    machine, newest = Incidents(), dict[str, Incident]()
    slow = [accused("rank.slow", number, 10.0) for number in SPREAD]
    stimuli: list[Stimulus] = [*hellos(64, 8), *slow, accused("rank.hung", 3, 9.0)]
    for stimulus in stimuli:
        newest |= {one.id: one for one in machine.handle(stimulus) if isinstance(one, Incident)}
    (one,) = (one for one in newest.values() if one.state != "resolved")
    assert (one.kind, one.tier, one.culprit) == ("rank.hung", Tier.ERROR, rank(3))


@pytest.mark.parametrize(
    "data",
    [{}, {"world_size": "many", "node": "n1"}, {"world_size": 4, "node": None}, {"world_size": 4, "node": "n1"}],
    ids=["nothing", "no number", "no node", "no rank"],
)
def test_a_hello_that_says_nonsense_is_passed_over(data: dict[str, str | int | None]) -> None:
    event = Event(
        kind="hello", subject=rank(0), source="s", seq=1, t_ns=0, seen_ns=0, job=JOB, epoch=Epoch(0), data=data
    )
    assert list(Incidents().handle(event)) == []
