"""The `trainwarden` command. Imports the standard library only: without the extras it says what to install."""

import sys
from importlib.util import find_spec

from trainwarden.core.version import __version__

NEEDED = ("dbos", "httpx", "numpy", "pyarrow", "pydantic", "rich", "typer", "yaml")
"""What the extra `agent` brings and every command needs."""


def main() -> None:
    """Run the command line; exit status 2 when an extra is missing."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"trainwarden {__version__}\n")
        return
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"trainwarden: {', '.join(missing)} not installed: only the rank collector works without extras.\n"
            "Install the command's own: pip install 'trainwarden[agent]'\n"
        )
        sys.exit(2)
    from trainwarden.app.cli.commands import run_commands

    run_commands()
