"""How tries to hand notices over have ended, by channel."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from trainwarden.core.model import Notice
from trainwarden.core.ports import Notifier


class Tries:
    """Counts, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, channel: str, result: str) -> None:
        """One try; result: `taken` or `failed`."""
        with self._lock:
            self._counts[channel, result] += 1

    def counts(self) -> Mapping[tuple[str, str], int]:
        """By channel and result."""
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class Counted:
    """A notifier whose tries are counted."""

    notifier: Notifier
    tries: Tries

    @property
    def channel(self) -> str:
        """Its own."""
        return self.notifier.channel

    def notify(self, notice: Notice) -> str:
        """As the notifier does, and raises what it raises."""
        result = "failed"
        try:
            receipt = self.notifier.notify(notice)
            result = "taken"
        finally:
            self.tries.note(notice.channel, result)
        return receipt
