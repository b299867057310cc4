from pathlib import Path

import pytest

from trainwarden.rehearsal.damage import SPOILED_BYTES, newest_published, spoil


def publish(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize(
    ("step", "newest"),
    [
        pytest.param(40, "step-100-8", id="the largest number, not the last word"),
        pytest.param(100, "step-100-8", id="of this very step"),
        pytest.param(101, None, id="not yet"),
    ],
)
def test_which_checkpoint_is_the_newest(step: int, newest: str | None, tmp_path: Path) -> None:
    found = newest_published(publish(tmp_path, "step-20-4", "step-100-4", "step-100-8", "step-60-4", "step-x"), step)
    assert (found and found.name) == newest


def test_nothing_is_published_where_there_is_no_folder(tmp_path: Path) -> None:
    assert newest_published(tmp_path / "published", 1) is None


@pytest.mark.parametrize("size", [1, SPOILED_BYTES, 10_000])
def test_a_spoiled_shard_keeps_its_length_and_nothing_else_changes(size: int, tmp_path: Path) -> None:
    before = {"__0_0.distcp": b"a" * size, "__1_0.distcp": b"", "manifest.json": b"{}" * size}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    shard = spoil(tmp_path)
    after = {name: (tmp_path / name).read_bytes() for name in before}
    assert [name for name in before if after[name] != before[name]] == [shard.name] == ["__0_0.distcp"]
    assert len(after[shard.name]) == size
    assert sum(one != two for one, two in zip(after[shard.name], before[shard.name], strict=True)) <= SPOILED_BYTES
