"""What each rank does right now, from live frames: one row a rank, and what moved with each frame.

A rank has moved when its step or phase changed or the phase was entered anew. When it moved is told by the receiver's
stamps, since the clocks of hosts differ; how long it stayed is told by the rank's own clock, as a difference.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Frame, State
from trainwarden.core.records import NAME_SLOTS, PHASES, STATES

JITTER_NS = 1_000_000
"""A phase whose start shifts by less has not been entered anew: the node's Unix clock is slewed under us (at most
500 ppm, adjtimex(2)), and its offset to the monotonic clock may be read afresh at each poll."""

MAX_RANKS = 1 << 18
"""Rank numbers beyond are garbage (rings are written by the tenant); twice the largest jobs planned for."""

DETACHED = STATES.index("detached")
INIT = PHASES.index("init")
OTHER = PHASES.index("other")
NEVER = -(1 << 62)
"""Key of a rank that has begun no step."""

ROW = np.dtype(
    [
        ("seen_ns", "<i8"),  # newest frame; 0 = never
        ("moved_ns", "<i8"),  # newest frame that showed a move
        ("since_ns", "<i8"),  # the rank's own stamp of its phase
        ("key", "<i8"),  # lap << 32 | step; NEVER before the first step
        ("first_key", "<i8"),  # the first step seen
        ("begun_ns", "<i8"),  # the rank's own stamp when the step was first seen
        ("begun_seen_ns", "<i8"),  # the receiver's
        ("step", "<i4"),
        ("batch", "<i4"),
        ("phase", "<i4"),  # index into Live.names
        ("flags", "<u4"),
        ("state", "<i4"),
        ("declared", "<i4"),  # phase that the script announced, -1 = none
        ("expect_s", "<f8"),  # how long it may take
        ("gone", "u1"),  # 0, or why it is not counted
    ]
)
NOT_A_MEMBER, LEFT = 1, 2
"""Values of `gone`: the job goes on without it; it ended in order."""

_EMPTY = np.zeros(1, ROW)
_EMPTY["key"] = _EMPTY["first_key"] = NEVER
_EMPTY["step"] = _EMPTY["batch"] = _EMPTY["declared"] = -1
_EMPTY["phase"] = INIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The ranks that one frame showed to have moved, as they were before and are now."""

    rank_K: NDArray[np.intp]
    old_K: NDArray[np.void]
    new_K: NDArray[np.void]


class Live:
    """The table. Rows of ranks that were never seen are all zero but for key, step and phase (init)."""

    def __init__(self) -> None:
        self.row_R: NDArray[np.void] = np.zeros(0, ROW)
        self.names: list[str] = list(PHASES)
        self._names: tuple[str, ...] = ()
        self._id_N: NDArray[np.int32] = np.zeros(0, np.int32)

    def forget(self) -> None:
        """A new incarnation of the ranks: nobody has been seen."""
        self.row_R = np.zeros(0, ROW)

    def reserve(self, ranks: int) -> None:
        """Have rows for this many ranks at least."""
        more = min(ranks, MAX_RANKS) - len(self.row_R)
        if more > 0:
            self.row_R = np.concatenate([self.row_R, np.repeat(_EMPTY, more)])

    def take(self, frame: Frame) -> Moves:
        """Write a live frame into the table; what moved, ranks seen for the first time not counted."""
        rows = frame.rows[(frame.rows["rank"] >= 0) & (frame.rows["rank"] < MAX_RANKS)]
        rank_K = rows["rank"].astype(np.intp)
        self.reserve(int(rank_K.max(initial=-1)) + 1)
        old_K = self.row_R[rank_K]
        new_K = self._now(old_K, rows, frame)
        self.row_R[rank_K] = new_K
        moved_K = (new_K["moved_ns"] != old_K["moved_ns"]) & (old_K["seen_ns"] > 0)
        return Moves(rank_K=rank_K[moved_K], old_K=old_K[moved_K], new_K=new_K[moved_K])

    def phase_id(self, name: str) -> int:
        """The table's number for a phase; new names get one as long as there are any left."""
        if name in self.names:
            return self.names.index(name)
        if len(self.names) >= NAME_SLOTS:
            return OTHER
        self.names.append(name)
        return len(self.names) - 1

    def skip(self, lost_ns: int, now_ns: int) -> None:
        """Time during which nobody looked: it is not held against anybody."""
        later_R = np.minimum(self.row_R["moved_ns"] + lost_ns, now_ns)
        self.row_R["moved_ns"] = np.where(self.row_R["seen_ns"] > 0, later_R, 0)

    def snapshot(self) -> State:
        return {"rows": self.row_R.copy(), "names": list(self.names)}

    def restore(self, state: State) -> None:
        self.row_R, self.names = state["rows"].copy(), [str(name) for name in state["names"]]
        self._names = ()

    def _now(self, old_K: NDArray[np.void], rows: NDArray[np.void], frame: Frame) -> NDArray[np.void]:
        new_K = old_K.copy()
        ids_N = self._ids(frame.names)
        new_K["phase"] = ids_N[np.minimum(rows["phase"], len(ids_N) - 1)]
        begun_K = (rows["step"] >= 0) & (new_K["phase"] != INIT)
        new_K["key"] = np.where(begun_K, rows["lap"].astype(np.int64) << 32 | rows["step"], NEVER)
        for name in ("since_ns", "step", "batch", "flags", "state"):
            new_K[name] = rows[name]
        new_K["seen_ns"] = frame.seen_ns
        step_K = new_K["key"] != old_K["key"]
        new_K["first_key"] = np.where(old_K["first_key"] == NEVER, new_K["key"], old_K["first_key"])
        new_K["begun_ns"] = np.where(step_K, new_K["since_ns"], old_K["begun_ns"])
        new_K["begun_seen_ns"] = np.where(step_K, frame.seen_ns, old_K["begun_seen_ns"])
        moved_K = _moved(old_K, new_K) | step_K | (old_K["seen_ns"] == 0)
        new_K["moved_ns"] = np.where(moved_K, frame.seen_ns, old_K["moved_ns"])
        return new_K

    def _ids(self, names: tuple[str, ...]) -> NDArray[np.int32]:
        if names != self._names or not len(self._id_N):
            self._names = names
            self._id_N = np.array([self.phase_id(name) for name in names] or [OTHER], np.int32)
        return self._id_N


def _moved(old_K: NDArray[Any], new_K: NDArray[Any]) -> NDArray[np.bool_]:
    entered_K = np.abs(new_K["since_ns"] - old_K["since_ns"]) > JITTER_NS
    return np.asarray(entered_K | (new_K["phase"] != old_K["phase"]))
