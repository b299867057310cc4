"""Today's readers read what each released version wrote (golden/make.py): rings, frames and recordings. What a newer
version wrote is refused, and says who has to be upgraded."""

import re
import shutil
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from tests.collectors.world import events, frames, rows, tmpfs_folder
from tests.replay.golden.make import (
    FRAMES,
    FRAMES_VERSION,
    HERE,
    LOSSES,
    RECORDING,
    RECORDING_VERSION,
    RING,
    bodies,
    framed,
    recorded,
)
from tests.replay.golden.make import frames as made

from trainwarden.collectors.rings import Rings
from trainwarden.core.codec import FRAME_MAGIC, dumps, frame_from_bytes, frame_to_bytes
from trainwarden.core.errors import DataError
from trainwarden.core.model import Frame, JobId
from trainwarden.core.recording import Item, Recording
from trainwarden.core.records import FEATURES, PHASES, VERSION, epoch_of


def test_each_version_up_to_todays_has_a_golden() -> None:
    """A new version adds one; none goes within 12 months."""
    for name, newest in (("ring", VERSION), ("frames", FRAMES_VERSION), ("recording", RECORDING_VERSION)):
        found = sorted(int(re.sub(r"\D", "", path.stem)) for path in HERE.glob(f"{name}-v*.*"))
        assert found == list(range(1, newest + 1)), name


def test_a_ring_of_version_1_is_read() -> None:
    with tmpfs_folder() as root:
        folder = root / "golden" / "rings"
        folder.mkdir(parents=True, mode=0o700)
        shutil.copyfile(RING.with_name("ring-v1.bin"), folder / "rank-1-3-1.ring")
        source = Rings(root, "n1", JobId("golden"), start_ns=time.time_ns())
        try:
            out = source.poll(time.time_ns())
        finally:
            source.close()
        steps = rows(out, "step")
        assert steps["rank"].tolist() == [1] * len(LOSSES)
        assert steps["step"].tolist() == steps["batch"].tolist() == list(range(len(LOSSES)))
        assert steps["values"][:, FEATURES.index("loss")].tolist() == list(LOSSES)
        assert (steps["values"][:, FEATURES.index("step_s")] > 0).all()
        assert {one.epoch for one in frames(out, "step")} == {epoch_of(3, 1, 0)}
        assert {PHASES[kind] for kind in rows(out, "span")["kind"]} == {"forward"}
        assert rows(out, "reading")["value"].tolist() == [step / 2 for step in range(len(LOSSES))]
        assert [one.data for one in events(out, "mark.note")] == [
            {"name": "my_note", "value": float(step), "step": step} for step in range(len(LOSSES))
        ]
        assert rows(out, "live")["step"].tolist() == [len(LOSSES) - 1]
        assert events(out, "source.blind") == []


@pytest.mark.parametrize("path", [pytest.param(FRAMES.with_name("frames-v1.bin"), id="version 1")])
def test_frames_of_each_version_are_read(path: Path) -> None:
    found = [frame_from_bytes(body) for body in bodies(path.read_bytes())]
    for one, expected in zip(found, made(), strict=True):
        for key in ("schema", "source", "job", "epoch", "seq", "sent_ns", "seen_ns", "names"):
            assert getattr(one, key) == getattr(expected, key), (one.schema, key)
        for column in expected.rows.dtype.names or ():
            np.testing.assert_array_equal(one.rows[column], expected.rows[column])


def test_the_command_would_make_todays_frames_again() -> None:
    """So that it is known how a golden was made. (A ring holds the times of its marks, a Parquet file its library.)"""
    assert framed([*map(frame_to_bytes, made())]) == FRAMES.read_bytes()


@pytest.mark.parametrize("path", [pytest.param(RECORDING.with_name("recording-v1.parquet"), id="version 1")])
def test_recordings_of_each_version_are_read(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(path, tmp_path / "00000001.parquet")
    recording = Recording(tmp_path)
    assert told(recording) == told(recorded())
    assert recording.refused == []


def told(items: Iterable[Item]) -> list[bytes]:
    return [frame_to_bytes(item) if isinstance(item, Frame) else dumps(item).encode() for item in items]


# versions to come


def test_a_ring_of_a_newer_version_makes_the_agent_blind_until_it_is_upgraded() -> None:
    with tmpfs_folder() as root:
        folder = root / "golden" / "rings"
        folder.mkdir(parents=True, mode=0o700)
        shutil.copyfile(RING, folder / "rank-1-3-1.ring")
        with (folder / "rank-1-3-1.ring").open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", VERSION + 1))
        source = Rings(root, "n1", JobId("golden"), start_ns=time.time_ns())
        (blind,) = events(source.poll(time.time_ns()), "source.blind")
        source.close()
    assert f"layout version {VERSION + 1}, we read up to {VERSION}: upgrade the agent" in str(blind.data["why"])


def test_a_frame_of_a_newer_version_is_refused() -> None:
    newer = FRAME_MAGIC[:-1] + str(FRAMES_VERSION + 1).encode()
    with pytest.raises(DataError, match=f"{newer.decode()}.*upgrade this one"):
        frame_from_bytes(newer + frame_to_bytes(made()[0])[len(FRAME_MAGIC) :])
