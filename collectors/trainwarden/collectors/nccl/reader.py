"""Starts the children that read dumps (columns.py) and hands on what they say, whatever becomes of them.

A dump that ends its child (too much time or memory, a crash of the interpreter) is refused, and a new child goes on
with the next one. Where a file system does not answer, what is left of that child's files is refused too.
"""

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGPROF
from typing import Any, Final

from trainwarden.collectors.nccl.columns import HEAD
from trainwarden.core.child import spawn
from trainwarden.core.errors import ChildError, ConfigError
from trainwarden.core.process import signal_name

FILES_A_CHILD: Final = 32
"""A child costs 25 ms to start, and what it says is kept until it ends: 4 MB for 32 dumps of 2,000 entries."""

GONE_S: Final = 1.0
"""A killed child is gone in ms, or hangs in a file system and cannot be waited for."""

_PROGRAM: Final = (
    f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); "
    "from trainwarden.collectors.nccl.columns import main; main()"
)
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH",)
"""All of ours that the child is given: an interpreter may need it to find its own library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpLimits:
    """What reading one dump may take."""

    max_bytes: int = 32 << 20
    """A larger file is refused. 2,000 entries with Python stacks take 0.3 MB, 200,000 take this."""

    memory_bytes: int = 512 << 20
    """Address space of the child: an entry of 160 bytes in the file is 2.2 kB as Python objects."""

    cpu: timedelta = timedelta(seconds=5)
    """Processor time of the child for one dump; 32 MiB take half a second."""

    answer: timedelta = timedelta(seconds=15)
    """Wall time for one dump; after that the file system is taken to hang."""

    children: int = 2
    """Children at a time, where there are more files than one child is given."""

    def __post_init__(self) -> None:
        for key in ("max_bytes", "memory_bytes", "children"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"collectors.dumps.limits.{key}: need a positive number, got {getattr(self, key)}")
        for key in ("cpu", "answer"):
            if getattr(self, key) < timedelta(milliseconds=100):
                raise ConfigError(f"collectors.dumps.limits.{key}: need at least 100ms, got {getattr(self, key)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a child said of one file: header and columns, or why it is not read."""

    path: str
    header: dict[str, Any]
    """As columns.columns() makes it."""
    columns: bytes
    why: str = ""
    """Not read: empty header, no columns."""


def read_columns(paths: Sequence[str], *, owner_uid: int, limits: DumpLimits) -> Iterator[Said]:
    """Of each file, in order. owner_uid: to whom they must belong; -1: to anybody."""
    chunks = [paths[at : at + FILES_A_CHILD] for at in range(0, len(paths), FILES_A_CHILD)]
    with ThreadPoolExecutor(max_workers=limits.children) as pool:
        for at in range(0, len(chunks), limits.children):  # not all at once: what nobody has taken yet is kept
            for said in pool.map(partial(_chunk, owner_uid, limits), chunks[at : at + limits.children]):
                yield from said


def _chunk(owner_uid: int, limits: DumpLimits, paths: Sequence[str]) -> list[Said]:
    said: list[Said] = []
    while len(said) < len(paths):
        why, goes_on = _ask(owner_uid, limits, paths[len(said) :], said)
        refused = paths[len(said) : len(said) + 1] if goes_on else paths[len(said) :]
        said += [Said(path=path, header={}, columns=b"", why=why) for path in refused]
    return said


def _ask(owner_uid: int, limits: DumpLimits, paths: Sequence[str], said: list[Said]) -> tuple[str, bool]:
    """Add what a child says until it ends: why it ended before the last file, and whether another one may do better."""
    numbers = (owner_uid, limits.max_bytes, limits.memory_bytes, round(limits.cpu.total_seconds() * 1000))
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, numbers), *paths]
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb", buffering=0):
        try:
            with os.fdopen(write_fd, "wb") as out:
                child = spawn(command, out=out, env=env)
        except ChildError as error:
            return str(error), False
        try:
            said += (_answer(read_fd, path, limits) for path in paths)
        except TimeoutError:
            return f"no answer within {limits.answer.total_seconds():g} s: does its file system hang?", False
        except EOFError:
            _wait(child.poll)
        finally:
            child.kill()
            _wait(child.poll)
    return _why_ended(child.poll(), limits), True


def _answer(fd: int, path: str, limits: DumpLimits) -> Said:
    """What is said of one file. Raises EOFError, TimeoutError."""
    end_s = time.monotonic() + limits.answer.total_seconds()
    header_bytes, column_bytes = HEAD.unpack(_take(fd, HEAD.size, end_s))
    header = json.loads(_take(fd, header_bytes, end_s))
    return Said(path=path, header=header, columns=_take(fd, column_bytes, end_s), why=header.get("why", ""))


def _take(fd: int, count: int, end_s: float) -> bytes:
    poll, taken = select.poll(), bytearray()
    poll.register(fd, select.POLLIN)
    while len(taken) < count:
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(fd, count - len(taken))
        if not part:
            raise EOFError
        taken += part
    return bytes(taken)


def _wait(poll: Callable[[], int | None]) -> None:
    end_s = time.monotonic() + GONE_S
    while poll() is None and time.monotonic() < end_s:
        time.sleep(0.001)


def _why_ended(code: int | None, limits: DumpLimits) -> str:
    if code == -SIGPROF:
        return f"hostile: takes more than {limits.cpu.total_seconds():g} s of processor time"
    said = f"by {signal_name(-code)}" if code is not None and code < 0 else f"with status {code}"
    return f"hostile or damaged: its reader ended {said}"
