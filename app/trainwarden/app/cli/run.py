"""`trainwarden run`: watch one command on this host."""

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from trainwarden.app.folders import choose_job, state_folder
from trainwarden.app.launch import check_command
from trainwarden.app.run import Request, Supervisor
from trainwarden.app.surroundings import load_run_settings
from trainwarden.app.wiring import choose_policy
from trainwarden.core.errors import ConfigError, FencedError, OwnedError, StoreError, TrainwardenError

EXIT_STATUS: Mapping[type[TrainwardenError], int] = {ConfigError: 2, OwnedError: 3, FencedError: 4, StoreError: 5}
"""Beside the launcher's own exit status."""


def run(
    command: Annotated[list[str], typer.Argument(help="The launcher with its arguments, after --.")],
    job: Annotated[str | None, typer.Option(help="Name of the job; the same name attaches again.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for what is kept; on a local disk.")] = None,
    policy: Annotated[str | None, typer.Option(help="YAML file: what may be done; none: observe only.")] = None,
    metrics: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus; port 0: any free one.")] = None,
) -> None:
    """Start COMMAND and watch it: say what is wrong, where and why. The training goes on if this command ends.

    Exit status: that of COMMAND (128 + n for a signal); 2 wrong settings, 3 somebody else watches the job,
    4 somebody took the job over, 5 the journal cannot be written.
    """
    check_command(command)
    settings, beside = load_run_settings(config)
    if metrics is not None:
        settings = replace(settings, metrics=replace(settings.metrics, listen=metrics))
    folder = state_folder(state)
    request = Request(
        job=choose_job(job, command, folder),
        command=tuple(command),
        state=folder,
        settings=settings,
        beside=beside,
        sources=settings.run.sources,
        policy=choose_policy(policy),
    )
    supervisor = Supervisor(request, say)
    supervisor.start()
    _forward_signals(supervisor)
    period_s = settings.run.poll.total_seconds()
    try:
        while supervisor.turn():
            time.sleep(period_s)
    except BaseException:
        supervisor.abandon()
        raise
    sys.exit(supervisor.finish())


def say(text: str) -> None:
    """One line of ours, apart from the training's own output."""
    sys.stderr.write(f"trainwarden: {text}\n")
    sys.stderr.flush()


def _forward_signals(supervisor: Supervisor) -> None:
    def ask(number: int, _frame: FrameType | None) -> None:
        supervisor.ask(signal.Signals(number))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
