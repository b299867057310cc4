"""Which sources a job has, and whether they can be read: the series of `source_up`, of which there are many."""

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from trainwarden.core.model import Event, Frame
from trainwarden.core.printable import printable

GONE_NS: Final = 15 * 60 * 10**9
"""A node that nothing was heard of for so long is not shown any more: neither healthy nor blind is known of it."""

SOURCES_MIN, SOURCES_A_RANK, SOURCES_MAX = 1000, 3, 65_536
"""How many are kept at most: 20 a node of 8 ranks, and what fits below 2,000 series in a small job. Their names are the
senders', and the senders may be the job's; so is the number of ranks."""


class SourcesSeen:
    """One thread changes it, any may ask what is shown."""

    def __init__(self, own: Iterable[str]) -> None:
        """own: those of this process, which can be read unless they say that they are blind, and never go."""
        self._own = tuple(own)
        self._up: dict[str, bool] = dict.fromkeys(self._own, True)
        self._heard_ns: dict[str, int] = {}
        """By node."""
        self.ranks = -1
        """Of the job."""

    def heard(self, item: Frame | Event) -> None:
        """Anything came: its node is there; who sends frames can be read until it says otherwise."""
        node = _node(item.source)
        if self._has_room(self._heard_ns, node):
            self._heard_ns[node] = item.seen_ns
        if isinstance(item, Frame) and item.source not in self._up:
            self.say(item.source, up=True)

    def say(self, source: str, *, up: bool) -> None:
        """What a source says of itself."""
        if self._has_room(self._up, source):
            self._up[source] = up

    def anew(self, now_ns: int) -> None:
        """An attempt began: all is read anew, and what is blind says so again."""
        up = {source: True for source, up in self._up.items() if up and self._is_there(source, now_ns)}
        self._up = up | dict.fromkeys(self._own, True)
        self._heard_ns = {node: at_ns for node, at_ns in self._heard_ns.items() if now_ns - at_ns < GONE_NS}

    def shown(self, now_ns: int) -> Iterator[tuple[str, bool]]:
        """Each that is there, and whether it is up."""
        for source, up in self._up.copy().items():
            if self._is_there(source, now_ns):
                yield printable(source), up

    def _has_room(self, table: Collection[str], key: str) -> bool:
        return key in table or len(table) < min(max(SOURCES_MIN, SOURCES_A_RANK * self.ranks), SOURCES_MAX)

    def _is_there(self, source: str, now_ns: int) -> bool:
        return source in self._own or now_ns - self._heard_ns.get(_node(source), now_ns) < GONE_NS


def _node(source: str) -> str:
    """Of `NAME@NODE`."""
    return source.rpartition("@")[2]
