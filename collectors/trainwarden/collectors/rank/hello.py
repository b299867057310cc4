"""The hello file: who this rank is, as JSON, for the agent. Written when a rank attaches, at each new lap, and again
when the rank finds that something about it cannot be told.
"""

import contextlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwarden.collectors.rank.ring import Ring
from trainwarden.collectors.rank.say import say
from trainwarden.core.identity import Identity, Process
from trainwarden.core.version import __version__


class Hello:
    """The hellos of one recorder: called with a lap, it writes that lap's. Failures are counted and said once."""

    def __init__(self, folder: Path, me: Identity, process: Process, ring: Ring, clock: str) -> None:
        self._folder, self._me, self._process, self._ring, self._clock = folder, me, process, ring, clock
        self._hidden: list[str] = []

    def __call__(self, lap: int) -> None:
        try:
            path = self._folder / f"rank-{self._me.rank}-{self._me.attempt}-{self._me.restart}-{lap}.json"
            _write(path, self._data(lap), self._process.pid)
        except OSError as error:
            self._ring.count("errors")
            say("no hello", f"no hello of this rank: {error}")

    def hides(self, lap: int, *what: str) -> None:
        """What of this rank cannot be told: names of signals, and sentences that say why. Written again if new."""
        new = [word for word in dict.fromkeys(what) if word not in self._hidden]
        if new:
            self._hidden += new
            self(lap)

    def timed_by_device(self, lap: int) -> None:
        """Phases are timed by the device from now on. Written again."""
        self._clock = "device"
        self(lap)

    def _blind(self) -> list[str]:
        by_clock = ["own_work"] if self._clock == "wall" else []  # it says little on a busy CPU, and less of a device
        return [*dict.fromkeys(by_clock + self._hidden)]

    def _data(self, lap: int) -> Mapping[str, Any]:
        """The data of event `hello` (core/kinds.py)."""
        me, process = self._me, self._process
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
            "ring": str(self._ring.path),
            "clock": self._clock,
            "blind": self._blind(),
            "attempt": me.attempt,
            "restart": me.restart,
            "lap": lap,
            "versions": _versions(),
        }


def _write(path: Path, data: Mapping[str, Any], pid: int) -> None:
    """Write it in an existing private folder; whoever sees it sees all of it. Raises OSError."""
    draft = path.with_name(f".{path.name}.{pid}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(data, file)
        draft.rename(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def _versions() -> Mapping[str, str]:
    torch = getattr(sys.modules.get("torch"), "__version__", None)
    found = {"python": platform.python_version(), "trainwarden": __version__}
    return found if torch is None else {**found, "torch": str(torch)}
