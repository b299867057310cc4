"""A first look at all rings of a job in one system call: which have new rows, and what each rank does.

The rings are mapped, and the pieces that are wanted are *written* from there into a file of our own (pwritev to a
memfd): 24 pieces of 8 rings take 3 us, 24 preads 15. The mappings are never touched by ourselves: a tenant may cut his
file short at any time, and a load beyond its end is SIGBUS, the end of the agent. The kernel's copy stops there instead
and says how far it came (write(2)); who is to blame is then found by pread.
"""

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import ne
from typing import Final, NamedTuple

from trainwarden.collectors.ringfile import RingFile
from trainwarden.core.records import LIVE, LIVE_OFFSET

_HEAD_BYTES: Final = 4
_PIECES_MAX: Final = 1024
"""Of one pwritev (IOV_MAX, limits.h)."""


class Seen(NamedTuple):
    """What one look found, of rings by their places."""

    steps: Sequence[int]
    """Where there seems to be a new step row."""
    details: Sequence[int]
    """The same of detail rows; looked at after all steps, so the spans of a step that is seen are seen too."""
    live: bytes
    """The live blocks, one behind the other; of side rings what stands there."""


class Glance:
    """Looks at the same rings again and again."""

    def __init__(self, rings: Sequence[RingFile]) -> None:
        self.rings = tuple(rings)
        count = len(rings)
        self._pieces = [memoryview(b"")] * 2 * count
        self._pieces += [ring.view[LIVE_OFFSET : LIVE_OFFSET + LIVE.size] for ring in rings]
        self._calm_steps, self._calm_details = [0] * count, [0] * count
        """What stands at the place of the next row where there is none: the number of the row a round before, or 0. No
        numpy here: who wakes up some times a second does so on cold caches, where it costs more than all the rest."""
        self._heads = struct.Struct(f"@{2 * count}I")
        self._bytes = self._heads.size + count * LIVE.size
        self._file = os.memfd_create("trainwarden-glance", os.MFD_CLOEXEC)
        os.ftruncate(self._file, max(self._bytes, 1))
        self._ours = mmap.mmap(self._file, max(self._bytes, 1), prot=mmap.PROT_READ)
        self.aim(range(count))

    def aim(self, places: Iterable[int]) -> None:
        """Rows of these rings were taken: look for those behind them."""
        count = len(self.rings)
        for place in places:
            ring = self.rings[place]
            steps, details = ring.details if ring.is_side else ring.steps, ring.details
            self._pieces[place] = ring.view[steps.next_at : steps.next_at + _HEAD_BYTES]
            self._pieces[count + place] = ring.view[details.next_at : details.next_at + _HEAD_BYTES]
            self._calm_steps[place] = max(steps.seq + 1 - steps.rows, 0)
            self._calm_details[place] = max(details.seq + 1 - details.rows, 0)

    def look(self) -> Seen | None:
        """None: a ring has become too short."""
        try:
            copied = os.pwritev(self._file, self._pieces, 0) if len(self._pieces) <= _PIECES_MAX else self._in_parts()
        except OSError:  # EFAULT: nothing at all of the first piece
            return None
        if copied != self._bytes:
            return None
        numbers, count = self._heads.unpack_from(self._ours), len(self.rings)
        steps = compress(range(count), map(ne, numbers, self._calm_steps))
        details = compress(range(count), map(ne, numbers[count:], self._calm_details))
        return Seen([*steps], [*details], self._ours[self._heads.size : self._bytes])

    def _in_parts(self) -> int:
        copied = 0
        for first in range(0, len(self._pieces), _PIECES_MAX):
            copied += os.pwritev(self._file, self._pieces[first : first + _PIECES_MAX], copied)
        return copied

    def close(self) -> None:
        """Let the mappings go."""
        self._pieces.clear()
        self._ours.close()
        os.close(self._file)
