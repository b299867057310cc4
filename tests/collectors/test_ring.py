"""The writer's side of a ring: a file that is whole from the first moment, and belongs to one living process."""

import os
import struct
from pathlib import Path

import pytest
from tests.collectors.world import World

from trainwarden.collectors.rank.ring import NoRing, Ring
from trainwarden.core import records
from trainwarden.core.identity import Process, identify, this_process


def make(folder: Path, rank: int = 0) -> Ring:
    return Ring(folder, identify({}, rank=rank, world_size=4), this_process(), 0)


def test_the_layout_fits() -> None:
    assert records.HEADER.size <= records.LIVE_OFFSET
    assert records.LIVE_OFFSET % 8 == 0, "the stamps are stored by aligned 8-byte stores"
    assert records.LIVE_OFFSET + records.LIVE.size <= records.COUNTERS_OFFSET
    assert records.COUNTERS_OFFSET + 8 * len(records.COUNTERS) <= records.CONTROL_OFFSET < records.NAMES_OFFSET
    assert records.NAMES_OFFSET + records.NAME_SLOTS * records.NAME_BYTES <= records.STEPS_OFFSET
    assert (records.STEP_ROW.size, records.STAMP_ROW.size, records.DETAIL_ROW.size) == (96, 96, 48)
    assert records.FILE_BYTES <= records.MAX_FILE_BYTES
    assert set(records.PHASE_FEATURE.values()) == {
        *("data_s", "forward_s", "backward_s", "wait_s", "optimizer_s", "checkpoint_s", "eval_s")
    }


def test_a_ring_is_private_allocated_in_full_and_described(world: World) -> None:
    ring = make(world.root, rank=2)
    found = ring.path.stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == records.FILE_BYTES
    assert found.st_blocks * 512 >= records.FILE_BYTES, "a store must never need a new page"
    fields = records.HEADER.unpack(ring.path.read_bytes()[: records.HEADER.size])
    assert fields[:2] == (records.MAGIC, records.VERSION)
    assert fields[9:14] == (2, 4, 0, 0, os.getpid())
    assert [path.name for path in world.root.iterdir()] == ["rank-2-0-0.ring"], "no draft is left"
    ring.close()


def test_the_names_begin_with_the_phases_and_end_when_the_table_is_full(world: World) -> None:
    ring = make(world.root)
    assert [ring.name_id(phase) for phase in records.PHASES] == [*range(len(records.PHASES))]
    given = [ring.name_id(f"name {number}") for number in range(records.NAME_SLOTS)]
    assert given.count(None) == len(records.PHASES)
    assert ring.name_id("x" * 49) is None
    assert ring.name_id("name 3") == given[3]
    counters = struct.unpack_from(f"<{len(records.COUNTERS)}Q", ring.view, records.COUNTERS_OFFSET)
    assert dict(zip(records.COUNTERS, counters, strict=True))["names_dropped"] == len(records.PHASES) + 1
    ring.close()


def test_a_second_living_writer_is_refused(world: World) -> None:
    first = make(world.root)
    with pytest.raises(NoRing, match="another living process is this rank of this attempt"):
        make(world.root)
    assert [path.name for path in world.root.iterdir()] == [first.path.name]
    make(world.root, rank=1).close()
    first.close()


def test_the_ring_of_a_dead_process_is_replaced_and_its_laps_counted_on(world: World) -> None:
    first = make(world.root)
    inode = first.path.stat().st_ino
    struct.pack_into("<q", first.view, records.LIVE_OFFSET + 8 * len(records.PHASES) + 24, 6)
    first.close()
    second = make(world.root)
    assert (first.first_lap, second.first_lap) == (0, 7)
    assert second.path.stat().st_ino != inode
    second.close()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_what_else_stands_at_the_name_is_left_alone(world: World, kind: str) -> None:
    path = world.root / "rank-0-0-0.ring"
    if kind == "symlink":
        path.symlink_to("/etc/passwd")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(NoRing):
        make(world.root)
    assert [entry.name for entry in world.root.iterdir()] == [path.name]


def test_a_folder_that_is_gone_is_no_ring(world: World) -> None:
    with pytest.raises(NoRing, match="No such file"):
        make(world.root / "none")


def test_a_draft_of_the_same_pid_is_in_nobodys_way(world: World) -> None:
    """Pids come again in containers: a draft that a killed process left must not stop the next for good."""
    me = Process(pid=77, start_time=1, uid=os.geteuid())
    (world.root / ".rank-0-0-0.ring.77").touch()
    with pytest.raises(NoRing, match="File exists"):
        Ring(world.root, identify({}), me, 0)
    Ring(world.root, identify({}), me, 0).close()
