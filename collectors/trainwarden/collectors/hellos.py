"""The hello files of one job on this host: who each rank is. Written by the job's user, so read with distrust."""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainwarden.collectors.blind import Blind
from trainwarden.collectors.folder import Folder
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import DataError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Epoch, Event, Subject
from trainwarden.core.records import epoch_of

FILE_NAME: Final = re.compile(r"rank-(\d{1,7})-(\d{1,5})-(\d{1,5})-(\d{1,5})\.json")
MAX_BYTES: Final = 1 << 16
_NUMBERED: Final = ("rank", "attempt", "restart", "lap")
_WHOLE: Final = (*_NUMBERED, "world_size", "pid", "start_time", "uid")
_TEXT: Final = ("slot", "device", "node", "ring", "clock")


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """A hello file by the numbers in its name, oldest first."""

    attempt: int
    restart: int
    lap: int
    rank: int
    name: str

    @property
    def generation(self) -> tuple[int, int]:
        """Which incarnation of the job it belongs to; larger is newer."""
        return self.attempt, self.restart


def _entry(key: tuple[str, int]) -> _Entry:
    found = FILE_NAME.fullmatch(key[0])
    assert found is not None
    rank, attempt, restart, lap = map(int, found.groups())
    return _Entry(attempt, restart, lap, rank, key[0])


class Hellos:
    """Follows one folder. Hellos of incarnations older than the newest one are not told."""

    def __init__(self, folder: Path, emit: Emitter, blind: Blind) -> None:
        self._folder, self._emit, self._blind = Folder(folder, FILE_NAME), emit, blind
        self._keys: frozenset[tuple[str, int]] = frozenset()

    def poll(self, now_ns: int) -> Iterator[Event]:
        """The new ones."""
        keys = self._folder.files(now_ns)
        if keys is self._keys:
            return
        new, self._keys = sorted(map(_entry, keys - self._keys)), keys
        newest = max((_entry(key).generation for key in keys), default=(0, 0))
        for entry in (entry for entry in new if entry.generation == newest):
            try:
                yield self._hello(entry, now_ns)
            except (OSError, ValueError) as error:
                yield from self._blind(f"{entry.name}: {error}", now_ns)

    def _hello(self, entry: _Entry, now_ns: int) -> Event:
        data, written_ns = _read(self._folder.path / entry.name, self._folder.owner_uid)
        _check(data)
        if any(data[name] != getattr(entry, name) for name in _NUMBERED):
            raise DataError("its numbers are not those of its name")
        told = {key: data[key] for key in KINDS["hello"].data}
        epoch = Epoch(epoch_of(entry.attempt, entry.restart, entry.lap))
        rank = Subject(kind="rank", id=str(entry.rank))
        return self._emit("hello", rank, now_ns=now_ns, data=told, t_ns=written_ns, epoch=epoch)


def _read(path: Path, owner_uid: int) -> tuple[Mapping[str, Any], int]:
    """The object in a file and when it was written. Raises OSError, ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise DataError("not a regular file")
        if found.st_uid != owner_uid:
            raise DataError(f"belongs to user {found.st_uid}, the job to user {owner_uid}")
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise DataError(f"more than {MAX_BYTES} bytes")
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise DataError("nested too deeply") from error
    if not isinstance(data, dict):
        raise DataError("no object")
    return data, found.st_mtime_ns


def _check(data: Mapping[str, Any]) -> None:
    """Raises DataError for a hello that lacks something or has it in the wrong form."""
    missing = [key for key in KINDS["hello"].data if key not in data]
    if missing:
        raise DataError(f"lacks {', '.join(missing)}")
    for key in _WHOLE:
        if type(data[key]) is not int or not 0 <= data[key] < 1 << 62:
            raise DataError(f"{key}: expected a whole number, got {data[key]!r:.40}")
    if data["pid"] >= 1 << 31:
        raise DataError(f"pid: no process has number {data['pid']}")
    for key in _TEXT:
        if not isinstance(data[key], str):
            raise DataError(f"{key}: expected text, got {data[key]!r:.40}")
    coords, blind, versions = data["coords"], data["blind"], data["versions"]
    if not isinstance(coords, dict) or any(type(place) is not int for place in coords.values()):
        raise DataError("coords: expected whole numbers by name")
    if not isinstance(blind, list) or not isinstance(versions, dict) or data["rank"] >= data["world_size"]:
        raise DataError("blind, versions or world_size is not what it should be")
