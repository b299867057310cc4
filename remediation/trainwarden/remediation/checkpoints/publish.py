"""How a staged checkpoint becomes one that can be selected: by the job's owner alone, and by one rename.

A stage is complete when every rank's file is in it. Before the rename the owner writes the manifest, forces it to the
disk, and reads once more whether the job is still its own. It may be interrupted anywhere: what is not renamed is not
there, and doing it again does it once. An owner that is frozen between that last look and the rename could still
publish too late; `close_attempt` is why such a one is never selected.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from trainwarden.core.errors import DataError
from trainwarden.core.manifest import (
    MANIFEST,
    Manifest,
    RankFile,
    rank_file_name,
    read_manifest,
    read_rank_file,
    write_manifest,
)
from trainwarden.core.model import Epoch, JobId, Json, StepMatrix
from trainwarden.core.records import FEATURES, NONFINITE, attempt_of
from trainwarden.core.sealed import is_draft, measure, sync_folder, write_sealed
from trainwarden.remediation.checkpoints.folder import (
    CheckpointFolder,
    accepted_names,
    name_of,
    names_in,
    numbers_in,
    order_of,
    regular_files,
    staged_steps,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """What all ranks said of one step."""

    loss: float | None
    """None: the script does not tell one."""
    grad_norm: float | None
    finite: bool
    """False: some rank had a value that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What became of an attempt to publish."""

    result: Literal["published", "already", "waiting", "refused"]
    """waiting: ask again; refused: it will never be published as it is."""
    name: str
    reason: str = ""


def step_values(matrix: StepMatrix) -> StepValues | None:
    """The values of a closed step; None: not all ranks told theirs, so nobody knows whether all were finite."""
    if matrix.partial:
        return None
    return StepValues(
        loss=_first_finite(matrix, "loss"),
        grad_norm=_first_finite(matrix, "grad_norm"),
        finite=not bool((matrix.flags_R & NONFINITE).any()),
    )


def staged(root: Path, attempt: int) -> list[tuple[Epoch, int]]:
    """(epoch, step) of every stage of an attempt, complete or not, in order."""
    epochs = [epoch for epoch in numbers_in(root / "staging") if attempt_of(epoch) == attempt]
    folder = CheckpointFolder(root)
    return [(Epoch(epoch), step) for epoch in epochs for step in staged_steps(folder.staging(epoch))]


def stage_complete(stage: Path, world_size: int) -> tuple[int, ...]:
    """The ranks whose file is still missing; none: the stage is complete."""
    there = set(names_in(stage))
    return tuple(rank for rank in range(world_size) if rank_file_name(rank) not in there)


def publish(
    root: Path,
    *,
    job: JobId,
    attempt: int,
    epoch: Epoch,
    step: int,
    world_size: int,
    values: StepValues | None,
    topology: Json,
    check: Callable[[], None],
) -> Publication:
    """Publish a staged checkpoint of the attempt that runs, if everything is there. Asked again, it does it once.

    values: of this step in this attempt; None: not (all) arrived. check: raises FencedError unless the job is ours.
    """
    assert world_size > 0
    folder, name = CheckpointFolder(root), name_of(step, epoch)
    try:
        if (folder.published / name / MANIFEST).exists():
            sync_folder(folder.published)  # whoever renamed it may have been killed before this
            return Publication(result="already", name=name)
        if why := _refusal(folder, attempt, epoch, values):
            return Publication(result="refused", name=name, reason=why)
        stage = folder.stage(epoch, step)
        if (why := _lack(stage, world_size, values)) or values is None:
            return Publication(result="waiting", name=name, reason=why)
        parts = [read_rank_file(stage, rank) for rank in range(world_size)]
        files = _claimed(stage, parts, step)
        _sync_below(stage, files)
        write_manifest(stage, _joined(name, job, epoch, step, values, topology, parts, files))
        folder.make()
        check()
        stage.rename(folder.published / name)
        sync_folder(folder.published)
        sync_folder(stage.parent)
    except DataError as error:
        return Publication(result="refused", name=name, reason=str(error))
    except OSError as error:  # a full disk, a file system that is away
        return Publication(result="waiting", name=name, reason=str(error))
    return Publication(result="published", name=name)


def close_attempt(root: Path, attempt: int, check: Callable[[], None]) -> frozenset[str]:
    """Write down, once, what an attempt that is over has published; what comes later is never selected.

    To be called when no process of it is alive, and before the next attempt starts. Raises FencedError, OSError,
    DataError (the record is there but damaged).
    """
    folder = CheckpointFolder(root)
    folder.make()
    known = accepted_names(folder, attempt)
    if known is not None:
        return known
    names = [name for name in names_in(folder.published) if attempt_of(order_of(name)[0]) == attempt]
    readable = [name for name in names if _readable(folder.published / name)]
    check()
    write_sealed(folder.accepted(attempt), {"attempt": attempt, "names": readable})
    return frozenset(readable)


def _first_finite(matrix: StepMatrix, feature: str) -> float | None:
    value_R = matrix.values_FR[FEATURES.index(feature)]
    finite = value_R[np.isfinite(value_R)]
    return float(finite[0]) if len(finite) else None


def _refusal(folder: CheckpointFolder, attempt: int, epoch: int, values: StepValues | None) -> str:
    if attempt_of(epoch) != attempt:
        return f"staged by attempt {attempt_of(epoch)}, not by attempt {attempt}, which is ours"
    if folder.accepted(attempt).exists():
        return f"attempt {attempt} is over"
    if values is not None and not _finite(values):
        return "its step has a value that is not finite"
    return ""


def _finite(values: StepValues) -> bool:
    told = [value for value in (values.loss, values.grad_norm) if value is not None]
    return values.finite and all(math.isfinite(value) for value in told)


def _lack(stage: Path, world_size: int, values: StepValues | None) -> str:
    if missing := stage_complete(stage, world_size):
        return f"{len(missing)} of {world_size} ranks have not finished writing, rank {missing[0]} first"
    return "" if values is not None else "not all ranks have told their values of this step"


def _claimed(stage: Path, parts: list[RankFile], step: int) -> dict[str, tuple[int, str]]:
    """Every file of the stage with its length and digest, each by exactly one rank. Raises DataError."""
    files = {rank_file_name(part.rank): measure(stage, rank_file_name(part.rank)) for part in parts}
    for part in parts:
        if part.step != step:
            raise DataError(f"{stage}: mixed steps: rank {part.rank} wrote step {part.step}")
        for name in part.files:
            if name in files or name == MANIFEST:
                raise DataError(f"{stage / name}: rank {part.rank} says that it wrote it, but it is another's")
        files |= part.files
    found = _without_leftovers(stage)
    for name in sorted(found ^ files.keys()):
        why = "missing" if name in files else "no rank says that it wrote it (files= of committed())"
        raise DataError(f"{stage / name}: {why}")
    for name, (length, _) in files.items():
        if (size := (stage / name).lstat().st_size) != length:
            raise DataError(f"{stage / name}: {size} bytes, {length} were written")
    return files


def _without_leftovers(stage: Path) -> frozenset[str]:
    """The files of the stage; those that an interrupted owner or rank began are removed."""
    found = regular_files(stage)
    drafts = {name for name in found if is_draft(name)}
    for name in drafts:
        (stage / name).unlink(missing_ok=True)
    return found - drafts - {MANIFEST}


def _sync_below(stage: Path, files: Mapping[str, object]) -> None:
    """Folders inside the stage: the ranks forced their files to the disk, and the manifest will force the stage."""
    for parent in sorted({os.path.dirname(name) for name in files} - {""}):
        sync_folder(stage / parent)


def _joined(
    name: str,
    job: JobId,
    epoch: int,
    step: int,
    values: StepValues,
    topology: Json,
    parts: list[RankFile],
    files: Mapping[str, tuple[int, str]],
) -> Manifest:
    positions = [part.data_position for part in parts]
    same = all(position == positions[0] for position in positions)
    return Manifest(
        name=name,
        job=job,
        epoch=epoch,
        step=step,
        t_ns=max(part.t_ns for part in parts),
        loss=values.loss,
        grad_norm=values.grad_norm,
        data_position=positions[0] if same else {"ranks": positions},
        topology=topology,
        rank_steps={part.rank: part.step for part in parts},
        files=files,
    )


def _readable(path: Path) -> bool:
    try:
        return read_manifest(path).name == path.name
    except (DataError, OSError):
        return False
