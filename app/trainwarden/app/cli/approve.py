"""`trainwarden approve`, `deny` and `stop-all`: what a person says to a running job's repairs."""

import getpass
import time
from pathlib import Path
from typing import Annotated

import typer

from trainwarden.app.commands import write_command
from trainwarden.app.folders import state_folder
from trainwarden.app.repair import STOP_ALL
from trainwarden.core.errors import ConfigError

_Job = Annotated[str, typer.Option(help="Name of the job.")]
_State = Annotated[Path | None, typer.Option(help="Folder for what is kept, as given to run.")]
_Why = Annotated[str, typer.Option(help="Why; kept in the journal.")]

NEVER_NS = 2**62


def approve(
    plan: Annotated[str, typer.Argument(help="The plan's id, as the notice says.")],
    job: _Job,
    why: _Why = "",
    minutes: Annotated[float, typer.Option(help="How long the approval counts.")] = 15.0,
    state: _State = None,
) -> None:
    """Let a plan that waits for a person begin."""
    _command(job, state, "approve", plan, why, time.time_ns() + int(minutes * 60e9))


def deny(
    plan: Annotated[str, typer.Argument(help="The plan's id, as the notice says.")],
    job: _Job,
    why: _Why = "",
    state: _State = None,
) -> None:
    """End a plan before its next rung."""
    _command(job, state, "deny", plan, why, NEVER_NS)


def stop_all(
    job: Annotated[str | None, typer.Option(help="Name of the job; none: every job below STATE.")] = None,
    undo: Annotated[bool, typer.Option(help="Allow actions again.")] = False,
    why: _Why = "",
    state: _State = None,
) -> None:
    """Switch all actions off, at once; nothing is undone and the training goes on."""
    folder = state_folder(state) if job is None else _folder(job, state)
    switch = folder / STOP_ALL
    if undo:
        switch.unlink(missing_ok=True)
    else:
        switch.touch()
    for one in [folder] if job is not None else [path.parent for path in folder.glob("*/journal.sqlite")]:
        _write(one, "stop_all", "resume" if undo else "", why, NEVER_NS)
    typer.echo(f"actions are {'allowed again' if undo else 'switched off'}: {switch}")


def _command(job: str, state: Path | None, verb: str, plan: str, why: str, expires_ns: int) -> None:
    _write(_folder(job, state), verb, plan, why, expires_ns)
    typer.echo(f"{verb} {plan}: handed to the supervisor of job {job}")


def _write(folder: Path, verb: str, plan: str, why: str, expires_ns: int) -> None:
    write_command(folder, verb, {"plan": plan, "who": getpass.getuser(), "why": why, "expires_ns": expires_ns})


def _folder(job: str, state: Path | None) -> Path:
    folder = state_folder(state) / job
    if not (folder / "journal.sqlite").exists():
        raise ConfigError(f"--job: there is no job {job!r} below {folder.parent}; name it as `trainwarden run` did")
    return folder
