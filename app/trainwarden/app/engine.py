"""Runs the pure machines on what is written down: each stimulus is journalled first, then handled.

What is handled is what the journal's text says, so a replay of the journal meets exactly what was met live. After a
start the newest snapshot is restored, the rows after it are handled again, and all their instructions leave again: they
carry keys, so again is once. What one machine decides goes on to the others inside one call, and is not journalled,
since a replay decides it again.

Without a durable record there is no action: while the journal cannot be written the machines still run, for the sake
of the notices, but no Start leaves; each is answered as refused. What could not be written is kept and written as soon
as the journal takes it, in order, so that a later replay still meets what was met.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from trainwarden.app.outage import Outage
from trainwarden.app.store import Fence, Row, Store
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.codec import dumps, loads
from trainwarden.core.errors import DataError, StoreError
from trainwarden.core.model import Event, Finding, Incident, Instruction, Outcome, Start, State, Stimulus, Tick
from trainwarden.core.ports import Machine, Stateful

SNAPSHOT_EVERY = 10_000
"""Stimuli between two snapshots: what a start has to handle again at most (architecture, section 4.2)."""

RETRY_NS = 5_000_000_000
"""Between two tries of a journal that could not be written: a locked one costs seconds each time."""

OWED_MAX = 10_000
"""Stimuli kept for a journal that cannot be written; beyond that it stays broken until the next start."""

_ENGINE = "engine"
"""All machines are in one snapshot, so that they stand at the same row."""


class DurableMachine(Machine, Stateful, Protocol):
    """A machine whose state can be written down."""


class Engine:
    """start() once, then handle() each stimulus; carry out what one call returned before the next call.

    machines: by name, in the order in which what one of them decides goes on to the next (alerts, then remediation).
    channels: who is told when the journal breaks. fence: the job and term without which nothing may be written.
    """

    def __init__(
        self,
        store: Store,
        machines: Mapping[str, DurableMachine],
        now: Clock = unix_ns,
        *,
        channels: Sequence[str] = ("terminal", "jsonl"),
        fence: Fence | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        self._store, self._machines, self._now = store, dict(machines), now
        self._channels, self._fence = tuple(channels), fence
        self._snapshot_every = snapshot_every
        self._since_snapshot = 0
        self._outage: Outage | None = None
        self._owed: dict[str, Row] = {}
        """By key: handled, but not written."""
        self._retry_ns = 0

    @property
    def degraded(self) -> bool:
        """Whether the journal cannot be written: observe only."""
        return self._outage is not None

    def start(self) -> list[Instruction]:
        """Take up where the journal ends: every instruction since the newest snapshot, again. Raises StoreError."""
        said: list[Instruction] = []
        ended: set[str] = set()
        for row in self._store.tail(self._restored_seq()):
            stimulus = _decoded(row)
            if isinstance(stimulus, Outcome) and stimulus.index == -1:
                ended.add(stimulus.plan)
            said += self._run(stimulus)
            self._since_snapshot += 1
        return [one for one in said if not (isinstance(one, Start) and one.plan.id in ended)]

    def handle(self, stimulus: Stimulus) -> list[Instruction]:
        """Journal a stimulus and let the machines handle it; nothing for a tick that is not due, or a known key.

        Raises FencedError when the job is not ours any more.
        """
        return self.handle_all((stimulus,))

    def handle_all(self, stimuli: Iterable[Stimulus]) -> list[Instruction]:
        """The same for several that came together: one wait for the disk."""
        said = self._mend()
        rows = [self._row(stimulus) for stimulus in stimuli if self._is_due(stimulus)]
        if not rows:
            return said
        self._snapshot_if_due()
        told, new = self._written(rows)
        said += told
        for row in new:
            said += self._run(_decoded(row))
        return self._refused(said) if self.degraded else said

    def due_ns(self) -> int | None:
        """When a machine next wants a Tick."""
        due = (machine.due_ns() for machine in self._machines.values())
        return min((due_ns for due_ns in due if due_ns is not None), default=None)

    def _is_due(self, stimulus: Stimulus) -> bool:
        if not isinstance(stimulus, Tick):
            return True
        due_ns = self.due_ns()
        return due_ns is not None and due_ns <= stimulus.seen_ns

    # machines

    def _run(self, stimulus: Stimulus) -> list[Instruction]:
        """Let a stimulus go through the machines, and what they decide through those that it concerns."""
        said: list[Instruction] = []
        todo: deque[tuple[Stimulus, Sequence[str]]] = deque([(stimulus, tuple(self._machines))])
        while todo:
            one, names = todo.popleft()
            for name in names:
                for instruction in self._machines[name].handle(one):
                    said.append(instruction)
                    if isinstance(instruction, Incident | Start):
                        todo.append((instruction, self._concerned(instruction, name)))
        return said

    def _concerned(self, instruction: Incident | Start, by: str) -> Sequence[str]:
        """An incident goes on to the machines after the one that said it, a start to all others."""
        names = list(self._machines)
        return names[names.index(by) + 1 :] if isinstance(instruction, Incident) else [n for n in names if n != by]

    def _refused(self, said: Sequence[Instruction]) -> list[Instruction]:
        """Without the starts; each plan ends here, as refused."""
        kept: list[Instruction] = []
        for one in said:
            if not isinstance(one, Start):
                kept.append(one)
                continue
            why = "the journal cannot be written: no durable record, no action"
            outcome = Outcome(plan=one.plan.id, index=-1, result="refused", reason=why, retryable=True, found={})
            for row in self._owe([self._row(outcome)]):
                kept += self._refused(self._run(_decoded(row)))
        return kept

    # the journal

    def _row(self, stimulus: Stimulus) -> Row:
        seen_ns = stimulus.seen_ns if isinstance(stimulus, Finding | Event | Tick) else self._now()
        return Row(key=key_of(stimulus), seen_ns=seen_ns, text=dumps(stimulus))

    def _written(self, rows: Sequence[Row]) -> tuple[list[Instruction], list[Row]]:
        """What is to be said about the journal, and the rows that are to be handled."""
        if self.degraded:
            return [], self._owe(rows)
        try:
            new = self._store.append_all(rows, self._fence)
        except StoreError as error:
            self._outage = Outage.begun(str(error), rows[0].key, rows[0].seen_ns)
            self._retry_ns = self._now() + RETRY_NS
            return self._outage.opened(self._channels), self._owe(rows)
        fresh = [row for row, is_new in zip(rows, new, strict=True) if is_new]
        self._since_snapshot += len(fresh)
        return [], fresh

    def _owe(self, rows: Sequence[Row]) -> list[Row]:
        """Keep rows for later; those that are not kept yet are to be handled now."""
        new = list({row.key: row for row in rows if row.key not in self._owed}.values())
        room = OWED_MAX + 1 - len(self._owed)
        self._owed |= {row.key: row for row in new[:room]}
        return new

    def _mend(self) -> list[Instruction]:
        """Try now and then to write what is owed."""
        if self._outage is None or self._now() < self._retry_ns or len(self._owed) > OWED_MAX:
            return []
        try:
            self._store.append_all(list(self._owed.values()), self._fence)
        except StoreError:
            self._retry_ns = self._now() + RETRY_NS
            return []
        said = self._outage.over(self._channels, len(self._owed))
        self._since_snapshot += len(self._owed)
        self._outage, self._owed = None, {}
        return said

    # snapshots

    def _snapshot_if_due(self) -> None:
        """Before a row is written: all rows are handled, and what came of them was taken up by the caller."""
        if self._since_snapshot < self._snapshot_every or self.degraded:
            return
        self._since_snapshot = 0
        state = {
            f"{name}/{key}": value for name, one in self._machines.items() for key, value in one.snapshot().items()
        }
        try:
            self._store.save_snapshot(self._store.last_seq(), _ENGINE, state)
        except StoreError:
            return  # the rows are all there: the next start just has more to handle again

    def _restored_seq(self) -> int:
        """Restore the newest snapshot and say after which row it was made; 0: from the beginning."""
        saved = self._store.load_snapshot(_ENGINE)
        if saved is None:
            return 0
        seq, state = saved
        blank = {name: machine.snapshot() for name, machine in self._machines.items()}
        try:
            for name, machine in self._machines.items():
                machine.restore(_part(state, name))
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            AssertionError,
        ):  # of another version: the journal has it all
            for name, machine in self._machines.items():
                machine.restore(blank[name])
            return 0
        return seq


def key_of(stimulus: Stimulus) -> str:
    """What makes a stimulus the same one when it comes again."""
    match stimulus:
        case Finding() | Incident():
            return f"{stimulus.id}/{stimulus.revision}"
        case Event():
            return f"{stimulus.source}/{stimulus.seq}"
        case Tick():
            return f"tick/{stimulus.seen_ns}"
        case Outcome():
            return f"{stimulus.plan}/{stimulus.index}"
        case Start():
            return stimulus.plan.id


def _decoded(row: Row) -> Stimulus:
    try:
        thing = loads(row.text)
    except DataError as error:
        raise StoreError(f"journal, row {row.key}: cannot be read: {error}") from error
    assert isinstance(thing, Finding | Event | Incident | Start | Outcome | Tick), f"{row.key} is no stimulus"
    return thing


def _part(state: State, name: str) -> State:
    """One machine's part of the engine's snapshot."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}
