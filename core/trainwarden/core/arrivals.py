"""Who has reported a step, when half of the members had, and how long the rest may take.

Times are the receiver's `seen_ns` of the rows, so that nothing here depends on how rows were cut into frames.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import Final

import numpy as np
from numpy.typing import NDArray

SPREADS_KEPT: Final = 64
"""Steps that the running median of spreads looks back: as many as the window holds."""


class Members:
    """The ranks that a step of this epoch waits for."""

    def __init__(self, member_R: NDArray[np.bool_]) -> None:
        self.member_R = member_R
        self.count = int(member_R.sum())
        self.half = (self.count + 1) // 2
        """How many are at least half of them."""

    @classmethod
    def everyone(cls, world_size: int) -> "Members":
        """All ranks of the epoch: who it starts with."""
        return cls(np.ones(world_size, np.bool_))


class Arrivals:
    """The reports of one step."""

    __slots__ = ("half_ns", "inside", "last_ns", "seen_R")

    def __init__(self, seen_R: NDArray[np.bool_]) -> None:
        self.seen_R = seen_R
        self.inside = 0
        """Members that have reported."""
        self.half_ns: int | None = None
        """When half of the members had."""
        self.last_ns = 0
        """When the newest report came."""

    def mark(self, ranks: NDArray[np.int32], at_ns: NDArray[np.int64], members: Members) -> NDArray[np.bool_]:
        """Note reports (each rank once) and say which of them are the first of their rank."""
        fresh = ~self.seen_R[ranks]
        counted_ns = at_ns[fresh & members.member_R[ranks]]
        self.seen_R[ranks] = True
        if counted_ns.size:
            if self.half_ns is None and self.inside + counted_ns.size >= members.half:
                self.half_ns = int(np.sort(counted_ns)[members.half - self.inside - 1])
            self.inside += counted_ns.size
            self.last_ns = max(self.last_ns, int(counted_ns.max()))
        return fresh

    def times(self) -> tuple[int, int, int]:
        """All but seen_R, for a snapshot; no time is negative."""
        return self.inside, -1 if self.half_ns is None else self.half_ns, self.last_ns

    @classmethod
    def of(cls, seen_R: NDArray[np.bool_], times: Sequence[int]) -> "Arrivals":
        """What `times` gave, taken up."""
        arrivals = cls(seen_R)
        arrivals.inside, half_ns, arrivals.last_ns = times
        arrivals.half_ns = None if half_ns < 0 else half_ns
        return arrivals

    def recount(self, members: Members, now_ns: int) -> None:
        """The members changed; if this makes half of them, half were in from now on."""
        self.inside = int((self.seen_R & members.member_R).sum())
        if self.half_ns is None and 0 < members.half <= self.inside:
            self.half_ns = now_ns


class Grace:
    """How long a step with half of its members waits for the others.

    clip(4 x running median of (last - half), 0.5 s, 10 s): docs/architecture.md, From frames to steps, rule 5b. Before
    the first step is complete nothing is known and the ceiling holds.
    """

    def __init__(self, factor: float, floor_ns: int, ceiling_ns: int) -> None:
        self._factor = factor
        self._floor_ns = floor_ns
        self._ceiling_ns = ceiling_ns
        self._spreads_ns: deque[int] = deque(maxlen=SPREADS_KEPT)
        self.ns = ceiling_ns

    @property
    def spreads_ns(self) -> Sequence[int]:
        """What was learnt, oldest first."""
        return tuple(self._spreads_ns)

    def learn(self, *spreads_ns: int) -> None:
        """Take in `last - half` of steps whose members all reported, be it after they closed."""
        self._spreads_ns.extend(spreads_ns)
        if self._spreads_ns:
            wanted_ns = int(self._factor * median_low(self._spreads_ns))
            self.ns = min(max(wanted_ns, self._floor_ns), self._ceiling_ns)
