"""Recordings: everything that was seen, in the order it was seen, as small Parquet files.

A file is written under a temporary name and renamed when it is whole, so that a crash loses the open file at most and
no reader meets half a file; pages carry checksums. The oldest files go when the directory outgrows its cap. Recording
is a help and never a duty: what cannot be written is counted and dropped, the caller goes on.

Columns: seen_ns; kind ("frame/step", "event/xid", "tick" ...: to filter by); body (core/codec.py).

The closed steps of a recording (core/steps.py makes them of its frames) can be had as a table: `step_table`.
"""

import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainwarden.core.codec import dumps, frame_from_bytes, frame_to_bytes, loads
from trainwarden.core.errors import DataError
from trainwarden.core.fromjson import INT64
from trainwarden.core.model import Event, Frame, StepMatrix, Tick
from trainwarden.core.records import FEATURES
from trainwarden.core.topology import tokens_of

if TYPE_CHECKING:
    import pandas as pd

Item: TypeAlias = Frame | Event | Tick

BYTES_PER_FILE: Final = 16 * 1024 * 1024
"""A file is closed when its bodies reach this: bounds the memory of an open file."""

_SCHEMA: Final = pa.schema([("seen_ns", pa.int64()), ("kind", pa.string()), ("body", pa.binary())])
_NAME: Final = re.compile(r"(\d{8,})\.parquet")
_FAILURES: Final = (OSError, pa.ArrowException)
_SECOND_NS: Final = 1_000_000_000
_TIMES: Final = [row for row, name in enumerate(FEATURES) if name.endswith("_s")]
_TOKENS: Final = FEATURES.index("tokens")


class Recorder:
    """Writes the recording of one directory; the only writer there.

    A file is closed after so many rows or seconds (of `seen_ns`: a recorder has no clock), or when close() is called.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int = 1024**3,
        rows_per_file: int = 20_000,
        seconds_per_file: float = 10.0,
    ) -> None:
        self.failures = 0
        """How often something could not be written."""
        self.lost_items = 0
        """Items that are in no file because of that."""
        self.last_error = ""
        self._directory = directory
        self._max_bytes = max_bytes
        self._rows_per_file = rows_per_file
        self._ns_per_file = int(seconds_per_file * _SECOND_NS)
        self._rows: list[tuple[int, str, bytes]] = []
        self._bytes = 0
        self._files: deque[tuple[Path, int]] = deque()
        """(path, bytes), oldest first."""
        self._number = 0
        self._take_over()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, item: Item) -> None:
        """Record an item. Never raises."""
        try:
            kind, body = _encoded(item)
        except (TypeError, ValueError) as error:
            self._failed(error, lost=1)
            return
        self._rows.append((item.seen_ns, kind, body))
        self._bytes += len(body)
        full = len(self._rows) >= self._rows_per_file or self._bytes >= BYTES_PER_FILE
        if full or item.seen_ns - self._rows[0][0] >= self._ns_per_file:
            self.close()

    def close(self) -> None:
        """Finish the open file, if there is one; a later write opens the next. Never raises."""
        rows, self._rows, self._bytes = self._rows, [], 0
        if not rows:
            return
        try:
            self._save(rows)
            self._keep_cap()
        except _FAILURES as error:
            self._failed(error, lost=len(rows))

    def _take_over(self) -> None:
        """Go on where an earlier recorder of this directory ended; what it had not finished goes."""
        try:
            for unfinished in self._directory.glob("*.parquet.tmp"):
                unfinished.unlink()
            self._files.extend((path, path.stat().st_size) for path in _files(self._directory))
        except OSError as error:
            self._failed(error, lost=0)
        if self._files:
            self._number = _number(self._files[-1][0])

    def _save(self, rows: list[tuple[int, str, bytes]]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._number += 1
        path = self._directory / f"{self._number:08}.parquet"
        unfinished = path.with_suffix(".parquet.tmp")
        try:
            columns = [
                pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), _SCHEMA, strict=True)
            ]
            table = pa.Table.from_arrays(columns, schema=_SCHEMA)
            pq.write_table(table, unfinished, compression="zstd", use_dictionary=["kind"], write_page_checksum=True)
            unfinished.rename(path)
        except _FAILURES:
            unfinished.unlink(missing_ok=True)
            raise
        self._files.append((path, path.stat().st_size))

    def _keep_cap(self) -> None:
        """The oldest files go first, the newest never."""
        while len(self._files) > 1 and sum(size for _, size in self._files) > self._max_bytes:
            path, _ = self._files.popleft()
            path.unlink(missing_ok=True)

    def _failed(self, error: Exception, *, lost: int) -> None:
        self.failures += 1
        self.lost_items += lost
        self.last_error = f"{self._directory}: {error}"


class Recording:
    """Reads a directory in the order it was written. What cannot be read is refused by name, the rest is read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.refused: list[DataError] = []
        """Files and rows that the last iteration passed over."""

    def __iter__(self) -> Iterator[Item]:
        self.refused = []
        for path in _files(self._directory):
            try:
                table = _table(path)
            except DataError as error:
                self.refused.append(error)
                continue
            for row, (kind, body) in enumerate(
                zip(*(table[name].to_pylist() for name in ("kind", "body")), strict=True)
            ):
                try:
                    yield _decoded(kind, body)
                except DataError as error:
                    self.refused.append(DataError(f"{path}: row {row}: {error}"))


