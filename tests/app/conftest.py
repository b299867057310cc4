"""What several tests of the app need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwarden.core.child import run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 512 KiB. Needs the right to mount, which a container often lacks: then this is skipped."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], deadline_s=10)
    if mounted.code != 0:
        pytest.skip(f"NOT TESTED: a really full disk: mount is not permitted here ({mounted.err.strip()})")
    yield disk
    done = run(["umount", str(disk)], deadline_s=10)
    assert done.code == 0, done.err
