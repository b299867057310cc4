"""From the bytes of ring rows to the rows of frames, for all ranks at once.

A step row in stamps is turned into seconds here: the loop stores, we subtract. Whatever a tenant may have written comes
out as numbers, NaN at worst, without a warning.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.records import FEATURES, IN_STAMPS, LIVE, PHASES, STAMPED, STEP_ROW
from trainwarden.core.schemas import LIVE as LIVE_FRAME
from trainwarden.core.schemas import SPAN, STEP

STEP_IN_SUMS: Final = np.dtype(
    [
        ("seq", "<u4"),
        ("step", "<i4"),
        ("batch", "<i4"),
        ("flags", "<u2"),
        ("lap", "<u2"),
        ("end", "<f8"),
        ("values", "<f4", (len(FEATURES),)),
        ("form", "<u4"),
        ("tail", "<u4"),
    ]
)
STEP_IN_STAMPS: Final = np.dtype(
    {
        "names": ["seq", "step", "end", "stamps", "values"],
        "formats": ["<u4", "<i4", "<f8", ("<f8", (STAMPED,)), ("<f4", (2,))],
        "offsets": [0, 4, 16, 24, 24 + 8 * STAMPED],
        "itemsize": STEP_ROW.size,
    }
)
DETAIL: Final = np.dtype(
    [
        ("seq", "<u4"),
        ("step", "<i4"),
        ("what", "<u2"),
        ("name", "<u2"),
        ("mb", "<i2"),
        ("flags", "<u2"),
        ("t", "<f8"),
        ("value", "<f8"),
        ("cpu_s", "<f4"),
        ("runq_s", "<f4"),
        ("lap", "<u4"),
        ("tail", "<u4"),
    ]
)
LIVE_BLOCK: Final = np.dtype(
    [
        ("since", "<f8", (len(PHASES),)),
        ("step", "<i8"),
        ("batch", "<i8"),
        ("flags", "<i8"),
        ("lap", "<i8"),
        ("state", "<u2"),
        ("pad", "V6"),
    ]
)
assert LIVE_BLOCK.itemsize == LIVE.size

_STAMP_COLUMNS: Final = [FEATURES.index(f"{phase}_s") for phase in reversed(PHASES[: STAMPED - 1])]
"""Where the seconds of data, forward, backward, wait, optimizer go."""
_STEP_S: Final = FEATURES.index("step_s")
_GIVEN: Final = [FEATURES.index("loss"), FEATURES.index("grad_norm")]
_LAST_SECOND: Final = 4e9
"""More uptime than there can be: int64 nanoseconds hold it."""


def step_rows(data: bytes, rank_N: NDArray[np.int32], offset_ns: int) -> NDArray[np.void]:
    """Rows of schema `step` from ring rows, one of `rank_N` for each."""
    ring_N = np.frombuffer(data, STEP_IN_SUMS)
    rows_N = np.empty(len(ring_N), STEP)
    rows_N["rank"] = rank_N
    for name in ("step", "batch", "flags", "lap"):
        rows_N[name] = ring_N[name]
    rows_N["end_ns"] = unix_ns(ring_N["end"], offset_ns)
    rows_N["values"] = ring_N["values"]
    stamps_N = ring_N["form"] == IN_STAMPS
    if stamps_N.any():
        rows_N["values"][stamps_N] = _seconds(np.frombuffer(data, STEP_IN_STAMPS)[stamps_N])
        rows_N["batch"][stamps_N] = ring_N["step"][stamps_N]
    return rows_N


def _seconds(rows_N: NDArray[Any]) -> NDArray[np.float32]:
    """FEATURES of rows in stamps: a phase lasts until the next one that was entered in this step, or the end."""
    stamps_NP = rows_N["stamps"][:, ::-1]
    begin_N, end_N = stamps_NP[:, 0], rows_N["end"]
    with np.errstate(invalid="ignore", over="ignore"):
        entered_NP = stamps_NP >= begin_N[:, None]
        times_NP = np.column_stack([np.where(entered_NP, stamps_NP, np.inf), end_N])
        next_NP = np.minimum.accumulate(times_NP[:, :0:-1], axis=1)[:, ::-1]
        spent_NP = np.where(entered_NP, next_NP - stamps_NP, np.nan)
        values_NF = np.full((len(rows_N), len(FEATURES)), np.nan, np.float32)
        values_NF[:, _STEP_S] = end_N - begin_N
        values_NF[:, _STAMP_COLUMNS] = spent_NP[:, 1:]
        values_NF[:, _GIVEN] = rows_N["values"]
    return values_NF


def span_rows(ring_N: NDArray[np.void], rank_N: NDArray[np.int32], offset_ns: int) -> NDArray[np.void]:
    """Rows of schema `span` from detail rows that are spans; kind indexes PHASES."""
    rows_N = np.empty(len(ring_N), SPAN)
    rows_N["rank"], rows_N["kind"] = rank_N, ring_N["name"]
    for name in ("step", "mb", "flags", "lap"):
        rows_N[name] = ring_N[name]
    rows_N["start_ns"] = unix_ns(ring_N["t"], offset_ns)
    with np.errstate(over="ignore", invalid="ignore"):
        rows_N["values"][:, 0] = ring_N["value"]
    rows_N["values"][:, 1], rows_N["values"][:, 2], rows_N["values"][:, 3] = ring_N["cpu_s"], ring_N["runq_s"], np.nan
    return rows_N


def live_rows(blocks: bytes, rank_R: NDArray[np.int32], offset_ns: int) -> NDArray[np.void]:
    """Rows of schema `live` from live blocks; phase indexes PHASES."""
    block_R = np.frombuffer(blocks, LIVE_BLOCK)
    since_RP = block_R["since"]
    rows_R = np.empty(len(block_R), LIVE_FRAME)
    rows_R["rank"] = rank_R
    rows_R["phase"] = phase_R = since_RP.argmax(axis=1)
    rows_R["since_ns"] = unix_ns(since_RP[np.arange(len(phase_R)), phase_R], offset_ns)
    rows_R["step"] = step_R = _fit(block_R["step"])
    rows_R["batch"] = np.where(block_R["batch"] < 0, step_R, _fit(block_R["batch"]))
    rows_R["flags"], rows_R["lap"], rows_R["state"] = block_R["flags"], block_R["lap"], block_R["state"]
    return rows_R


def unix_ns(seconds_N: NDArray[np.float64], offset_ns: int) -> NDArray[np.int64]:
    """Unix time of monotonic seconds; what is no time becomes the time of the boot."""
    sound_N = np.where((seconds_N >= 0) & (seconds_N < _LAST_SECOND), seconds_N, 0.0)
    return np.asarray((sound_N * 1e9).astype(np.int64) + offset_ns)


def _fit(numbers_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Step numbers that fit a row; -1 for those that do not."""
    return np.where((numbers_N >= 0) & (numbers_N < 1 << 31), numbers_N, -1)
