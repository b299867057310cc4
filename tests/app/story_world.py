"""An incident's story as the real machines make it, for tests of what is told from stories."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.remediation.plan_world import JOB, at, attempt, incident, outcome, policy, tick

from trainwarden.alerts.incidents import Incidents
from trainwarden.app.engine import DurableMachine, Engine
from trainwarden.app.store import Store
from trainwarden.app.story import IncidentStory, Story
from trainwarden.core.model import Finding, Incident, Outcome, Start, Stimulus, Tell
from trainwarden.remediation.policy import Policy
from trainwarden.remediation.repairs import Repairs

KILLED = "process.killed.train-3.1.rank-2.0"
"""The incident that killed() opens."""


def killed(**changes: Any) -> Finding:
    """Rank 2 of attempt 1 dies at 5 s, which is known for certain at 6 s."""
    finding = incident("process.killed").findings[0]
    return replace(finding, seen_ns=changes.pop("seen_ns", at(6)), **changes)


class World:
    """The machines, and the story of what they decide."""

    def __init__(self, folder: Path, made: Policy) -> None:
        self._now_s = 0.0
        self.store = Store(folder / "journal.sqlite")
        machines: dict[str, DurableMachine] = {"incidents": Incidents(), "repairs": Repairs(made, JOB)}
        self.engine = Engine(self.store, machines, lambda: at(self._now_s))
        self.story = Story(folder / "story.jsonl")
        self.play(0, *attempt(1, 0))

    def play(self, t_s: float, *stimuli: Stimulus) -> None:
        """Stimuli that come at one time, and the tick after them."""
        self._now_s = t_s
        for stimulus in (*stimuli, tick(t_s)):
            if isinstance(stimulus, Outcome):
                self.story.note(stimulus, at(t_s))
            for said in self.engine.handle(stimulus):
                if isinstance(said, Incident | Start | Tell):
                    self.story.note(said, at(t_s))

    def repair(self, plan: str, *times_and_results: tuple[float, str], retryable: bool = True) -> None:
        """Rungs end; the plan ends with the last."""
        for index, (t_s, result) in enumerate(times_and_results):
            self.play(t_s, outcome(plan, index, result, reason=f"it {result}"))
        self.play(t_s + 0.25, outcome(plan, -1, result, reason="so", retryable=retryable))

    @property
    def told(self) -> IncidentStory:
        """The only incident."""
        (story,) = self.story.incidents.values()
        return story


@contextmanager
def world(folder: Path, made: Policy | None = None) -> Iterator[World]:
    """Attempt 1 of four ranks runs."""
    one = World(folder, made or policy())
    yield one
    one.store.close()
