"""Reading back: whatever is wrong with a published checkpoint is named, and it is never selected."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.test_manifest import seal
from tests.remediation.shelves import (
    JOB,
    SECOND,
    T0,
    copied,
    failing,
    nobody_else,
    published,
    stage,
    store,
    struck,
)

from trainwarden.core.errors import ActionError, ConfigError, DataError, FencedError
from trainwarden.core.manifest import MANIFEST, read_manifest, write_manifest
from trainwarden.core.model import JobId
from trainwarden.remediation.checkpoints.dcp import DcpStore
from trainwarden.remediation.checkpoints.folder import CheckpointFolder
from trainwarden.remediation.checkpoints.publish import close_attempt
from trainwarden.remediation.checkpoints.select import select_verified

NEW, OLD = "step-40-4294967296", "step-20-4294967296"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 20 and 40 of an attempt that is over."""
    published(tmp_path, 20)
    published(tmp_path, 40)
    close_attempt(tmp_path, 1, nobody_else)
    return tmp_path


def retell(path: Path, **changes: Any) -> None:
    """The manifest says something else, and is sealed."""
    write_manifest(path, replace(read_manifest(path), **changes))


def without(path: Path, *names: str) -> None:
    """These files are neither there nor in the manifest."""
    for name in names:
        (path / name).unlink()
    files = {name: told for name, told in read_manifest(path).files.items() if name not in names}
    retell(path, files=files)


def alter(file: Path, at: int = 7) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def link(file: Path) -> None:
    elsewhere = file.parents[2] / "elsewhere"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def reseal(path: Path, old: str, new: str) -> None:
    body, _, _ = (path / MANIFEST).read_text().rpartition(',"seal"')
    assert old in body
    (path / MANIFEST).write_text(seal(body.replace(old, new) + "}"))


SPOILT = [
    pytest.param(lambda path: (path / MANIFEST).unlink(), "manifest.json: missing", id="no manifest"),
    pytest.param(lambda path: os.truncate(path / MANIFEST, 99), "manifest.json: torn", id="torn manifest"),
    pytest.param(lambda path: alter(path / MANIFEST), "manifest.json: altered", id="altered manifest"),
    pytest.param(lambda path: link(path / MANIFEST), "manifest.json: a symbolic link", id="linked manifest"),
    pytest.param(lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp: missing", id="missing shard"),
    pytest.param(
        lambda path: os.truncate(path / "__1_0.distcp", 1024), "__1_0.distcp: 1024 bytes, not 1025", id="short shard"
    ),
    pytest.param(lambda path: os.truncate(path / "__0_0.distcp", 0), "__0_0.distcp: 0 bytes", id="empty shard"),
    pytest.param(lambda path: alter(path / "__1_0.distcp"), "__1_0.distcp: other bytes", id="altered shard"),
    pytest.param(lambda path: (path / "__2_0.distcp").touch(), "__2_0.distcp: not in the manifest", id="extra shard"),
    pytest.param(lambda path: link(path / "__1_0.distcp"), "__1_0.distcp: a symbolic link", id="linked shard"),
    pytest.param(lambda path: os.mkfifo(path / "pipe"), "pipe: neither a file nor a folder", id="a pipe"),
    pytest.param(lambda path: without(path, ".metadata"), ".metadata: missing", id="no table of contents"),
    pytest.param(
        lambda path: without(path, "__1_0.distcp"), "__1_0.distcp: missing, but .metadata names it", id="a named shard"
    ),
    pytest.param(lambda path: alter(path / ".metadata"), ".metadata: other bytes", id="altered table of contents"),
    pytest.param(
        lambda path: retell(path, rank_steps={0: 40, 1: 39}), "mixed steps: rank 1 wrote step 39", id="mixed steps"
    ),
    pytest.param(lambda path: retell(path, rank_steps={1: 40}), "rank_steps: expected all ranks", id="a rank is lost"),
    pytest.param(lambda path: retell(path, rank_steps={}), "rank_steps: expected all ranks", id="no rank"),
    pytest.param(lambda path: retell(path, epoch=5), "of another checkpoint", id="foreign epoch"),
    pytest.param(lambda path: retell(path, name=OLD), "of another checkpoint", id="another name"),
    pytest.param(lambda path: retell(path, job="other"), "job: expected train-3, got 'other'", id="another job"),
    pytest.param(lambda path: reseal(path, '"loss":2.5', '"loss":NaN'), "not finite: NaN", id="NaN"),
    pytest.param(lambda path: reseal(path, "0.75", "1e999"), "not finite: 1e999", id="infinite"),
    pytest.param(
        lambda path: reseal(path, "__1_0.distcp", "../__1_0.distcp"),
        "files: expected names of files below the folder, got '../__1_0.distcp'",
        id="upwards",
    ),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_a_spoilt_checkpoint_is_named_and_the_one_before_is_taken(
    root: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    spoil(root / "published" / NEW)
    with pytest.raises(DataError) as refused:
        store(root).verify(NEW)
    assert words in str(refused.value)
    chosen, reasons = select_verified(store(root), None)
    assert chosen is not None
    assert (chosen.name, chosen.trust) == (OLD, "good")
    assert list(reasons) == [NEW]
    assert words in reasons[NEW]


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        pytest.param(
            "step-60-4294967296", lambda path: path.symlink_to(NEW), "not a folder", id="a link to a good one"
        ),
        pytest.param("step-60-4294967296", lambda path: path.touch(), "not a folder", id="a file"),
        pytest.param("step-60-4294967296", lambda path: path.mkdir(), "manifest.json: missing", id="an empty folder"),
        pytest.param("step-60.tmp", lambda path: path.mkdir(), "manifest.json: missing", id="a name that is none"),
        pytest.param(
            "step-60-8589934592", lambda path: shutil.copytree(path.parent / NEW, path), "another checkpoint", id="copy"
        ),
    ],
)
def test_strange_entries_are_listed_and_never_selected(
    root: Path, name: str, make: Callable[[Path], Any], words: str
) -> None:
    make(root / "published" / name)
    (strange,) = (entry for entry in store(root).entries() if entry.checkpoint is None)
    assert strange.name == name
    assert words in strange.reason
    chosen, _ = select_verified(store(root), None)
    assert chosen is not None
    assert chosen.name == NEW
    assert [one.name for one in store(root).catalogue(JOB)] == [NEW, OLD]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("good"), 40)


