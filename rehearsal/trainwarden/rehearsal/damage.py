"""Damage to files, made on purpose: what a bad disk or a torn copy leaves behind."""

import re
from pathlib import Path

SPOILED_BYTES = 64
_NAME = re.compile(r"step-(\d+)-(\d+)")


def newest_published(published: Path, step: int) -> Path | None:
    """The checkpoint of the largest step below this folder, if that is this step or a later one."""
    names = [match for path in published.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    newest = max(names, key=lambda match: (int(match[1]), int(match[2])), default=None)
    return published / newest[0] if newest is not None and int(newest[1]) >= step else None


def spoil(checkpoint: Path) -> Path:
    """Flip bytes in the middle of its largest shard, whose length stays; gives that shard."""
    shard = max(checkpoint.glob("*.distcp"), key=lambda path: (path.stat().st_size, path.name))
    with shard.open("r+b") as file:
        middle = shard.stat().st_size // 2
        file.seek(middle)
        flipped = bytes(byte ^ 0xFF for byte in file.read(SPOILED_BYTES))
        file.seek(middle)
        file.write(flipped)
    return shard
