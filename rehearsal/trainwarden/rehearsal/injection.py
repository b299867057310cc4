"""A rank makes the faults that name it. Standard library only, and nothing at all when TRAINWARDEN_FAULTS is unset.

    faults = Faults.from_environment()
    for step in ...:
        faults.before_step(step)            # stops, kills, ends, raises, stalls
        weight = faults.batch(batch, weight)    # poisons
        with faults.slowed("forward"): ...      # slows down
        faults.in_phase("checkpoint")           # makes it long

Slow ranks do real extra work: what the phase cost this thread in CPU time last time, (factor - 1) times more. They do
it before the phase's own work, because behind the last gradient the time would count as waiting for the others.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, NoReturn, Protocol, Self, TypeVar

from trainwarden.core.identity import identify
from trainwarden.rehearsal.faults import (
    FAULTS_VARIABLE,
    LOG_VARIABLE,
    Fault,
    Strike,
    from_json,
    log_strike,
    read_strikes,
)


class Scalable(Protocol):
    """A tensor, as far as poisoning it goes."""

    def __mul__(self, other: float, /) -> Self: ...


T = TypeVar("T", bound=Scalable)


class Faults:
    """What goes wrong on one rank."""

    def __init__(self, faults: Mapping[int, Fault], rank: int = 0, log: Path | None = None) -> None:
        self._faults = faults
        """Only those that name this rank, by their index in the list."""
        self._rank = rank
        self._log = log
        self._step = 0
        self._struck: set[int] = set()
        self._own_s: dict[str, float] = {}
        """CPU seconds that each phase took last time, without what was added."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Faults":
        """Those that name this rank, or the slot it sits on. Raises ConfigError."""
        text = environment.get(FAULTS_VARIABLE)
        if not text:
            return cls({})
        me = identify(environment)
        slot = int(me.slot.rpartition(":")[2])
        log = Path(environment[LOG_VARIABLE]) if environment.get(LOG_VARIABLE) else None
        over = {strike.fault for strike in read_strikes(log)} if log else set()
        mine = {
            number: fault
            for number, fault in enumerate(from_json(text))
            if not fault.outside and fault.names(me.rank, slot) and not (fault.once and number in over)
        }
        return cls(mine, me.rank, log)

    def before_step(self, step: int) -> None:
        """Call it where the step loads its data."""
        self._step = step
        for number, fault in self._of(*_SUDDEN):
            if fault.at_step == step:
                self._strike(number)
                _end(fault)

    def batch(self, batch: int, tensor: T) -> T:
        """The tensor, or NaN in its shape where this batch is poisoned."""
        for number, fault in self._of("poison_batch"):
            if fault.number("batch") == batch:
                self._strike(number)
                return tensor * math.nan
        return tensor

    def slowed(self, phase: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        """Put the phase's work inside."""
        slow = [(n, f) for n, f in self._of("slow_slot", "slow_rank") if f.choice("where") in ("all", phase)]
        return self._slowed(phase, slow) if slow else _NOTHING

    @contextmanager
    def _slowed(self, phase: str, slow: Sequence[tuple[int, Fault]]) -> Iterator[None]:
        for number, fault in slow:
            if fault.at_step <= self._step:
                self._strike(number)
                extra_s = (fault.number("factor") - 1.0) * self._own_s.get(phase, 0.0)
                time.sleep(extra_s) if fault.choice("how") == "sleep" else compute(extra_s)
        start_s = time.thread_time()
        yield
        self._own_s[phase] = time.thread_time() - start_s

    def in_phase(self, phase: Literal["checkpoint", "eval"]) -> None:
        """Call it inside the phase; the first one at or after the fault's step is long."""
        for number, fault in self._of(f"slow_{phase}"):
            if fault.at_step <= self._step and number not in self._struck:
                self._strike(number)
                time.sleep(fault.number("seconds")) if phase == "checkpoint" else _compute_until(fault)

    def _of(self, *kinds: str) -> Iterator[tuple[int, Fault]]:
        return ((number, fault) for number, fault in self._faults.items() if fault.kind in kinds)

    def _strike(self, number: int) -> None:
        if number in self._struck:
            return
        self._struck.add(number)
        if self._log:
            log_strike(self._log, Strike(fault=number, step=self._step, t_ns=time.time_ns(), rank=self._rank))


_NOTHING = nullcontext()
_SUDDEN = ("stop_self", "kill_self", "exit_code", "raise", "stall_python")


def _end(fault: Fault) -> None:
    if fault.kind == "stop_self":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "kill_self":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "exit_code":
        sys.stdout.flush()
        os._exit(int(fault.number("code")))  # orderly, with PyTorch's threads at work, it can end in SIGABRT instead
    elif fault.kind == "raise":
        raise RuntimeError(f"rehearsed failure at step {fault.at_step}")
    elif fault.kind == "stall_python":
        load_from_a_dead_disk()


def load_from_a_dead_disk() -> NoReturn:
    """Never comes back, like a read from storage that is gone; its name is what a stack shows."""
    while True:
        time.sleep(0.05)


def compute(cpu_s: float) -> None:
    """Keep the CPU busy for so much CPU time of this thread, however long that takes."""
    until_s = time.thread_time() + cpu_s
    x = 1.0
    while time.thread_time() < until_s:
        for _ in range(200):
            x = math.sqrt(x + 1.0)


def _compute_until(fault: Fault) -> None:
    until_s = time.monotonic() + fault.number("seconds")
    while time.monotonic() < until_s:
        compute(0.01)
