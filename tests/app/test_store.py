"""The journal takes each key once and says in words what is wrong with its file; snapshots come back as they were."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from trainwarden.app.mounts import Mount, mount_of
from trainwarden.app.store import Row, Store
from trainwarden.core.errors import FencedError, StoreError
from trainwarden.core.model import JobId

JOB = JobId("train-3")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    one = Store(path)
    yield one
    one.close()


def row(number: int) -> Row:
    return Row(key=f"k{number}", seen_ns=number, text=f'{{"n":{number}}}')


def keys(store: Store, after_seq: int = 0) -> list[str]:
    return [one.key for one in store.tail(after_seq)]


def test_a_key_is_taken_once(store: Store) -> None:
    assert store.append("a", 1, "{}")
    assert not store.append("a", 2, "other")
    assert [(one.key, one.seen_ns, one.text) for one in store.tail()] == [("a", 1, "{}")]


def test_several_at_once_are_all_or_nothing_and_each_key_counts_once(store: Store) -> None:
    assert store.append_all([row(1), row(2), row(1)]) == [True, True, False]
    assert store.append_all([row(2), row(3)]) == [False, True]
    assert keys(store) == ["k1", "k2", "k3"]


def test_the_tail_goes_on_after_a_place_in_order(store: Store) -> None:
    store.append_all([row(number) for number in range(2500)])
    rows = list(store.tail())
    assert [one.key for one in rows] == [f"k{number}" for number in range(2500)]
    assert keys(store, rows[2399].seq) == [f"k{number}" for number in range(2400, 2500)]
    assert store.last_seq() == rows[-1].seq
    assert keys(store, store.last_seq()) == []


def test_it_is_all_there_after_a_restart(path: Path, store: Store) -> None:
    store.append("a", 1, "{}")
    again = Store(path)
    assert keys(again) == ["a"]
    assert not again.append("a", 1, "{}")
    again.close()


def test_only_its_owner_may_read_it(path: Path, store: Store) -> None:
    store.append("a", 1, "{}")
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700


# snapshots


def test_a_snapshot_comes_back_bit_by_bit(store: Store) -> None:
    state = {"numbers": np.arange(5, dtype=np.float32), "name": "x", "deep": [{"a": None}], "empty": np.zeros((0, 3))}
    store.save_snapshot(7, "line", state)
    store.save_snapshot(3, "other", {})
    saved = store.load_snapshot("line")
    assert saved is not None
    seq, back = saved
    assert (seq, back["name"], back["deep"]) == (7, "x", [{"a": None}])
    assert back["numbers"].dtype == np.float32
    np.testing.assert_array_equal(back["numbers"], state["numbers"])
    assert back["empty"].shape == (0, 3)
    assert store.load_snapshot("other") == (3, {})
    assert store.load_snapshot("nobody") is None


def test_the_newest_snapshot_counts(store: Store) -> None:
    store.save_snapshot(1, "m", {"n": 1})
    store.save_snapshot(2, "m", {"n": 2})
    assert store.load_snapshot("m") == (2, {"n": 2})


def test_what_is_neither_json_nor_array_is_no_state(store: Store) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.save_snapshot(1, "m", {"n": float("nan")})
    with pytest.raises(TypeError):
        store.save_snapshot(1, "m", {"n": object()})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        store.save_snapshot(1, "m", {"n": np.array([object()])})
    assert store.load_snapshot("m") is None


# what can be wrong with the file


def test_no_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is a letter to my mother" * 100)
    with pytest.raises(StoreError, match=r"journal\.sqlite: no journal of trainwarden: move it away"):
        Store(path)


def test_a_damaged_database(path: Path) -> None:
    store = Store(path)
    store.append_all([row(number) for number in range(500)])
    store.close()
    raw = bytearray(path.read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    path.write_bytes(raw)
    store = Store(path)
    with pytest.raises(StoreError, match="damaged: move it away"):
        keys(store)
    store.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"journal\.sqlite: Not a directory"):
        Store(tmp_path / "file" / "state" / "journal.sqlite")


def test_a_path_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(tmp_path)


def test_a_newer_layout(path: Path) -> None:
    Store(path).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match=r"newer trainwarden \(layout 99\): upgrade"):
        Store(path)


def test_locked_by_another_process(path: Path) -> None:
    store = Store(path, busy=timedelta(milliseconds=50))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked by another process for too long"):
        store.append("a", 1, "{}")
    other.execute("ROLLBACK")
    assert store.append("a", 1, "{}")
    other.close()
    store.close()


def test_closed(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match=r"cannot be used \(Cannot operate on a closed database"):
        store.append("a", 1, "{}")


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_told_and_loses_nothing(small_disk: Path) -> None:
    store = Store(small_disk / "journal.sqlite")
    store.append("first", 1, "{}")
    fill(small_disk / "filler")
    with pytest.raises(StoreError, match=r"no space left: free some|the disk does not take it"):
        store.append("second", 2, "x" * 8192)
    assert keys(store) == ["first"]
    (small_disk / "filler").unlink()
    assert store.append("second", 2, "x" * 8192)
    store.close()


# network file systems

LINES = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /home rw - nfs4 filer:/home rw
31 30 0:41 / /home/scratch rw - xfs /dev/sdb rw
32 22 0:42 / /my\040share rw shared:7 - lustre 10.0.0.1@o2ib:/fs rw
33 22 0:43 / /over rw - nfs old:/x rw
34 22 0:44 / /over rw - ext4 /dev/sdc rw
35 22 0:45 / /s3 rw - fuse.s3fs s3fs rw
36 22 0:46 / /fuse rw - fuse.fuse-overlayfs x rw
a line of the future
"""


