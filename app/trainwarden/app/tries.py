"""Notifiers around notifiers: how tries have ended, by channel, and one that is asked in a thread."""

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trainwarden.core.errors import DeliveryError
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


class Behind:
    """A notifier that may wait for the network, asked in a thread: the first answer is `try again`, a later one its."""

    def __init__(self, inner: Notifier, pool: ThreadPoolExecutor) -> None:
        self._inner, self._pool = inner, pool
        self.channel = inner.channel
        self._under_way: dict[str, Future[str]] = {}

    def notify(self, notice: Notice) -> str:
        """As the inner one's last try. Raises DeliveryError, also while that is under way."""
        if notice.key not in self._under_way:
            self._under_way[notice.key] = self._pool.submit(self._inner.notify, notice)
        if not self._under_way[notice.key].done():
            raise DeliveryError(f"{self.channel}: under way", retryable=True)
        return self._under_way.pop(notice.key).result()
