"""One pass over a job's recording: closed steps come out, and what else it shows is kept in a bounded form.

Nothing of a single rank is kept but its place on a grid of bounded size (dashboards.facts.Grid): the memory of a pass
grows with attempts and with what went wrong, not with ranks times steps.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from trainwarden.app.effective import TimeSplit
from trainwarden.app.folders import JobFolder
from trainwarden.core.model import Event, StepMatrix, Topology
from trainwarden.core.recording import Recording
from trainwarden.core.records import attempt_of, restart_of
from trainwarden.core.steps import StepAssembler, StepCounters, StepsConfig
from trainwarden.dashboards.facts import Grid
from trainwarden.detectors.ownwork import OwnWork

GAP_NS: Final = 5_000_000_000
"""Ticks come four a second: nothing for this long and nobody was watching (store.LEASE_NS: an owner that is frozen)."""


class Recorded:
    """What one pass over the recording shows, beside the closed steps."""

    def __init__(self, folder: JobFolder) -> None:
        self.recording = Recording(folder.path / "frames")
        self.grid, self.split = Grid(), TimeSplit()
        self.items = self.first_ns = self.last_ns = 0
        self.ranks: int | None = None
        self.began_ns: dict[int, int] = {}
        self.ended: dict[int, Event] = {}
        """By attempt."""
        self.commands: list[Event] = []
        self.blind: list[tuple[str, str, int, int | None]] = []
        """Source, why, since when, until when."""
        self.gaps: list[tuple[int, int]] = []
        self.own_work: Counter[str] = Counter()
        """Why own work could not be told -> steps."""
        self.lost: Counter[str] = Counter()
        """Source -> how often rows of it were missing."""
        self._job = folder.job
        self._assembler = StepAssembler(folder.job, StepsConfig())
        self._work = OwnWork(1)
        self._no_own_work: dict[int, set[int]] = {}
        """By epoch: ranks whose collector cannot tell its own work."""

    @property
    def counters(self) -> StepCounters:
        return self._assembler.counters

    def steps(self) -> Iterator[StepMatrix]:
        """To be called once, and to its end."""
        for item in self.recording:
            self._pass_time(item.seen_ns)
            yield from self._closed(self._assembler.feed(item))
            if isinstance(item, Event):
                self._hear(item)
            self.split.feed(item)
        yield from self._closed(self._assembler.finish())
        self.split.settle()

    def _pass_time(self, seen_ns: int) -> None:
        if self.items and seen_ns - self.last_ns > GAP_NS:
            self.gaps.append((self.last_ns, seen_ns))
        self.items += 1
        self.first_ns = self.first_ns or seen_ns
        self.last_ns = max(self.last_ns, seen_ns)

    def _closed(self, outputs: Sequence[Topology | StepMatrix]) -> Iterator[StepMatrix]:
        for one in outputs:
            if isinstance(one, Topology):
                self.ranks = len(one.device_R)
                self._work.adopt(one, np.full(self.ranks, -1, np.int32))
                continue
            epoch = one.topology.epoch
            self._work.tell_blind(self._no_own_work.get(epoch, ()))
            self.grid.add(label(epoch), one.step, self._work.keep(one))
            if why := self._work.blind_reason:
                self.own_work[why] += 1
            self.split.feed(one)
            yield one

    def _hear(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case "attempt.started" if isinstance(number := data.get("attempt"), int):
                self.began_ns.setdefault(number, event.t_ns)
            case "attempt.ended" if isinstance(number := data.get("attempt"), int):
                self.ended[number] = event
            case "hello" if event.epoch is not None and isinstance(rank := data.get("rank"), int):
                blind = data.get("blind")
                ranks = self._no_own_work.setdefault(event.epoch, set())
                (ranks.add if isinstance(blind, Sequence) and "own_work" in blind else ranks.discard)(rank)
            case "source.blind":
                self.blind.append((event.subject.id, str(data.get("why")), event.t_ns, None))
            case "source.up":
                self.blind = [
                    (source, why, since_ns, event.t_ns if until_ns is None and source == event.subject.id else until_ns)
                    for source, why, since_ns, until_ns in self.blind
                ]
            case "telemetry.lost":
                self.lost[event.subject.id] += 1
            case kind if kind.startswith("command."):
                self.commands.append(event)


def label(epoch: int) -> str:
    """Of an attempt; of a launcher's own restart inside one.

    >>> label(2 << 32), label(2 << 32 | 1 << 16)
    ('attempt 2', 'attempt 2, restart 1')
    """
    restart = restart_of(epoch)
    return f"attempt {attempt_of(epoch)}" + (f", restart {restart}" if restart else "")
