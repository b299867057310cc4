"""Publishing: all or nothing, by the owner alone, for its own attempt alone, wherever it is interrupted."""

import errno
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.remediation.shelves import (
    FINE,
    JOB,
    RANKS,
    SECOND,
    T0,
    epoch,
    failing,
    nobody_else,
    published,
    put_out,
    stage,
    store,
    struck,
    write_part,
)

from trainwarden.app.store import LEASE_NS, Store
from trainwarden.core.errors import DataError, FencedError
from trainwarden.core.manifest import read_manifest, write_rank_file
from trainwarden.core.model import JobId, StepMatrix, Topology
from trainwarden.core.process import identify
from trainwarden.core.records import FEATURES, LOCAL_NONFINITE
from trainwarden.remediation.checkpoints.folder import CheckpointFolder
from trainwarden.remediation.checkpoints.publish import (
    StepValues,
    close_attempt,
    publish,
    stage_complete,
    staged,
    step_values,
)
from trainwarden.remediation.checkpoints.select import select_verified


def names(root: Path) -> list[str]:
    return [entry.name for entry in store(root).entries()]


def test_what_is_published_says_everything_and_verifies(tmp_path: Path) -> None:
    path = published(tmp_path, 40)
    found = store(tmp_path).verify(path.name)
    assert (found.name, found.job, found.epoch, found.step) == ("step-40-4294967296", JOB, epoch(1), 40)
    assert (found.loss, found.grad_norm, found.t_ns) == (2.5, 0.75, T0 + 40 * SECOND)
    assert found.rank_steps == {0: 40, 1: 40}
    assert found.data_position == {"next_batch": 41}
    assert found.topology == {"slots": {"0": "n1:0", "1": "n1:1"}}
    assert sorted(found.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "rank-0.json", "rank-1.json"]
    assert found.trust == "good"
    assert not CheckpointFolder(tmp_path).stage(epoch(1), 40).exists()


def test_asked_again_it_is_published_already(tmp_path: Path) -> None:
    published(tmp_path, 40)
    assert put_out(tmp_path, 40).result == "already"
    stage(tmp_path, 40)  # a second save at the same step changes nothing
    assert put_out(tmp_path, 40).result == "already"


def test_what_ranks_have_staged_is_found_by_attempt(tmp_path: Path) -> None:
    for step, attempt in ((20, 1), (40, 2), (60, 2)):
        stage(tmp_path, step, attempt, ranks=[1])
    assert staged(tmp_path, 2) == [(epoch(2), 40), (epoch(2), 60)]
    assert staged(tmp_path, 3) == []
    assert stage_complete(CheckpointFolder(tmp_path).stage(epoch(2), 40), 3) == (0, 2)


@pytest.mark.parametrize(
    ("values", "result", "words"),
    [
        pytest.param(None, "waiting", "not all ranks have told their values", id="not told"),
        pytest.param(replace(FINE, finite=False), "refused", "not finite", id="some rank's is not finite"),
        pytest.param(replace(FINE, loss=math.nan), "refused", "not finite", id="NaN"),
        pytest.param(replace(FINE, grad_norm=math.inf), "refused", "not finite", id="infinite"),
        pytest.param(StepValues(loss=None, grad_norm=None, finite=True), "published", "", id="a script without any"),
    ],
)
def test_values_decide(tmp_path: Path, values: StepValues | None, result: str, words: str) -> None:
    stage(tmp_path, 40)
    told = put_out(tmp_path, 40, values=values)
    assert told.result == result
    assert words in told.reason
    assert len(names(tmp_path)) == (result == "published")


def test_a_rank_that_has_not_finished_is_waited_for(tmp_path: Path) -> None:
    folder = stage(tmp_path, 40, ranks=[0])
    write_part(folder, 1)
    told = put_out(tmp_path, 40)
    assert (told.result, told.reason) == ("waiting", "1 of 2 ranks have not finished writing, rank 1 first")
    write_rank_file(folder, rank=1, step=40)
    assert put_out(tmp_path, 40).result == "published"


def test_nothing_staged_is_waited_for(tmp_path: Path) -> None:
    assert put_out(tmp_path, 40).result == "waiting"


def link(path: Path) -> None:
    shard = path / "__1_0.distcp"
    (path.parent / "elsewhere").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(path.parent / "elsewhere")


def claim(path: Path) -> None:
    write_rank_file(path, rank=1, step=40, files=["__0_0.distcp"])


