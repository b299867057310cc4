"""A recording (core/recording.py) as a source: what was seen once is seen again, at the pace at which it was.

For trying a server, its rules and its dashboards on what really happened. (`trainwarden replay` needs no pace: it reads
the recording itself, ticks and all.) Items keep their source, job and numbers; their times are shifted, so that the
first one was seen when we began.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainwarden.collectors.blind import Blind, Parts
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Tick

if TYPE_CHECKING:
    from trainwarden.core.recording import Item, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingsConfig:
    """Which recording is played."""

    folder: Path | None = None
    """Folder of its files; unset: none is played."""

    speed: float = 1.0
    """Seconds of the recording a second."""

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 1000:
            raise ConfigError(f"collectors.recordings.speed: need more than 0 and at most 1000, got {self.speed:g}")


class Recordings:
    """Source of everything in one recording but its ticks."""

    period_s = 0.1

    def __init__(self, config: RecordingsConfig, *, node: str, start_ns: int) -> None:
        assert config.folder is not None, "a recording to play"
        self.name = f"recordings@{node}"
        self._speed, self._folder = config.speed, config.folder
        self._items: Iterator[Item] = iter(())
        self._next: Item | None = None
        self._recording: Recording | None = None
        """Since its first item could be read."""
        self._start_ns = self._first_ns = 0
        emit = Emitter(self.name, job=None, start_ns=start_ns)
        self._parts, self._refused = Parts(emit), Blind(emit)

    @property
    def over(self) -> bool:
        """Whether all of it was told."""
        return self._recording is not None and self._next is None

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """What was seen up to the moment that is now; why files or rows cannot be read, each reason once."""
        recording = self._recording or self._begin(now_ns)
        why = "" if self._recording else f"{self._folder}: no recording can be read there"
        yield from self._parts("", why, now_ns)
        until_ns = self._first_ns + int((now_ns - self._start_ns) * self._speed)
        while self._next is not None and self._next.seen_ns <= until_ns:
            item, self._next = self._next, next(self._items, None)
            if not isinstance(item, Tick):
                yield replace(item, seen_ns=self._start_ns + int((item.seen_ns - self._first_ns) / self._speed))
        for refused in recording.refused:
            yield from self._refused(str(refused), now_ns)

    def _begin(self, now_ns: int) -> "Recording":
        """Read its first item, in a poll: a file system that hangs must not hold whoever makes this."""
        from trainwarden.core.recording import Recording  # pyarrow: 30 MB that an agent that plays nothing saves

        recording = Recording(self._folder)
        self._items = iter(recording)
        self._next = next(self._items, None)
        if self._next is not None:
            self._recording, self._start_ns, self._first_ns = recording, now_ns, self._next.seen_ns
        return recording
