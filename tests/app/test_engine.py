"""Written down first, then handled; a start meets what was met before."""

import json
import os
import signal
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.alerts.incidents import Incidents
from trainwarden.app.engine import SNAPSHOT_EVERY, DurableMachine, Engine, key_of
from trainwarden.app.store import LEASE_NS, Store
from trainwarden.core.codec import dumps
from trainwarden.core.errors import FencedError, StoreError
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
)
from trainwarden.core.process import identify

JOB = JobId("train-3")
SECOND = 1_000_000_000
T0 = 10**18


def rank(number: int) -> Subject:
    return Subject(kind="rank", id=str(number))


def death(number: int) -> Finding:
    """Each in an epoch of its own: an incident of its own."""
    return Finding(
        id=f"death/{JOB}/{number}/rank:{number}/0",
        revision=0,
        status="final",
        kind="process.killed",
        subject=rank(number),
        suspects=((rank(number), 1.0),),
        job=JOB,
        epoch=Epoch(number << 32),
        onset_ns=T0 + number * SECOND,
        onset_step=None,
        seen_ns=T0 + number * SECOND,
        confidence=1.0,
        reason=f"rank {number} was killed",
        evidence=(),
    )


def event(number: int) -> Event:
    job = Subject(kind="job", id=JOB)
    return Event(kind="attempt.ended", subject=job, source="run@n1", seq=number, t_ns=T0, seen_ns=T0, job=JOB)


def plan(name: str, incident: str) -> Plan:
    return Plan(id=name, incident=incident, rule="r", mode="act", fence=1, deadline_ns=T0, ladder=())


def outcome(of: str, index: int = -1) -> Outcome:
    return Outcome(plan=of, index=index, result="reached", reason="", retryable=False, found={})