def fold(path: Path) -> None:
    path.rename(path.parent / "real")
    path.symlink_to("real")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp: missing", id="a shard is gone"),
        pytest.param(
            lambda path: os.truncate(path / "__1_0.distcp", 5), "__1_0.distcp: 5 bytes, 1025 were written", id="short"
        ),
        pytest.param(lambda path: (path / "x").touch(), "x: no rank says that it wrote it", id="somebody's file"),
        pytest.param(
            lambda path: write_rank_file(path, rank=7, step=40), "rank-7.json: no rank says", id="a rank too many"
        ),
        pytest.param(
            lambda path: write_rank_file(path, rank=1, step=39), "mixed steps: rank 1 wrote step 39", id="mixed steps"
        ),
        pytest.param(claim, "__0_0.distcp: rank 1 says that it wrote it, but it is another's", id="claimed twice"),
        pytest.param(lambda path: os.truncate(path / "rank-1.json", 50), "rank-1.json: torn", id="torn rank file"),
        pytest.param(link, "__1_0.distcp: a symbolic link", id="a linked shard"),
        pytest.param(fold, "step-40: not a folder", id="a linked stage"),
        pytest.param(lambda path: os.mkfifo(path / "pipe"), "pipe: neither a file nor a folder", id="a pipe"),
    ],
)
def test_a_spoilt_stage_is_refused(tmp_path: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(stage(tmp_path, 40))
    told = put_out(tmp_path, 40)
    assert told.result == "refused"
    assert words in told.reason
    assert names(tmp_path) == []


def test_what_a_killed_writer_left_behind_is_removed(tmp_path: Path) -> None:
    folder = stage(tmp_path, 40)
    (folder / ".manifest.json.77-1").write_bytes(b"{")
    (folder / ".rank-1.json.77-1").write_bytes(b"{")
    assert put_out(tmp_path, 40).result == "published"
    assert store(tmp_path).verify(names(tmp_path)[0]).trust == "good"


def test_positions_that_differ_are_told_by_rank(tmp_path: Path) -> None:
    folder = stage(tmp_path, 40)
    write_rank_file(folder, rank=1, step=40, data_position="elsewhere")
    told = put_out(tmp_path, 40)
    manifest = read_manifest(tmp_path / "published" / told.name)
    assert manifest.data_position == {"ranks": [{"next_batch": 41}, "elsewhere"]}


# attempts and owners


def publish_as(root: Path, attempt: int, of: int, check: Callable[[], None]) -> str:
    """The owner of `attempt` tries to publish step 40, staged by attempt `of`."""
    told = publish(
        root,
        job=JOB,
        attempt=attempt,
        epoch=epoch(of),
        step=40,
        world_size=RANKS,
        values=FINE,
        topology=None,
        check=check,
    )
    return f"{told.result} {told.reason}"


def test_a_stage_of_another_attempt_is_never_published(tmp_path: Path) -> None:
    stage(tmp_path, 40, attempt=1)
    said = publish_as(tmp_path, 2, 1, nobody_else)
    assert said == "refused staged by attempt 1, not by attempt 2, which is ours"
    assert names(tmp_path) == []


def test_a_rank_that_wakes_up_after_its_attempt_changes_nothing(tmp_path: Path) -> None:
    """It was stopped inside the save; the attempt was closed; it goes on writing."""
    old = published(tmp_path, 20).name
    folder = stage(tmp_path, 40, ranks=[0])
    write_part(folder, 1)
    assert close_attempt(tmp_path, 1, nobody_else) == {old}
    write_rank_file(folder, rank=1, step=40)
    assert publish_as(tmp_path, 1, 1, nobody_else) == "refused attempt 1 is over"
    assert publish_as(tmp_path, 2, 1, nobody_else).startswith("refused staged by attempt 1")
    assert names(tmp_path) == [old]


def test_closing_again_changes_nothing(tmp_path: Path) -> None:
    first = published(tmp_path, 20).name
    assert close_attempt(tmp_path, 1, nobody_else) == {first}
    os.rename(published(tmp_path, 40, attempt=2), tmp_path / "published" / "step-40-4294967296")
    assert close_attempt(tmp_path, 1, nobody_else) == {first}
    assert store(tmp_path).accepted() == {1: {first}}


def test_a_damaged_record_accepts_nothing_and_is_told(tmp_path: Path) -> None:
    published(tmp_path, 20)
    close_attempt(tmp_path, 1, nobody_else)
    os.truncate(tmp_path / "accepted" / "1.json", 30)
    with pytest.raises(DataError, match=r"accepted/1.json: torn"):
        close_attempt(tmp_path, 1, nobody_else)
    assert store(tmp_path).accepted() == {1: frozenset()}
    assert select_verified(store(tmp_path), None)[0] is None


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[tuple[Store, int]]:
    """A job's database in which we are the old owner: frozen, expired, replaced. And our old term."""
    me = identify(os.getpid())
    assert me is not None
    database = Store(tmp_path / "journal.sqlite")
    old = database.claim(JobId("train-3"), me.pid, me.start_time, T0)
    database.claim(JobId("train-3"), me.pid, me.start_time, T0 + LEASE_NS)
    yield database, old
    database.close()


def test_the_old_owner_publishes_and_closes_nothing(tmp_path: Path, owners: tuple[Store, int]) -> None:
    database, old = owners
    stage(tmp_path, 40)
    with pytest.raises(FencedError):
        publish_as(tmp_path, 1, 1, lambda: database.check(JOB, old))
    with pytest.raises(FencedError):
        close_attempt(tmp_path, 1, lambda: database.check(JOB, old))
    assert names(tmp_path) == []
    assert store(tmp_path).accepted() == {}
    assert publish_as(tmp_path, 1, 1, lambda: database.check(JOB, old + 1)) == "published "


def test_what_an_owner_frozen_before_its_rename_publishes_is_never_selected(tmp_path: Path) -> None:
    old = published(tmp_path, 20).name
    stage(tmp_path, 40)

    def look_then_freeze() -> None:
        """The job is still ours; then we are frozen, replaced, and woken up in the next attempt."""
        close_attempt(tmp_path, 1, nobody_else)

    assert publish_as(tmp_path, 1, 1, look_then_freeze) == "published "
    chosen, refused = select_verified(store(tmp_path), None)
    assert chosen is not None
    assert chosen.name == old
    assert refused == {"step-40-4294967296": "published after attempt 1 was over"}


# interrupted anywhere

FAILING = ("open", "fsync", "rename", "mkdir", "unlink")
CHANGING = (*FAILING, "close")


def killed_at(at: int, act: Callable[[], object]) -> bool:
    """Do it in a child process that is killed at its call of this number; False: it was done before."""
    child = os.fork()
    if child == 0:
        try:
            with struck(at, lambda: os.kill(os.getpid(), signal.SIGKILL), CHANGING):
                act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def all_good(root: Path) -> list[str]:
    """The published ones, each of which verifies."""
    shelf = store(root)
    return [shelf.verify(entry.name).name for entry in shelf.entries()]


def test_killed_anywhere_it_is_published_whole_or_not_and_once(tmp_path: Path) -> None:
    for at in itertools.count():
        root = tmp_path / str(at)
        old = published(root, 20).name
        stage(root, 40)
        killed = killed_at(at, partial(put_out, root, 40))
        assert all_good(root) in ([old], ["step-40-4294967296", old])
        again = put_out(root, 40)
        assert again.result in ("published", "already"), (at, again)
        assert all_good(root) == ["step-40-4294967296", old]
        if not killed:
            break
    assert at > 15, "the calls are no longer seen"


def test_a_disk_that_is_full_anywhere_is_waited_for(tmp_path: Path) -> None:
    for at in itertools.count():
        root = tmp_path / str(at)
        stage(root, 40)
        with struck(at, failing(errno.ENOSPC), FAILING) as made:
            told = put_out(root, 40)
        assert len(all_good(root)) == (root / "published" / told.name).exists()
        if len(made) <= at:
            break
        harmless = told.result == "published" and made[at] == "mkdir"  # of a folder that is there
        assert harmless or (told.result == "waiting" and "No space" in told.reason)
        assert put_out(root, 40).result in ("published", "already")
        assert len(all_good(root)) == 1
    assert at > 15, "the calls are no longer seen"


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda root: close_attempt(root, 1, nobody_else), id="closing an attempt", marks=pytest.mark.slow),
        pytest.param(lambda root: store(root).pin("step-40-4294967296"), id="pinning"),
        pytest.param(lambda root: store(root).prune(1, (), nobody_else), id="pruning", marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere_what_is_left_verifies_and_it_can_be_done_again(
    tmp_path: Path, act: Callable[[Path], object]
) -> None:
    for at in itertools.count():
        root = tmp_path / str(at)
        for step in (20, 40):
            published(root, step)
        killed = killed_at(at, partial(act, root))
        assert all_good(root)[0] == "step-40-4294967296"
        act(root)
        assert all_good(root)[0] == "step-40-4294967296"
        assert not [*(root / "trash").iterdir()]
        if not killed:
            break
    assert at > 3, "the calls are no longer seen"


# values of a step


def matrix(loss: list[float], *, flags: int = 0, partial: bool = False) -> StepMatrix:
    ranks = len(loss)
    values_FR = np.full((len(FEATURES), ranks), np.nan, np.float32)
    values_FR[FEATURES.index("loss")] = loss
    topology = Topology(
        job=JOB,
        epoch=epoch(1),
        device_R=("",) * ranks,
        node_R=np.zeros(ranks, np.int32),
        coords_RP=np.zeros((ranks, 5), np.int16),
        domains={},
    )
    return StepMatrix(
        topology=topology,
        step=40,
        batch=40,
        seen_ns=T0,
        partial=partial,
        values_FR=values_FR,
        seen_R=np.ones(ranks, np.bool_),
        flags_R=np.array([0] * (ranks - 1) + [flags], np.uint32),
    )


@pytest.mark.parametrize(
    ("closed", "values"),
    [
        pytest.param(matrix([2.5, 2.5]), StepValues(loss=2.5, grad_norm=None, finite=True), id="all ranks alike"),
        pytest.param(matrix([math.nan, 2.5]), StepValues(loss=2.5, grad_norm=None, finite=True), id="the last stage"),
        pytest.param(
            matrix([2.5, 2.5], flags=LOCAL_NONFINITE),
            StepValues(loss=2.5, grad_norm=None, finite=False),
            id="one rank's own loss is not finite",
        ),
        pytest.param(matrix([2.5, 2.5], partial=True), None, id="a rank is missing"),
    ],
)
def test_values_of_a_closed_step(closed: StepMatrix, values: StepValues | None) -> None:
    assert step_values(closed) == values
