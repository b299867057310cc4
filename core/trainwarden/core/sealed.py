"""Small files that are whole or not there, and large ones measured, in folders that others can write to.

A sealed file is a JSON object whose last key is the digest of all that stands before it: an altered byte is noticed. It
comes into its folder by a rename, after it is on the disk. No symbolic link below the folder is followed, nothing
special is opened, no number is larger than 64 bits or not finite. Standard library only: ranks write sealed files.
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from trainwarden.core.errors import DataError

FORM = 1
"""Of all sealed files; a reader refuses a larger one."""

MAX_SEALED_BYTES = 1 << 27
"""A manifest of 100,000 ranks with 8 files each is about 90 MB; beyond is garbage."""

MAX_NAME_CHARS = 1024
_INT64_END = 1 << 63

_DRAFT = re.compile(r"\.[\w.-]+\.json\.\d+-\d+")
_SEAL = re.compile(rb'(sha256:[0-9a-f]{64})"\}\n')
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""NONBLOCK: the open of a named pipe must not wait for its writer."""

_WORDS = {errno.ENOENT: "missing", errno.ELOOP: "a symbolic link", errno.ENOTDIR: "not below a plain folder"}
"""Findings about the file; any other OSError is about the surroundings and goes up as it is."""


class Sealed:
    """The keys of one sealed file, each taken with what it must be; else DataError with file, key, value, expected."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path, self._content = path, content

    def refuse(self, key: str, expected: str, got: object) -> NoReturn:
        """The value of this key is not what it must be."""
        shown = ascii(got)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise DataError(f"{self._path}: {key}: expected {expected}, got {shown}")

    def take(self, key: str) -> Any:
        """Any JSON."""
        if key not in self._content:
            raise DataError(f"{self._path}: {key}: missing")
        return self._content[key]

    def whole(self, key: str, end: int = _INT64_END) -> int:
        """A whole number before `end`, not negative."""
        value = self.take(key)
        if type(value) is not int or not 0 <= value < end:
            self.refuse(key, f"a whole number from 0 to {end - 1}", value)
        return value

    def number(self, key: str) -> float | None:
        """A finite number (others are never read) or null."""
        value = self.take(key)
        if value is not None and type(value) not in (int, float):
            self.refuse(key, "a finite number or null", value)
        return None if value is None else float(value)

    def text(self, key: str) -> str:
        """Text."""
        value = self.take(key)
        if type(value) is not str:
            self.refuse(key, "text", value)
        return value

    def truth(self, key: str) -> bool:
        """True or false."""
        value = self.take(key)
        if type(value) is not bool:
            self.refuse(key, "true or false", value)
        return value

    def table(self, key: str) -> dict[str, Any]:
        """An object of any JSON."""
        value = self.take(key)
        if type(value) is not dict:
            self.refuse(key, "a table", value)
        return value


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Put a JSON object in place: whoever sees the file sees all of it, also after a power cut. DataError, OSError."""
    try:
        body = json.dumps({**content, "form": FORM}, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be told in JSON: {error}") from error
    sealed = f'{body[:-1]},"seal":"{_digest(body.encode())}"}}\n'.encode()
    if len(sealed) > MAX_SEALED_BYTES:
        raise DataError(f"{path}: {len(sealed)} bytes, at most {MAX_SEALED_BYTES} are allowed")
    draft = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_sealed(path: Path) -> Sealed:
    """What `write_sealed` wrote. Raises DataError, OSError."""
    with _opened(path.parent, path.name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_SEALED_BYTES:
            raise DataError(f"{path}: {size} bytes, at most {MAX_SEALED_BYTES} are allowed")
        raw = file.readall()
    body, _, end = raw.rpartition(b',"seal":"')
    seal = _SEAL.fullmatch(end)
    if seal is None:
        raise DataError(f"{path}: torn: expected a seal at its end, got {end[-60:]!r}")
    if seal[1].decode() != _digest(body + b"}"):
        raise DataError(f"{path}: altered: its seal is that of other bytes")
    found = Sealed(path, _parsed(path, body + b"}"))
    if found.whole("form") != FORM:
        found.refuse("form", f"{FORM} (a newer trainwarden wrote it: upgrade this one)", found.take("form"))
    return found


def is_draft(name: str) -> bool:
    """Whether a file of this name was left behind by a writer of a sealed file that was killed."""
    return _DRAFT.fullmatch(name) is not None


def measure(folder: Path, name: str, *, sync: bool = False) -> tuple[int, str]:
    """Length and digest of a regular file below folder, read to its end.

    sync: force it to the disk as well. Raises DataError for what the file is, OSError for what the surroundings are.
    """
    with _opened(folder, name) as file:
        digest = hashlib.file_digest(file, "sha256")
        if sync:
            os.fsync(file.fileno())
        return file.tell(), f"sha256:{digest.hexdigest()}"


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk."""
    folder = os.open(path, _FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_safe(name: str) -> bool:
    """Whether a name stays below its folder and can be shown.

    >>> [is_safe(name) for name in ("__0_0.distcp", "a/b", "../a", "/a", "a//b", ".", "a\\x1b")]
    [True, True, False, False, False, False, False]
    """
    parts = name.split("/")
    return len(name) <= MAX_NAME_CHARS and name.isprintable() and not any(part in ("", ".", "..") for part in parts)


def _parsed(path: Path, body: bytes) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(body, parse_int=_int64, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    return content  # an object, since it ends in its bracket


def _int64(text: str) -> int:
    value = int(text) if len(text) <= 20 else _INT64_END
    if not -_INT64_END <= value < _INT64_END:
        raise ValueError(f"a number beyond 64 bits: {text[:20]}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number that is not finite: {text[:20]}")
    return value


def _digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _opened(folder: Path, name: str) -> FileIO:
    try:
        descriptor = _descend(folder, name)
    except OSError as error:
        if error.errno not in _WORDS:
            raise
        raise DataError(f"{folder / name}: {_WORDS[error.errno]}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{folder / name}: not a regular file")
    return FileIO(descriptor)


def _descend(folder: Path, name: str) -> int:
    """Open folder by folder, so that none on the way is a symbolic link."""
    *parents, last = name.split("/")
    here = os.open(folder, _FOLDER)
    try:
        for part in parents:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        return os.open(last, _FILE, dir_fd=here)
    finally:
        os.close(here)
