"""What a source cannot read, said once for each cause."""

from typing import Final

from trainwarden.core.emit import Emitter
from trainwarden.core.model import Event, Subject

MAX_CAUSES: Final = 64
"""A tenant who makes up a new broken file each second is told no more of than this."""


class Blind:
    """Makes Event source.blind, at most one a cause."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self._told: set[str] = set()

    def __call__(self, why: str, now_ns: int) -> list[Event]:
        """The event, or none if this was told before."""
        if why in self._told or len(self._told) == MAX_CAUSES:
            return []
        self._told.add(why)
        source = Subject(kind="source", id=self._emit.source)
        return [self._emit("source.blind", source, now_ns=now_ns, data={"why": why})]
