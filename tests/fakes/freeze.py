"""A supervisor that stands still, as one does whose machine swaps."""

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path

from trainwarden.core.process import read_stat

WITHIN_S = 30.0


def stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, which takes it a moment."""
    now = read_stat(pid)
    return now is not None and now.state == "T"


def freeze(pid: int, journal: Path) -> None:
    """Stop a process between two of its writes: stopped within one, it would lock the journal for everybody."""
    end_s = time.monotonic() + WITHIN_S
    while True:
        os.kill(pid, signal.SIGSTOP)
        while not stopped(pid):
            assert time.monotonic() < end_s, f"{pid} cannot be stopped"
        if _writable(journal):
            return
        os.kill(pid, signal.SIGCONT)
        assert time.monotonic() < end_s, f"{pid} holds {journal} whenever it is stopped"


def _writable(journal: Path) -> bool:
    with contextlib.closing(sqlite3.connect(journal, timeout=0, isolation_level=None)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as why:
            if why.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            return False
        database.execute("ROLLBACK")
        return True
