"""The recorder of one rank: what the training loop calls.

    w.begin(step); w.mark(DATA); w.mark(FORWARD); w.mark(BACKWARD); w.mark(OPTIMIZER); w.value(LOSS, x); w.end()

It is built around the cost of that line. begin, mark, value and end have a short way: a clock read, a store into
shared memory, a store into a list; no system call, no lock, nothing kept, no arithmetic. end() packs the stamps as they
are, the agent subtracts. What a row in stamps cannot say takes the long way (sums.py): end() then packs sums. Two
numbers tell which way to go, each by one comparison: `_phase` (a mark goes the short way if its phase is smaller, which
is never so in a step in sums, between steps, or without a ring) and `_gate` (so does begin() if its step is larger).

The methods stand on a slots class since Python calls those fastest; measured in ADR 0002. Nothing here raises: what
goes wrong is counted in the ring and said once.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, Final

from trainwarden.collectors.rank.dumps import Dumps
from trainwarden.collectors.rank.hello import Hello
from trainwarden.collectors.rank.numbers import HIGH, LOW, RefusedValue, number
from trainwarden.collectors.rank.pending import Pending
from trainwarden.collectors.rank.requests import Agree, Desk
from trainwarden.collectors.rank.ring import Ring
from trainwarden.collectors.rank.say import say, say_error
from trainwarden.collectors.rank.schedstat import Schedstat
from trainwarden.collectors.rank.side import Side
from trainwarden.collectors.rank.spans import Span
from trainwarden.collectors.rank.sums import Sums
from trainwarden.collectors.rank.values import give, tell
from trainwarden.collectors.rank.words import (
    BETWEEN,
    GRAD_NORM,
    INIT,
    LOSS,
    OPTIMIZER,
    OTHER,
    Feature,
    Phase,
    Scope,
)
from trainwarden.core.control import Request
from trainwarden.core.records import (
    COMMITTED,
    CONTAINS_COMM,
    DETAILS_OFFSET,
    LIVE_OFFSET,
    PHASES,
    STAMP_ROW,
    STAMPED,
    STEP_ROW,
    STEPS_OFFSET,
)

IN_SUMS: Final = -1
BETWEEN_STEPS: Final = -2
"""Values of `_phase` below all phases."""

NEVER: Final = (1 << 30) - 1
"""A gate that no step passes; a larger number would compare more slowly (CPython stores it in two digits)."""

MAX_LAP: Final = 0xFFFF

_LOW, _HIGH = LOW, HIGH
_clock = time.perf_counter
_pack_stamps = STAMP_ROW.pack_into
_ROW_BYTES: Final = STEP_ROW.size
_WORDS_OFFSET: Final = LIVE_OFFSET + 8 * len(PHASES)
_STEP, _BATCH, _FLAGS, _LAP = range(4)  # the words behind the live stamps
_ENTERED: Final = frozenset(range(len(PHASES))) - {BETWEEN, INIT}


class Rank:
    """One rank's recorder. Made by attach(); all methods are for the training thread, save side().

    Without a ring (`why_off` says why) everything is a no-op.
    """

    # fmt: off
    __slots__ = (
        "_at", "_batch", "_batched", "_control", "_desk", "_dumps", "_flags", "_gate", "_hello", "_into", "_lap",
        "_live", "_long", "_open", "_pending", "_phase", "_plain", "_ring", "_schedstat", "_seq", "_side", "_step",
        "_sums", "_view", "_words", "attempt", "why_off",
    )
    # fmt: on
    _gate: int
    _phase: int
    _live: Any  # parts of the ring, or lists that nobody reads; Any: a cast memoryview has no type of items
    _words: Any
    _control: Any
    _view: Any
    _open: Any  # `_plain` inside a step, a tuple between steps: what value() then gives belongs to no step

    def __init__(
        self,
        ring: Ring | None,
        *,
        schedstat: Schedstat | None = None,
        attempt: Mapping[str, Any] | None = None,
        hello: Hello | None = None,
        side_ring: Callable[[], Ring] | None = None,
        desk: Desk | None = None,
        dumps: Dumps | None = None,
        why_off: str = "",
    ) -> None:
        self.attempt = attempt
        """The attempt file, as it was when we attached; None without one."""
        self.why_off = why_off
        self._hello, self._schedstat, self._desk, self._dumps = hello, schedstat, desk, dumps
        self._side = Side(side_ring, lambda: (self._step, self._lap))
        self._sums = Sums(schedstat)
        self._into = self._sums.enter
        self._pending: Pending | None = None
        self._plain = [0.0] * STAMPED + [nan, nan]
        """What a row in stamps tells: stamps by phase, loss, gradient norm."""
        self._step = self._batch = -1
        self._seq = self._flags = self._lap = 0
        self._batched = False  # the live block holds a batch of its own
        self._long = False  # no step goes the short way
        self._at = STEPS_OFFSET - _ROW_BYTES
        self._turn_off()
        if ring is not None:
            self._turn_on(ring)

    def begin(self, step: int, batch: int | None = None) -> None:
        """An optimizer step begins. Step numbers grow; `batch` is the global index of its data where that differs."""
        try:
            if step <= self._gate or batch is not None:
                self._begin(step, batch)
                return
            self._step = step
            self._gate = NEVER
            self._words[_STEP] = step
            self._open = self._plain
            self._phase = OTHER
            self._live[OTHER] = self._plain[OTHER] = _clock()
        except Exception:
            self._failed()

    def mark(self, phase: Phase, tokens: object = None, contains_comm: bool = False) -> None:
        """Close the open phase and open the next; `tokens` are added to the step's."""
        try:
            if phase < self._phase:
                self._live[phase] = self._plain[phase] = _clock()
                self._phase = phase
            else:
                self._enter(phase)
            if (tokens is not None or contains_comm) and self._ring is not None:
                tell(self, tokens, contains_comm)
        except Exception:
            self._failed()

    def value(self, name: Feature | str, value: object, scope: Scope | None = None) -> None:
        """A number of this step. LOSS and GRAD_NORM are `global` (the same on all ranks) unless `local` is said."""
        try:
            if isinstance(value, float) and _LOW < value < _HIGH and scope is None:
                self._open[name] = value  # a name raises, and so does a tuple: the long way
                return
        except Exception:  # what is really wrong shows again on the long way
            pass
        self._value(name, value, scope)

    def end(self, agree: Agree | None = None) -> Request | None:
        """The step ends: its row is written. Gives what all ranks are asked to do now, or None; the same on each rank.
        agree: the script's own min-reduce of a bool over all ranks; a job of several hosts obeys nothing without."""
        try:
            now = _clock()
            self._live[BETWEEN] = now
            if self._phase < OPTIMIZER:
                self._end(now)
            else:
                self._phase = BETWEEN_STEPS
                self._open = ()
                self._gate = step = self._step
                self._seq = seq = self._seq + 1
                at = self._at + _ROW_BYTES
                if at == DETAILS_OFFSET:
                    at = STEPS_OFFSET
                self._at = at
                plain = self._plain
                optimizer, wait, backward, forward, data, begin, loss, grad_norm = plain
                # fmt: off
                _pack_stamps(
                    self._view, at, seq, step, now, optimizer, wait, backward, forward, data, begin, loss, grad_norm,
                    seq,
                )
                # fmt: on
                plain[LOSS] = plain[GRAD_NORM] = nan
            if self._control[0] and self._desk is not None:
                return self._desk.attend(self._step, self._live, agree)
        except Exception:
            self._failed()
        return None

    def committed(self, step: int, path: str | Path, data_position: Any = None, files: Sequence[str] = ()) -> None:
        """Any thread: this rank's part of a step's checkpoint is written. Leaves PATH/rank-<r>.json with the digests of
        DCP's own files and of `files`. data_position: the next batch."""
        try:
            if self._desk is not None:
                self._desk.commit(Path(path), step, data_position, files)
                self._side.note(COMMITTED, step)
        except Exception:
            self._failed()

    def span(self, kind: Phase, mb: int = -1, contains_comm: bool = False) -> Span:
        """A context manager: a stretch inside the open phase, of a micro-batch where `mb` is given."""
        return Span(self, kind, mb, CONTAINS_COMM if contains_comm else 0)

    def phase(self, phase: Phase, expect_s: float | None = None) -> None:
        """Enter a phase that may legally be long and announce for how long, until the next mark, begin() or end()."""
        try:
            self._enter(phase)
            may_take_s = nan if expect_s is None else number(expect_s)
            self._detail("phase", PHASES[phase], self._sums.since, may_take_s)
        except Exception:
            self._failed()

    def note(self, name: str, value: object = 0.0) -> None:
        """A named mark of the script's own."""
        try:
            self._detail("note", name, _clock(), number(value))
        except Exception:
            self._failed()

    def side(self) -> Side:
        """A handle with value() and note() for other threads; it has a ring and a lock of its own."""
        return self._side

    def close(self) -> None:
        """The training ends in order. Done by itself at exit."""
        if self._ring is not None:
            if self._pending is not None:
                self._pending.flush()
            self._ring.state("detached")
        self.let_go("closed")

    def let_go(self, why: str) -> None:
        """Write nothing any more; also what a forked child does, whose parent goes on writing."""
        held = (self._side, self._ring, self._schedstat, self._desk, self._dumps)
        self._turn_off()
        self.why_off = why
        self._hello = self._desk = None
        for one in held:
            if one is not None:
                one.close()

    # the long way

    def _turn_off(self) -> None:
        self._ring: Ring | None = None
        self._live = [0.0] * len(PHASES)
        self._words = [0] * 4
        self._control = (0,)
        self._view = bytearray()
        self._open = [*self._plain, nan]
        self._phase, self._gate = BETWEEN_STEPS, NEVER

    def _turn_on(self, ring: Ring) -> None:
        self._ring, self._view, self._live = ring, ring.view, ring.live
        self._words = ring.view[_WORDS_OFFSET : _WORDS_OFFSET + 4 * 8].cast("q")
        if self._desk is not None:
            self._control = self._desk.words
        self._words[_LAP] = self._lap = ring.first_lap
        self._long = self._lap > 0 or self._schedstat is not None
        self._open = ()
        self._live[INIT] = _clock()
        ring.state("attached")

    def _begin(self, step: int, batch: int | None) -> None:
        if self._ring is None:
            return
        ended = self._step
        if self._phase != BETWEEN_STEPS:
            ended -= 1  # the open step has no row: it may be tried again
            self._drop_step()
        if step <= ended:
            self._next_lap()
        if self._flags:
            self._flags = self._words[_FLAGS] = 0
        self._batch = step if batch is None else batch
        if batch is not None or self._batched:
            self._words[_BATCH] = self._batch
            self._batched = batch is not None
        if self._pending is not None:
            self._pending.begin()
        self._words[_STEP] = self._step = step
        self._gate = NEVER
        self._open = self._plain
        self._live[OTHER] = self._plain[OTHER] = now = _clock()
        self._sums.begin(now)
        self._phase = IN_SUMS if self._long or self._batched or self._sums.carries_over else OTHER

    def _drop_step(self) -> None:
        self._sums.reset()
        if self._pending is not None:
            self._pending.drop()
        self._plain[LOSS] = self._plain[GRAD_NORM] = nan
        self._wrong("begin() without end() before it: the step before has no row")

    def _next_lap(self) -> None:
        if self._lap == MAX_LAP or self._hello is None:
            raise ValueError(f"more than {MAX_LAP} laps")
        if self._pending is not None:
            self._pending.flush()
        self._words[_LAP] = self._lap = self._lap + 1
        self._long = True
        self._hello(self._lap)

    def _enter(self, phase: Phase) -> None:
        """A mark out of the usual order, in a step in sums or between steps."""
        if self._phase != IN_SUMS:
            if self._ring is None:
                return
            self._go_long()
        if phase not in _ENTERED:
            raise ValueError(f"{phase!r} is no phase to enter")
        self._live[phase] = now = _clock()
        enter = self._into
        enter(phase, now)

    def _back_to(self, phase: Phase) -> None:
        """What a span was in goes on, if only the time between two steps."""
        self._live[phase] = now = _clock()
        self._into(phase, now)

    def _go_long(self) -> None:
        """The open step goes on in sums; between steps, the next one will."""
        self._gate = NEVER
        if self._phase >= OPTIMIZER:
            self._batch = self._step
            self._sums.take_over(self._plain)
            self._phase = IN_SUMS

    def _value(self, name: Feature | str, value: object, scope: Scope | None, flagged: bool = True) -> None:
        try:
            if self._ring is not None:
                give(self, name, value, scope, flagged)
        except Exception:
            self._failed()

    def _end(self, now: float) -> None:
        if self._ring is None:
            return
        if self._phase == BETWEEN_STEPS:
            self._wrong("end() without begin()")
            return
        self._phase, self._open = BETWEEN_STEPS, ()
        plain, step, pending = self._plain, self._step, self._pending
        if pending is None:
            self._seq = seq = self._seq + 1
            at = self._at + _ROW_BYTES
            self._at = at = STEPS_OFFSET if at == DETAILS_OFFSET else at
            view = self._view
        else:
            seq, at, view = 0, 0, pending.row()
        head = (seq, step, self._batch, self._flags, self._lap)
        self._sums.end(now, plain[LOSS], plain[GRAD_NORM], view, at, head)
        plain[LOSS] = plain[GRAD_NORM] = nan
        self._gate = NEVER if self._long or self._batched or self._flags else step
        if pending is not None:
            pending.end()

    def _detail(self, what: str, name: str, at: float, value: float) -> None:
        if self._ring is not None:
            self._ring.detail(what, name, (value, nan, nan), at=at, step=self._step, lap=self._lap)

    def _failed(self) -> None:
        """An exception inside the collector, or a value refused: counted, said once, never raised."""
        error = sys.exception()
        if self._ring is not None:
            self._ring.count(error.counter if isinstance(error, RefusedValue) else "errors")
            say_error(error)

    def _wrong(self, what: str) -> None:
        """A call out of order."""
        if self._ring is not None:
            self._ring.count("errors")
            say(what, f"{what} (the training goes on)")
