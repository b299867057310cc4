"""Facts of a report, made up: two attempts, 60 steps and back to 40, one incident that was recovered."""

from typing import Any

import numpy as np
import pandas as pd

from trainwarden.core.records import FEATURES, LOSS_NONFINITE, epoch_of
from trainwarden.dashboards.facts import Attempt, Grid, Plan, Report, Rung, Trouble


def steps_of(count: int, attempt: int = 1, first: int = 1, bad: int = 0) -> pd.DataFrame:
    """bad: that many at the end are not finite."""
    step = np.arange(first, first + count)
    table = pd.DataFrame(np.nan, index=range(count), columns=list(FEATURES))
    table["epoch"], table["step"], table["batch"] = epoch_of(attempt, 0, 0), step, step
    table["seen_ns"], table["partial"], table["flags"] = step, False, 0
    table["attempt"], table["kept"], table["t_s"] = f"attempt {attempt}", True, step / 2.0
    table["loss"], table["grad_norm"], table["step_s"] = 1 + 3 / step, 1 / np.sqrt(step), 0.4 + 0.01 * (step % 3)
    table["checkpoint_s"], table["eval_s"] = (
        np.where(step % 10 == 0, 0.1, np.nan),
        np.where(step % 25 == 0, 0.1, np.nan),
    )
    if bad:
        table.loc[count - bad :, "loss"], table.loc[count - bad :, "flags"] = np.nan, LOSS_NONFINITE
    return table


FIRST = steps_of(60, bad=4)
FIRST.loc[40:, "kept"] = False
STEPS = pd.concat([FIRST, steps_of(60, attempt=2, first=41)], ignore_index=True)


def trouble(name: str, **more: Any) -> Trouble:
    """more: fields that differ."""
    fields = {
        "id": name,
        "kind": "loss.nonfinite",
        "tier": "CRITICAL",
        "state": "resolved",
        "culprit": "rank:1",
        "reason": "loss is not finite on rank 1",
        "action": "restart",
        "runbook": "loss-nonfinite",
        "step": 57,
        "until_s": 20.0,
        "instants": (("first sign", 10.0), ("detected", 10.5), ("runs again", 19.0)),
        "lost_s": {"detect": 0.5, "start": 8.5},
    }
    return Trouble(**{**fields, **more})


def grid() -> Grid:
    """Rank 2 is slow for a while, rank 3 blind."""
    made = Grid()
    for step in range(1, 61):
        made.add("attempt 1", step, np.array([1.0, 1.0, 1.6 if 20 < step < 40 else 1.0, np.nan]))
    return made


def made(**more: Any) -> Report:
    """more: fields that differ."""
    rungs = (
        Rung(goal="stopped", result="reached", took_s=1.0, said="ended: 4"),
        Rung(goal="verified", result="failed", took_s=3.0, said="", checks=(("loss", "fails", "9", "at most 3"),)),
    )
    fields = {
        "job": "nano",
        "node": "n0",
        "command": "torchrun train.py",
        "ranks": 4,
        "began": "2026-01-01 00:00:00 UTC",
        "wall_s": 60.0,
        "ended": "Attempt 2 ended, in order (exit status 0).",
        "attempts": (
            Attempt(number=1, began_s=0.0, ended_s=18.0, end="exit status 1", origin="the beginning"),
            Attempt(number=2, began_s=18.0, ended_s=60.0, end="in order (exit status 0)", origin="step-40-1"),
        ),
        "steps": STEPS,
        "rollbacks": (),
        "skipped": (),
        "grid": grid(),
        "slow": 1.3,
        "activity_s": {"training": 40.0, "repeated": 5.0, "checkpoint": 3.0, "evaluation": 1.0}
        | {"starting": 6.0, "interrupted": 4.0, "other": 1.0},
        "decided": True,
        "troubles": (trouble("t1"),),
        "plans": (
            Plan(
                id="t1/plan-1",
                rule="loss.nonfinite",
                culprit="rank:1",
                mode="act",
                why="",
                began_s=11.0,
                rungs=rungs,
                result="failed",
                reason="verified: loss fails",
            ),
        ),
        "said": ("12.0 s: ann: deny t1/plan-1",),
        "checkpoints": pd.DataFrame(
            [["step-40-1", 40, 1, 17.0, 1.07, 5.3, "good", True, "read back"]],
            columns=["name", "step", "attempt", "saved_s", "loss", "MB", "trust", "pinned", "reason"],
        ),
        "unseen": (("oom@n0 was blind", "permission denied"),),
        "made": (("by", "trainwarden"),),
    }
    return Report(**{**fields, **more})