class Repairs:
    """A second machine: one plan for each incident that it hears of; it remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def handle(self, stimulus: Stimulus) -> Sequence[Instruction]:
        self.heard.append(key_of(stimulus))
        if isinstance(stimulus, Incident) and stimulus.revision == 1:
            return [Start(plan=plan(f"plan-{stimulus.id}", stimulus.id))]
        return []

    def due_ns(self) -> int | None:
        return None

    def snapshot(self) -> State:
        return {"heard": list(self.heard)}

    def restore(self, state: State) -> None:
        self.heard = list(state["heard"])


class Life:
    """One life of a server: its store, its machines, its engine."""

    def __init__(self, path: Path, machines: dict[str, DurableMachine] | None = None, every: int = SNAPSHOT_EVERY):
        self.store = Store(path)
        self.machines = {"incidents": Incidents()} if machines is None else machines
        self.engine = Engine(self.store, self.machines, lambda: T0, snapshot_every=every)

    def keys(self) -> list[str]:
        return [row.key for row in self.store.tail()]

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def life(path: Path) -> Iterator[Life]:
    with Life(path) as one:
        yield one


def texts(instructions: Sequence[Instruction]) -> list[str]:
    return [dumps(one) for one in instructions]


def fed(life: Life, stimuli: Sequence[Stimulus]) -> list[Instruction]:
    return [one for stimulus in stimuli for one in life.engine.handle(stimulus)]


# journal first


def test_each_stimulus_has_the_key_that_makes_it_the_same_again(life: Life) -> None:
    fed(life, [replace(death(1), revision=3), event(7), outcome("p1", 2), Start(plan=plan("p2", "i"))])
    assert life.keys() == ["death/train-3/1/rank:1/0/3", "run@n1/7", "p1/2", "p2"]


def test_a_known_key_is_not_handled_again(life: Life) -> None:
    first = life.engine.handle(death(1))
    assert len(first) == 3, "the incident and a notice on each of two channels"
    assert life.engine.handle(death(1)) == []
    assert len(life.engine.handle_all([death(1), death(2), death(2)])) == 3
    assert life.keys() == [key_of(death(1)), key_of(death(2))]


def test_several_at_once_are_handled_in_order(life: Life, tmp_path: Path) -> None:
    stimuli: list[Stimulus] = [death(1), event(1), death(2), replace(death(1), revision=1, status="cleared")]
    with Life(tmp_path / "other.sqlite") as other:
        assert texts(life.engine.handle_all(stimuli)) == texts(fed(other, stimuli))
        assert life.keys() == other.keys()


def test_what_is_handled_is_what_the_journal_says(life: Life) -> None:
    """A tuple in evidence comes out of a journal as a list: it must do so at once, or a replay would differ."""
    said = life.engine.handle(replace(event(1), data={"by": ("a", "b")}))
    assert said == []
    assert json.loads(next(iter(life.store.tail())).text)["data"] == {"by": ["a", "b"]}


def test_a_tick_is_journalled_only_when_a_machine_wants_it(life: Life) -> None:
    fed(life, [Tick(seen_ns=T0), death(1), replace(death(1), revision=1, reason="killed by hand")])
    due_ns = life.engine.due_ns()
    assert due_ns == death(1).seen_ns + 30 * SECOND
    assert life.engine.handle(Tick(seen_ns=due_ns - 1)) == []
    assert [one.change for one in life.engine.handle(Tick(seen_ns=due_ns)) if isinstance(one, Notice)] == [
        "updated"
    ] * 2
    assert life.keys() == [key_of(death(1)), "death/train-3/1/rank:1/0/1", f"tick/{due_ns}"]


# two machines


def test_an_incident_goes_on_to_the_next_machine_and_a_start_comes_back(path: Path) -> None:
    repairs = Repairs()
    with Life(path, {"incidents": Incidents(), "repairs": repairs}) as life:
        said = life.engine.handle(death(1))
        incidents = [one for one in said if isinstance(one, Incident)]
        assert [one.state for one in incidents] == ["confirmed", "mitigating"]
        assert [one.plan.id for one in said if isinstance(one, Start)] == [f"plan-{incidents[0].id}"]
        assert repairs.heard == [key_of(death(1)), *(f"{one.id}/{one.revision}" for one in incidents)]
        assert life.keys() == [key_of(death(1))], "what is decided is not journalled: a replay decides it again"


def test_a_plan_that_ended_is_not_started_again(path: Path) -> None:
    def machines() -> dict[str, DurableMachine]:
        return {"incidents": Incidents(), "repairs": Repairs()}

    with Life(path, machines()) as life:
        started = [one.plan.id for one in fed(life, [death(1), death(2)]) if isinstance(one, Start)]
        life.engine.handle(outcome(started[0]))
    with Life(path, machines()) as again:
        assert [one.plan.id for one in again.engine.start() if isinstance(one, Start)] == started[1:]


# again


STORY: list[Stimulus] = [
    stimulus
    for number in range(5)
    for stimulus in (
        death(number),
        event(number),
        replace(death(number), revision=1, reason="other words"),
        replace(death(number), revision=2, status="cleared"),
    )
]


@settings(max_examples=15, deadline=None)
@given(stimuli=st.lists(st.sampled_from(STORY), max_size=20), cut=st.integers(0, 20), every=st.sampled_from((1, 3, 50)))
def test_a_restart_says_again_what_was_said_and_goes_on_alike(
    tmp_path_factory: pytest.TempPathFactory, stimuli: list[Stimulus], cut: int, every: int
) -> None:
    folder = tmp_path_factory.mktemp("lives")
    with Life(folder / "one.sqlite") as whole:
        said = [texts(whole.engine.handle(stimulus)) for stimulus in stimuli]
    with Life(folder / "two.sqlite", every=every) as first:
        assert [texts(first.engine.handle(one)) for one in stimuli[:cut]] == said[:cut]
    with Life(folder / "two.sqlite", every=every) as second:
        again = texts(second.engine.start())
        before = [text for one in said[:cut] for text in one]
        assert again == before[len(before) - len(again) :], "the end of what was said before"
        assert len(again) >= len(before) or every < len(stimuli)
        assert [texts(second.engine.handle(one)) for one in stimuli[cut:]] == said[cut:]


def test_a_snapshot_shortens_what_a_start_handles_again(path: Path) -> None:
    with Life(path, every=10) as life:
        fed(life, [event(number) for number in range(25)])
    with Life(path, every=10) as again:
        assert again.store.load_snapshot("engine") is not None
        seq, _ = again.store.load_snapshot("engine") or (0, {})
        assert seq == 20
        assert again.engine.start() == []


def test_what_the_last_call_said_is_said_again_even_after_a_snapshot(path: Path) -> None:
    """A snapshot is taken before the next stimulus: whatever the process dies of, nothing is lost between the two."""
    with Life(path, every=1) as life:
        said = [life.engine.handle(death(number)) for number in range(3)]
    with Life(path, every=1) as again:
        assert texts(again.engine.start()) == texts(said[-1])


def test_a_snapshot_of_another_version_is_passed_over(path: Path) -> None:
    with Life(path) as life:
        said = fed(life, [death(1), death(2)])
        life.store.save_snapshot(life.store.last_seq(), "engine", {"incidents/cases": [{"of": "the future"}]})
    with Life(path) as again:
        assert texts(again.engine.start()) == texts(said)


def test_a_machine_that_is_new_starts_with_what_comes(path: Path) -> None:
    with Life(path, every=1) as life:
        fed(life, [death(1), death(2)])
    repairs = Repairs()
    with Life(path, {"incidents": Incidents(), "repairs": repairs}) as again:
        again.engine.start()
        assert repairs.heard[0] == key_of(death(1)), "the snapshot does not know it, so all is handled again"


def test_a_row_that_cannot_be_read_is_named(path: Path) -> None:
    with Life(path) as life:
        life.store.append("mystery", T0, '{"type":"Riddle"}')
    with Life(path) as again, pytest.raises(StoreError, match="row mystery: cannot be read: no known type: 'Riddle'"):
        again.engine.start()


class Dies:
    """A machine that is killed on the spot when it is to handle its n-th stimulus."""

    def __init__(self, after: int) -> None:
        self._left = after

    def handle(self, stimulus: Stimulus) -> Sequence[Instruction]:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return []

    def due_ns(self) -> int | None:
        return None

    def snapshot(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        pass


@pytest.mark.parametrize("after", [0, 1, 4])
def test_killed_between_writing_and_handling(path: Path, after: int) -> None:
    """kill -9 of a real process with the stimulus written down and not handled: the next life handles it."""
    child = os.fork()
    if child == 0:
        try:
            fed(Life(path, {"dies": Dies(after)}), [death(number) for number in range(10)])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with Life(path) as again:
        said = again.engine.start()
        assert again.keys() == [key_of(death(number)) for number in range(after + 1)]
        assert [one.findings for one in said if isinstance(one, Incident)][-1] == (death(after),)
        assert [one.change for one in said if isinstance(one, Notice)][-2:] == ["opened", "opened"]
        rest = fed(again, [death(number) for number in range(10)])
        assert len([one for one in rest if isinstance(one, Incident)]) == 9 - after, "each once"


# the fence


def test_who_was_replaced_writes_and_says_nothing_more(path: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    with Life(path) as life:
        term = life.store.claim(JOB, me.pid, me.start_time, 0)
        engine = Engine(life.store, {"incidents": Incidents()}, lambda: T0, fence=(JOB, term))
        assert engine.handle(death(1)) != []
        life.store.claim(JOB, me.pid, me.start_time, LEASE_NS)
        with pytest.raises(FencedError):
            engine.handle(death(2))
        assert life.keys() == [key_of(death(1))]


def test_the_journal_is_plain_sqlite(life: Life, path: Path) -> None:
    """For whoever wants to read it without us."""
    life.engine.handle(death(1))
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    ((key, seen_ns, text),) = reader.execute("SELECT key, seen_ns, json FROM journal").fetchall()
    reader.close()
    assert (key, seen_ns) == (key_of(death(1)), death(1).seen_ns)
    assert json.loads(text)["kind"] == "process.killed"
