"""A step added up phase by phase: the long way, for all that a row in stamps cannot say.

That is: a phase entered twice, micro-batches and nested spans, the CPU clock, tokens, local values, a batch that is not
the step. Phases between two steps are added to the second.
"""

import os
from itertools import pairwise
from math import nan
from typing import Any, Final

from trainwarden.collectors.rank.schedstat import MAX_BYTES, Schedstat
from trainwarden.collectors.rank.words import BETWEEN, INIT, OPTIMIZER, OTHER, WAIT, Phase
from trainwarden.core.records import IN_SUMS, PHASES, STEP_ROW

VALUES: Final = ("tokens", "local_loss", "local_grad_norm", "learning_rate")
"""Values of a step that a row in stamps has no room for."""

_pread = os.pread
_pack = STEP_ROW.pack_into
_NO_SECONDS: Final = [0.0] * len(PHASES)
_NO_VALUES: Final = [nan] * len(VALUES)


class Sums:
    """Seconds by phase and some values of the step that is open, and what was done before it."""

    __slots__ = ("_begin", "_cpu_ns", "_queued_ns", "_schedstat", "phase", "seconds", "since", "values")

    def __init__(self, schedstat: Schedstat | None) -> None:
        self._schedstat = schedstat
        self.since = self._begin = 0.0
        self._cpu_ns = self._queued_ns = 0
        self.phase: Phase = INIT
        self.seconds = _NO_SECONDS.copy()
        """By phase."""
        self.values = _NO_VALUES.copy()
        """By place in VALUES."""

    @property
    def carries_over(self) -> bool:
        """Whether something was done between the steps that the coming row must tell."""
        return any(self.seconds[INIT + 1 :]) or any(self.seconds[:BETWEEN])

    def enter(self, phase: Phase, now: float) -> None:
        """Close the open phase and open the next."""
        spent_s = now - self.since
        clock = self._schedstat
        if clock is not None:
            try:
                clock.cpu, queued, _ = _pread(clock.fd, MAX_BYTES, 0).split()
                if queued != clock.queued:  # on a machine with CPUs to spare there is nothing to parse
                    spent_s -= clock.queued_s(queued)
            except (OSError, ValueError):
                spent_s = clock.give_up()
        if spent_s > 0:
            self.seconds[self.phase] += spent_s
        self.phase = phase
        self.since = now

    def begin(self, now: float) -> None:
        """A step begins."""
        self.enter(OTHER, now)
        self._begin = now
        if self._schedstat is not None:
            self._cpu_ns, self._queued_ns = self._schedstat.cpu_ns, self._schedstat.queued_ns

    def take_over(self, stamps: list[float]) -> None:
        """Go on with a step that was kept in stamps up to now: down the ids, each phase at most once."""
        self._begin = stamps[OTHER]
        entered = [phase for phase in range(OTHER, OPTIMIZER - 1, -1) if stamps[phase] >= self._begin]
        for phase, following in pairwise(entered):
            self.seconds[phase] += stamps[following] - stamps[phase]
        self.phase = Phase(entered[-1])
        self.since = stamps[self.phase]

    def end(self, now: float, loss: float, grad_norm: float, view: Any, at: int, head: tuple[int, ...]) -> None:
        """The step ends: write its row. head: seq, step, batch, flags, lap."""
        self.enter(BETWEEN, now)
        # fmt: off
        (
            optimizer_s, wait_s, backward_s, forward_s, data_s, _, _, _, checkpoint_s, eval_s, _, input_s, weight_s,
        ) = self.seconds
        cpu_s = queued_s = nan
        if self._schedstat is not None and not self._schedstat.broken:
            cpu_s = (self._schedstat.cpu_ns - self._cpu_ns) * 1e-9
            queued_s = (self._schedstat.queued_ns - self._queued_ns) * 1e-9
        seq, step, batch, flags, lap = head
        tokens, local_loss, local_grad_norm, learning_rate = self.values
        _pack(
            view, at, seq, step, batch, flags, lap, now,
            now - self._begin, data_s or nan, forward_s or nan, backward_s + input_s + weight_s or nan,
            optimizer_s or nan, checkpoint_s or nan, eval_s or nan, cpu_s, wait_s or nan, queued_s,
            tokens, loss, grad_norm, local_loss, local_grad_norm, learning_rate,
            IN_SUMS, seq,
        )
        # fmt: on
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self.phase = BETWEEN
        self.seconds = _NO_SECONDS.copy()
        self.values = _NO_VALUES.copy()

    def usage(self) -> tuple[float, float, float]:
        """(waited, on the CPU, waiting for one) in seconds so far; the latter two NaN on the wall clock. For spans."""
        if self._schedstat is None:
            return self.seconds[WAIT], nan, nan
        return self.seconds[WAIT], self._schedstat.cpu_ns * 1e-9, self._schedstat.queued_ns * 1e-9
