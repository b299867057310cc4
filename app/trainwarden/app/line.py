"""The line of one job: frames, events and ticks in, findings out. Pure; a replay of what it was fed gives the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from trainwarden.core.model import Event, Finding, Frame, Input, State, StepMatrix, Tick, Topology
from trainwarden.core.ports import Detector, Stateful
from trainwarden.core.steps import StepAssembler


class LineDetector(Detector, Stateful, Protocol):
    """A detector whose state can be written down: what a line needs."""


class Line:
    """The assembler and the job's detectors."""

    def __init__(self, assembler: StepAssembler, detectors: Sequence[LineDetector]) -> None:
        self.on_step: Callable[[StepMatrix], None] | None = None
        """Told of each closed step before the detectors are."""
        self._assembler = assembler
        self._detectors = tuple(detectors)
        self.topology: Topology | None = None
        self.last: StepMatrix | None = None
        """The newest closed step."""
        self.live: Frame | None = None
        """The newest live frame: what every rank does right now."""

    def feed(self, item: Frame | Event | Tick) -> list[Finding]:
        """Take one recorded item, in seen_ns order."""
        if isinstance(item, Frame) and item.schema == "live":
            self.live = item
        # what the assembler gives belongs to earlier instants than the item: it is told first
        findings = [finding for closed in self._assembler.feed(item) for finding in self._closed(closed)]
        return findings + self._tell(item)

    def finish(self) -> list[Finding]:
        """The job ended: close what is open."""
        return [finding for closed in self._assembler.finish() for finding in self._closed(closed)]

    def snapshot(self) -> State:
        """The state of the assembler and every detector, as `<part>/<key>`."""
        return {f"{name}/{key}": value for name, part in self._parts() for key, value in part.snapshot().items()}

    def restore(self, state: State) -> None:
        """Take up what snapshot gave; a part that is not in it (a new detector) starts afresh."""
        for name, part in self._parts():
            own = {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}
            if own:
                part.restore(own)

    def _parts(self) -> Iterator[tuple[str, Stateful]]:
        yield "assembler", self._assembler
        yield from ((detector.name, detector) for detector in self._detectors)

    def _closed(self, closed: Topology | StepMatrix) -> list[Finding]:
        if isinstance(closed, Topology):
            self.topology = closed
        else:
            self.last = closed
            if self.on_step is not None:
                self.on_step(closed)
        return self._tell(closed)

    def _tell(self, item: Input) -> list[Finding]:
        word = topic(item)
        return [f for detector in self._detectors if word in detector.wants for f in detector.update(item)]


def topic(item: Input) -> str:
    """The word by which a detector wants such items (core.ports.Detector.wants)."""
    match item:
        case Topology():
            return "topology"
        case StepMatrix():
            return "steps"
        case Tick():
            return "tick"
        case Frame():
            return item.schema
        case Event():
            return item.kind
