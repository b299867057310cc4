"""The ports between components: one method where possible. Built-ins are wired in app/wiring.py; third parties use the
entry point groups trainwarden.sources, .detectors, .notifiers, .actuators, .checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from trainwarden.core.model import (
    Checkpoint,
    Epoch,
    Event,
    Finding,
    Frame,
    Input,
    Instruction,
    JobId,
    JobStatus,
    Json,
    Look,
    Notice,
    Rung,
    State,
    StepMatrix,
    Stimulus,
)


class Source(Protocol):
    """One thing that can be seen. What cannot be read is said as Event source.blind, never as zero."""

    @property
    def name(self) -> str: ...
    @property
    def period_s(self) -> float: ...

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """Everything new since the last poll. Never raises for what the world does."""
        ...


class Detector(Protocol):
    """Turns closed steps, frames, events and ticks into findings; keeps what it needs of the past itself."""

    @property
    def name(self) -> str: ...
    @property
    def wants(self) -> frozenset[str]:
        """Of "topology", "steps", "tick", the frame schemas and the event kinds."""
        ...

    def update(self, item: Input) -> Sequence[Finding]:
        """Take the next item, in order, and return what it reveals, usually nothing."""
        ...


class Witness(Protocol):
    """Looks closer when asked; what it sees comes back as Events, is recorded and revises findings."""

    def look(self, look: Look) -> Iterable[Event]: ...


class History(Protocol):
    """Closed steps of the past."""

    def steps(self, job: JobId, epoch: Epoch, first: int, last: int) -> Sequence[StepMatrix]: ...


class Machine(Protocol):
    """A pure state machine: no clock, no I/O, no thread."""

    def handle(self, stimulus: Stimulus) -> Sequence[Instruction]: ...

    def due_ns(self) -> int | None:
        """When the machine next wants a Tick; None: never."""
        ...


class Stateful(Protocol):
    """Whose state can be written down and taken up again."""

    def snapshot(self) -> State: ...
    def restore(self, state: State) -> None: ...


class Notifier(Protocol):
    """One channel to people."""

    @property
    def channel(self) -> str: ...

    def notify(self, notice: Notice) -> str:
        """Deliver and return a receipt. Raises DeliveryError."""
        ...


class Actuator(Protocol):
    """Makes goals true."""

    @property
    def goals(self) -> frozenset[str]: ...

    def reached(self, rung: Rung) -> bool | None:
        """Read only; None = cannot tell."""
        ...

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        """Work towards the goal. Raises ActionError, FencedError."""
        ...


class Runtime(Actuator, Protocol):
    """The actuator that owns a job's processes."""

    def status(self, job: JobId) -> JobStatus: ...


class CheckpointStore(Protocol):
    """Checkpoints of a job."""

    def catalogue(self, job: JobId) -> Sequence[Checkpoint]: ...
    def verify(self, name: str) -> Checkpoint: ...
    def mark(self, name: str, trust: str, reason: str) -> None: ...


class Transport(Protocol):
    """Moves opaque bodies, at least once."""

    def publish(self, topic: str, key: str, body: bytes) -> None: ...
    def ack(self, topic: str, keys: Sequence[str]) -> None: ...
    def pull(self, topic: str, limit: int, wait_s: float) -> Sequence[tuple[str, bytes]]: ...