@given(st.data())
def test_one_thing_changed_in_one_file_is_noticed_and_the_file_named(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = copied(good, tmp_path_factory.getbasetemp() / "spoilt")
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    size = file.stat().st_size
    match data.draw(st.sampled_from(["byte", "cut", "delete", "append"])):
        case "byte":
            raw = bytearray(file.read_bytes())
            raw[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
            file.write_bytes(raw)
        case "cut":
            os.truncate(file, data.draw(st.integers(0, size - 1)))
        case "delete":
            file.unlink()
        case "append":
            file.write_bytes(file.read_bytes() + data.draw(st.binary(min_size=1, max_size=9)))
    with pytest.raises(DataError) as refused:
        DcpStore(path.parents[1], JOB).verify(path.name)
    assert f"{file}: " in str(refused.value)


def test_the_table_of_contents_is_never_unpickled(root: Path) -> None:
    """The one of these tests would call evil.module; a pickle that is refused would be refused as a shard is."""
    assert store(root).verify(NEW).trust == "good"
    assert b"evil" in (root / "published" / NEW / ".metadata").read_bytes()


def test_newest_is_by_attempt_then_step(root: Path) -> None:
    """An attempt that went back to an earlier step is the later one."""
    published(root, 30, attempt=2)
    names = [entry.name for entry in store(root).entries()]
    assert names == ["step-30-8589934592", NEW, OLD]


def test_another_job_has_no_checkpoints_here(root: Path) -> None:
    assert store(root).catalogue(JobId("other")) == []
    assert [entry.checkpoint for entry in DcpStore(root, JobId("other")).entries()] == [None, None]


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert store(tmp_path / "absent").entries() == []
    assert store(tmp_path / "absent").accepted() == {}
    assert select_verified(store(tmp_path / "absent"), None) == (None, {})


# marks


def test_a_distrusted_one_is_never_selected_until_that_is_lifted(root: Path) -> None:
    store(root).mark(NEW, "distrusted", "the run diverged")
    chosen, reasons = select_verified(store(root), None)
    assert chosen is not None
    assert chosen.name == OLD
    assert reasons == {NEW: "distrusted: the run diverged"}
    assert store(root).verify(NEW).trust == "distrusted"
    store(root).mark(NEW, "unverified", "")
    assert select_verified(store(root), None)[0] == replace(store(root).catalogue(JOB)[0], trust="good")


def test_a_mark_that_says_good_is_not_believed(root: Path) -> None:
    assert store(root).judge(NEW).reason == "read back"
    assert store(root).catalogue(JOB)[0].trust == "good"
    alter(root / "published" / NEW / "__1_0.distcp")
    chosen, _ = select_verified(store(root), None)
    assert chosen is not None
    assert chosen.name == OLD


def test_a_judgement_is_kept_and_never_lifts_a_persons(root: Path) -> None:
    alter(root / "published" / NEW / "__1_0.distcp")
    entry = store(root).judge(NEW)
    assert entry.checkpoint is not None
    assert entry.checkpoint.trust == "distrusted"
    assert entry.reason.endswith("__1_0.distcp: other bytes than were written")
    store(root).mark(OLD, "distrusted", "a person said so")
    assert store(root).judge(OLD).reason == "a person said so"


def test_a_disk_that_fails_for_a_moment_is_told_and_marks_nothing(root: Path) -> None:
    with struck(0, failing(errno.EIO), ["open"]):
        assert "Input/output error" in store(root).judge(NEW).reason
    assert not [*(root / "marks").iterdir()]
    assert store(root).verify(NEW).trust == "good"


def test_what_is_not_older_than_an_onset_is_distrusted_for_good(root: Path) -> None:
    assert store(root).distrust_since(T0 + 40 * SECOND, "after the onset") == [NEW]
    assert store(root).distrust_since(T0 + 40 * SECOND, "again") == []
    assert select_verified(store(root), None)[1] == {NEW: "distrusted: after the onset"}


def test_pins_and_trust_do_not_disturb_each_other(root: Path) -> None:
    store(root).pin(NEW)
    store(root).mark(NEW, "distrusted", "why")
    (found, _) = store(root).catalogue(JOB)
    assert (found.pinned, found.trust) == (True, "distrusted")
    store(root).unpin(NEW)
    (found, _) = store(root).catalogue(JOB)
    assert (found.pinned, found.trust) == (False, "distrusted")


def test_a_damaged_mark_is_told_and_its_checkpoint_not_selected(root: Path) -> None:
    store(root).pin(NEW)
    os.truncate(root / "marks" / f"{NEW}.json", 9)
    chosen, reasons = select_verified(store(root), None)
    assert chosen is not None
    assert chosen.name == OLD
    assert "marks/step-40-4294967296.json: torn" in reasons[NEW]


@pytest.mark.parametrize("name", ["step-60-1", "..", "../published", "", "a/b"])
def test_names_that_are_not_there_are_refused(root: Path, name: str) -> None:
    for act in (store(root).verify, store(root).pin, store(root).judge):
        with pytest.raises(ConfigError, match="no checkpoint"):
            act(name)


def test_a_trust_that_is_none_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of unverified, good, distrusted, got 'fine'"):
        store(root).mark(NEW, "fine", "")


def test_a_holder_that_was_stopped_is_not_waited_for_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwarden.remediation.checkpoints.folder.LOCK_S", 0.05)
    with CheckpointFolder(root).locked(), pytest.raises(ActionError, match="held by another process"):
        store(root).pin(NEW)


# pruning


def left(root: Path) -> list[int]:
    return [int(entry.name.split("-")[1]) for entry in store(root).entries()]


def test_the_last_and_pinned_and_selected_ones_are_kept(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        published(tmp_path, step)
    store(tmp_path).pin("step-10-4294967296")
    removed = store(tmp_path).prune(2, ["step-30-4294967296"], nobody_else)
    assert left(tmp_path) == [70, 60, 30, 10]
    assert [int(name.split("-")[1]) for name in removed] == [50, 40, 20]
    assert not [*(tmp_path / "trash").iterdir()]
    assert not (tmp_path / "marks" / "step-20-4294967296.json").exists()


def test_those_nobody_can_go_back_to_do_not_count(tmp_path: Path) -> None:
    """The last two good ones stay, the bad ones between them too; what is older goes."""
    for step in (10, 20, 30, 40, 50):
        published(tmp_path, step)
    (tmp_path / "published" / "step-50-4294967296" / MANIFEST).unlink()
    store(tmp_path).mark("step-30-4294967296", "distrusted", "")
    store(tmp_path).prune(2, (), nobody_else)
    assert left(tmp_path) == [50, 40, 30, 20]


def test_a_broken_one_that_is_pinned_stays(root: Path) -> None:
    store(root).pin(OLD)
    (root / "published" / OLD / MANIFEST).unlink()
    assert store(root).prune(1, (), nobody_else) == []


def test_the_old_owner_removes_nothing(root: Path) -> None:
    def not_ours() -> None:
        raise FencedError("our term is over")

    with pytest.raises(FencedError):
        store(root).prune(1, (), not_ours)
    assert left(root) == [40, 20]


def test_what_attempts_that_are_over_left_in_staging_goes(root: Path) -> None:
    stage(root, 60, attempt=1)
    stage(root, 60, attempt=2)
    store(root).prune(2, (), nobody_else)
    assert os.listdir(root / "staging") == ["8589934592"]
    assert left(root) == [40, 20]
