"""The server in process: records what arrives, feeds the line, lets the machines decide, and tells people.

Order matters and is the same for every item: recorded, then fed to the line; each finding and event goes through the
engine (journal first); each instruction is carried out. A notifier that fails is asked again and holds up nobody.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainwarden.alerts.incidents import Incidents
from trainwarden.alerts.notify.jsonl import JsonLines
from trainwarden.app.engine import Engine
from trainwarden.app.line import Line
from trainwarden.app.store import Store
from trainwarden.app.story import IncidentStory, Story, Told
from trainwarden.app.tries import Counted, Tries
from trainwarden.core.clock import unix_ns
from trainwarden.core.errors import DeliveryError, StoreError
from trainwarden.core.model import (
    Event,
    Finding,
    Frame,
    Incident,
    Instruction,
    Look,
    Notice,
    Outcome,
    Plan,
    Start,
    Tell,
    Tick,
)
from trainwarden.core.ports import Notifier
from trainwarden.core.recording import Recorder
from trainwarden.core.steps import StepAssembler
from trainwarden.detectors.straggler import Straggler
from trainwarden.remediation.repairs import Repairs

if TYPE_CHECKING:
    from trainwarden.app.metrics import JobMetrics

UNDELIVERED_MAX = 1000
"""Notices kept for another try; beyond that the oldest are dropped and counted."""

RETRY_S = 1.0

SAVE_S = 10.0
"""Between two snapshots of the line's state (what detectors learnt); also taken after each finding."""

LINE = "line"
"""Name of the line's snapshot in the store."""

NOT_JOURNALLED = frozenset({"mark.note", "telemetry.lost", "node.domains", "domains.differ"})
"""Events that no machine decides on and that can come in any number; the recording has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What works inside a server and can tell of itself."""

    incidents: Incidents
    assembler: StepAssembler
    straggler: Straggler
    repairs: Repairs
    recorder: Recorder


class Server:
    """One job's line, engine, recorder and notifiers."""

    def __init__(
        self,
        *,
        line: Line,
        engine: Engine,
        parts: Parts,
        notifiers: Mapping[str, Notifier],
        look: Callable[[Look], None],
        store: Store,
        story: Story,
    ) -> None:
        self.line, self.engine, self.parts, self.story = line, engine, parts, story
        self._recorder, self._look, self._store = parts.recorder, look, store
        self.notifiers = dict(notifiers)
        """By channel."""
        self.tries = Tries()
        self.carried: frozenset[str] = frozenset()
        """Channels whose notices somebody else carries from here: how that ends is counted there."""
        self.incidents: dict[str, Incident] = dict(story.open)
        """The newest revision of each incident that was not over when we began."""
        self.plans: dict[str, Plan] = {}
        """Those under way."""
        self.start: Callable[[Plan], None] | None = None
        self.tell: Callable[[Tell], None] | None = None
        """What carries plans out, and lets them hear something; None: nothing does."""
        self.metrics: JobMetrics | None = None
        """Told of everything; None: nobody wants to see it."""
        self.on_news: Callable[[IncidentStory], None] | None = None
        """Told when something has become of an incident."""
        self.undelivered: deque[Notice] = deque(maxlen=UNDELIVERED_MAX)
        self._retry_ns = self._save_ns = 0

    def ingest(self, items: Iterable[Frame | Event | Tick], now_ns: int) -> None:
        """Take items in the order they came; now_ns is the receiver's stamp of all of them."""
        for item in items:
            stamped = replace(item, seen_ns=now_ns)
            self._recorder.write(stamped)
            self._decide(self.line.feed(stamped))
            if self.metrics is not None:
                self.metrics.take(stamped)
            if isinstance(stamped, Tick) or (isinstance(stamped, Event) and stamped.kind not in NOT_JOURNALLED):
                self._carry_out(self.engine.handle(stamped))

    def tick(self, now_ns: int) -> None:
        """Let time pass; also the moment to try undelivered notices again."""
        self.ingest([Tick(seen_ns=now_ns)], now_ns)
        if self.undelivered and now_ns >= self._retry_ns:
            self._retry_ns = now_ns + int(RETRY_S * 1e9)
            for _ in range(len(self.undelivered)):
                self._notify(self.undelivered.popleft())
        if now_ns >= self._save_ns:
            self._save_ns = now_ns + int(SAVE_S * 1e9)
            self._save_line()

    def take(self, outcomes: Iterable[Outcome]) -> None:
        """How rungs and plans ended; each may come again."""
        for outcome in outcomes:
            self._note(outcome)
            self._carry_out(self.engine.handle(outcome))
            if outcome.index == -1:
                self.plans.pop(outcome.plan, None)

    def resume(self) -> None:
        """After a start: take up the line's state, and carry out again what the journal's tail says.

        Instructions carry keys, so again is once; a person at the terminal is only told what no one was told before.
        """
        saved = self._store.load_snapshot(LINE)
        if saved is not None:
            self.line.restore(saved[1])
        log = self.notifiers.get("jsonl")
        again = self.engine.start()
        if isinstance(log, JsonLines):
            again = [one for one in again if not (isinstance(one, Notice) and log.holds(_log_key(one)))]
        self._carry_out(again)

    def finish(self) -> None:
        """The job ended: close open steps, write what is left of the recording."""
        self._decide(self.line.finish())
        self._save_line()
        self._recorder.close()

    def _decide(self, findings: Iterable[Finding]) -> None:
        said = False
        for finding in findings:
            self._carry_out(self.engine.handle(finding))
            said = True
        if said:  # a restarted line must not number a new finding like one that the journal has
            self._save_line()

    def _save_line(self) -> None:
        with contextlib.suppress(StoreError):  # the engine says that the journal cannot be written
            self._store.save_snapshot(self._store.last_seq(), LINE, self.line.snapshot())

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Incident():
                    self._note(instruction)
                    self.incidents[instruction.id] = instruction
                case Notice():
                    self._notify(instruction)
                case Look():
                    self._look(instruction)
                case Start():
                    if self.start is not None:
                        self.plans[instruction.plan.id] = instruction.plan
                        self._note(instruction)
                        self.start(instruction.plan)
                case Tell():
                    if self.tell is not None:
                        self._note(instruction)
                        self.tell(instruction)

    def _note(self, thing: Told) -> None:
        """Into the story, and news to the metrics."""
        known = isinstance(thing, Incident) and thing.id in self.story.incidents
        if not self.story.note(thing, unix_ns()):
            return
        if self.on_news is not None and (about := self.story.about(thing)) is not None:
            self.on_news(about)
        if self.metrics is None:
            return
        match thing:
            case Incident() if not known:
                self.metrics.opened(thing)
            case Start():
                self.metrics.started(thing.plan)
            case Outcome(index=-1) if (told := self.story.plan(thing.plan)) is not None:
                self.metrics.ended(told.plan, thing)

    def _notify(self, notice: Notice) -> None:
        notifier = self.notifiers.get(notice.channel)
        if notifier is None:
            return
        try:
            (notifier if notice.channel in self.carried else Counted(notifier, self.tries)).notify(notice)
        except DeliveryError as error:
            if error.retryable:
                self.undelivered.append(notice)


def _log_key(notice: Notice) -> str:
    """The key under which the same revision stands in the log."""
    return f"{notice.key.removesuffix(notice.channel)}jsonl"
