"""Where the checkpoints of one job stand: data fenced by attempt, so that a process of an old one changes nothing.

staging/<epoch>/step-<k>/     where the ranks of an attempt write; nothing below is ever selected
published/step-<k>-<epoch>/   came by one rename of the job's owner, its manifest in it
marks/<name>.json             what persons and verifications said: trust, pin, reasons
accepted/<attempt>.json       what an attempt had published when it was over; written before the next one starts
trash/                        on its way out
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainwarden.core.errors import ActionError, DataError
from trainwarden.core.sealed import read_sealed

LOCK_S = 2.0
"""A mark takes milliseconds, a pruning renames."""

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,18})")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,9})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """One job's."""

    root: Path

    @property
    def published(self) -> Path:
        return self.root / "published"

    @property
    def marks(self) -> Path:
        return self.root / "marks"

    @property
    def trash(self) -> Path:
        return self.root / "trash"

    def staging(self, epoch: int) -> Path:
        """Where the ranks of an epoch write; named by the attempt file."""
        return self.root / "staging" / str(epoch)

    def stage(self, epoch: int, step: int) -> Path:
        """Where they write the checkpoint of a step."""
        return self.staging(epoch) / f"step-{step}"

    def accepted(self, attempt: int) -> Path:
        """The record that an attempt is over."""
        return self.root / "accepted" / f"{attempt}.json"

    def make(self) -> None:
        """Create what is missing."""
        for name in ("staging", "published", "marks", "accepted", "trash"):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else of this host changes marks or removes checkpoints meanwhile. Raises ActionError."""
        self.marks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.marks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(descriptor, self.marks)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Not for ever: the holder may have been stopped."""
    end_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end_s:
                raise ActionError(f"{path}: held by another process for {LOCK_S:g} s", retryable=True) from error
        time.sleep(0.01)


def name_of(step: int, epoch: int) -> str:
    """A published checkpoint's name.

    >>> name_of(40, 1 << 32)
    'step-40-4294967296'
    """
    return f"step-{step}-{epoch}"


def order_of(name: str) -> tuple[int, int]:
    """(epoch, step) of a name, which is the order of age: a later attempt may have gone back to an earlier step.

    >>> order_of("step-40-4294967296"), order_of("step-40.tmp")
    ((4294967296, 40), (-1, -1))
    """
    found = _NAME.fullmatch(name)
    return (-1, -1) if found is None else (int(found[2]), int(found[1]))


def staged_steps(folder: Path) -> list[int]:
    """Steps that are (being) staged in an epoch's folder."""
    return sorted(int(found[1]) for name in names_in(folder) if (found := _STEP.fullmatch(name)))


def numbers_in(folder: Path) -> list[int]:
    """Entries that are named by a number (and `.json`): epochs or attempts."""
    return sorted(int(stem) for name in names_in(folder) if _NUMBER.fullmatch(stem := name.removesuffix(".json")))


def names_in(folder: Path) -> list[str]:
    """Every entry; a folder that is not there has none."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def accepted_names(folder: CheckpointFolder, attempt: int) -> frozenset[str] | None:
    """What was accepted from an attempt; None: it is not over. Raises DataError."""
    path = folder.accepted(attempt)
    if not path.exists():
        return None
    found = read_sealed(path)
    if found.whole("attempt") != attempt:
        found.refuse("attempt", f"{attempt}, as the file's name says", found.take("attempt"))
    names = found.take("names")
    if type(names) is not list or not all(type(name) is str for name in names):
        found.refuse("names", "a list of names", names)
    return frozenset(names)


def regular_files(folder: Path) -> frozenset[str]:
    """Names of all files below. Raises DataError for anything that is neither a file nor a folder, OSError."""
    if folder.is_symlink() or not folder.is_dir():
        raise DataError(f"{folder}: not a folder")
    names, todo = [], [""]
    while todo:
        below = todo.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    todo.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    names.append(name)
                else:
                    what = "a symbolic link" if entry.is_symlink() else "neither a file nor a folder"
                    raise DataError(f"{folder / name}: {what}")
    return frozenset(names)
