"""Micro-batches: from span rows to forward and backward seconds a micro-batch and rank.

Spans are held by step until the step closes, then summed once. The same span sent twice counts once (its key is step,
rank, kind, micro-batch and start), several spans of one micro-batch (virtual stages, backward cut in two) are added.
A span is own work only without a collective inside (docs/architecture.md, Measuring inside the rank): a device time
where there is one, else wall minus run-queue wait; a span that contains a collective makes its cell unknown.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Frame
from trainwarden.core.records import CONTAINS_COMM

KINDS: Final = ("forward", "backward", "backward_input", "backward_weight")
"""The span kinds that make up a micro-batch."""

COLUMNS: Final = ("forward_s", "backward_s", "tokens")
"""The middle axis of StepMatrix.micro_MKR; tokens are not in span rows yet: NaN."""

_COLUMN_OF_KIND: Final = np.array([0, 1, 1, 1])
_SUMMED: Final = 2
"""Columns that are sums of spans."""

_HELD: Final = np.dtype(
    [("step", "<i4"), ("rank", "<i4"), ("mb", "<i4"), ("kind", "<i4"), ("start_ns", "<i8"), ("seconds", "<f4")]
)


class MicroBatches:
    """The span rows of steps that have not closed."""

    def __init__(self, world_size: int, micro_batches: int) -> None:
        self._world_size = world_size
        self._micro_batches = micro_batches
        self._held: dict[int, list[NDArray[np.void]]] = {}

    def add(self, frames: Sequence[Frame], first: int | None, end: int | None) -> tuple[int, int]:
        """Hold the rows of steps from `first` up to before `end`; returns how many rows were (late, garbage)."""
        held = np.concatenate([_own_work(frame) for frame in frames])
        step, rank, mb = held["step"], held["rank"], held["mb"]
        sound = (step >= 0) & (rank >= 0) & (rank < self._world_size) & (mb < self._micro_batches)
        sound &= np.True_ if end is None else step < end
        late = sound & (np.False_ if first is None else step < first)
        kept = held[sound & ~late]
        kept = kept[np.argsort(kept["step"], kind="stable")]
        for part in np.split(kept, np.flatnonzero(np.diff(kept["step"])) + 1):
            if len(part):
                self._held.setdefault(int(part["step"][0]), []).append(part)
        return int(late.sum()), int((~sound).sum())

    def take(self, step: int, seen_R: NDArray[np.bool_]) -> NDArray[np.float32] | None:
        """The table of a step that closes, for the ranks that were seen; forgets it and all steps before."""
        parts = self._held.get(step)
        for old in [known for known in self._held if known <= step]:
            del self._held[old]
        if parts is None:
            return None
        rows = np.concatenate(parts)
        rows = rows[seen_R[rows["rank"]]]
        return _table(_once(rows, self._world_size), self._world_size) if len(rows) else None

    def snapshot(self) -> NDArray[np.void]:
        """All rows held, in the order they came."""
        return np.concatenate([np.empty(0, _HELD), *(part for parts in self._held.values() for part in parts)])

    def restore(self, rows: NDArray[np.void]) -> None:
        """Take up what `snapshot` gave."""
        self._held = {int(step): [rows[rows["step"] == step]] for step in np.unique(rows["step"])}


def _own_work(frame: Frame) -> NDArray[np.void]:
    """The spans of micro-batches with their own-work seconds."""
    kind_of_name = _kinds(frame.names)
    kind = kind_of_name[np.minimum(frame.rows["kind"], len(kind_of_name) - 1)]
    chosen = (frame.rows["mb"] >= 0) & (kind >= 0)
    rows, held = frame.rows[chosen], np.empty(int(chosen.sum()), _HELD)
    for name in ("step", "rank", "mb", "start_ns"):
        held[name] = rows[name]
    held["kind"] = kind[chosen]
    wall_s, _, runq_s, device_s = rows["values"].T
    with np.errstate(invalid="ignore"):  # garbage may hold infinities
        host_s = wall_s - np.where(np.isnan(runq_s), np.float32(0), runq_s)
    own_s = np.where(np.isnan(device_s), host_s, device_s)
    held["seconds"] = np.where(rows["flags"] & CONTAINS_COMM, np.float32(np.nan), own_s)
    return held


@lru_cache(maxsize=1024)
def _kinds(names: tuple[str, ...]) -> NDArray[np.int32]:
    """Index into KINDS for each name id, -1 for other names; the last entry stands for ids beyond the table."""
    index = {kind: number for number, kind in enumerate(KINDS)}
    return np.array([*(index.get(name, -1) for name in names), -1], np.int32)


def _once(rows: NDArray[np.void], world_size: int) -> NDArray[np.void]:
    """Without copies, in an order that does not depend on how they came: sums of floats are then the same."""
    cell = (rows["mb"].astype(np.int64) * len(KINDS) + rows["kind"]) * world_size + rows["rank"]
    order = np.lexsort((rows["start_ns"], cell))
    cell, start_ns = cell[order], rows["start_ns"][order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (cell[1:] != cell[:-1]) | (start_ns[1:] != start_ns[:-1])
    return rows[order[first]]


def _table(rows: NDArray[np.void], world_size: int) -> NDArray[np.float32]:
    count_M = int(rows["mb"].max()) + 1
    cell = (rows["mb"].astype(np.int64) * _SUMMED + _COLUMN_OF_KIND[rows["kind"]]) * world_size + rows["rank"]
    cells = count_M * _SUMMED * world_size
    total = np.bincount(cell, rows["seconds"], cells)
    total[np.bincount(cell, minlength=cells) == 0] = np.nan
    micro_MKR = np.full((count_M, len(COLUMNS), world_size), np.nan, np.float32)
    with np.errstate(over="ignore"):
        micro_MKR[:, :_SUMMED] = total.reshape(count_M, _SUMMED, world_size)
    return micro_MKR
