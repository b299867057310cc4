"""Numbers that a device is still computing when the script gives them, and how long it took over each phase.

A tensor is copied on the current stream into a pinned slot, an event behind it; at each mark that begins or ends a
phase of the device, an event is recorded. At begin() and end() events are queried, never waited for, and never while a
stream is being captured. A step's row is held back, in the order of the steps, until all of its numbers are there: a
row is whole and tells of its own step (ADR 0006 says why, and what it costs). Slots and events are used again.
"""

import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Any, Final

from trainwarden.collectors.rank.device import DEVICES, DROPPED, Device
from trainwarden.collectors.rank.numbers import HIGH, LOW, RefusedValue, local_part
from trainwarden.collectors.rank.say import say
from trainwarden.collectors.rank.words import BETWEEN, OTHER, Phase
from trainwarden.core.records import (
    CAPTURED,
    DETAILS_OFFSET,
    DEVICE_TIMED,
    FEATURES,
    PHASE_FEATURE,
    PHASES,
    STEP_ROW,
    STEPS_OFFSET,
)

if TYPE_CHECKING:
    from trainwarden.collectors.rank.rank import Rank

SLOTS: Final = 64
"""Values on their way at once. Our judgement, like the next three: two a step are usual, and a driver lets the host run
ahead by about a thousand launches, which is less than a step of a large model and some steps of a small one."""

EVENTS: Final = 1024
"""Events in use at once."""

MARKS: Final = 128
"""Events of one step: what a pipeline of 31 micro-batches needs. A step with more is not timed on the device."""

HELD_ROWS: Final = 16
"""Rows held back; the oldest then goes without what has not come."""

_FLOAT, _COUNT, _FLAG_WORD = struct.Struct("@f"), struct.Struct("@I"), struct.Struct("@H")
_VALUES_AT: Final = struct.calcsize("@I 2i 2H d")  # parts of records.STEP_ROW
_FLAGS_AT: Final = struct.calcsize("@I 2i")
_TAIL_AT: Final = STEP_ROW.size - _COUNT.size
LIVE_FLAGS: Final = 2
"""Which of the words behind the live stamps."""

_TIMED: Final = {
    Phase(PHASES.index(name)): _VALUES_AT + 4 * FEATURES.index(PHASE_FEATURE[name])
    for name in ("forward", "backward", "backward_input", "backward_weight", "optimizer", "wait")
}
"""Phases in which the device works, and where their seconds stand in a row. The others are the host's own."""


@dataclass(slots=True)
class _Value:
    """One value on its way."""

    name: str
    at: int
    """Where it goes in the row; -1: it is a reading."""
    flag: int
    """Raised if it is not finite; 0: it is then not told."""
    slot: Any
    event: Any
    given: tuple[float, int, int]
    """When, in which step and lap."""


@dataclass(slots=True)
class _Step:
    """What is on its way of one step."""

    row: bytearray | None = None
    values: deque[_Value] = field(default_factory=deque)
    marks: list[tuple[Phase, Any]] = field(default_factory=list)
    timed: bool = True
    """Whether all its marks have their event so far."""
    came: set[int] = field(default_factory=set)
    """Where in the row values of the device stand: a later one may replace them."""
    flags: int = 0


