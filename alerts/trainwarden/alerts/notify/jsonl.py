"""Notices as a file: one line of strict JSON each, on the disk before it counts as said, and never twice.

The file is its own memory: which keys it holds is read from it, also what another process wrote meanwhile (appends are
taken in turns by a file lock). A line that a crash or a full disk cut short is cut off again before the next one.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

from trainwarden.core.errors import DeliveryError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Json, Notice, Subject

RETRY_AFTER_S = 5.0
"""A disk that is full now will be for a while."""


class JsonLines:
    """The notifier of channel `jsonl`."""

    channel = "jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: set[str] = set()
        self._read_bytes = 0
        """How far the file is known."""

    def notify(self, notice: Notice) -> str:
        """Append it, unless the file has its key. Raises DeliveryError."""
        line = json.dumps(in_json(notice), allow_nan=False, sort_keys=True, separators=(",", ":")) + "\n"
        try:
            with self._locked() as file:
                self._catch_up(file)
                if notice.key not in self._keys:
                    self._append(file, line.encode())
                    self._keys.add(notice.key)
        except OSError as error:
            why = f"{self._path}: {error.strerror or error}"
            raise DeliveryError(f"jsonl: {why}", retryable=True, retry_after_s=RETRY_AFTER_S) from error
        return f"{self._path}: {notice.key}"

    def holds(self, key: str) -> bool:
        """Whether the file has this key: then it was said, in this life or an earlier one."""
        try:
            with self._locked() as file:
                self._catch_up(file)
        except OSError:
            return False
        return key in self._keys

    @contextmanager
    def _locked(self) -> Iterator[int]:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _catch_up(self, file: int) -> None:
        """Read what is new; mend a torn end."""
        size = os.fstat(file).st_size
        if size < self._read_bytes:  # somebody made it shorter: all is new
            self._keys, self._read_bytes = set(), 0
        new = _read(file, self._read_bytes, size - self._read_bytes)
        whole, newline, torn = new.rpartition(b"\n")
        self._keys |= {key for line in whole.splitlines() if (key := _key(line))}
        self._read_bytes += len(whole) + len(newline)
        if torn:
            os.ftruncate(file, self._read_bytes)

    def _append(self, file: int, line: bytes) -> None:
        """All of the line or nothing of it."""
        try:
            rest = line
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except OSError:
            os.ftruncate(file, self._read_bytes)
            raise
        self._read_bytes += len(line)


def _read(file: int, offset: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(file, min(size, 1 << 24), offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def _key(line: bytes) -> str:
    """The key of a line; empty for one that is none of ours."""
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    key = found.get("key") if isinstance(found, dict) else None
    return key if isinstance(key, str) else ""


def in_json(notice: Notice) -> Mapping[str, Json]:
    """A notice as plain JSON: tiers by name, subjects as `rank:3`, and the runbook page of the kind."""
    incident = notice.incident
    runbook = KINDS[incident.kind].runbook if incident.kind in KINDS else ""
    return {
        "key": notice.key,
        "channel": notice.channel,
        "change": notice.change,
        "runbook": runbook,
        "incident": plain(incident),
    }


def plain(thing: object) -> Json:
    """Any word of the model as JSON that needs no knowledge of ours to read.

    >>> plain((Subject(kind="rank", id="3"), float("nan")))
    ['rank:3', 'NaN']
    """
    if isinstance(thing, Subject):
        return str(thing)
    if isinstance(thing, Enum):
        return thing.name
    if isinstance(thing, float) and not math.isfinite(thing):
        return "NaN" if math.isnan(thing) else "Infinity" if thing > 0 else "-Infinity"
    if thing is None or isinstance(thing, str | int | float):
        return thing
    if is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: plain(getattr(thing, field.name)) for field in fields(thing)}
    if isinstance(thing, Mapping):
        return {str(key): plain(value) for key, value in thing.items()}
    assert isinstance(thing, Sequence), f"{type(thing).__name__} is no word of the model"
    return [plain(item) for item in thing]
