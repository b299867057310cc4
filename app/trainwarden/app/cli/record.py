"""`trainwarden record` and `trainwarden replay`: keep what is seen, and go through it again."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from trainwarden.app.cli.agent import Config, Node, stop_at_signals
from trainwarden.app.cli.run import say
from trainwarden.app.node_agent import Gathering, gather, node_name, recorded
from trainwarden.app.node_sources import load_node_settings
from trainwarden.app.replay import replay as replayed
from trainwarden.app.surroundings import load_run_settings
from trainwarden.core.codec import dumps
from trainwarden.core.durations import parse_duration
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Finding, Incident
from trainwarden.core.printable import printable
from trainwarden.core.recording import Recording

_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def record(
    folder: Annotated[Path, typer.Argument(help="Where to; one that has a recording is added to.")],
    size: Annotated[str, typer.Option(help="At most so much; beyond it the oldest part goes.")] = "1GiB",
    for_: Annotated[str | None, typer.Option("--for", help="How long, such as 10min; none: until SIGINT.")] = None,
    node: Node = None,
    config: Config = None,
) -> None:
    """Write what the sources of this node see to FOLDER, for `trainwarden replay`."""
    settings, for_s = load_node_settings(config), None
    if for_ is not None:
        try:
            for_s = parse_duration(for_).total_seconds()
        except ValueError as error:
            raise ConfigError(f"--for: need a number and a unit, such as 10min, got {for_!r}") from error
    outlet = recorded(folder, size_bytes(size))
    asked = Gathering(node=node_name(node, settings), settings=settings, outlets=[outlet], for_s=for_s)
    gather(asked, stop_at_signals(), say)


def replay(
    folder: Annotated[
        Path, typer.Argument(help="A recording: of `record`, of an agent, or STATE/JOB/frames of a run.")
    ],
    config: Annotated[Path | None, typer.Option(help="YAML file with settings, as for run.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Every revision of every finding and incident, a line each.")
    ] = False,
) -> None:
    """Say what would be found in a recording today. Exit status 0, whatever is found."""
    (settings, _), recording = load_run_settings(config), Recording(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no folder; a recording is a folder of NUMBER.parquet files")
    found = replayed(recording, settings)
    if json:
        for one in found:
            typer.echo(dumps(one))
    else:
        Console().print(table(found))
    for refused in recording.refused:
        say(f"passed over: {printable(str(refused))}")


def table(found: Iterable[Finding | Incident]) -> Table:
    """The last revision of each incident."""
    last = {one.id: one for one in found if isinstance(one, Incident)}
    shown = Table("job", "tier", "state", "kind", "what", box=None, pad_edge=False)
    for one in last.values():
        shown.add_row(*(printable(str(word)) for word in (one.job, one.tier.name, one.state, one.kind, one.reason)))
    if not last:
        shown.add_row("", "", "", "", "nothing was found")
    return shown


def size_bytes(text: str) -> int:
    """Bytes of a size with its unit. Raises ConfigError.

    >>> size_bytes("64MiB")
    67108864
    """
    found = re.fullmatch(r"(\d{1,12}) ?(KiB|MiB|GiB)?", text)
    if found is None or (size := int(found[1]) * _UNITS[found[2] or ""]) < 1 << 20:
        raise ConfigError(f"--size: need at least 1MiB, as a number and KiB, MiB or GiB, got {text!r}")
    return size
