"""Sources that cannot hold each other up: each is polled in a thread of its own, with a deadline.

A call into a driver in an error storm took 45 s, and some never return; a thread that hangs cannot be ended from
outside. So the one who drains never waits for a source: what does not answer is told as blind until it does, what
raises is told with its words and asked again later and later. What a source gives waits in a queue of bounded size; if
nobody drains it, the oldest goes and is counted.

Threads, not processes: the calls that hang are system calls and ctypes calls, which give up the interpreter's lock.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeAlias

from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Json, Subject
from trainwarden.core.ports import Source

Item: TypeAlias = Frame | Event
Word: TypeAlias = Literal["up", "blind", "stale"]

EVENT_BYTES: Final = 1024
"""What an event, or the head of a frame, counts for: an event with a kernel line takes about as much."""
ITEMS_MAX: Final = 20_000
"""Of one poll; what a source has beyond that (it may never end) is not taken and counts as one item dropped. A kernel
log of 7,000 lines read from its beginning fits."""
TELL_S: Final = 0.25
"""Between two looks at who does not answer."""
WHY_MAX: Final = 300
"""Characters of what a source raised."""
PARTS_MAX: Final = 256
"""Things that sources speak of beside themselves: ports, devices, files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationConfig:
    """How patient the agent is with its sources."""

    deadline: timedelta = timedelta(seconds=10)
    """A source whose poll takes longer is blind until it answers. Healthy polls take milliseconds, a mount that is slow
    or a vendor's first call a few seconds."""

    retry_max: timedelta = timedelta(seconds=60)
    """A source that raises is polled again after twice as long each time, and at least this often."""

    queue_bytes: int = 4 << 20
    """What one source may have waiting; beyond it the oldest goes and is counted. 8 ranks write as much in an hour."""

    def __post_init__(self) -> None:
        if self.deadline < timedelta(milliseconds=10):
            raise ConfigError(f"agent.isolation.deadline: need at least 10ms, got {self.deadline.total_seconds():g}s")
        if self.retry_max < timedelta(milliseconds=10):
            raise ConfigError(f"agent.isolation.retry_max: need at least 10ms, got {self.retry_max.total_seconds():g}s")
        if self.queue_bytes < 1 << 16:
            raise ConfigError(f"agent.isolation.queue_bytes: need at least 65536, got {self.queue_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """How one source fares."""

    name: str
    word: Word
    """blind: it says so itself, raises, or does not answer; stale: not blind, and its last answer is older than it
    should be; up: anything else."""
    age_s: float
    """Since its last answer, or since it was added."""
    why: str = ""
    """Why it is blind or stale."""
    answered: bool = True
    """Whether it has ever answered."""
    raised: int = 0
    dropped: int = 0
    """Items that nobody took in time, since it was added."""
    stretch: int = 1
    """How many times its period it is polled at."""


@dataclass(slots=True)
class _Health:
    """What is told of one name: its own word, and what we told last."""

    own_why: str | None = None
    """What it says of itself; None: it can be read."""
    told: str | None = None


@dataclass(slots=True)
class _Kept:
    """One source with its thread. `lock` guards everything that both threads touch."""

    source: Source
    added_s: float
    stop: SimpleQueue[None] = field(default_factory=SimpleQueue)
    """Something in it: end. (To wait for a threading.Event costs half as much again as a thread's waking up itself.)"""
    lock: threading.Lock = field(default_factory=threading.Lock)
    queue: deque[Item] = field(default_factory=deque)
    queue_bytes: int = 0
    began_s: float | None = None
    """When the poll under way began; None: none is."""
    answered_s: float = 0.0
    """When it last did; at first when it was added."""
    answers: int = 0
    raised_why: str | None = None
    raised: int = 0
    raised_in_a_row: int = 0
    dropped: int = 0
    dropped_told: int = 0
    stretch: int = 1
    cpu_s: float = 0.0
    """That its thread had used at the end of its last poll."""
    thread: threading.Thread | None = None
    health: _Health = field(default_factory=_Health)

    @property
    def period_s(self) -> float:
        """Between two polls."""
        return self.source.period_s * self.stretch

    def put(self, item: Item, limit: int) -> None:
        """Queue an item; the oldest ones go beyond the limit."""
        with self.lock:
            self.queue.append(item)
            self.queue_bytes += weight(item)
            while self.queue_bytes > limit and len(self.queue) > 1:
                self.queue_bytes -= weight(self.queue.popleft())
                self.dropped += 1

    def ends_before(self, due_s: float) -> bool:
        """Wait until then, or until it is to end."""
        try:
            self.stop.get(timeout=max(0.0, due_s - time.monotonic()))
        except Empty:
            return False
        return True

    def take(self) -> list[Item]:
        with self.lock:
            taken = [*self.queue]
            self.queue.clear()
            self.queue_bytes = 0
        return taken


class Isolation:
    """Polls sources; drain() gives what they saw, with source.blind and source.up of those that hang or raise."""

    def __init__(self, config: IsolationConfig, node: str, *, clock: Clock = unix_ns) -> None:
        self._config, self._clock = config, clock
        self._emit = Emitter(f"agent@{node}", job=None, start_ns=clock())
        self._kept: dict[str, _Kept] = {}
        self._tell_s = 0.0
        self._parts: dict[str, _Health] = {}
        """What sources say of others than themselves (such as processes@n of kernel-log@n)."""

    def add(self, source: Source) -> None:
        """Begin to poll a source; a name is polled once at a time."""
        assert source.name not in self._kept, f"source {source.name} is polled already"
        now_s = time.monotonic()
        kept = self._kept[source.name] = _Kept(source=source, added_s=now_s, answered_s=now_s)
        kept.thread = threading.Thread(target=self._poll, args=(kept,), name=f"source {source.name}"[:60], daemon=True)
        kept.thread.start()

    def remove(self, name: str) -> list[Item]:
        """Stop polling; what it had given. Its thread ends when its poll does, and closes the source."""
        kept = self._kept.pop(name)
        kept.stop.put(None)
        return kept.take()

    def drain(self) -> list[Item]:
        """Everything that was seen since the last time, in the order in which each source gave it. Never waits."""
        found: list[Item] = []
        now_s = time.monotonic()
        tell, self._tell_s = now_s >= self._tell_s, max(self._tell_s, now_s)
        for kept in self._kept.values():
            if kept.queue:
                items = kept.take()
                for item in items:
                    self._hear(kept, item)
                found += items
            if tell:
                found += self._tell(kept, now_s)
        self._tell_s += TELL_S * tell
        return found

    def states(self) -> list[SourceState]:
        """How each source, and each thing that sources speak of, fares now."""
        now_s = time.monotonic()
        states = [self._state(kept, now_s) for kept in self._kept.values()]
        states += [
            SourceState(name=name, word="up" if part.own_why is None else "blind", age_s=0.0, why=part.own_why or "")
            for name, part in self._parts.items()
        ]
        return states

    def cpu(self) -> dict[str, tuple[int, float]]:
        """Of each source: its thread (as the kernel numbers it; 0: not begun), and the CPU time that it has used."""
        return {
            name: (kept.thread.native_id or 0 if kept.thread is not None else 0, kept.cpu_s)
            for name, kept in self._kept.items()
        }

    def stretch(self, factors: Mapping[str, int], why: str) -> list[Event]:
        """Poll sources at so many times their periods from now on; an event for each of which this changes."""
        told = []
        for name, factor in factors.items():
            kept = self._kept.get(name)
            if kept is not None and kept.stretch != factor:
                kept.stretch = factor
                data: dict[str, Json] = {"why": why, "factor": factor, "period_s": kept.period_s}
                subject = Subject(kind="source", id=name)
                told.append(self._emit("source.stretched", subject, now_ns=self._clock(), data=data))
        return told

    def close(self, within_s: float = 1.0) -> list[str]:
        """Stop all and give them this long together; the names of those that hang (their threads end with us)."""
        for kept in self._kept.values():
            kept.stop.put(None)
        until_s = time.monotonic() + within_s
        hanging = []
        for name, kept in self._kept.items():
            assert kept.thread is not None
            kept.thread.join(max(0.0, until_s - time.monotonic()))
            if kept.thread.is_alive():
                hanging.append(name)
        return hanging

    # the thread of one source

    def _poll(self, kept: _Kept) -> None:
        due_s = time.monotonic()
        while not kept.ends_before(due_s):
            began_s = time.monotonic()
            with kept.lock:
                kept.began_s = began_s
            why = self._once(kept)
            ended_s = time.monotonic()
            with kept.lock:
                kept.began_s, kept.answered_s, kept.raised_why = None, ended_s, why
                kept.raised_in_a_row = 0 if why is None else kept.raised_in_a_row + 1
                kept.raised += why is not None
                kept.answers += 1
            kept.cpu_s = time.thread_time()
            period_s = kept.period_s
            if why is not None:
                period_s = min(period_s * 2**kept.raised_in_a_row, max(period_s, self._retry_max_s))
            due_s = max(due_s + period_s, ended_s + period_s / 10)  # one that takes long is not asked all the time
        close: Callable[[], object] = getattr(kept.source, "close", lambda: None)
        with contextlib.suppress(BaseException):
            close()

    def _once(self, kept: _Kept) -> str | None:
        """One poll; what it raised, in words."""
        try:
            for item in _some(kept, kept.source.poll(self._clock())):
                kept.put(item, self._config.queue_bytes)
        except BaseException as error:  # a library that calls sys.exit() ends nobody here
            return f"{type(error).__name__}: {error}"[:WHY_MAX]
        return None

    @property
    def _retry_max_s(self) -> float:
        return self._config.retry_max.total_seconds()

    # what is told

    def _hear(self, kept: _Kept, item: Item) -> None:
        if isinstance(item, Event) and item.kind in ("source.blind", "source.up"):
            name, why = item.subject.id, str(item.data["why"]) if item.kind == "source.blind" else None
            if name == kept.source.name:
                kept.health.own_why = why
            elif name in self._parts or (name not in self._kept and len(self._parts) < PARTS_MAX):
                self._parts.setdefault(name, _Health()).own_why = why

    def _tell(self, kept: _Kept, now_s: float) -> Iterator[Event]:
        """What the source cannot say itself: that it hangs, raises, answers again, or that items were dropped."""
        why, told = self._silent_why(kept, now_s), kept.health.told
        if why is None and told is None and kept.dropped == kept.dropped_told:
            return
        now_ns, subject = self._clock(), Subject(kind="source", id=kept.source.name)
        if why is not None and told is None:
            yield self._emit("source.blind", subject, now_ns=now_ns, data={"why": why})
        elif why is None and told is not None:
            yield self._emit("source.up", subject, now_ns=now_ns, data={"why": f"it answers again, after: {told}"})
        kept.health.told = why if told is None or why is None else told
        if kept.dropped > kept.dropped_told:
            first, kept.dropped_told = kept.dropped_told + 1, kept.dropped
            data = {"from_seq": first, "to_seq": kept.dropped_told}
            yield self._emit("telemetry.lost", subject, now_ns=now_ns, data=data)

    def _silent_why(self, kept: _Kept, now_s: float) -> str | None:
        """Why a source that says nothing of itself cannot be read; None: it can."""
        with kept.lock:
            began_s, why = kept.began_s, kept.raised_why
        if began_s is not None and now_s - began_s > self._config.deadline.total_seconds():
            return f"no answer for {self._config.deadline.total_seconds():g} s"
        return why

    def _state(self, kept: _Kept, now_s: float) -> SourceState:
        why = self._silent_why(kept, now_s) or kept.health.own_why
        with kept.lock:
            answered_s, answers, raised, dropped = kept.answered_s, kept.answers, kept.raised, kept.dropped
        age_s = max(0.0, now_s - answered_s)
        word: Word = "up" if why is None else "blind"
        late_s = 3 * kept.period_s
        if why is None and age_s > late_s + 1:
            word, why = (
                "stale",
                f"its last answer is {age_s:.0f} s old, it should come every {kept.period_s:g} s",
            )
        return SourceState(
            name=kept.source.name,
            word=word,
            age_s=age_s,
            why=why or "",
            answered=answers > 0,
            raised=raised,
            dropped=dropped,
            stretch=kept.stretch,
        )


def weight(item: Item) -> int:
    """Bytes that an item takes, roughly."""
    return EVENT_BYTES + (item.rows.nbytes if isinstance(item, Frame) else 0)


def _some(kept: _Kept, items: Iterable[Item]) -> Iterator[Item]:
    """What one poll may give."""
    given = iter(items)
    yield from islice(given, ITEMS_MAX)
    if next(given, None) is not None:
        with kept.lock:
            kept.dropped += 1
