"""The file that plans are written down in: each term of the job's owner has its own, begun as a copy of the last.

So an owner that was frozen and wakes up goes on writing where nobody reads, takes up nothing of its successor's, and
holds no lock that its successor needs.
"""

import os
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from trainwarden.core.errors import StoreError

_NAME = re.compile(r"durable-([1-9][0-9]*)\.sqlite")


def files(folder: Path) -> Mapping[int, Path]:
    """The files there are, by term."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in named if match is not None}


def take_over(folder: Path, term: int) -> Path:
    """This term's file, with all that the newest term before it wrote; the others are gone then. Raises StoreError.

    Called once a term. A file of this term or a later one is of an owner whose journal was moved away: not ours.
    """
    mine, draft, there = folder / f"durable-{term}.sqlite", folder / "durable.new", files(folder)
    try:
        _remove(draft)
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        if earlier := [one for one in there if one < term]:
            with closing(sqlite3.connect(there[max(earlier)])) as old:
                old.execute("VACUUM INTO ?", (str(draft),))
        with closing(sqlite3.connect(draft)) as new:  # in rollback mode a writer would keep all readers out
            new.execute("PRAGMA journal_mode = WAL")
        _sync(draft)
        _remove(mine)
        draft.rename(mine)
        _sync(folder)
        for path in there.values():
            if path != mine:
                _remove(path)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{folder}: what plans wrote down cannot be taken over: {error}") from error
    return mine


def _remove(path: Path) -> None:
    """With what lies beside it: a log of another file would be taken for its own."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
