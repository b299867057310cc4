"""Without a durable record there is no action: people hear it once, hear the rest as before, and nothing is started."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from trainwarden.alerts.incidents import Incidents
from trainwarden.app.engine import OWED_MAX, RETRY_NS, SNAPSHOT_EVERY, DurableMachine, Engine, key_of
from trainwarden.app.store import Store
from trainwarden.core.model import (
    Epoch,
    Event,
    Finding,
    Incident,
    Instruction,
    JobId,
    Notice,
    Outcome,
    Plan,
    Start,
    State,
    Stimulus,
    Subject,
    Tick,
    Tier,
)

JOB = JobId("train-3")
SECOND = 1_000_000_000
T0 = 10**18


def death(number: int) -> Finding:
    subject = Subject(kind="rank", id=str(number))
    return Finding(
        id=f"death/{JOB}/{number}/rank:{number}/0",
        revision=0,
        status="final",
        kind="process.killed",
        subject=subject,
        suspects=((subject, 1.0),),
        job=JOB,
        epoch=Epoch(number << 32),
        onset_ns=T0 + number * SECOND,
        onset_step=None,
        seen_ns=T0 + number * SECOND,
        confidence=1.0,
        reason=f"rank {number} was killed",
        evidence=(),
    )


class Repairs:
    """Starts a plan for each incident, and remembers how its plans ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def handle(self, stimulus: Stimulus) -> Sequence[Instruction]:
        if isinstance(stimulus, Outcome):
            self.ended.append(f"{stimulus.plan} {stimulus.result}")
        if isinstance(stimulus, Incident) and stimulus.revision == 1:
            name = f"plan-{stimulus.id}"
            plan = Plan(id=name, incident=stimulus.id, rule="r", mode="act", fence=1, deadline_ns=T0, ladder=())
            return [Start(plan=plan)]
        return []

    def due_ns(self) -> int | None:
        return None

    def snapshot(self) -> State:
        return {"ended": list(self.ended)}

    def restore(self, state: State) -> None:
        self.ended = list(state["ended"])


class Life:
    """An engine of two machines whose clock the test moves."""

    def __init__(self, path: Path, every: int = SNAPSHOT_EVERY) -> None:
        self.now_ns = T0
        self.repairs, self.incidents = Repairs(), Incidents()
        self.store = Store(path, busy=timedelta(milliseconds=50))
        machines: dict[str, DurableMachine] = {"incidents": self.incidents, "repairs": self.repairs}
        told = ("pager", "jsonl")
        self.engine = Engine(self.store, machines, lambda: self.now_ns, channels=told, snapshot_every=every)

    def handle(self, stimulus: Stimulus) -> list[str]:
        """What is said, in short."""
        return [_short(one) for one in self.engine.handle(stimulus)]

    def written(self) -> list[str]:
        return [row.key for row in self.store.tail()]


def _short(one: Instruction) -> str:
    if isinstance(one, Notice):
        return f"{one.channel}: {one.change} {one.incident.tier.name} {one.incident.kind}"
    return type(one).__name__


OUTAGE = ["Incident", "pager: opened CRITICAL journal.unwritable", "jsonl: opened CRITICAL journal.unwritable"]
OVER = ["Incident", "pager: resolved CRITICAL journal.unwritable", "jsonl: resolved CRITICAL journal.unwritable"]
DEATH = ["terminal: opened ERROR process.killed", "jsonl: opened ERROR process.killed"]


class Lock:
    """Another process that has the database and does not let go: the simplest way in which it cannot be written."""

    def __init__(self, path: Path, every: int = SNAPSHOT_EVERY) -> None:
        self._other = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> None:
        self._other.execute("BEGIN IMMEDIATE")

    def __exit__(self, *_: object) -> None:
        self._other.execute("ROLLBACK")
        self._other.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def life(path: Path) -> Iterator[Life]:
    one = Life(path)
    yield one
    one.store.close()


def heal(life: Life) -> list[str]:
    """What is said at the next tick after the journal can be written again and the time to try has come."""
    life.now_ns += RETRY_NS
    return life.handle(Tick(seen_ns=life.now_ns))


def test_people_hear_of_the_outage_and_of_the_death_and_nothing_is_started(life: Life, path: Path) -> None:
    with Lock(path):
        said = life.handle(death(1))
    assert life.engine.degraded
    assert said[:3] == OUTAGE
    assert [one for one in said if "opened ERROR" in one] == DEATH
    assert "Start" not in said
    assert life.repairs.ended == ["plan-death.train-3.1.rank-1.0 refused"]


