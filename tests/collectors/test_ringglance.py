"""One look at all rings: what is new, and that a file that is cut short ends nobody."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.collectors.world import World, a_world, tmpfs_folder

from trainwarden.collectors import ringglance
from trainwarden.collectors.rank import Rank
from trainwarden.collectors.ringfile import RingFile, confirm
from trainwarden.collectors.ringglance import Glance, Seen
from trainwarden.core.records import LIVE

RANKS = 5


@pytest.fixture
def world() -> Iterator[World]:
    with a_world() as made:
        yield made


@pytest.fixture
def ranks(world: World) -> list[Rank]:
    return [world.attach(rank=rank, world_size=RANKS) for rank in range(RANKS)]


@pytest.fixture
def glance(world: World, ranks: list[Rank]) -> Iterator[Glance]:
    rings = [RingFile(path, os.geteuid()) for path in sorted(world.rings.iterdir())]
    made = Glance(rings)
    yield made
    made.close()
    for ring in rings:
        ring.close()


def seen(glance: Glance) -> Seen:
    found = glance.look()
    assert found is not None
    return found


def take(glance: Glance, found: Seen) -> None:
    """As a reader does that takes all rows."""
    looks = [glance.rings[place].steps.look() for place in found.steps]
    looks += [glance.rings[place].details.look() for place in found.details]
    for look in looks:
        if look is not None:
            confirm([look], 0)
    glance.aim({*found.steps, *found.details})


def test_only_what_is_new_is_seen_and_what_each_rank_does(glance: Glance, ranks: list[Rank]) -> None:
    assert ([*seen(glance).steps], [*seen(glance).details]) == ([], [])
    ranks[3].begin(1)
    ranks[3].end()
    ranks[1].note("hello", 1.0)
    found = seen(glance)
    assert ([*found.steps], [*found.details]) == ([3], [1])
    assert found.live == b"".join(ring.live() for ring in glance.rings)
    assert len(found.live) == RANKS * LIVE.size
    assert [*seen(glance).steps] == [3], "until it is taken"
    take(glance, found)
    assert ([*seen(glance).steps], [*seen(glance).details]) == ([], [])


@pytest.mark.parametrize("at_once", [1024, 4])
def test_it_sees_what_reading_each_ring_sees(
    glance: Glance, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Also once rings have gone round, and where there are more pieces than one call may have."""
    monkeypatch.setattr(ringglance, "_PIECES_MAX", at_once)
    draw, step = random.Random(7), 0
    for _ in range(60):
        for rank in draw.sample(ranks, draw.randint(0, RANKS)):
            for _ in range(draw.choice([1, 1, 2, 700])):
                rank.begin(step := step + 1)
                rank.end()
            rank.note("n", 1.0)
        found = seen(glance)
        assert [*found.steps] == [place for place, ring in enumerate(glance.rings) if ring.steps.look() is not None]
        assert [*found.details] == [place for place, ring in enumerate(glance.rings) if ring.details.look() is not None]
        if draw.random() < 0.7:
            take(glance, found)


@pytest.mark.parametrize("size", [0, 100, 4096, 16384])
@pytest.mark.parametrize("which", [0, 3])
def test_a_file_that_is_cut_short_ends_nobody(world: World, ranks: list[Rank], which: int, size: int) -> None:
    """A load from a mapping of it would be SIGBUS, and this the last test of the run."""
    with tmpfs_folder() as copies:  # of the rings: their writers would not survive it either
        paths = [Path(shutil.copy(path, copies)) for path in sorted(world.rings.iterdir())]
        rings = [RingFile(path, os.geteuid()) for path in paths]
        glance = Glance(rings)
        assert [*seen(glance).steps] == []
        os.truncate(paths[which], size)
        assert glance.look() is None
        glance.close()
        for ring in rings:
            ring.close()
