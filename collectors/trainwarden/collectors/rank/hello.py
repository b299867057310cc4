"""The hello file: who this rank is, as JSON, for the agent. Written when a rank attaches and at each new lap."""

import contextlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwarden.core.identity import Identity, Process
from trainwarden.core.version import __version__


def write_hello(folder: Path, me: Identity, process: Process, ring: Path, *, clock: str, lap: int) -> None:
    """Write it in an existing private folder; whoever sees it sees all of it. Raises OSError."""
    path = folder / f"rank-{me.rank}-{me.attempt}-{me.restart}-{lap}.json"
    draft = folder / f".{path.name}.{process.pid}"
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(_data(me, process, ring, clock, lap), file)
        draft.rename(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def _data(me: Identity, process: Process, ring: Path, clock: str, lap: int) -> Mapping[str, Any]:
    """The data of event `hello` (core/kinds.py)."""
    return {
        "rank": me.rank,
        "world_size": me.world_size,
        "coords": dict(me.coords),
        "slot": me.slot,
        "device": me.device,
        "node": me.node,
        "pid": process.pid,
        "start_time": process.start_time,
        "uid": process.uid,
        "ring": str(ring),
        "clock": clock,
        "blind": [] if clock == "cpu" else ["own_work"],  # no device time yet: wall time says little on a busy CPU
        "attempt": me.attempt,
        "restart": me.restart,
        "lap": lap,
        "versions": _versions(),
    }


def _versions() -> Mapping[str, str]:
    torch = getattr(sys.modules.get("torch"), "__version__", None)
    found = {"python": platform.python_version(), "trainwarden": __version__}
    return found if torch is None else {**found, "torch": str(torch)}
