"""The live view of one supervised job for a terminal: ranks, steps, incidents. Reads, never decides."""

from collections.abc import Iterable

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainwarden.app.run import Supervisor
from trainwarden.core.model import Frame, Incident, StepMatrix, Tier
from trainwarden.core.records import FEATURES

RANKS_MAX = 32
"""Rows shown; a larger job is looked at on a dashboard."""

COLOURS = {Tier.INFO: "dim", Tier.WARN: "yellow", Tier.ERROR: "red", Tier.CRITICAL: "bold red"}


def view(title: str, supervisor: Supervisor, now_ns: int) -> RenderableType:
    """What there is to see right now."""
    line = supervisor.server.line
    parts: list[RenderableType] = [_ranks(line.live, now_ns), _step(line.last)]
    parts += _incidents(supervisor.server.incidents.values())
    return Panel(Group(*parts), title=title, title_align="left")


def _ranks(live: Frame | None, now_ns: int) -> RenderableType:
    if live is None:
        return Text("starting: no rank has said hello yet", style="dim")
    table = Table("rank", "step", "phase", "for (s)", box=None, pad_edge=False)
    for row in live.rows[np.argsort(live.rows["rank"])][:RANKS_MAX]:
        since_s = max(0.0, (now_ns - int(row["since_ns"])) / 1e9)
        table.add_row(str(row["rank"]), str(row["step"]), live.names[row["phase"]], f"{since_s:.1f}")
    return table


def _step(last: StepMatrix | None) -> RenderableType:
    if last is None:
        return Text("")
    step_s = last.values_FR[FEATURES.index("step_s")][last.seen_R]
    loss = last.values_FR[FEATURES.index("loss")][last.seen_R]
    return Text(f"step {last.step}: {step_s.max():.3f} s on the slowest rank, loss {loss[0]:.4f}", style="dim")


def _incidents(incidents: Iterable[Incident]) -> list[RenderableType]:
    return [
        Text(f"{incident.tier.name} {incident.state}: {incident.reason}", style=COLOURS[incident.tier])
        for incident in incidents
    ]
