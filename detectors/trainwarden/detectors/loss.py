"""Values that are not finite: the first step, batch and rank with a NaN or an infinity.

A global loss is NaN on all ranks at once and locates nothing; a rank's own loss, before any reduction, does. The fast
path reads the flags in live frames, which are those of the step in progress; a step that was over before the next poll
is only seen when it closes, and by then the NaN has spread to everybody. So the live path waits (a tick at most) for
the step before to close, and the closed step has the last word.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Evidence, Finding, Frame, Input, JobId, State, StepMatrix, Tick, Topology
from trainwarden.core.records import FEATURES, GRAD_NONFINITE, LOCAL_NONFINITE, LOSS_NONFINITE, NONFINITE
from trainwarden.detectors.case import (
    Said,
    confirmed,
    ended,
    fact,
    job_subject,
    opened,
    put,
    rank_subject,
    read,
    restated,
    say_ranks,
    take,
    written,
)
from trainwarden.detectors.incarnation import Incarnation
from trainwarden.detectors.live import NEVER, Live
from trainwarden.detectors.robust import Bools

LOCATED, SUBSET, SPREAD = 0.95, 0.6, 0.5
"""Our judgement: a local value names its rank; a global value that is odd on some ranks only (they should agree) points
at them; one that is odd on all names the job, which is certain, but no rank."""

VALUES = ("loss", "grad_norm", "local_loss", "local_grad_norm")

_PLAIN = ("found", "flagged_ns", "closed_step", "finite_steps")
"""Attributes that a snapshot holds as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteConfig:
    """When the non-finite detector speaks and is quiet again."""

    settle: timedelta = timedelta(milliseconds=200)
    """How long the live path waits for the step before to close; less than a tick, so that one tick is waited."""

    finite_steps: int = 3
    """Complete finite steps after which the finding is cleared."""

    def __post_init__(self) -> None:
        if self.finite_steps < 1:
            raise ConfigError(f"detectors.non_finite.finite_steps: need at least 1, got {self.finite_steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Onset:
    """The first step with a value that is not finite, as far as was seen."""

    step: int
    batch: int
    ranks: tuple[int, ...]
    """Ranks it is blamed on; empty: none stands out."""
    flagged: tuple[int, ...]
    flags: int
    confidence: float
    t_ns: int
    epoch: Epoch
    evidence: tuple[Evidence, ...] = ()


class NonFinite:
    """One finding loss.nonfinite for each onset."""

    name = "non_finite"
    wants = frozenset({"topology", "live", "steps", "tick"})

    def __init__(self, config: NonFiniteConfig | None = None) -> None:
        self._config = config or NonFiniteConfig()
        self._now = Incarnation()
        self._live = Live()
        self._case: Finding | None = None
        self._found = 0
        self._forget()

    def _forget(self) -> None:
        self._live.forget()
        self._flagged_ns: int | None = None
        self._closed_step: int | None = None
        self._finite_steps = 0

    def update(self, item: Input) -> Sequence[Finding]:
        match item:
            case Tick():
                return self._look(item.seen_ns)
            case Frame() if item.schema == "live" and self._current(item.job, item.epoch):
                self._live.take(item)
            case Topology():
                self._current(item.job, item.epoch)
            case StepMatrix() if self._current(item.topology.job, item.topology.epoch):
                return self._close_step(item)
        return []

    def _current(self, job: JobId | None, epoch: Epoch | None) -> bool:
        met = self._now.meet(job, epoch)
        if met == "new":
            self._forget()
        return met != "old"

    # the fast path

    def _look(self, now_ns: int) -> list[Finding]:
        row_R = self._live.row_R
        flagged_R = (row_R["flags"] & NONFINITE != 0) & (row_R["key"] > NEVER)
        if not flagged_R.any():
            self._flagged_ns = None
            return []
        self._flagged_ns = now_ns if self._flagged_ns is None else self._flagged_ns
        if self._open_here() or not self._settled(int(row_R["step"][flagged_R].min()), now_ns):
            return []
        return self._say(_from_live(row_R, flagged_R, self._now.epoch, self._flagged_ns), now_ns, "provisional")

    def _settled(self, step: int, now_ns: int) -> bool:
        assert self._flagged_ns is not None
        waited = now_ns - self._flagged_ns >= self._config.settle.total_seconds() * 1e9
        return waited or (self._closed_step is not None and self._closed_step >= step - 1)

    # the last word

    def _close_step(self, matrix: StepMatrix) -> list[Finding]:
        self._closed_step = matrix.step
        flagged_R = matrix.seen_R & (matrix.flags_R & NONFINITE != 0)
        if not flagged_R.any():
            return self._calm(matrix)
        self._finite_steps = 0
        case = self._case if self._open_here() else None
        if case is None or (case.status == "provisional" and matrix.step <= (case.onset_step or 0)):
            return self._say(_from_step(matrix, flagged_R), matrix.seen_ns, "final")
        found = confirmed(case, matrix.seen_ns)  # the step of the onset closed without the rows that showed it
        self._case = found[-1] if found else case
        return found

    def _calm(self, matrix: StepMatrix) -> list[Finding]:
        case = self._case
        later = case is None or not self._open_here() or matrix.step > (case.onset_step or 0)
        self._finite_steps += not matrix.partial and later
        if case is None or self._finite_steps < self._config.finite_steps:
            return []
        self._case = None
        return ended(case, "cleared", f"finite again, up to step {matrix.step}", matrix.seen_ns)

    # what is said

    def _open_here(self) -> bool:
        return self._case is not None and self._now.holds(self._case.epoch)

    def _say(self, onset: _Onset, now_ns: int, status: Literal["provisional", "final"]) -> list[Finding]:
        case, job = self._case, self._now.job
        said = _said(onset, job, status)
        if case is not None and self._open_here():
            found = restated(case, replace(said, onset_ns=min(case.onset_ns, said.onset_ns)), now_ns)
        else:
            found = [] if case is None else ended(case, "cleared", "the job was started anew", now_ns)
            found.append(opened(self.name, self._found, said, job=job, epoch=onset.epoch, seen_ns=now_ns))
            self._found += 1
        self._case = found[-1] if found else case
        return found

    # snapshots

    def snapshot(self) -> State:
        return {
            **{name: getattr(self, f"_{name}") for name in _PLAIN},
            "case": written(self._case),
            **put("now", self._now.snapshot()),
            **put("live", self._live.snapshot()),
        }

    def restore(self, state: State) -> None:
        for name in _PLAIN:
            setattr(self, f"_{name}", state[name])
        self._case = read(state["case"])
        self._now.restore(take("now", state))
        self._live.restore(take("live", state))


def _from_live(row_R: NDArray[np.void], flagged_R: Bools, epoch: Epoch, now_ns: int) -> _Onset:
    """The rank furthest behind among the flagged tells the first step; others may not have got there yet."""
    key = row_R["key"][flagged_R].min()
    here_R = flagged_R & (row_R["key"] == key)
    local_R = here_R & (row_R["flags"] & LOCAL_NONFINITE != 0)
    everybody = int(np.count_nonzero(row_R["seen_ns"] > 0))
    located = 0 < np.count_nonzero(local_R) < max(everybody, 2)
    first = row_R[int(np.argmax(here_R))]
    return _Onset(
        step=int(first["step"]),
        batch=int(first["batch"]),
        ranks=_numbers(local_R) if located else (),
        flagged=_numbers(here_R),
        flags=int(np.bitwise_or.reduce(row_R["flags"][here_R])),
        confidence=LOCATED if located else SPREAD,
        t_ns=now_ns,
        epoch=epoch,
    )


def _from_step(matrix: StepMatrix, flagged_R: Bools) -> _Onset:
    local_R = flagged_R & (matrix.flags_R & LOCAL_NONFINITE != 0)
    everybody = max(int(np.count_nonzero(matrix.seen_R)), 2)
    located = 0 < np.count_nonzero(local_R) < everybody
    subset = not local_R.any() and not matrix.partial and np.count_nonzero(flagged_R) < everybody
    blamed_R = local_R if located else flagged_R
    return _Onset(
        step=matrix.step,
        batch=matrix.batch,
        ranks=_numbers(blamed_R) if located or subset else (),
        flagged=_numbers(flagged_R),
        flags=int(np.bitwise_or.reduce(matrix.flags_R[flagged_R])),
        confidence=LOCATED if located else SUBSET if subset else SPREAD,
        t_ns=matrix.seen_ns,
        epoch=matrix.topology.epoch,
        evidence=_values(matrix, int(np.argmax(blamed_R))),
    )


def _values(matrix: StepMatrix, rank: int) -> tuple[Evidence, ...]:
    """What the rank's row holds; NaN also stands for not measured, and then it says nothing."""
    value = {name: float(matrix.values_FR[FEATURES.index(name), rank]) for name in VALUES}
    flags = int(matrix.flags_R[rank])
    bad = {"loss": flags & LOSS_NONFINITE, "grad_norm": flags & GRAD_NONFINITE, "local_loss": flags & LOCAL_NONFINITE}
    if not math.isnan(value["local_loss"]):
        bad["local_grad_norm"] = flags & LOCAL_NONFINITE
    shown = {name: number for name, number in value.items() if bad.get(name) or not math.isnan(number)}
    return tuple(fact(name, number, source=f"rank {rank}") for name, number in shown.items())


def _said(onset: _Onset, job: JobId | None, status: Literal["provisional", "final"]) -> Said:
    suspects = onset.ranks or onset.flagged
    share = onset.confidence / len(suspects)
    return Said(
        status=status,
        kind="loss.nonfinite",
        subject=rank_subject(onset.ranks[0]) if onset.ranks else job_subject(job),
        suspects=tuple((rank_subject(rank), share) for rank in suspects),
        onset_ns=onset.t_ns,
        onset_step=onset.step,
        confidence=onset.confidence,
        reason=_reason(onset),
        evidence=(
            fact("step", onset.step),
            fact("batch", onset.batch),
            fact("flags", _flag_names(onset.flags)),
            fact("ranks", list(onset.flagged)),
            *onset.evidence,
        ),
    )


def _reason(onset: _Onset) -> str:
    what = "gradient norm" if onset.flags & NONFINITE == GRAD_NONFINITE else "loss"
    where = f"at step {onset.step} (batch {onset.batch})"
    if onset.ranks:
        return f"{what} is not finite on {say_ranks(onset.ranks)} {where}"
    return f"{what} is not finite {where}, on {say_ranks(onset.flagged)}: no local value tells where it began"


def _flag_names(flags: int) -> list[str]:
    names = {LOSS_NONFINITE: "loss", GRAD_NONFINITE: "grad_norm", LOCAL_NONFINITE: "local"}
    return [name for flag, name in names.items() if flags & flag]


def _numbers(mask_R: Bools) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask_R).tolist())
