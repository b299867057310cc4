"""`trainwarden tokens`: who may send to a server. A running server takes a changed file up within seconds."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import typer

from trainwarden.core.auth import TokensConfig, change_tokens, hashed, new_token
from trainwarden.core.config import load
from trainwarden.core.errors import ConfigError

Kind = Literal["node", "job", "observe", "approve", "act"]

tokens = typer.Typer(no_args_is_help=True, help="Make, list and revoke the tokens that a server takes.")

SECTIONS: Final[Mapping[Kind, str]] = {
    "node": "agents",
    "job": "jobs",
    **{scope: scope for scope in get_args(Kind)[2:]},
}
"""Kind -> its section of the file; observe, approve and act are scopes of a person's commands."""
NAME_MAX: Final = 128
HINT_DIGITS: Final = 8
"""Of a hash that are shown, to tell tokens apart."""

File = Annotated[Path, typer.Option("--tokens", help="The server's file of tokens; only hashes stand in it.")]
OfKind = Annotated[Kind, typer.Argument(help="What the token stands for: a node, a job, or a person's scope.")]
Name = Annotated[str, typer.Argument(help="Name of the node, job or person.")]


@tokens.command()
def add(
    kind: OfKind,
    name: Name,
    file: File,
    out: Annotated[Path | None, typer.Option(help="New file for the token (0600); none: it is printed, once.")] = None,
    replaced: Annotated[bool, typer.Option("--replace", help="The token that it had ends.")] = False,
) -> None:
    """Make a token. The file keeps its hash; nobody can read the token from there again."""
    token = new_token()

    def enter(told: dict[str, str]) -> None:
        if name in told and not replaced:
            raise ConfigError(f"NAME: {kind} {name} has a token already: --replace ends it, or revoke it first")
        if out is not None:
            _write(out, token)
        told[name] = hashed(token)

    if not name.isprintable() or not 0 < len(name.strip()) == len(name) <= NAME_MAX:
        raise ConfigError(f"NAME: need 1 to {NAME_MAX} characters, no spaces around them, got {name[:NAME_MAX]!a}")
    _change(file, kind, enter)
    typer.echo(token if out is None else f"the token of {kind} {name} is in {out}")


@tokens.command("list")
def list_all(file: File) -> None:
    """Every token: kind, name, and the first digits of its hash."""
    config = load(file, {"tokens": TokensConfig})["tokens"]
    for kind, section in SECTIONS.items():
        for name, token in sorted(getattr(config, section).items()):
            typer.echo(f"{kind:8} {name:32} {token.partition(':')[2][:HINT_DIGITS]}")


@tokens.command()
def revoke(kind: OfKind, name: Name, file: File) -> None:
    """End a token. Connections that came with it are closed."""

    def strike(told: dict[str, str]) -> None:
        if told.pop(name, None) is None:
            raise ConfigError(f"NAME: need a {kind} with a token, as list shows them, got {name[:NAME_MAX]!a}")

    _change(file, kind, strike)
    typer.echo(f"the token of {kind} {name} is revoked")


def _change(file: Path, kind: Kind, edit: Callable[[dict[str, str]], None]) -> None:
    def change(config: TokensConfig) -> TokensConfig:
        told = dict(getattr(config, SECTIONS[kind]))
        edit(told)
        return replace(config, **{SECTIONS[kind]: told})

    change_tokens(file, change)


def _write(path: Path, token: str) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(f"--out: cannot make {path}: {error.strerror or error}") from error
