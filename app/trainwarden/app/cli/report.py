"""`trainwarden report`: one run as one HTML page."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from trainwarden.app.folders import state_folder
from trainwarden.core.errors import ConfigError

NEEDED = ("jinja2", "matplotlib", "pandas")
"""What the extra `dashboards` brings and a report needs."""


def report(
    run: Annotated[str, typer.Argument(help="Name of a job below STATE, or the path of its folder.")],
    state: Annotated[Path | None, typer.Option(help="Folder for what is kept, as given to run.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; none: report.html in the job's folder.")] = None,
) -> None:
    """Write what happened to RUN as one HTML page that needs nothing else, while it runs or after."""
    typer.echo(written(run, state_folder(state), out))


def written(run: str, state: Path, out: Path | None = None) -> Path:
    """The page of a run, made anew. Raises ConfigError."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(f"{', '.join(missing)} not installed: pip install 'trainwarden[dashboards]'")
    from trainwarden.app.reporting import find_run, write_report  # matplotlib and pandas: a second to load

    return write_report(find_run(run, state), out)