@pytest.fixture
def mountinfo(tmp_path: Path) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text(LINES)
    return file


@pytest.mark.parametrize(
    ("where", "point", "network"),
    [
        pytest.param("/var/lib/x", "/", False, id="local disk"),
        pytest.param("/home/me/state", "/home", True, id="NFS"),
        pytest.param("/home/scratch/me", "/home/scratch", False, id="a local disk below NFS"),
        pytest.param("/homeless", "/", False, id="a name that only begins alike"),
        pytest.param("/my share/state", "/my share", True, id="Lustre, a blank in its name"),
        pytest.param("/over/x", "/over", False, id="the last mount on one point hides the others"),
        pytest.param("/s3/x", "/s3", True, id="a bucket by FUSE"),
        pytest.param("/fuse/x", "/fuse", False, id="FUSE on this host"),
    ],
)
def test_on_what_a_path_lies(mountinfo: Path, where: str, point: str, network: bool) -> None:
    mount = mount_of(Path(where), mountinfo)
    assert mount is not None
    assert (mount.point, mount.is_network) == (point, network)


def test_where_nothing_can_be_told_nothing_is_refused(tmp_path: Path) -> None:
    assert mount_of(tmp_path, tmp_path / "none") is None
    (tmp_path / "empty").write_text("")
    assert mount_of(tmp_path, tmp_path / "empty") is None


def test_the_mounts_of_this_host_can_be_read(tmp_path: Path) -> None:
    mount = mount_of(tmp_path)
    assert isinstance(mount, Mount)
    assert tmp_path.resolve().is_relative_to(mount.point)


def test_a_network_file_system_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    lines = tmp_path / "mountinfo"
    lines.write_text(f"30 1 0:40 / {shared} rw - nfs4 filer:/home rw\n")
    with pytest.raises(
        StoreError, match=rf"lies on {shared} \(nfs4, filer:/home\), a network file system.*TRAINWARDEN_STATE"
    ):
        Store(shared / "job" / "journal.sqlite", mountinfo=lines)
    assert list(shared.iterdir()) == []


# the fence


def test_behind_a_fence_only_the_owner_writes(store: Store) -> None:
    term = store.claim(JOB, os.getpid(), 0, now_ns=0)
    with pytest.raises(FencedError, match="our term 7 is over"):
        store.append_all([row(1)], (JOB, 7))
    assert store.append_all([row(1)], (JOB, term)) == [True]
    assert keys(store) == ["k1"]
