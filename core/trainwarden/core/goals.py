"""Every goal a rung can name: one of the three tables that join the components.

A goal is a state of the world, never a motion. `proof` says what is read to tell that it is reached; `undo` how it is
taken back, or why it cannot be. The actuators that reach them come with the repair engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One row."""

    name: str
    args: tuple[str, ...]
    proof: str
    undo: str


_ROWS = (
    Goal(
        name="evidence_collected",
        args=("incident",),
        proof="evidence/<incident>/ holds a stack or the reason why not for each rank",
        undo="none needed: read only",
    ),
    Goal(
        name="checkpoint_taken",
        args=("within_steps",),
        proof="a manifest of this attempt at or after the requested step verifies",
        undo="none needed: adds a checkpoint",
    ),
    Goal(
        name="quiesced",
        args=(),
        proof="every rank's ring says phase wait at the same step",
        undo="request resume",
    ),
    Goal(
        name="stopped",
        args=("attempt",),
        proof="no process of the attempt is alive",
        undo="running: a new attempt",
    ),
    Goal(
        name="running",
        args=("attempt", "before_ns", "without", "skip"),
        proof="all ranks of the attempt said hello and began a step",
        undo="stopped",
    ),
    Goal(
        name="verified",
        args=("attempt", "steps"),
        proof="step time, loss and gradient norm of the first steps agree with the recorded ones",
        undo="none needed: read only",
    ),
)

GOALS: Mapping[str, Goal] = {row.name: row for row in _ROWS}
