"""Checkpoints as ranks stage them, without PyTorch: a folder a rank wrote to, and one that was published."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwarden.core.manifest import write_rank_file
from trainwarden.core.model import Epoch, JobId
from trainwarden.core.ports import CheckpointStore
from trainwarden.core.records import epoch_of
from trainwarden.remediation.checkpoints.dcp import DcpStore
from trainwarden.remediation.checkpoints.folder import CheckpointFolder
from trainwarden.remediation.checkpoints.publish import Publication, StepValues, publish

JOB = JobId("train-3")
RANKS = 2
SECOND = 1_000_000_000
T0 = 1_700_000_000 * SECOND
FINE = StepValues(loss=2.5, grad_norm=0.75, finite=True)


def epoch(attempt: int) -> Epoch:
    return Epoch(epoch_of(attempt, 0, 0))


def nobody_else() -> None:
    """The job is ours."""


def write_part(stage: Path, rank: int) -> None:
    """What DCP writes as this rank: a shard, and rank 0 the table of contents."""
    stage.mkdir(parents=True, exist_ok=True)
    (stage / f"__{rank}_0.distcp").write_bytes(bytes(range(256)) * 4 + bytes([rank]))
    if rank == 0:
        names = b"".join(b"\x8c\x0c__%d_0.distcp" % other for other in range(RANKS))
        (stage / ".metadata").write_bytes(b"\x80\x04cevil\nmodule\n" + names + b".")


def stage(
    root: Path, step: int, attempt: int = 1, ranks: Sequence[int] = range(RANKS), t_ns: int | None = None
) -> Path:
    """A checkpoint as these ranks staged it."""
    folder = CheckpointFolder(root).stage(epoch(attempt), step)
    for rank in ranks:
        write_part(folder, rank)
    for rank in ranks:
        position = {"next_batch": step + 1}
        write_rank_file(
            folder, rank=rank, step=step, data_position=position, t_ns=T0 + step * SECOND if t_ns is None else t_ns
        )
    return folder


def put_out(root: Path, step: int, attempt: int = 1, values: StepValues | None = FINE) -> Publication:
    """What comes of publishing it."""
    return publish(
        root,
        job=JOB,
        attempt=attempt,
        epoch=epoch(attempt),
        step=step,
        world_size=RANKS,
        values=values,
        topology={"slots": {"0": "n1:0", "1": "n1:1"}},
        check=nobody_else,
    )


def published(root: Path, step: int, attempt: int = 1) -> Path:
    """A published checkpoint's folder."""
    stage(root, step, attempt)
    told = put_out(root, step, attempt)
    assert told.result == "published", told
    return root / "published" / told.name


PORT: type[CheckpointStore] = DcpStore
"""It has the port's shape (mypy says so)."""


def store(root: Path) -> DcpStore:
    return DcpStore(root, JOB)


def copied(good: Path, root: Path) -> Path:
    """A fresh copy of a published checkpoint, below another root."""
    target = root / "published" / good.name
    if target.exists():
        shutil.rmtree(target)
    return Path(shutil.copytree(good, target))


@contextmanager
def struck(at: int, strike: Callable[[], None], calls: Sequence[str]) -> Iterator[list[str]]:
    """Of these system calls, the one of this number does not happen: `strike` does. Gives the calls that were made."""
    made: list[str] = []
    originals = {name: getattr(os, name) for name in calls}

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(original.__name__)
            if len(made) == at + 1:
                strike()
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(os, name, wrapped(original))
    try:
        yield made
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def failing(number: int) -> Callable[[], None]:
    """A strike that fails as the system does."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail
