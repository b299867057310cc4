"""Makes the goldens of one version of what is kept and sent: a rank's ring, a frame of each schema, a recording.

Run once for each version of a layout, with the code of that version, and never again: what it made is what a rank or an
agent that was not upgraded still writes. Readers of later versions must read all of them for 12 months.

    .venv/bin/python -m tests.replay.golden.make        # refuses to replace a file that exists
"""

import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainwarden.core.codec import FRAME_MAGIC, frame_from_bytes, frame_to_bytes
from trainwarden.core.model import Epoch, Event, Frame, JobId, Schema, Subject, Tick
from trainwarden.core.records import FEATURES, PHASES, VERSION, epoch_of
from trainwarden.core.schemas import DTYPES

HERE = Path(__file__).resolve().parent
FRAMES_VERSION = int(FRAME_MAGIC.decode()[-1])
RECORDING_VERSION = 1
"""Of columns and the text of events; a change of these that today's reader needs to tell apart makes it 2."""
RING, FRAMES = HERE / f"ring-v{VERSION}.bin", HERE / f"frames-v{FRAMES_VERSION}.bin"
RECORDING = HERE / f"recording-v{RECORDING_VERSION}.parquet"
NAMES: dict[Schema, tuple[str, ...]] = {
    "step": (),
    "live": PHASES,
    "span": PHASES,
    "reading": ("device:GPU-1", "node:n1", "gpu_power_watts", "node_load_1m"),
    "collective": ("default", "nccl:all_reduce", "nccl:send 1->2"),
}
STEPS = 5
LOSSES = (4.0, 2.0, 1.0, 0.5, 0.25)
_LENGTH = struct.Struct("<I")


def frames() -> list[Frame]:
    """Two or three rows of each schema: every column has numbers of its own, one job's and one node's frame."""
    made = []
    for number, (schema, names) in enumerate(NAMES.items()):
        rows = np.zeros(3 if names else 2, DTYPES[schema])
        for place, column in enumerate(rows.dtype.names or ()):
            for row in range(len(rows)):
                many = 1 if rows[column].ndim == 1 else rows[column].shape[1]
                value = np.arange(many) / 4 + row + 10 * place if many > 1 else (row + place) % max(len(names), 100)
                rows[column][row] = value
        for column in ("kind", "phase", "subject", "signal", "group", "op"):
            if column in (rows.dtype.names or ()):
                rows[column] = np.arange(len(rows)) % len(names)
        if schema == "step":
            rows["values"][1, FEATURES.index("grad_norm")] = np.nan
        of_job = schema != "reading"
        made.append(
            Frame(
                schema=schema,
                source="rings@n1",
                job=JobId("golden") if of_job else None,
                epoch=Epoch(epoch_of(2, 1, 3)) if of_job else None,
                seq=100 + number,
                sent_ns=1_800_000_000_000_000_000,
                seen_ns=1_800_000_000_000_000_001,
                names=names,
                rows=rows,
            )
        )
    return made


def framed(bodies: Sequence[bytes]) -> bytes:
    """Each with its length before it."""
    return b"".join(_LENGTH.pack(len(body)) + body for body in bodies)


def bodies(data: bytes) -> Iterator[bytes]:
    """What `framed` put together."""
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + _LENGTH.size : at + _LENGTH.size + length]
        at += _LENGTH.size + length


def recorded() -> list[Frame | Event | Tick]:
    """The frames, events with every sort of value in their data, and time passing."""
    rank, at_ns = Subject(kind="rank", id="3"), 1_800_000_000_000_000_000
    job = {"job": JobId("golden"), "epoch": Epoch(epoch_of(2, 1, 3))}
    exit_ = {"rank": 3, "pid": 7, "code": None, "signal": 9, "oom": False, "by": "keeper", "t_ns": at_ns}
    told: list[tuple[str, Subject, dict[str, Any]]] = [
        ("process.exit", rank, {"data": exit_, **job}),
        ("mark.note", rank, {"data": {"name": "lr \u00e9", "value": 0.5, "more": [1, {"deep": "x"}]}, **job}),
        ("source.blind", Subject(kind="source", id="nvml@n1"), {"data": {"why": "no driver"}}),
    ]
    events = [
        Event(kind=kind, subject=subject, source="s@n1", seq=number, t_ns=at_ns, seen_ns=at_ns + 1, **more)
        for number, (kind, subject, more) in enumerate(told)
    ]
    return [*frames(), *events, Tick(seen_ns=at_ns + 2)]


def recording() -> bytes:
    """The one file of a recording of these."""
    from trainwarden.core.recording import Recorder

    with tempfile.TemporaryDirectory() as folder:
        with Recorder(Path(folder)) as recorder:
            for item in recorded():
                recorder.write(item)
        (file,) = Path(folder).glob("*.parquet")
        return file.read_bytes()


def ring() -> bytes:
    """The ring of rank 1 of 2, attempt 3, restart 1, after five steps with a span, a value and a note; not closed."""
    from trainwarden.collectors.rank import BACKWARD, DATA, FORWARD, OPTIMIZER, attach

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        told = Path(folder) / "attempt.json"
        told.write_text('{"attempt": 3}')
        os.environ |= {"TRAINWARDEN_DIR": folder, "TRAINWARDEN_ATTEMPT_FILE": str(told)}
        os.environ |= {"TORCHELASTIC_RESTART_COUNT": "1"}
        rank = attach(rank=1, world_size=2, job="golden")
        for step, loss in enumerate(LOSSES[:STEPS]):
            rank.begin(step)
            for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER):
                rank.mark(phase)
            rank.value("loss", loss)
            rank.value("my_value", step / 2)
            with rank.span(FORWARD, mb=1):
                pass
            rank.note("my_note", step)
            rank.end()
        (file,) = Path(folder).glob("golden/rings/*.ring")
        kept = file.read_bytes()
        rank.close()
    return kept


def main() -> None:
    made = ((RING, ring), (FRAMES, lambda: framed([*map(frame_to_bytes, frames())])), (RECORDING, recording))
    for path, make in made:
        if path.exists():
            sys.stdout.write(f"{path.name} stays: it is what that version wrote\n")
            continue
        path.write_bytes(make())
        sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")
    assert all(frame_from_bytes(body) for body in bodies(FRAMES.read_bytes()))


if __name__ == "__main__":
    main()
