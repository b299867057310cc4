"""What the named rows of rings mean: numbers become readings, marks become events. Names are looked up ring by ring,
since each ring has its own table; the rows are few."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.collectors.ringfile import RingFile
from trainwarden.collectors.ringrows import unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.model import Epoch, Event, Json, Subject
from trainwarden.core.records import COMMITTED, DETAILS, RECOMPILED, epoch_of
from trainwarden.core.schemas import READING

MAX_MARKS: Final = 64
"""Marks of one ring told at one poll; a script that makes more loses the others (told as lost)."""

_PHASE, _NOTE = DETAILS.index("phase"), DETAILS.index("note")


def reading_rows(
    ring_N: NDArray[np.void], which_N: NDArray[np.intp], rings: Sequence[RingFile], offset_ns: int
) -> tuple[NDArray[np.void], tuple[str, ...], NDArray[np.bool_]]:
    """Rows of schema `reading` from value rows, their names, and which of the rows had a name at all.

    which_N: the place in `rings` that each row is from.
    """
    key_N = which_N.astype(np.int64) << 16 | ring_N["name"]
    key_K, place_N = np.unique(key_N, return_inverse=True)
    ids: dict[str, int] = {}
    pairs_K = np.full((len(key_K), 2), -1)
    for place, key in enumerate(key_K.tolist()):
        ring = rings[key >> 16]
        signal = ring.name_of(key & 0xFFFF)
        if signal is not None:
            pairs_K[place] = [ids.setdefault(name, len(ids)) for name in (f"rank:{ring.rank}", signal)]
    pairs_N = pairs_K[place_N]
    named_N = pairs_N[:, 0] >= 0
    rows_N = np.empty(len(ring_N), READING)
    rows_N["subject"], rows_N["signal"] = pairs_N.T
    rows_N["step"], rows_N["value"] = ring_N["step"], ring_N["value"]
    rows_N["t_ns"] = unix_ns(ring_N["t"], offset_ns)
    return rows_N[named_N], tuple(ids), named_N


def mark_events(
    ring_N: NDArray[np.void], ring: RingFile, emit: Emitter, *, now_ns: int, offset_ns: int
) -> Iterator[Event]:
    """Events of the phase and note rows of one ring; those beyond MAX_MARKS go to what its tail has lost."""
    marks_N = ring_N[(ring_N["what"] == _PHASE) | (ring_N["what"] == _NOTE)]
    if len(marks_N) > MAX_MARKS:
        ring.details.lost.append((int(marks_N["seq"][MAX_MARKS]), int(marks_N["seq"][-1])))
    t_N = unix_ns(marks_N["t"], offset_ns)
    for row, t_ns in zip(marks_N[:MAX_MARKS], t_N.tolist(), strict=False):
        name = ring.name_of(int(row["name"]))
        if name is None:
            continue
        kind, data = _meaning(row, name, ring.rank)
        epoch = Epoch(epoch_of(ring.attempt, ring.restart, int(row["lap"]) & 0xFFFF))
        yield emit(kind, Subject(kind="rank", id=str(ring.rank)), now_ns=now_ns, data=data, t_ns=t_ns, epoch=epoch)


def _meaning(row: np.void, name: str, rank: int) -> tuple[str, dict[str, Json]]:
    """Kind and data of the event that a mark stands for."""
    value = float(row["value"])
    finite = value if math.isfinite(value) else None
    if row["what"] == _PHASE:
        return "mark.phase", {"phase": name, "expect_s": finite, "step": int(row["step"])}
    if name == COMMITTED and finite is not None:
        return "mark.checkpoint_committed", {"step": int(value), "path": "", "rank": rank}
    if name.startswith(RECOMPILED) and finite is not None:
        return "mark.recompile", {"rank": rank, "name": name.removeprefix(RECOMPILED), "count": int(finite)}
    return "mark.note", {"name": name, "value": finite, "step": int(row["step"])}
