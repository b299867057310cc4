"""What a report of a run is made of: strings, numbers, tables, and what bounds the size of figures.

Times `_s` without another word are seconds since the report's zero, the beginning of the job's first known attempt.
What nobody saw is None, NaN or empty, never 0. Text may come from the job's tenant; it is made harmless where it is
rendered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

GRID_COLUMNS, GRID_ROWS = 512, 256
"""Cells of the grid at most: two or three dots each on a screen, so that more could not be told apart."""
TIERS = ("INFO", "WARN", "ERROR", "CRITICAL")
POINTS = 2000
"""Of a series at most: two a dot of a wide screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of the job."""

    number: int
    began_s: float
    ended_s: float | None
    """None: nobody saw its end."""
    end: str
    """How it ended, in words; "": it may still run."""
    origin: str
    """What it started from: a checkpoint, or the beginning."""
    changes: str = ""
    """Slots left out, batches skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One state of the world that a plan wanted."""

    goal: str
    result: str
    """As Outcome.result; "" while it is not over, or was never begun."""
    took_s: float | None
    said: str
    """What was found, or why not."""
    checks: tuple[tuple[str, str, str, str], ...] = ()
    """Of a verification: check, result, got, expected."""

    @property
    def failed(self) -> bool:
        """Whether a check did not hold."""
        return any(result != "holds" for _, result, _, _ in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was, or would have been, done about an incident."""

    id: str
    rule: str
    culprit: str
    mode: str
    why: str
    """What stood against it."""
    began_s: float
    rungs: tuple[Rung, ...]
    result: str
    """"" while it is under way."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One incident as it stands at the end of the report."""

    id: str
    kind: str
    tier: str
    state: str
    culprit: str
    reason: str
    action: str
    runbook: str
    step: int | None
    """First step with a sign of it."""
    until_s: float
    """Resolved, or the end of the report."""
    instants: tuple[tuple[str, float], ...]
    """What happened when: first sign, detected, decided, stopped, runs again, verified; only what did."""
    lost_s: Mapping[str, float]
    """Seconds of each phase of its recovery; empty: it was not recovered by a plan, or that was not kept."""

    @property
    def open(self) -> bool:
        return self.state != "resolved"

    @property
    def order(self) -> tuple[bool, int, float]:
        """Sorts what is open before what is not, then the louder first, then the earlier."""
        return not self.open, -TIERS.index(self.tier), self.instants[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Steps that were done again: the newest that had closed, the last that was kept, and what was gone back to."""

    last: int
    kept: int
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is shown."""

    job: str
    node: str
    command: str
    ranks: int | None
    began: str
    """Zero, as date and time in UTC."""
    wall_s: float
    """From zero to the last that was recorded."""
    ended: str
    """How the job ended; "": no end was recorded."""
    attempts: tuple[Attempt, ...]
    steps: pd.DataFrame
    """core.recording.step_table, and: attempt (a label), kept (not done again later), t_s (when it closed)."""
    rollbacks: tuple[Rollback, ...]
    skipped: tuple[tuple[int, int], ...]
    """Ranges of batches, inclusive."""
    grid: "Grid"
    slow: float
    """Ratio of own work to that of the peers from which on a rank counts as slow."""
    activity_s: Mapping[str, float]
    """Where the wall time went, by core.signals.ACTIVITIES; empty: not known."""
    decided: bool
    """Whether decisions were recorded: without it no incident is not known, rather than none."""
    troubles: tuple[Trouble, ...]
    plans: tuple[Plan, ...]
    said: tuple[str, ...]
    """What people told the supervisor, as it came."""
    checkpoints: pd.DataFrame
    """Newest first: name, step, attempt, saved_s, loss, MB, trust, pinned, reason."""
    unseen: tuple[tuple[str, str], ...]
    """What could not be seen, and why or how much."""
    made: tuple[tuple[str, str], ...]
    """How the report was made."""


class Grid:
    """Ratios of ranks over steps as they come, on a grid that never outgrows its size: when it is full, neighbours are
    joined. A joined cell has the largest ratio of its parts, and is blind if any of them is."""

    def __init__(self) -> None:
        self.steps_per_column = self.ranks_per_row = 1
        self.ranks = 0
        """The most that any step had."""
        self.starts: list[tuple[str, int]] = []
        """Of each column: label of the attempt and the first step."""
        self._ratio_CR: NDArray[np.float32] = np.full((GRID_COLUMNS, GRID_ROWS), np.nan, np.float32)
        self._blind_CR: NDArray[np.bool_] = np.zeros((GRID_COLUMNS, GRID_ROWS), np.bool_)
        self._room = 0
        """Steps that the last column still takes."""

    @property
    def ratio_RC(self) -> NDArray[np.float32]:
        """Largest ratio in each cell; NaN: none was told."""
        return self._ratio_CR[: len(self.starts), : self._rows].T

    @property
    def blind_RC(self) -> NDArray[np.bool_]:
        """Cells of ranks that took part and whose ratio could not be told."""
        return self._blind_CR[: len(self.starts), : self._rows].T

    def add(self, attempt: str, step: int, ratio_R: NDArray[np.float64]) -> None:
        """Take the next step; NaN: this rank took part and its ratio cannot be told."""
        self.ranks = max(self.ranks, len(ratio_R))
        while self._rows > GRID_ROWS:
            self._join_rows()
        if self._room == 0 or self.starts[-1][0] != attempt:
            if len(self.starts) == GRID_COLUMNS:
                self._join_columns()
            self.starts.append((attempt, step))
            self._room = self.steps_per_column
        self._room -= 1
        padded_R = np.full(-(-len(ratio_R) // self.ranks_per_row) * self.ranks_per_row, -np.inf)
        padded_R[: len(ratio_R)] = ratio_R
        parts_RP = padded_R.reshape(-1, self.ranks_per_row)
        worst_R = np.fmax.reduce(parts_RP, axis=1)
        cells = len(self.starts) - 1, slice(len(parts_RP))
        known_R = np.where(np.isneginf(worst_R), np.nan, worst_R)
        self._ratio_CR[cells] = np.fmax(self._ratio_CR[cells], known_R)
        self._blind_CR[cells] |= np.isnan(parts_RP).any(axis=1)

    @property
    def _rows(self) -> int:
        return -(-self.ranks // self.ranks_per_row)

    def _join_rows(self) -> None:
        self.ranks_per_row *= 2
        half = GRID_ROWS // 2
        self._ratio_CR[:, :half] = np.fmax(self._ratio_CR[:, 0::2], self._ratio_CR[:, 1::2])
        self._blind_CR[:, :half] = self._blind_CR[:, 0::2] | self._blind_CR[:, 1::2]
        self._ratio_CR[:, half:], self._blind_CR[:, half:] = np.nan, False

    def _join_columns(self) -> None:
        self.steps_per_column *= 2
        half = GRID_COLUMNS // 2
        self._ratio_CR[:half] = np.fmax(self._ratio_CR[0::2], self._ratio_CR[1::2])
        self._blind_CR[:half] = self._blind_CR[0::2] | self._blind_CR[1::2]
        self._ratio_CR[half:], self._blind_CR[half:] = np.nan, False
        self.starts = self.starts[0::2]


def thinned(steps: pd.DataFrame, name: str, most: int = POINTS) -> pd.DataFrame:
    """At most so many of the rows whose value is finite: of each stretch that with the smallest and the largest."""
    finite: pd.DataFrame = steps[np.isfinite(steps[name])]
    if len(finite) <= most:
        return finite
    stretches = finite[name].groupby(np.arange(len(finite)) * (most // 2) // len(finite))
    ends: pd.DataFrame = finite.loc[sorted({*stretches.idxmin(), *stretches.idxmax()})]
    return ends


def thinned_words(steps: pd.DataFrame) -> list[str]:
    """What the caption says of it."""
    many = len(steps) > POINTS
    return [f"Of {len(steps)} steps the lowest and highest of each stretch are drawn."] if many else []


def spread(at: NDArray[Any], most: int = 200) -> NDArray[Any]:
    """At most so many marks, evenly."""
    return at if len(at) <= most else at[np.linspace(0, len(at) - 1, most).astype(int)]
