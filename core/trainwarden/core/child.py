"""The only home of subprocess: commands with a deadline, and long-lived children (an import test bans it elsewhere)."""

import contextlib
import os
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


class Talker:
    """A child that answers lines with lines. Nothing here waits: what it has not said yet is not there, and a child
    that cannot be killed (state D) costs its two pipes no more."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises ChildError."""
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._to, self._from = self._child.stdin, self._child.stdout
        for pipe in (self._to, self._from):
            os.set_blocking(pipe.fileno(), False)
        self._rest = b""

    @property
    def pid(self) -> int:
        """The child's."""
        return self._child.pid

    @property
    def code(self) -> int | None:
        """How it ended, as Popen gives it; None: it lives. A dead child is reaped by asking."""
        return self._child.poll()

    def ask(self, line: bytes) -> None:
        """Send one short line; a child that is gone or does not read any more shows in `code` and by its silence."""
        with contextlib.suppress(OSError):
            self._to.write(line + b"\n")

    def lines(self, at_most_bytes: int = 1 << 20) -> list[bytes]:
        """Whole lines said since the last call. Raises ChildError for a line without end."""
        said = self._rest
        while len(said) < at_most_bytes and (part := self._from.read(1 << 16)):
            said += part
        *whole, self._rest = said.split(b"\n")
        if len(self._rest) >= at_most_bytes:
            raise ChildError(f"child {self.pid}: a line of more than {at_most_bytes} bytes")
        return whole

    def kill(self) -> None:
        """SIGKILL, once, without waiting for the end: `code` tells it."""
        self._child.kill()  # first: at the end of its input it might end by itself, in order
        self._to.close()
        self._from.close()

    def wait(self, limit_s: float) -> bool:
        """Whether it ended within the limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(limit_s)
        return self._child.returncode is not None
