"""The rings and hellos of one job on this host, some times a second: what the ranks say of themselves.

All ranks of one epoch share one frame a schema and poll. Step rows are looked at before detail rows and told after
them, so that a step's spans always come first. All of it was written by the job's user: a file that is not what it
claims to be is refused with its reason, once, and the others are read on. Of several incarnations of the job only the
newest is read; what the one before it had not told yet is told first.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.collectors.blind import Blind
from trainwarden.collectors.folder import Folder
from trainwarden.collectors.hellos import Hellos
from trainwarden.collectors.ringdetails import mark_events, reading_rows
from trainwarden.collectors.ringfile import FILE_NAME, Looked, RingFile, confirm
from trainwarden.collectors.ringglance import Glance
from trainwarden.collectors.ringrows import DETAIL, live_rows, span_rows, step_rows
from trainwarden.core.clock import boot_offset_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import DataError
from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, Schema, Subject
from trainwarden.core.records import DETAILS, LIVE, PHASES, STATES, epoch_of

BETWEEN_LOOKS_S: Final = 0.001
"""Two equal reads this far apart: a store is visible to all cores long before (ADR 0002)."""

CLOCK_STEP_NS: Final = 100_000_000
"""The Unix clock has been set, not slewed, when its distance from the monotonic clock moves by more than this: reading
both takes a loaded machine some ms at worst. The distance is otherwise kept, so that a phase that goes on keeps its
start to the nanosecond."""

TORN_NS: Final = 1_000_000_000
"""A row that is not whole for this long, and whose writer is gone, was torn by its end."""

URGENT: Final = ("rank", "flags", "state")
"""Of a live row: who there is, what is not finite, who has left."""

QUIET_POLLS: Final = 3
"""A ring that will not be written any more is closed after this many polls without a new row."""

_SPAN, _VALUE = DETAILS.index("span"), DETAILS.index("value")
_DETACHED: Final = STATES.index("detached")
_Key = tuple[str, int]
_Looks = dict[RingFile, Looked]


class Rings:
    """Source of step, live, span and reading frames, hellos and marks of one job's ranks on this host."""

    period_s = 0.1

    def __init__(
        self, directory: Path, node: str, job: JobId, *, start_ns: int, name: str = "", live_ns: int = 0
    ) -> None:
        """directory: the root that the ranks were told (TRAINWARDEN_DIR). name: other than `rings@<node>`.

        live_ns: between two live frames that differ in no rank's flags, state or epoch; 0: one is told at each poll.
        """
        self.name = name or f"rings@{node}"
        self._job = job
        self._folder = Folder(directory / job / "rings", FILE_NAME)
        self._keys: frozenset[_Key] = frozenset()
        self._emit = Emitter(self.name, job=job, start_ns=start_ns)
        self._blind = Blind(self._emit)
        self._hellos = Hellos(directory / job / "hello", self._emit, self._blind)
        self._frame_seq = start_ns // 1000
        self._offset_ns = boot_offset_ns()
        self._open: dict[_Key, RingFile] = {}
        self._shut: set[_Key] = set()
        """Refused, or read to their end."""
        self._generation = (-1, -1)
        self._glance: Glance | None = None
        self._visited: set[int] = set()
        """Places in it of rings of which rows were looked at since: the next row may stand elsewhere."""
        self._live_ns, self._live_told_ns = live_ns, 0
        self._urgent: object = None
        """What of the newest live rows is told at once when it changes."""
        self._told: tuple[object, list[tuple[int, NDArray[np.void]]]] = (None, [])
        """The live blocks told last, and the rows that were made of them: most polls find the same ones."""

    def poll(self, now_ns: int) -> list[Frame | Event]:
        """Everything new, in the order in which the line wants it."""
        self._keep_offset()
        out: list[Frame | Event] = [*self._hellos.poll(now_ns), *self._open_new(now_ns)]
        steps, details, blocks = self._look(out, now_ns)
        if steps or details:
            sleep(BETWEEN_LOOKS_S)
        if details:
            out += self._details(details, now_ns)
        if steps:
            out += self._steps(steps, now_ns)
        if blocks:
            out += self._live(blocks, now_ns)
        out += self._lost(now_ns)
        self._close_quiet()
        return out

    def close(self) -> None:
        """Let all files go."""
        for ring in self._open.values():
            ring.close()
        self._open.clear()
        if self._glance is not None:
            self._glance.close()
            self._glance = None

    def _keep_offset(self) -> None:
        now_ns = boot_offset_ns()
        if abs(now_ns - self._offset_ns) > CLOCK_STEP_NS:
            self._offset_ns = now_ns

    # which files

    def _open_new(self, now_ns: int) -> Iterator[Event]:
        keys = self._folder.files(now_ns)
        if keys is self._keys:
            return
        self._keys = keys
        fresh: dict[_Key, RingFile] = {}
        for key in sorted(keys - self._open.keys() - self._shut):
            try:
                fresh[key] = RingFile(self._folder.path / key[0], self._folder.owner_uid)
            except (OSError, DataError) as error:
                self._shut.add(key)
                yield from self._blind(f"{key[0]}: {error}", now_ns)
        self._generation = max([self._generation, *(ring.generation for ring in fresh.values())])
        for key, ring in fresh.items():
            if ring.generation < self._generation:  # of an incarnation that was over before we came
                ring.close()
                self._shut.add(key)
            else:
                self._open[key] = ring
        for key, ring in self._open.items():
            ring.ending = ring.ending or ring.generation < self._generation or key not in keys
        self._shut &= keys

    def _drop(self, key: _Key) -> None:
        self._open.pop(key).close()
        self._shut.add(key)

    def _close_quiet(self) -> None:
        for key, ring in [*self._open.items()]:
            if ring.ending and ring.quiet_polls >= QUIET_POLLS:
                self._drop(key)

    # rows

    def _look(self, out: list[Frame | Event], now_ns: int) -> tuple[_Looks, _Looks, dict[RingFile, bytes]]:
        """First look at every ring: new step rows; then new detail rows; and the live blocks."""
        rings = [*self._open.items()]
        seen = self._glance_at([ring for _, ring in rings]).look()
        every, size = range(len(rings)), LIVE.size
        steps: _Looks = {}
        details: _Looks = {}

        def first(ring: RingFile) -> None:
            if (look := ring.steps.look()) is not None:
                steps[ring] = look

        def second(ring: RingFile) -> None:
            if (look := ring.details.look()) is not None:
                details[ring] = look
            if seen is None:
                ring.live()

        self._visited = {*every} if seen is None else {*seen.steps, *seen.details}
        for visit, places in ((first, every if seen is None else seen.steps), (second, sorted(self._visited))):
            for key, ring in (rings[place] for place in places):
                try:
                    if key in self._open:
                        visit(ring)
                except (OSError, DataError) as error:
                    self._drop(key)
                    steps.pop(ring, None)
                    out += self._blind(f"{key[0]}: {error}", now_ns)
        blocks = {
            ring: ring.live() if seen is None else seen.live[place * size : (place + 1) * size]
            for place, (key, ring) in enumerate(rings)
            if not ring.is_side and not ring.ending and key in self._open
        }
        for ring in self._open.values():
            ring.quiet_polls = 0 if ring in steps or ring in details else ring.quiet_polls + 1
        return steps, details, blocks

    def _glance_at(self, rings: list[RingFile]) -> Glance:
        if self._glance is None or self._glance.rings != tuple(rings):
            if self._glance is not None:
                self._glance.close()
            self._glance = Glance(rings)
        else:
            self._glance.aim(self._visited)
        return self._glance

    def _steps(self, looks: _Looks, now_ns: int) -> Iterator[Frame]:
        rings = [*looks]
        data, counts = confirm([*looks.values()], now_ns)
        rank_N, epoch_N = np.repeat(_ranks(rings), counts), np.repeat(_epochs(rings), counts)
        rows_N = step_rows(data, rank_N, self._offset_ns)
        yield from self._frames("step", rows_N, epoch_N | rows_N["lap"], (), now_ns)

    def _details(self, looks: _Looks, now_ns: int) -> Iterator[Frame | Event]:
        rings = [*looks]
        data, counts = confirm([*looks.values()], now_ns)
        ring_N, which_N = np.frombuffer(data, DETAIL), np.repeat(np.arange(len(rings)), counts)
        epoch_N = _epochs(rings)[which_N] | (ring_N["lap"] & 0xFFFF)
        span_N = (ring_N["what"] == _SPAN) & (ring_N["name"] < len(PHASES))
        spans = span_rows(ring_N[span_N], _ranks(rings)[which_N[span_N]], self._offset_ns)
        yield from self._frames("span", spans, epoch_N[span_N], PHASES, now_ns)
        value_N = np.flatnonzero(ring_N["what"] == _VALUE)
        if len(value_N):
            rows_N, names, named_N = reading_rows(ring_N[value_N], which_N[value_N], rings, self._offset_ns)
            yield from self._frames("reading", rows_N, epoch_N[value_N][named_N], names, now_ns)
        for place, ring in enumerate(rings):
            yield from mark_events(ring_N[which_N == place], ring, self._emit, now_ns=now_ns, offset_ns=self._offset_ns)

    def _live(self, blocks: dict[RingFile, bytes], now_ns: int) -> Iterator[Frame]:
        if (now := (blocks, self._offset_ns)) != self._told[0]:
            rings = [*blocks]
            rows_R = live_rows(b"".join(blocks.values()), _ranks(rings), self._offset_ns)
            for ring in (rings[place] for place in np.flatnonzero(rows_R["state"] == _DETACHED)):
                ring.ending = True
            rows_R.flags.writeable = False
            self._told = now, [*_split(rows_R, _epochs(rings) | rows_R["lap"])]
            if self._live_ns:
                urgent = [(epoch, [rows_N[word].tolist() for word in URGENT]) for epoch, rows_N in self._told[1]]
                self._live_told_ns = self._live_told_ns if urgent == self._urgent else now_ns - self._live_ns
                self._urgent = urgent
        if self._live_ns:
            if now_ns - self._live_told_ns < self._live_ns:
                return
            self._live_told_ns = now_ns
        for epoch, rows_N in self._told[1]:
            yield self._frame("live", epoch, rows_N, PHASES, now_ns)

    def _frames(
        self, schema: Schema, rows_N: NDArray[np.void], epoch_N: NDArray[np.int64], names: tuple[str, ...], now_ns: int
    ) -> Iterator[Frame]:
        """One an epoch."""
        for epoch, rows_K in _split(rows_N, epoch_N):
            yield self._frame(schema, epoch, rows_K, names, now_ns)

    def _frame(
        self, schema: Schema, epoch: int, rows_N: NDArray[np.void], names: tuple[str, ...], now_ns: int
    ) -> Frame:
        self._frame_seq += 1
        return Frame(
            schema=schema,
            source=self.name,
            job=self._job,
            epoch=Epoch(epoch),
            seq=self._frame_seq,
            sent_ns=now_ns,
            seen_ns=now_ns,
            names=names,
            rows=rows_N,
        )

    def _lost(self, now_ns: int) -> Iterator[Event]:
        for ring in self._open.values():
            for area, tail in (("steps", ring.steps), ("details", ring.details)):
                if tail.torn_since_ns is not None and now_ns - tail.torn_since_ns > TORN_NS and ring.writer_is_gone():
                    tail.give_up()
                if tail.lost:
                    yield from [self._lost_rows(ring, area, first, last, now_ns) for first, last in tail.lost]
                    tail.lost.clear()

    def _lost_rows(self, ring: RingFile, area: str, first: int, last: int, now_ns: int) -> Event:
        source, epoch = Subject(kind="source", id=self.name), Epoch(epoch_of(ring.attempt, ring.restart, 0))
        data: dict[str, Json] = {"from_seq": first, "to_seq": last, "rank": ring.rank, "rows": area}
        return self._emit("telemetry.lost", source, now_ns=now_ns, data=data, epoch=epoch)


def _split(rows_N: NDArray[np.void], epoch_N: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Rows by epoch, older epochs first."""
    if len(epoch_N) and (epoch_N == epoch_N[0]).all():
        yield int(epoch_N[0]), rows_N
        return
    for epoch in np.unique(epoch_N).tolist():
        yield epoch, rows_N[epoch_N == epoch]


def _ranks(rings: Sequence[RingFile]) -> NDArray[np.int32]:
    return np.array([ring.rank for ring in rings], np.int32)


def _epochs(rings: Sequence[RingFile]) -> NDArray[np.int64]:
    """Epochs of lap 0."""
    return np.array([epoch_of(ring.attempt, ring.restart, 0) for ring in rings], np.int64)
