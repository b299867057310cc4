"""Was the right thing said and done in time, and nothing else? Pure: what was told and what happened in, a verdict out.

What was done is judged only where it is given: a run that observes repairs nothing.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from trainwarden.core.model import Incident, Tier
from trainwarden.rehearsal.faults import Strike
from trainwarden.rehearsal.scenario import Expect, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a person was told, and when: one notice of one incident."""

    t_ns: int
    """Unix."""
    id: str
    kind: str
    tier: Tier
    culprit: str | None

    @classmethod
    def of(cls, incident: Incident, t_ns: int) -> "Told":
        """That this incident was told at this time."""
        culprit = None if incident.culprit is None else str(incident.culprit)
        return cls(t_ns=t_ns, id=incident.id, kind=incident.kind, tier=incident.tier, culprit=culprit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What was done, and what came of it."""

    attempts: int
    """How often the training was started; 1: nothing was repaired."""
    checkpoint: int | None = None
    """Step of the checkpoint that the last attempt went back to; None: to the beginning."""
    refused: tuple[int, ...] = ()
    """Steps of newer checkpoints that were looked at and not taken."""
    without: tuple[int, ...] = ()
    """Slots that it leaves out."""
    skip: tuple[int, ...] = ()
    """Batches that it leaves out."""
    recovered_after_s: float | None = None
    """From the fault until every rank of the last attempt had begun a step; None: that was never seen."""
    steps_lost: int | None = None
    """Steps that had begun and were done again."""
    relapses: tuple[str, ...] = ()
    """Kinds of what was found wrong in attempts after the first."""
    final_loss: str | None = None
    """To the last bit, as float.hex() writes it; None: the training did not come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How one expectation was met."""

    expect: Expect
    told: Told | None
    """The first notice that was right, else the last word on the incident that came nearest; None: nothing like it."""
    after_s: float | None
    """From the fault to `told`; None where either is missing."""
    after_steps: int | None
    """Steps that began from the fault to `told`."""

    @property
    def kind_right(self) -> bool:
        return self.told is not None and self.told.kind == self.expect.kind

    @property
    def tier_right(self) -> bool:
        return self.told is not None and self.told.tier == self.expect.loudness

    @property
    def culprit_right(self) -> bool:
        return self.told is not None and self.told.culprit == self.expect.culprit

    @property
    def in_time(self) -> bool:
        return _within(self.after_s, self.expect.within_s) and _within(self.after_steps, self.expect.within_steps)

    @property
    def ok(self) -> bool:
        return self.kind_right and self.tier_right and self.culprit_right and self.in_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row of the demo's table."""

    scenario: str
    found: tuple[Found, ...]
    """One an expectation, in their order."""
    false_alarms: tuple[Told, ...]
    """The last word on each incident that nobody expected."""
    repair_right: bool = True
    """Also where it is not judged."""
    loss_right: bool = True
    """Also where it is not judged."""

    @property
    def detected_after_s(self) -> float | None:
        """The slowest of what was detected; None if nothing was."""
        return max((one.after_s for one in self.found if one.after_s is not None), default=None)

    @property
    def detected_after_steps(self) -> int | None:
        """As detected_after_s, in optimizer steps."""
        return max((one.after_steps for one in self.found if one.after_steps is not None), default=None)

    @property
    def kind_right(self) -> bool:
        return all(one.kind_right for one in self.found)

    @property
    def tier_right(self) -> bool:
        return all(one.tier_right for one in self.found)

    @property
    def culprit_right(self) -> bool:
        return all(one.culprit_right for one in self.found)

    @property
    def ok(self) -> bool:
        """Everything expected was said rightly and in time, and done, and nothing else was said or done."""
        said = all(one.ok for one in self.found) and not self.false_alarms
        return said and self.repair_right and self.loss_right


def judge(
    scenario: Scenario,
    told: Sequence[Told],
    strikes: Sequence[Strike],
    progress: Sequence[tuple[int, int]] = (),
    repaired: Repaired | None = None,
    losses: Mapping[str, str | None] = MappingProxyType({}),
) -> Verdict:
    """The verdict. `strikes`: when each fault struck; `progress`: (Unix ns, step) whenever a step was seen to begin;
    `repaired`: None where that is not to be judged; `losses`: final ones of other scenarios, to the last bit."""
    by_incident = _by_incident(told)
    found = []
    for expected in scenario.expect:
        chosen = max(by_incident, key=lambda name: _nearness(by_incident[name], expected), default=None)
        story = by_incident.pop(chosen) if chosen and any(_nearness(by_incident[chosen], expected)) else ()
        found.append(_found(expected, story, strikes, sorted(progress)))
    unexpected = tuple(story[-1] for story in by_incident.values())
    return Verdict(
        scenario=scenario.name,
        found=tuple(found),
        false_alarms=unexpected,
        repair_right=repaired is None or _repair_right(scenario, repaired),
        loss_right=repaired is None or _loss_right(scenario, repaired, losses),
    )


def _repair_right(scenario: Scenario, repaired: Repaired) -> bool:
    """Once and for all, if it had to be; never, if not."""
    if not scenario.repairs:
        return repaired.attempts == 1
    if repaired.attempts != 2 or repaired.recovered_after_s is None or repaired.relapses:
        return False
    steps = {one.checkpoint for one in scenario.expect if one.checkpoint is not None}
    without = {slot for one in scenario.expect for slot in one.without}
    skip = {batch for one in scenario.expect for batch in one.skip}
    went_back = repaired.checkpoint is not None and steps <= {repaired.checkpoint}
    return went_back and set(repaired.without) == without and set(repaired.skip) == skip


def _loss_right(scenario: Scenario, repaired: Repaired, losses: Mapping[str, str | None]) -> bool:
    """The training came to its end, and to the same bits as the one it is compared with."""
    other = scenario.compared_with
    return repaired.final_loss is not None and (other is None or repaired.final_loss == losses.get(other))


def _by_incident(told: Sequence[Told]) -> dict[str, list[Told]]:
    stories: dict[str, list[Told]] = {}
    for one in sorted(told, key=attrgetter("t_ns")):
        stories.setdefault(one.id, []).append(one)
    return stories


def _right(told: Told, expected: Expect) -> bool:
    return (told.kind, told.culprit, told.tier) == (expected.kind, expected.culprit, expected.loudness)


def _nearness(story: Sequence[Told], expected: Expect) -> tuple[bool, bool]:
    """How much of the expectation the last word on an incident meets; all False: it is another matter."""
    return story[-1].kind == expected.kind, story[-1].culprit == expected.culprit


def _found(
    expected: Expect, story: Sequence[Told], strikes: Sequence[Strike], progress: Sequence[tuple[int, int]]
) -> Found:
    """A verdict may be revised: what counts is the last word, and since when it has been right without a break."""
    told = story[-1] if story else None
    for one in reversed(story):
        if not _right(one, expected):
            break
        told = one
    struck = min((s for s in strikes if s.fault == expected.fault), key=attrgetter("t_ns"), default=None)
    if told is None or struck is None:
        return Found(expect=expected, told=told, after_s=None, after_steps=None)
    after_steps = _step_at(progress, told.t_ns) - struck.step if progress else None
    return Found(expect=expected, told=told, after_s=(told.t_ns - struck.t_ns) / 1e9, after_steps=after_steps)


def _step_at(progress: Sequence[tuple[int, int]], t_ns: int) -> int:
    """The newest step that had begun."""
    index = bisect_right(progress, t_ns, key=lambda one: one[0])
    return progress[max(index - 1, 0)][1]


def _within(measured: float | None, allowed: float | None) -> bool:
    return allowed is None or (measured is not None and measured <= allowed)
