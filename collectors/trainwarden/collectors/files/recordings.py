"""A recording (core/recording.py) as a source: what was seen once is seen again, at the pace at which it was.

For trying a server, its rules and its dashboards on what really happened. (`trainwarden replay` needs no pace: it reads
the recording itself, ticks and all.) Items keep their source, job and numbers; their times are shifted, so that the
first one was seen when we began.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainwarden.collectors.blind import Blind
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Tick

if TYPE_CHECKING:
    from trainwarden.core.recording import Item


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
        from trainwarden.core.recording import (
            Recording,  # pyarrow: 30 MB that an agent that plays nothing does not spend
        )

        assert config.folder is not None, "a recording to play"
        self.name = f"recordings@{node}"
        self._speed, self._start_ns = config.speed, start_ns
        self._recording = Recording(config.folder)
        self._items: Iterator[Item] = iter(self._recording)
        self._next = next(self._items, None)
        self._first_ns = 0 if self._next is None else self._next.seen_ns
        self._blind = Blind(Emitter(self.name, job=None, start_ns=start_ns))
        self._folder = config.folder

    @property
    def over(self) -> bool:
        """Whether all of it was told."""
        return self._next is None

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """What was seen up to the moment that is now; why files or rows cannot be read, each reason once."""
        until_ns = self._first_ns + int((now_ns - self._start_ns) * self._speed)
        while self._next is not None and self._next.seen_ns <= until_ns:
            item, self._next = self._next, next(self._items, None)
            if not isinstance(item, Tick):
                yield replace(item, seen_ns=self._start_ns + int((item.seen_ns - self._first_ns) / self._speed))
        for refused in self._recording.refused:
            yield from self._blind(str(refused), now_ns)
        if self._first_ns == 0:
            yield from self._blind(f"{self._folder}: no recording can be read there", now_ns)
