"""`trainwarden dashboards`: the dashboards and alert rules that ship, to a Grafana or into a folder."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from trainwarden.core.errors import ConfigError

dashboards = typer.Typer(no_args_is_help=True, help="Push the dashboards to a Grafana, or write them to a folder.")

Runbooks = Annotated[str, typer.Option(help="Address of docs/runbooks as people read it; links lead there.")]


@dashboards.command()
def push(
    url: Annotated[str, typer.Option(help="Address of Grafana, with its sub path if it has one.")],
    folder: Annotated[str, typer.Option(help="Folder of Grafana; made if it is missing.")] = "trainwarden",
    token_file: Annotated[Path | None, typer.Option(help="File with the token; none: GRAFANA_TOKEN.")] = None,
    runbooks: Runbooks = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
) -> None:
    """Create or update the dashboards in Grafana; pushing again changes nothing. The token is a service account's."""
    from trainwarden.dashboards.push import Grafana, shipped
    from trainwarden.dashboards.push import push as send

    grafana = Grafana(url=url, token=_token(token_file))
    for line in send(list(shipped(runbooks).values()), grafana, folder, dry_run=dry_run):
        typer.echo(line)


@dashboards.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; files of these names are written over.")],
    runbooks: Runbooks = "",
) -> None:
    """Write FOLDER/dashboards/*.json for Grafana's provisioning and FOLDER/rules/*.yaml for Prometheus."""
    from trainwarden.alerts.rules import rules_text
    from trainwarden.dashboards.push import shipped

    boards = {f"dashboards/{name}": json.dumps(board, indent=1) + "\n" for name, board in shipped(runbooks).items()}
    for name, text in (boards | {f"rules/{name}": text for name, text in rules_text().items()}).items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"FOLDER: cannot write {path}: {error.strerror}") from None
        typer.echo(path)


def _token(path: Path | None) -> str:
    """Never from the command line, where every user of the host can read it."""
    if path is None:
        return os.environ.get("GRAFANA_TOKEN", "").strip()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: cannot read {path}: {type(error).__name__}") from None
