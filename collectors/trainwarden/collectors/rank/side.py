"""What other threads may write: values and notes, into a ring of their own under a lock."""

import threading
import time
from collections.abc import Callable
from math import nan

from trainwarden.collectors.rank.numbers import RefusedValue, number
from trainwarden.collectors.rank.ring import NoRing, Ring
from trainwarden.collectors.rank.say import say, say_error
from trainwarden.collectors.rank.words import FEATURE_NAMES, Feature


class Side:
    """Given by Rank.side(), for asynchronous checkpoint callbacks and the like. Never raises."""

    __slots__ = ("_lock", "_make_ring", "_ring", "_step_and_lap")

    def __init__(self, make_ring: Callable[[], Ring] | None, step_and_lap: Callable[[], tuple[int, int]]) -> None:
        """make_ring: called when something is to be written for the first time; None: nothing is."""
        self._make_ring = make_ring
        self._ring: Ring | None = None
        self._step_and_lap = step_and_lap
        self._lock = threading.Lock()

    def value(self, name: Feature | str, value: object) -> None:
        """A number, told under its name; the newest step is its step."""
        self._write("value", FEATURE_NAMES[name] if isinstance(name, int) else name, value)

    def note(self, name: str, value: object = 0.0) -> None:
        """A named mark."""
        self._write("note", name, value)

    def close(self) -> None:
        """Write nothing any more."""
        ring, self._ring, self._make_ring = self._ring, None, None
        if ring is not None:
            ring.close()

    def _write(self, what: str, name: str, value: object) -> None:
        with self._lock:
            ring = self._opened()
            if ring is None:
                return
            try:
                step, lap = self._step_and_lap()
                ring.detail(what, name, (number(value), nan, nan), at=time.perf_counter(), step=step, lap=lap)
            except Exception as error:
                ring.count(error.counter if isinstance(error, RefusedValue) else "errors")
                say_error(error)

    def _opened(self) -> Ring | None:
        if self._make_ring is not None:
            make, self._make_ring = self._make_ring, None
            try:
                self._ring = make()
            except NoRing as why:
                say("side ring", f"no side ring: {why}")
        return self._ring
