"""What a source cannot read: pieces that it refuses, each cause once; parts that are blind, until they are not."""

from typing import Final

from trainwarden.core.emit import Emitter
from trainwarden.core.model import Event, Subject

MAX_CAUSES: Final = 64
"""A tenant who makes up a new broken file each second is told no more of than this."""


class Blind:
    """Makes Event source.blind, at most one a cause, of the part `refused` of a source: what it refuses for good makes
    nothing else of it blind. The subject is `source:rings@n1/refused`."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self._told: set[str] = set()

    def __call__(self, why: str, now_ns: int) -> list[Event]:
        """The event, or none if this was told before."""
        if why in self._told or len(self._told) == MAX_CAUSES:
            return []
        self._told.add(why)
        part = Subject(kind="source", id=f"{self._emit.source}/refused")
        return [self._emit("source.blind", part, now_ns=now_ns, data={"why": why})]


class Parts:
    """Tells which parts of a source are blind: once when one goes blind, once when it can be read again.

    The subject of part `mlx5_0/1` of source `infiniband@n1` is `source:infiniband@n1/mlx5_0/1`, of part "" the source.
    """

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self._blind: set[str] = set()

    def __call__(self, part: str, why: str, now_ns: int) -> list[Event]:
        """Say how a part is: why it is blind, or "" where it can be read. The event, or none where nothing changed."""
        if bool(why) == (part in self._blind) or (why and len(self._blind) == MAX_CAUSES):
            return []
        (self._blind.add if why else self._blind.discard)(part)
        source = self._emit.source
        subject = Subject(kind="source", id=f"{source}/{part}" if part else source)
        kind, said = ("source.blind", why) if why else ("source.up", "it is not blind any more")
        return [self._emit(kind, subject, now_ns=now_ns, data={"why": said})]