class Pending:
    """The part of a Rank that deals with a device; with one, every step goes the long way.

    Like Rank it raises nothing: what goes wrong is counted and said. After a fork the child does nothing with it, not
    even forget it: what it holds is its parent's.
    """

    def __init__(self, rank: "Rank", device: Device) -> None:
        self._rank, self._device = rank, device
        self._slots: list[Any] | None = None  # made with the first value
        self._events: list[Any] = []
        self._events_left = EVENTS
        self.clock = False
        """Whether the device times the phases."""
        self._phase: Phase = BETWEEN
        self._open = self._ending = _Step()
        self._held: deque[_Step] = deque()
        self._gone: list[_Step] = []
        """Steps whose row is written or will never be, with something still on its way."""
        self._found = 0
        rank._long = True
        rank._go_long()

    def start_clock(self) -> None:
        """Phases are timed by the device from the next step on."""
        self.clock = True
        self._rank._into = self._enter
        self._open.timed = self._rank._open is not self._rank._plain  # a step under way lacks its first events

    def value(self, name: str, column: str | None, flag: int, tensor: Any) -> bool:
        """Take a tensor with one element; column: of FEATURES, None: a reading. False: it was not taken."""
        try:
            self._send(name, column, flag, local_part(tensor))
        except Exception:
            self._failed()
            return False
        return True

    def mark(self, phase: Phase) -> None:
        """A phase begins."""
        before, self._phase = self._phase, phase
        step = self._open
        if not (self.clock and step.timed and (phase in _TIMED or before in _TIMED)):
            return
        try:
            if self._device.capturing():
                self._rank._flags |= CAPTURED
                raise RefusedValue(DROPPED, "a step is not timed on the device if a stream is captured at its marks")
            if len(step.marks) == MARKS:
                raise RefusedValue(DROPPED, f"a step with more than {MARKS} marks is not timed on the device")
            event = self._event()
            self._device.record(event)
            step.marks.append((phase, event))
        except Exception:
            step.timed = False
            self._failed()

    def begin(self) -> None:
        """A step begins: the live flags are what was found to be not finite since the one before began."""
        self._settle()
        self._rank._words[LIVE_FLAGS], self._found = self._found, 0
        self.mark(OTHER)

    def row(self) -> bytearray:
        """The step ends: where its row is to be packed, without numbers."""
        self.mark(BETWEEN)
        step = self._ending = self._open
        self._open = _Step()
        step.row = bytearray(STEP_ROW.size)
        return step.row

    def end(self) -> None:
        """The row is packed."""
        row = self._ending.row
        assert row is not None
        if self.clock:
            for at in _TIMED.values():  # what the host took is no answer to what the device took
                _FLOAT.pack_into(row, at, nan)
        self._held.append(self._ending)
        self._settle()

    def drop(self) -> None:
        """The open step has no row."""
        self._gone.append(self._open)
        self._open = _Step()

    def flush(self) -> None:
        """Nothing is held back any more: what is not there now is not told."""
        self._settle()
        while self._held:
            self._let_go(self._held.popleft())

    def _send(self, name: str, column: str | None, flag: int, tensor: Any) -> None:
        at = -1 if column is None else _VALUES_AT + 4 * FEATURES.index(column)
        if tensor.numel() != 1:
            raise RefusedValue("values_refused", f"a tensor with {tensor.numel()} elements is no number")
        if self._device.capturing():
            raise RefusedValue(DROPPED, "no value is taken from a device while a stream is being captured")
        if self._slots is None:
            self._slots = []  # should there be no pinned memory: asked for once
            self._slots += self._device.slots(SLOTS)
        if not self._slots:
            raise RefusedValue(DROPPED, "no slot is free for a value of the device: too many are on their way")
        event, slot = self._event(), self._slots.pop()
        self._device.copy(slot, tensor, event)  # a slot whose copy failed may still be written to: it is not used again
        given = (time.perf_counter(), self._rank._step, self._rank._lap)
        self._open.values.append(_Value(name, at, flag, slot, event, given))

    def _enter(self, phase: Phase, now: float) -> None:
        self._rank._sums.enter(phase, now)
        self.mark(phase)

    def _settle(self) -> None:
        """Take what has come; write the rows that wait for nothing more, oldest first."""
        try:
            if self._device.capturing():
                return
            self._gone = [step for step in self._gone if not self._came(step)]
            while self._held and self._came(self._held[0]):
                self._write(self._held.popleft())
        except Exception:
            self._failed()
        finally:
            while len(self._held) > HELD_ROWS:
                self._let_go(self._held.popleft())

    def _came(self, step: _Step) -> bool:
        """Whether all of a step is there; each value is taken when it is. What the device fails over is given up."""
        try:
            while step.values and self._device.done(step.values[0].event):
                self._take(step, step.values[0])
                step.values.popleft()
            if step.values or not all(self._device.done(event) for _, event in reversed(step.marks)):
                return False
            if step.row is not None and step.timed:
                self._tell_times(step, step.row)
            self._events += [event for _, event in step.marks]
            step.marks.clear()
        except Exception:
            step.values.clear()
            step.marks.clear()
            self._failed()
        return True

    def _take(self, step: _Step, value: _Value) -> None:
        assert self._slots is not None
        amount = self._device.read(value.slot)
        self._slots.append(value.slot)
        self._events.append(value.event)
        if value.at < 0:
            at, number, lap = value.given
            if (ring := self._rank._ring) is not None:
                ring.detail("value", value.name, (amount, nan, nan), at=at, step=number, lap=lap)
            return
        if not LOW < amount < HIGH:
            if not value.flag:
                return
            step.flags |= value.flag
            self._found |= value.flag
            self._rank._words[LIVE_FLAGS] |= value.flag
        row = step.row
        if row is not None and (value.at in step.came or _number_at(row, value.at) is None):
            step.came.add(value.at)
            _FLOAT.pack_into(row, value.at, amount)

    def _tell_times(self, step: _Step, row: bytearray) -> None:
        spent_s: dict[int, float] = {}
        for (phase, first), (_, last) in pairwise(step.marks):
            if phase in _TIMED:
                at = _TIMED[phase]
                spent_s[at] = spent_s.get(at, 0.0) + self._device.elapsed_s(first, last)
        for at, seconds in spent_s.items():
            _FLOAT.pack_into(row, at, seconds)
            step.flags |= DEVICE_TIMED

    def _let_go(self, step: _Step) -> None:
        """Its row goes without what has not come, which is counted."""
        late, ring = sum(value.at >= 0 for value in step.values) + bool(step.marks), self._rank._ring
        if late and ring is not None:
            say("device late", "a step's row had to go without numbers that the device had not computed yet")
            for _ in range(late):
                ring.count(DROPPED)
        self._write(step)
        step.row = None
        if step.values or step.marks:
            self._gone.append(step)

    def _write(self, step: _Step) -> None:
        row = step.row
        assert row is not None
        rank = self._rank
        rank._seq = number = rank._seq + 1
        at = rank._at + len(row)
        rank._at = at = STEPS_OFFSET if at == DETAILS_OFFSET else at
        (flags,) = _FLAG_WORD.unpack_from(row, _FLAGS_AT)
        _FLAG_WORD.pack_into(row, _FLAGS_AT, flags | step.flags)
        _COUNT.pack_into(row, 0, number)
        _COUNT.pack_into(row, _TAIL_AT, number)
        rank._view[at : at + len(row)] = row

    def _failed(self) -> None:
        """An exception of the device, said once wherever it comes up, or something refused."""
        error, ring = sys.exception(), self._rank._ring
        if ring is not None:
            ring.count(error.counter if isinstance(error, RefusedValue) else "errors")
            say(f"device: {error}", f"{type(error).__name__}: {error} (the training goes on)")

    def _event(self) -> Any:
        if self._events:
            return self._events.pop()
        if not self._events_left:
            raise RefusedValue(DROPPED, "no event is free for the device: too many are on their way")
        self._events_left -= 1
        return self._device.event()


def pending_of(rank: "Rank", kind: str) -> Pending:
    """That of a rank, made if there is none. kind: of DEVICES. Raises what the device does."""
    if rank._pending is None:
        rank._pending = Pending(rank, DEVICES[kind]())
    return rank._pending


def time_on(rank: "Rank", kind: str) -> None:
    """Phases are timed by the device from now on, and the hello says so. Raises what the device does."""
    pending = pending_of(rank, kind)
    if not pending.clock:
        pending.start_clock()
        if rank._hello is not None:
            rank._hello.timed_by_device(rank._lap)


def _number_at(row: bytearray, at: int) -> float | None:
    (number,) = _FLOAT.unpack_from(row, at)
    return number if number == number else None
