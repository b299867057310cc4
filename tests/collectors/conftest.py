"""The world of a rank and its agent."""

from collections.abc import Iterator

import pytest
from tests.collectors.world import World, make_world, tmpfs_folder


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with tmpfs_folder() as folder:
        made = make_world(monkeypatch, folder)
        yield made
        made.end()
