"""`trainwarden doctor`: what can be seen from here, and what contradicts itself."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainwarden.app.cli.agent import Config, Node
from trainwarden.app.doctor import Check, Level, examine, exit_status
from trainwarden.app.doctor_facts import gather
from trainwarden.app.node_agent import node_name
from trainwarden.app.node_sources import load_node_settings
from trainwarden.app.surroundings import load_run_settings
from trainwarden.core.durations import parse_duration
from trainwarden.core.errors import ConfigError
from trainwarden.core.printable import printable

STYLES: dict[Level, str] = {"ok": "green", "note": "dim", "warning": "yellow", "error": "bold red"}


def doctor(
    command: Annotated[list[str] | None, typer.Argument(help="The launcher with its arguments, after --.")] = None,
    config: Config = None,
    run_config: Annotated[Path | None, typer.Option(help="YAML file with settings, as for run.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for what is kept, as for run.")] = None,
    nccl_timeout: Annotated[str, typer.Option(help="What init_process_group is given.")] = "10min",
    node: Node = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what can be read here and what is blind, why, and what to do; whether timeouts are in order.

    Run it where the job runs, with the job's environment. Exit status: 0 all is well, 1 warnings, 2 errors.
    """
    settings, (run, _) = load_node_settings(config), load_run_settings(run_config)
    try:
        timeout = parse_duration(nccl_timeout)
    except ValueError as error:
        raise ConfigError(f"--nccl-timeout: need a number and a unit, such as 10min, got {nccl_timeout!r}") from error
    facts = gather(
        settings,
        node_name(node, settings),
        hang=run.hang,
        command=command or (),
        state=state,
        nccl_timeout=timeout,
        checkpoint_interval=run.metrics.checkpoint_interval,
    )
    checks = examine(facts)
    if as_json:
        typer.echo(json.dumps({"status": exit_status(checks), "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        Console().print(screen(checks))
    sys.exit(exit_status(checks))


def screen(checks: list[Check]) -> Table:
    """A line a check, with what to do about it below."""
    shown = Table.grid(padding=(0, 2))
    for check in checks:
        style = STYLES[check.level]
        what = Text(printable(check.what)).append(f"\n-> {printable(check.do)}" if check.do else "", style="dim")
        shown.add_row(Text(check.level, style=style), check.area, what)
    return shown
