"""`trainwarden checkpoints`: what a job could go back to, and a person's word on it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainwarden.app.folders import state_folder
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import JobId
from trainwarden.core.printable import printable
from trainwarden.core.records import attempt_of
from trainwarden.remediation.checkpoints.dcp import DcpStore
from trainwarden.remediation.checkpoints.select import Entry

checkpoints = typer.Typer(no_args_is_help=True, help="List, verify, pin and distrust the checkpoints of a job.")

TABLE_WIDTH = 150
"""Columns where nobody looks at a terminal: a log does not wrap."""

Job = Annotated[str, typer.Option("--job", help="Name of the job.")]
State = Annotated[Path | None, typer.Option("--state", help="Folder for what is kept, as of run.")]
Root = Annotated[Path | None, typer.Option("--root", help="Folder of the checkpoints, if not STATE/JOB/checkpoints.")]
InJson = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
Name = Annotated[str, typer.Argument(help="Name of a checkpoint, as list shows it.")]
Names = Annotated[list[str] | None, typer.Argument(help="Names of checkpoints; none: all.")]


@checkpoints.command("list")
def list_all(job: Job, state: State = None, root: Root = None, in_json: InJson = False) -> None:
    """Every published checkpoint, newest first; broken ones with the reason."""
    store = _store(job, state, root)
    _show(store, store.entries(), in_json)


@checkpoints.command()
def verify(job: Job, names: Names = None, state: State = None, root: Root = None, in_json: InJson = False) -> None:
    """Read checkpoints back, all files to their end, and mark each good or distrusted; exit status 1 if one is bad."""
    store = _store(job, state, root)
    found = [store.judge(name) for name in names or [one.name for one in store.entries()]]
    _show(store, found, in_json)
    if any(_trust(entry) != "good" for entry in found):
        sys.exit(1)


@checkpoints.command()
def pin(
    job: Job,
    name: Name,
    state: State = None,
    root: Root = None,
    undo: Annotated[bool, typer.Option("--undo", help="It may be removed again.")] = False,
) -> None:
    """Never remove this checkpoint."""
    store = _store(job, state, root)
    (store.unpin if undo else store.pin)(name)


@checkpoints.command()
def distrust(
    job: Job,
    name: Name,
    why: Annotated[str, typer.Option(help="The reason, in words.")] = "a person said so",
    state: State = None,
    root: Root = None,
    undo: Annotated[bool, typer.Option("--undo", help="It may be selected again, if it verifies.")] = False,
) -> None:
    """Never go back to this checkpoint."""
    _store(job, state, root).mark(name, "unverified" if undo else "distrusted", "" if undo else why)


def _store(job: str, state: Path | None, root: Path | None) -> DcpStore:
    folder = root or state_folder(state) / job / "checkpoints"
    if not folder.is_dir():
        option = "--root" if root else "--job"
        raise ConfigError(f"{option}: there are no checkpoints of job {job}: no folder {folder}")
    return DcpStore(folder, JobId(job))


def _show(store: DcpStore, entries: Sequence[Entry], in_json: bool) -> None:
    if in_json:
        sys.stdout.writelines(f"{json.dumps(_in_json(entry))}\n" for entry in entries)
        return
    console = Console()
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    table = Table("name", "step", "attempt", "saved", "loss", "gradient norm", "MB", "trust", "pinned")
    table.add_column("reason", overflow="fold")
    for entry in entries:
        short = replace(entry, reason=entry.reason.replace(f"{store.path(entry.name)}/", ""))
        table.add_row(*(Text(printable(cell)) for cell in _row(short)))
    console.print(table if entries else "no checkpoint is published")


def _row(entry: Entry) -> list[str]:
    found, pinned = entry.checkpoint, "pinned" if entry.pinned else ""
    if found is None:
        return [entry.name, *("-" for _ in range(6)), _trust(entry), pinned, entry.reason]
    values = ["-" if value is None else f"{value:.6g}" for value in (found.loss, found.grad_norm)]
    saved = datetime.fromtimestamp(found.t_ns / 1e9).isoformat(" ", "seconds")
    size = f"{sum(length for length, _ in found.files.values()) / 1e6:.1f}"
    attempt = str(attempt_of(found.epoch))
    return [entry.name, str(found.step), attempt, saved, *values, size, _trust(entry), pinned, entry.reason]


def _in_json(entry: Entry) -> dict[str, object]:
    found = entry.checkpoint
    told = {"name": entry.name, "trust": _trust(entry), "pinned": entry.pinned, "reason": entry.reason}
    if found is None:
        return told
    told |= {"step": found.step, "epoch": found.epoch, "attempt": attempt_of(found.epoch), "t_ns": found.t_ns}
    size = sum(length for length, _ in found.files.values())
    return told | {"loss": found.loss, "grad_norm": found.grad_norm, "bytes": size, "files": len(found.files)}


def _trust(entry: Entry) -> str:
    return "broken" if entry.checkpoint is None else entry.checkpoint.trust
