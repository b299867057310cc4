"""A selector that looks seldom: what many connections send one by one is read together.

At 12,800 frames a second, each from another node, a frame costs 22 us with a turn of asyncio's loop for each, and 18 us
with this (benchmarks/ingest.py, `nodes`, medians of 25 interleaved rounds on two busy cores); and the thread that takes
up what was read is not woken for each.
"""

import selectors
import time
from typing import Final

GATHER_S: Final = 0.002
"""Between two looks for what came; a turn of the server, which takes it up, waits for 25 times as long."""
MUCH_BYTES: Final = 64 * 1024
"""Read in one turn of the loop."""


class Gathering(selectors.DefaultSelector):
    """Waits out GATHER_S between two looks, so that what comes meanwhile is found, and read, in one turn of the loop.
    Where much comes it comes together anyway."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s, self.read_bytes = 0.0, 0
        """Since the last look."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As any selector."""
        found = super().select(timeout)
        if timeout == 0:  # something else is to be done
            return found
        wait_s = self._next_s - time.monotonic()
        if found and wait_s > 0 and self.read_bytes < MUCH_BYTES:
            time.sleep(wait_s)
            found = super().select(0)
        self._next_s, self.read_bytes = time.monotonic() + GATHER_S, 0
        return found