def step_table(steps: Iterable[StepMatrix], *, by_rank: bool = False) -> "pd.DataFrame":
    """Closed steps in the order in which they closed; needs pandas (extra `dashboards`). 180 bytes a row.

    A row a step: epoch, step, batch, seen_ns, partial, flags (those of all ranks together) and FEATURES: times of the
    slowest rank, tokens as topology.tokens_of, anything else as the lowest rank tells it; NaN: no rank does.
    by_rank: a row a step and rank that was seen, with its own values (for small runs: so many times the rows).
    """
    import pandas as pd

    names = ["epoch", "step", "batch", "seen_ns", "partial", "flags", "rank"][: 7 if by_rank else 6]
    keys, values = array("q"), array("d")
    for matrix in steps:
        told = matrix.topology.epoch, matrix.step, matrix.batch, matrix.seen_ns, matrix.partial
        if by_rank:
            for rank in np.flatnonzero(matrix.seen_R).tolist():
                keys.extend((*told, int(matrix.flags_R[rank]), rank))
                values.extend(matrix.values_FR[:, rank])
        else:
            keys.extend((*told, int(np.bitwise_or.reduce(matrix.flags_R))))
            values.extend(_over_ranks(matrix))
    table = pd.DataFrame(np.frombuffer(keys, np.int64).reshape(-1, len(names)), columns=names)
    numbers = np.frombuffer(values, np.float64).reshape(-1, len(FEATURES))
    return table.astype({"partial": bool}).join(pd.DataFrame(numbers, columns=list(FEATURES)))


def _over_ranks(matrix: StepMatrix) -> NDArray[np.float64]:
    values_FR = matrix.values_FR
    known_FR = ~np.isnan(values_FR)
    lowest_F = known_FR.argmax(axis=1)[:, None]
    value_F = np.take_along_axis(values_FR, lowest_F, axis=1)[:, 0].astype(np.float64)
    value_F[_TIMES] = np.fmax.reduce(values_FR[_TIMES], axis=1)
    value_F[_TOKENS] = tokens_of(matrix)
    return value_F


def read(directory: Path) -> Iterator[Item]:
    """All items of a recording; use `Recording` to learn what had to be passed over."""
    return iter(Recording(directory))


def _files(directory: Path) -> list[Path]:
    return sorted((path for path in directory.glob("*.parquet") if _NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _encoded(item: Item) -> tuple[str, bytes]:
    if item.seen_ns not in INT64:
        raise ValueError(f"seen_ns {item.seen_ns} is out of range")
    if isinstance(item, Frame):
        return f"frame/{item.schema}", frame_to_bytes(item)
    return f"event/{item.kind}" if isinstance(item, Event) else "tick", dumps(item).encode()


def _decoded(kind: str | None, body: bytes | None) -> Item:
    if kind is None or body is None:
        raise DataError("empty")
    if kind.startswith("frame/"):
        return frame_from_bytes(body)
    item = loads(body)
    if not isinstance(item, Event | Tick):
        raise DataError(f"a {type(item).__name__} is not recorded")
    return item


def _table(path: Path) -> pa.Table:
    """A whole file or a DataError: never half of one."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except (*_FAILURES, ValueError, MemoryError) as error:
        raise DataError(f"{path}: {error}") from error
    if not table.schema.equals(_SCHEMA):
        raise DataError(f"{path}: columns are {', '.join(f'{one.name} {one.type}' for one in table.schema)}")
    return table
