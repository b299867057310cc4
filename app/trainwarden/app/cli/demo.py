"""`trainwarden demo`: real faults on a real training, and whether the right thing was said."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from trainwarden.app.demo import RANKS, Result, cores, rehearse
from trainwarden.app.run import Supervisor
from trainwarden.app.view import view
from trainwarden.core.errors import ConfigError
from trainwarden.rehearsal.scenario import Scenario, built_in

TABLE_WIDTH = 150
"""Columns of the table where nobody looks at a terminal: a log does not wrap."""


def demo(
    only: Annotated[list[str] | None, typer.Option(help="Name of a scenario to run; may be given again.")] = None,
    observe: Annotated[bool, typer.Option(help="Only say what is wrong; repair nothing.")] = False,
) -> None:
    """Run every scenario on a real 4-rank torchrun training; exit status 1 when any verdict is wrong."""
    console = Console()
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    scenarios = _chosen(only or [])
    console.print(f"{len(scenarios)} scenarios, {RANKS} ranks by torchrun with gloo on {cores()} cores; observe only")
    with _show(console) as look:
        policy = "default" if observe else "demo"
        results = rehearse(scenarios, look, lambda result: console.print(_line(result)), policy)
    console.print(_table(results))
    console.print(f"recordings, journals and notices: {results[0].folder.parent}")
    if not all(result.verdict.ok for result in results):
        sys.exit(1)


def _chosen(names: Sequence[str]) -> list[Scenario]:
    known = built_in()
    for name in names:
        if name not in known:
            raise ConfigError(f"--only: no scenario {name!r}; there are {', '.join(known)}")
    return [scenario for name, scenario in known.items() if not names or name in names]


class _Look:
    """What is shown while a scenario runs: a live view on a terminal, else nothing."""

    def __init__(self, live: Live | None) -> None:
        self._live = live

    def __call__(self, scenario: Scenario, supervisor: Supervisor) -> None:
        if self._live is not None:
            self._live.update(view(f"{scenario.name}: {scenario.title}", supervisor, time.time_ns()))


@contextmanager
def _show(console: Console) -> Iterator[_Look]:
    if not console.is_terminal:
        yield _Look(None)
        return
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        yield _Look(live)


def _line(result: Result) -> str:
    said = "right" if result.verdict.ok else "WRONG"
    return f"{result.scenario.name}: {said} ({result.scenario.title}; {result.wall_s:.0f} s)"


def _table(results: Sequence[Result]) -> Table:
    table = Table("scenario", "what happens", "detected after", "culprit", "kind", "tier", "false alarms", "final loss")
    for result in results:
        table.add_row(*_row(result))
    return table


def _row(result: Result) -> list[str]:
    verdict = result.verdict
    loss = "-" if result.final_loss is None else f"{result.final_loss:.6f}"
    alarms = str(len(verdict.false_alarms))
    if not verdict.found:
        return [verdict.scenario, result.scenario.title, "nothing to say", "-", "-", "-", alarms, loss]
    found = verdict.found[0]
    told = found.told
    mark = "right" if verdict.culprit_right else "WRONG"
    culprit = f"{told.culprit if told else 'nobody'}: {mark}"
    kind = f"{told.kind if told else 'nothing'}{'' if verdict.kind_right else ' WRONG'}"
    tier = f"{told.tier.name if told else '-'}{'' if verdict.tier_right else ' WRONG'}"
    return [verdict.scenario, result.scenario.title, _after(result), culprit, kind, tier, alarms, loss]


def _after(result: Result) -> str:
    """Measured against the goal, in the goal's unit."""
    found, verdict = result.verdict.found[0], result.verdict
    late = "" if found.in_time else " LATE"
    if found.expect.within_steps is not None:
        return f"{verdict.detected_after_steps} steps (goal {found.expect.within_steps}){late}"
    seconds = "never" if verdict.detected_after_s is None else f"{verdict.detected_after_s:.2f} s"
    return f"{seconds} (goal {found.expect.within_s:g} s){late}"
