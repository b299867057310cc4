"""The only home of subprocess: commands with a deadline, and long-lived children (an import test bans it elsewhere)."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainwarden.core.errors import ChildError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended; code as Popen gives it (negative: signal)."""

    code: int
    out: str
    err: str


def run(command: Sequence[str], *, deadline_s: float, env: Mapping[str, str] | None = None) -> Ran:
    """Run a command to its end. Raises ChildError if it cannot start or overruns (it is then killed)."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"{command[0]}: no answer within {deadline_s:g} s, killed") from error
    except OSError as error:
        raise ChildError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
    return Ran(code=done.returncode, out=done.stdout, err=done.stderr)


def spawn(
    command: Sequence[str],
    *,
    out: IO[bytes] | None = None,
    err: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    new_session: bool = True,
) -> "subprocess.Popen[bytes]":
    """Start a child with output to files (never to a pipe that could fill or break). Raises ChildError."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out if out is not None else subprocess.DEVNULL,
            stderr=err if err is not None else subprocess.DEVNULL,
            env=env,
            cwd=cwd,
            start_new_session=new_session,
        )
    except OSError as error:
        raise ChildError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
