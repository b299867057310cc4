"""The world of a rank and its agent."""

from collections.abc import Iterator

import pytest
from tests.collectors.world import World, a_world


@pytest.fixture
def world() -> Iterator[World]:
    with a_world() as made:
        yield made
