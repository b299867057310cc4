"""What makes a folder of files a checkpoint: a rank file of every rank, and the manifest that joins them.

A rank measures what it wrote (length and SHA-256, read back and forced to the disk) and says so in rank-<r>.json beside
it. The job's owner joins the rank files to manifest.json, written last. Whatever is not exactly as it must be is a
DataError that names file, key, value and what was expected: whoever wrote it may be anything but well.

Standard library only: ranks write rank files. SHA-256 because every Python has it and most processors have
instructions for it.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwarden.core.clock import unix_ns
from trainwarden.core.errors import DataError
from trainwarden.core.sealed import Sealed, is_safe, measure, read_sealed, write_sealed

MANIFEST = "manifest.json"
MAX_RANKS = 1 << 20
MAX_STEP = 1 << 31
"""A ring's steps are int32."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RANK = re.compile(r"0|[1-9][0-9]{0,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What one rank says of its part of a checkpoint."""

    rank: int
    step: int
    t_ns: int
    """When the part was complete, by the rank's clock: nothing in it is younger."""
    data_position: Any
    """Where the rank stands in its data; JSON."""
    files: Mapping[str, tuple[int, str]]
    """Name below the folder -> (bytes, "sha256:...")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published checkpoint is: the fields of model.Checkpoint that never change again."""

    name: str
    job: str
    epoch: int
    step: int
    t_ns: int
    """The youngest rank file's."""
    loss: float | None
    """At this step, as the owner saw it; None: the script does not tell one."""
    grad_norm: float | None
    data_position: Any
    topology: Any
    rank_steps: Mapping[int, int]
    files: Mapping[str, tuple[int, str]]
    """Every file but the manifest itself."""


def rank_file_name(rank: int) -> str:
    """Beside what the rank wrote."""
    return f"rank-{rank}.json"


def write_rank_file(
    folder: Path,
    *,
    rank: int,
    step: int,
    files: Iterable[str | os.PathLike[str]] = (),
    data_position: Any = None,
    t_ns: int | None = None,
) -> RankFile:
    """Measure what this rank wrote below folder and say so beside it; called when all of it is written.

    files: paths, absolute or below folder, beside what torch.distributed.checkpoint writes as this rank. t_ns: a moment
    after which nothing was changed (default: now). Raises DataError, OSError.
    """
    names = [*_dcp_files(folder, rank), *(os.path.relpath(folder / file, folder) for file in files)]
    told = RankFile(
        rank=rank,
        step=step,
        t_ns=unix_ns() if t_ns is None else t_ns,
        data_position=data_position,
        files={_checked(folder, name): measure(folder, name, sync=True) for name in names},
    )
    write_sealed(folder / rank_file_name(rank), asdict(told))
    return told


def read_rank_file(folder: Path, rank: int) -> RankFile:
    """What a rank said of its part. Raises DataError, OSError."""
    found = read_sealed(folder / rank_file_name(rank))
    if found.whole("rank", MAX_RANKS) != rank:
        found.refuse("rank", f"{rank}, as the file's name says", found.take("rank"))
    return RankFile(
        rank=rank,
        step=found.whole("step", MAX_STEP),
        t_ns=found.whole("t_ns"),
        data_position=found.take("data_position"),
        files=_files(found),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, for good. Raises DataError, OSError."""
    write_sealed(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises DataError, OSError."""
    found = read_sealed(folder / MANIFEST)
    return Manifest(
        name=found.text("name"),
        job=found.text("job"),
        epoch=found.whole("epoch"),
        step=found.whole("step", MAX_STEP),
        t_ns=found.whole("t_ns"),
        loss=found.number("loss"),
        grad_norm=found.number("grad_norm"),
        data_position=found.take("data_position"),
        topology=found.take("topology"),
        rank_steps=_rank_steps(found),
        files=_files(found),
    )


def _rank_steps(found: Sealed) -> dict[int, int]:
    table = found.table("rank_steps")
    for rank, step in table.items():
        if not _RANK.fullmatch(rank) or int(rank) >= MAX_RANKS:
            found.refuse("rank_steps", "ranks as keys", rank)
        if type(step) is not int or not 0 <= step < MAX_STEP:
            found.refuse(f"rank_steps.{rank}", f"a whole number from 0 to {MAX_STEP - 1}", step)
    return {int(rank): step for rank, step in table.items()}


def _files(found: Sealed) -> dict[str, tuple[int, str]]:
    return {name: _file(found, name, value) for name, value in found.table("files").items()}


def _file(found: Sealed, name: str, value: object) -> tuple[int, str]:
    if not is_safe(name):
        found.refuse("files", "names of files below the folder", name)
    match value:
        case [int(length), str(digest)] if type(length) is int and length >= 0 and _DIGEST.fullmatch(digest):
            return length, digest
    found.refuse(f"files.{name}", '[bytes, "sha256:..."]', value)


def _checked(folder: Path, name: str) -> str:
    if not is_safe(name):
        raise DataError(f"{folder}: files: expected paths below the folder, got {name!r}")
    return name


def _dcp_files(folder: Path, rank: int) -> list[str]:
    """This rank's shards; the first rank writes the table of contents for all."""
    shard = re.compile(rf"__{rank}_\d+\.distcp")
    return sorted(name for name in os.listdir(folder) if shard.fullmatch(name) or (rank == 0 and name == ".metadata"))