def test_the_outage_is_told_once(life: Life, path: Path) -> None:
    with Lock(path):
        life.handle(death(1))
        assert not any("journal" in one for one in life.handle(death(2)))
        assert life.handle(death(2)) == [], "a key is handled once, written or not"


def test_what_is_said_of_it(life: Life, path: Path) -> None:
    with Lock(path):
        outage = next(one for one in life.engine.handle(death(1)) if isinstance(one, Incident))
    assert (outage.id, outage.tier, outage.state) == ("journal.death.train-3.1.rank-1.0.0", Tier.CRITICAL, "confirmed")
    assert "nothing is repaired" in outage.reason
    assert "locked by another process" in outage.reason


def test_when_it_is_over_all_is_written_in_order_and_starts_leave_again(life: Life, path: Path) -> None:
    life.handle(death(1))
    with Lock(path):
        life.handle(death(2))
        life.handle(death(3))
    assert heal(life) == OVER
    assert not life.engine.degraded
    refused = [f"plan-death.train-3.{number}.rank-{number}.0/-1" for number in (2, 3)]
    assert life.written() == [key_of(death(1)), key_of(death(2)), refused[0], key_of(death(3)), refused[1]]
    assert "Start" in life.handle(death(4))


def test_it_is_tried_again_only_now_and_then(life: Life, path: Path) -> None:
    """A try costs seconds while the database is locked, and a look at the job must not wait for it."""
    with Lock(path):
        life.handle(death(1))
    life.now_ns += RETRY_NS - 1
    assert life.handle(Tick(seen_ns=life.now_ns)) == []
    assert life.engine.degraded
    assert heal(life) == OVER


def test_it_may_still_be_broken_when_it_is_tried_again(life: Life, path: Path) -> None:
    with Lock(path):
        life.handle(death(1))
        assert heal(life) == []
    assert life.engine.degraded
    assert heal(life) == OVER


def test_a_snapshot_that_cannot_be_written_is_no_outage_of_its_own(path: Path) -> None:
    life = Life(path, every=1)
    life.handle(death(1))
    with Lock(path):
        assert life.handle(death(2))[:3] == OUTAGE
    assert heal(life) == OVER
    life.handle(death(3))
    assert [key for key in life.written() if key.startswith("death/")] == [key_of(death(n)) for n in (1, 2, 3)]
    life.store.close()


def test_a_second_outage_is_another_incident(life: Life, path: Path) -> None:
    names = []
    for number in (1, 2):
        with Lock(path):
            names.append(next(one for one in life.engine.handle(death(number)) if isinstance(one, Incident)).id)
        heal(life)
    assert len(set(names)) == 2


def test_a_replay_after_an_outage_meets_what_was_met(life: Life, path: Path) -> None:
    with Lock(path):
        life.handle(death(1))
    heal(life)
    life.handle(death(2))
    again = Life(path)
    said = [_short(one) for one in again.engine.start()]
    assert said.count("Start") == 1, "the refused plan is not started after all"
    assert again.repairs.ended == life.repairs.ended
    assert again.incidents.snapshot() == life.incidents.snapshot()
    again.store.close()


def test_more_than_can_be_kept_leaves_it_broken_until_the_next_start(life: Life, path: Path) -> None:
    subject = Subject(kind="source", id="s")
    with Lock(path):
        life.handle(death(1))
        life.engine.handle_all(
            Event(kind="source.blind", subject=subject, source="s", seq=number, t_ns=T0, seen_ns=T0)
            for number in range(OWED_MAX)
        )
    assert heal(life) == []
    assert life.engine.degraded
    assert "Start" not in life.handle(death(2))


# real disks


def test_a_full_disk(small_disk: Path) -> None:
    life = Life(small_disk / "journal.sqlite")
    life.handle(death(0))
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    said: list[str] = []
    number = 1
    while not life.engine.degraded and number < 100:  # pages that SQLite has already take a few rows
        said = life.handle(death(number))
        number += 1
    assert said[:3] == OUTAGE
    assert "Start" not in said
    filler.unlink()
    assert heal(life) == OVER
    assert [key for key in life.written() if key.startswith("death/")] == [key_of(death(n)) for n in range(number)]
    life.store.close()
