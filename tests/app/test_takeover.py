"""A file a term: what the successor gets, and that the one before it has nothing to do with it any more."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from trainwarden.app.takeover import files, take_over
from trainwarden.core.errors import StoreError


def write(path: Path, *values: int) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS one(value)")
        database.executemany("INSERT INTO one VALUES (?)", [(value,) for value in values])


def read(path: Path) -> Sequence[int]:
    with closing(sqlite3.connect(path)) as database:
        return [value for (value,) in database.execute("SELECT value FROM one")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_first_term_begins_an_empty_file_that_is_nobody_elses(tmp_path: Path) -> None:
    path = take_over(tmp_path, 1)
    assert path.name == "durable-1.sqlite"
    assert path.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_a_later_term_has_what_the_newest_before_it_wrote_and_the_others_are_gone(tmp_path: Path) -> None:
    write(take_over(tmp_path, 1), 1)
    write(take_over(tmp_path, 4), 4)
    write(tmp_path / "durable-3.sqlite", 3)  # an owner of term 3 that woke up
    path = take_over(tmp_path, 12)
    assert read(path) == [1, 4]
    assert names(tmp_path) == ["durable-12.sqlite"]


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """An owner in the middle of a transaction: it has the lock, and what it wrote last is in the log only."""
    path = take_over(tmp_path, 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("CREATE TABLE one(value)")
        database.execute("INSERT INTO one VALUES (1)")
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO one VALUES (2)")
        yield database


def test_a_frozen_owner_holds_up_nobody_and_reaches_nobody(tmp_path: Path, frozen: sqlite3.Connection) -> None:
    path = take_over(tmp_path, 2)
    assert read(path) == [1], "what it had written down, and no more"
    frozen.execute("COMMIT")
    frozen.execute("INSERT INTO one VALUES (3)")
    assert read(path) == [1]
    assert read(take_over(tmp_path, 3)) == [1]


def test_files_of_this_term_or_a_later_one_are_of_an_owner_whose_journal_was_moved_away(tmp_path: Path) -> None:
    write(tmp_path / "durable-1.sqlite", 1)
    write(tmp_path / "durable-7.sqlite", 7)
    (tmp_path / "durable-1.sqlite-wal").write_bytes(b"not of the new file")
    path = take_over(tmp_path, 1)
    assert names(tmp_path) == ["durable-1.sqlite"]
    write(path, 8)
    assert read(path) == [8]


def test_a_take_over_that_was_interrupted_is_done_again(tmp_path: Path) -> None:
    write(take_over(tmp_path, 1), 1)
    (tmp_path / "durable.new").write_bytes(b"half a copy")
    assert read(take_over(tmp_path, 2)) == [1]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("journal.sqlite", "durable-x.sqlite", "durable-01.sqlite", "durable-2.sqlite.bak"):
        (tmp_path / name).touch()
    take_over(tmp_path, 9)
    assert len(names(tmp_path)) == 5
    assert files(tmp_path) == {9: tmp_path / "durable-9.sqlite"}


def test_what_cannot_be_taken_over_is_told(tmp_path: Path) -> None:
    (tmp_path / "durable-1.sqlite").write_bytes(b"x" * 4096)
    with pytest.raises(StoreError, match="what plans wrote down cannot be taken over: file is not a database"):
        take_over(tmp_path, 2)
    assert (tmp_path / "durable-1.sqlite").exists()
