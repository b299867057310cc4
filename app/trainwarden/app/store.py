"""The one durable store of a job: what was decided on (journal), where machines stood (snapshots), who owns the job.

SQLite in write-ahead mode, every commit on the disk before it returns (synchronous=FULL). Such a file on a network file
system is refused: its locks and shared memory do not hold between hosts, and two owners of one job would be the result
(https://www.sqlite.org/wal.html, "Overview": all processes must be on the same host).
"""

import io
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import numpy as np

from trainwarden.app.mounts import MOUNTINFO, mount_of
from trainwarden.core.errors import FencedError, OwnedError, StoreError
from trainwarden.core.model import JobId, State
from trainwarden.core.process import ProcessId, alive

LEASE_NS = 5_000_000_000
"""An owner that lives and has not renewed for this long is frozen and may be replaced (architecture, section 6)."""

BUSY = timedelta(seconds=2)
"""How long another writer is waited for: an owner's renewal or a claim holds the lock for milliseconds."""

_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS journal(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, seen_ns INTEGER NOT NULL, json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot(
    machine TEXT PRIMARY KEY, seq INTEGER NOT NULL, json TEXT NOT NULL, npz BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS owner(
    job TEXT PRIMARY KEY, term INTEGER NOT NULL, holder_pid INTEGER NOT NULL, holder_start INTEGER NOT NULL,
    expires_ns INTEGER NOT NULL);
"""

_NOBODY = 0
"""holder_pid of a job that was released; its row stays, so that terms only grow."""


Fence: TypeAlias = tuple[JobId, int]
"""A job and the term in which it is ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stimulus as the journal has it."""

    key: str
    seen_ns: int
    text: str
    seq: int = 0
    """Its place; given by the journal."""


class Store:
    """The journal's database. Every method raises StoreError when it cannot do its work."""

    def __init__(self, path: Path, *, busy: timedelta = BUSY, mountinfo: Path = MOUNTINFO) -> None:
        self._path, self._busy_s = path, busy.total_seconds()
        self._lock = threading.Lock()
        _refuse_network(path, mountinfo)
        with self._words():
            self._database = _opened(path, self._busy_s)
        self._check_version()

    def append(self, key: str, seen_ns: int, text: str) -> bool:
        """Write down one stimulus. False: its key is there already."""
        return self.append_all([Row(key=key, seen_ns=seen_ns, text=text)])[0]

    def append_all(self, rows: Sequence[Row], fence: Fence | None = None) -> list[bool]:
        """Write down several at once, all or none of them (one wait for the disk instead of many).

        With a fence: only while the job is ours, else FencedError. A frozen owner that wakes up writes nothing.
        """
        with self._changing() as database:
            if fence is not None:
                _check(database, *fence)
            return [_insert(database, row) for row in rows]

    def tail(self, after_seq: int = 0) -> Iterator[Row]:
        """What was written down after this place, in order."""
        while rows := self._page(after_seq):
            yield from rows
            after_seq = rows[-1].seq

    def last_seq(self) -> int:
        """The place of the newest row; 0: there is none."""
        with self._reading() as database:
            return int(database.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()[0])

    def save_snapshot(self, seq: int, machine: str, state: State) -> None:
        """Remember where a machine stood after the row at this place."""
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in state.items() if name not in arrays}
        packed = io.BytesIO()
        np.savez(packed, allow_pickle=False, **arrays)
        text = json.dumps(plain, allow_nan=False, sort_keys=True, separators=(",", ":"))
        with self._changing() as database:
            database.execute("REPLACE INTO snapshot VALUES (?, ?, ?, ?)", (machine, seq, text, packed.getvalue()))

    def load_snapshot(self, machine: str) -> tuple[int, State] | None:
        """Where a machine stood last, and after which row."""
        with self._reading() as database:
            row = database.execute("SELECT seq, json, npz FROM snapshot WHERE machine = ?", (machine,)).fetchone()
        if row is None:
            return None
        with np.load(io.BytesIO(row[2]), allow_pickle=False) as arrays:
            return int(row[0]), {**json.loads(row[1]), **dict(arrays)}

    def claim(self, job: JobId, pid: int, start: int, now_ns: int) -> int:
        """Become the owner of a job and get a new term. Raises OwnedError while another one lives and renews."""
        with self._changing() as database:
            row = database.execute(
                "SELECT term, holder_pid, holder_start, expires_ns FROM owner WHERE job = ?", (job,)
            ).fetchone()
            if row is not None and _holds(row, now_ns):
                raise OwnedError(f"job {job} is owned by process {row[1]} (term {row[0]}), which is alive")
            term = 1 if row is None else int(row[0]) + 1
            owner = (job, term, pid, start, now_ns + LEASE_NS)
            database.execute("REPLACE INTO owner VALUES (?, ?, ?, ?, ?)", owner)
        return term

    def renew(self, job: JobId, term: int, now_ns: int) -> None:
        """Stay the owner for another lease. Raises FencedError."""
        with self._changing() as database:
            done = database.execute(
                "UPDATE owner SET expires_ns = ? WHERE job = ? AND term = ? AND holder_pid <> ?",
                (now_ns + LEASE_NS, job, term, _NOBODY),
            )
            if done.rowcount != 1:
                raise _fenced(job, term)

    def check(self, job: JobId, term: int) -> None:
        """Raises FencedError unless the job is still ours."""
        with self._reading() as database:
            _check(database, job, term)

    def release(self, job: JobId, term: int) -> None:
        """Let the job go, if it is still ours."""
        with self._changing() as database:
            database.execute(
                "UPDATE owner SET holder_pid = ?, holder_start = 0, expires_ns = 0 WHERE job = ? AND term = ?",
                (_NOBODY, job, term),
            )

    def close(self) -> None:
        """Close the file; the store is not used after that."""
        with self._lock, self._words():
            self._database.close()

    def _page(self, after_seq: int) -> list[Row]:
        with self._reading() as database:
            found = database.execute(
                "SELECT seq, key, seen_ns, json FROM journal WHERE seq > ? ORDER BY seq LIMIT 1000", (after_seq,)
            ).fetchall()
        return [Row(seq=seq, key=key, seen_ns=seen_ns, text=text) for seq, key, seen_ns, text in found]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._words():
            yield self._database

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that has the write lock from its beginning: what it reads stays true until it commits."""
        with self._lock, self._words():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(_say(self._path, error)) from error
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror or error}") from error

    def _check_version(self) -> None:
        with self._reading() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            self.close()
            raise StoreError(f"{self._path}: written by a newer trainwarden (layout {version}): upgrade this one")


def _opened(path: Path, busy_s: float) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # only if new: closing a descriptor of an open database would drop its locks
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    database = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _use_write_ahead(database, busy_s)
        database.execute("PRAGMA synchronous = FULL")
        if database.execute("PRAGMA user_version").fetchone()[0] == 0:
            database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
    except BaseException:
        database.close()
        raise
    return database


def _use_write_ahead(database: sqlite3.Connection, busy_s: float) -> None:
    """Of several that open a new file at once, one switches; the others are told `busy`, whatever the timeout."""
    deadline = time.monotonic() + busy_s
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _refuse_network(path: Path, mountinfo: Path) -> None:
    mount = mount_of(path, mountinfo)
    if mount is not None and mount.is_network:
        raise StoreError(
            f"{path} lies on {mount.point} ({mount.kind}, {mount.source}), a network file system: the journal and "
            "the job's owner need a disk of this node; name one with --state or $TRAINWARDEN_STATE"
        )


def _holds(row: tuple[int, int, int, int], now_ns: int) -> bool:
    """Whether the holder of an owner row is alive and not frozen."""
    _, pid, start, expires_ns = row
    return pid != _NOBODY and now_ns < expires_ns and alive(ProcessId(pid=pid, start_time=start))


def _insert(database: sqlite3.Connection, row: Row) -> bool:
    done = database.execute(
        "INSERT OR IGNORE INTO journal(key, seen_ns, json) VALUES (?, ?, ?)", (row.key, row.seen_ns, row.text)
    )
    return done.rowcount == 1


def _check(database: sqlite3.Connection, job: JobId, term: int) -> None:
    row = database.execute("SELECT term, holder_pid FROM owner WHERE job = ?", (job,)).fetchone()
    if row is None or row[0] != term or row[1] == _NOBODY:
        raise _fenced(job, term)


def _fenced(job: JobId, term: int) -> FencedError:
    return FencedError(f"job {job} is not ours any more: our term {term} is over")


_ADVICE: Mapping[int, str] = {
    sqlite3.SQLITE_FULL: "no space left: free some",
    sqlite3.SQLITE_IOERR: "the disk does not take it: see the kernel's log; a quota or file size limit shows so too",
    sqlite3.SQLITE_READONLY: "read-only: make it writable",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: make its folder writable",
    sqlite3.SQLITE_BUSY: "locked by another process for too long: end that one",
    sqlite3.SQLITE_LOCKED: "locked within this process",
    sqlite3.SQLITE_CORRUPT: "damaged: move it away (a new one is begun) and keep it for repair",
    sqlite3.SQLITE_NOTADB: "no journal of trainwarden: move it away (a new one is begun)",
}


def _say(path: Path, error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return f"{path}: {_ADVICE.get(code, 'cannot be used')} ({error})"
