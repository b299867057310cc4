"""Stretches inside a phase: micro-batches, waits, pieces of a pipeline schedule. Each becomes a row of its own.

A span is a mark at its start and a mark back at its end, so its time counts as its own kind and not as the phase around
it. What its row tells is wall time without the waits inside.
"""

from types import TracebackType
from typing import TYPE_CHECKING

from trainwarden.collectors.rank.words import WAIT, Phase
from trainwarden.core.records import PHASES

if TYPE_CHECKING:
    from trainwarden.collectors.rank.rank import Rank


class Span:
    """One use of Rank.span(): a part of Rank that lives as long as a `with` block."""

    __slots__ = ("_around", "_flags", "_kind", "_mb", "_rank", "_since", "_step", "_usage")

    def __init__(self, rank: "Rank", kind: Phase, mb: int, flags: int) -> None:
        self._rank, self._kind, self._mb, self._flags = rank, kind, mb, flags
        self._since: float | None = None

    def __enter__(self) -> None:
        rank = self._rank
        try:
            if rank._ring is None:
                return
            rank._go_long()
            self._around, self._step = rank._sums.phase, (rank._step, rank._seq)
            rank._enter(self._kind)
            self._since, self._usage = rank._sums.since, rank._sums.usage()
        except Exception:
            rank._failed()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._since is not None and self._rank._ring is not None:
                self._close(self._rank, self._since)
        except Exception:
            self._rank._failed()

    def _close(self, rank: "Rank", since: float) -> None:
        same_step = self._step == (rank._step, rank._seq)
        sums, ring = rank._sums, rank._ring
        rank._back_to(self._around if same_step else sums.phase)
        wait_s, cpu_s, runq_s = (after - before for after, before in zip(sums.usage(), self._usage, strict=True))
        wall_s = sums.since - since
        own_s = wall_s if self._kind == WAIT or not same_step else wall_s - wait_s
        row = (own_s, cpu_s, runq_s)
        assert ring is not None
        ring.detail(
            "span", PHASES[self._kind], row, at=since, step=rank._step, lap=rank._lap, mb=self._mb, flags=self._flags
        )
