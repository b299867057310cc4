"""`trainwarden demo`: real faults on a real training, and whether the right thing was said and done."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from trainwarden.app.cli.report import written
from trainwarden.app.demo import RANKS, Result, cores, rehearse
from trainwarden.app.run import Supervisor
from trainwarden.app.verdicts import table
from trainwarden.app.view import view
from trainwarden.core.errors import ConfigError, TrainwardenError
from trainwarden.rehearsal.scenario import Scenario, built_in

TABLE_WIDTH = 170
"""Columns of the table where nobody looks at a terminal: a log does not wrap."""


def demo(
    only: Annotated[list[str] | None, typer.Option(help="Name of a scenario to run; may be given again.")] = None,
    observe: Annotated[bool, typer.Option(help="Only say what is wrong; repair nothing.")] = False,
) -> None:
    """Run every scenario on a real 4-rank torchrun training; exit status 1 when any verdict is wrong."""
    console = Console()
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    policy = "default" if observe else "demo"
    mode = "observe only" if observe else f"repairs by policy {policy}"
    scenarios = _chosen(only or [], compared=not observe)
    console.print(f"{len(scenarios)} scenarios, {RANKS} ranks by torchrun with gloo on {cores()} cores; {mode}")
    with _show(console) as look:
        results = rehearse(scenarios, look, lambda result: console.print(_line(result)), policy)
    console.print(table(results))
    console.print(f"recordings, journals and notices: {results[0].folder.parent}")
    for result in results:
        console.print(f"report of {result.scenario.name}: {_report(result)}", soft_wrap=True)
    if not all(result.verdict.ok for result in results):
        sys.exit(1)


def _report(result: Result) -> str:
    """Where it is, or why there is none: a report is a help, the verdict stands without it."""
    try:
        return str(written(result.scenario.name, result.folder / "state"))
    except TrainwardenError as error:
        return str(error)


def _chosen(names: Sequence[str], compared: bool) -> list[Scenario]:
    """All, or those named and, if `compared`, those whose loss they must end with."""
    known = built_in()
    for name in names:
        if name not in known:
            raise ConfigError(f"--only: no scenario {name!r}; there are {', '.join(known)}")
    needed = {known[name].compared_with for name in names} if compared else set()
    return [scenario for name, scenario in known.items() if not names or name in names or name in needed]


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
