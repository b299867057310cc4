"""What an agent keeps for a server: a bounded buffer, from which the oldest frames go first, then the oldest events."""

from collections import deque
from dataclasses import dataclass
from itertools import chain


@dataclass(slots=True)
class Held:
    """One message in the buffer."""

    number: int
    message: bytes


class Buffer:
    """Messages in the order of their numbers: first those sent and not acknowledged, then the others. No lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self.bytes = self._number = 0
        self._sent: dict[bool, deque[Held]] = {True: deque(), False: deque()}
        """By whether they are frames: frames go first."""
        self._unsent: dict[bool, deque[Held]] = {True: deque(), False: deque()}

    def add(self, message: bytes, *, is_frame: bool) -> list[str]:
        """Append one, and say which fields of UplinkCounts what had to go for it counts under."""
        self._number += 1
        self._unsent[is_frame].append(Held(self._number, message))
        self.bytes += len(message)
        gone = []
        while self.bytes > self._max:
            kind = bool(self._sent[True] or self._unsent[True])
            was_sent = bool(self._sent[kind])
            self._forget((self._sent if was_sent else self._unsent)[kind])
            gone.append("forgotten" if was_sent else "dropped_frames" if kind else "dropped_events")
        return gone

    def take(self, max_bytes: int) -> list[Held]:
        """The next messages to send, at least one if there is any; they count as sent."""
        out: list[Held] = []
        size = 0
        while size < max_bytes and (kind := self._first(self._unsent)) is not None:
            held = self._unsent[kind].popleft()
            self._sent[kind].append(held)
            out.append(held)
            size += len(held.message)
        return out

    def acked(self, number: int) -> None:
        """All up to this one are safe."""
        for held in self._sent.values():
            while held and held[0].number <= number:
                self._forget(held)

    def rewind(self) -> int:
        """What was not acknowledged is to be sent again; how many messages wait now."""
        for kind, held in self._sent.items():
            self._unsent[kind].extendleft(reversed(held))
        self._sent = {True: deque(), False: deque()}
        return sum(map(len, self._unsent.values()))

    @property
    def all_sent(self) -> bool:
        """Whether nothing waits for its first or next sending."""
        return self._first(self._unsent) is None

    def holds(self, size: int) -> bool:
        """Whether at least so many bytes wait for their first or next sending."""
        found = 0
        for held in chain(*self._unsent.values()):
            found += len(held.message)
            if found >= size:
                return True
        return False

    def drop(self, held: Held) -> None:
        """Give up one that was sent just now: nobody takes it."""
        for sent in self._sent.values():
            if sent and sent[-1] is held:
                sent.pop()
                self.bytes -= len(held.message)

    def _forget(self, held: deque[Held]) -> None:
        self.bytes -= len(held.popleft().message)

    @staticmethod
    def _first(queues: dict[bool, deque[Held]]) -> bool | None:
        heads = [(held[0].number, kind) for kind, held in queues.items() if held]
        return min(heads)[1] if heads else None
