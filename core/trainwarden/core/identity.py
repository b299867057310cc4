"""Who a rank is, and where its ring may lie. Standard library only: this runs inside the training process.

Arguments win over what launchers leave in the environment: the first of LAUNCHERS that tells all of rank, size and
local rank is believed, whole. Nothing is put together from two of them, and where they disagree the order decides:
launchers run inside one another (torchrun in srun, mpirun in a batch script), and everything below inherits the
variables of the outer ones. A rank without a size is refused, since every process would take itself for a job of one.
Without any launcher the process is rank 0 of 1.

What `trainwarden run` wants a new attempt to know stands in a JSON file named by TRAINWARDEN_ATTEMPT_FILE. Whatever is
wrong is a ConfigError with the name, the value got and what is allowed; the collector counts it, says it once, and the
training goes on without us.
"""

import json
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwarden.core.errors import ConfigError
from trainwarden.core.process import identify as identify_process

OFF = "TRAINWARDEN"
"""Environment variable: `0` turns everything inside the rank off."""

AXES = ("pp", "tp", "dp", "ep", "cp")
"""Coordinates a rank may have; the same order as Topology.coords_RP."""

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
"""A job's name is a folder's name."""

MAX_RANKS = 1 << 20
"""World sizes beyond are garbage: ten times the largest jobs known."""

MAX_ATTEMPT_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The environment variables in which a launcher tells a process who it is."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str
    """How many ranks this host has."""
    restart: str = ""
    only_with: str = ""
    """Without this variable the others tell nothing."""


LAUNCHERS = (
    Launcher(
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        restart="TORCHELASTIC_RESTART_COUNT",
    ),
    *(
        Launcher(
            rank=f"{mpi}_COMM_WORLD_RANK",
            world_size=f"{mpi}_COMM_WORLD_SIZE",
            local_rank=f"{mpi}_COMM_WORLD_LOCAL_RANK",
            local_size=f"{mpi}_COMM_WORLD_LOCAL_SIZE",
        )
        for mpi in ("OMPI", "MV2")
    ),
    Launcher(rank="PMI_RANK", world_size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS"),
    Launcher(
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        restart="SLURM_RESTART_COUNT",
        only_with="SLURM_STEP_ID",
    ),
)
"""The innermost first: torchrun (and all that speak like it), Open MPI, MVAPICH2, MPICH and Intel MPI (Hydra), srun.

srun starts Hydra's helpers, so PMI comes before Slurm; srun's own PMI has no local rank and is passed over. A batch
script has SLURM_PROCID=0 beside the size of the whole job and is no task of it: only srun sets a step.
"""

_RANK_WITHOUT_SIZE = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")

_16_BITS = 1 << 16
_15_BITS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """This process, as nobody else will ever be named."""

    pid: int
    start_time: int
    """Clock ticks since boot, field 22 of /proc/PID/stat."""
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One rank of one attempt."""

    job: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this host; where nobody tells, all of them."""
    attempt: int
    """Issued by the job's owner; 0 where nobody owns the job."""
    restart: int
    """The launcher's own restarts inside the attempt."""
    node: str
    slot: str
    """`<node>:<index>`: the place that exclusions name."""
    device: str
    coords: Mapping[str, int]
    """Some of AXES."""
    told: Mapping[str, Any] | None
    """The attempt file: attempt, term, checkpoint, skip, slots, staging; None without one."""


def identify(
    environment: Mapping[str, str] = os.environ,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    job: str | None = None,
    coords: Mapping[str, int] | None = None,
) -> Identity:
    """This rank's identity. Raises ConfigError.

    >>> me = identify({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TRAINWARDEN_NODE": "n2"})
    >>> me.rank, me.world_size, me.slot, me.job
    (5, 8, 'n2:1', 'job')
    """
    told = read_attempt_file(environment.get("TRAINWARDEN_ATTEMPT_FILE"))
    by = _launcher(environment, alone=rank is None and world_size is None)
    world = max(1, _whole(by.world_size, world_size, environment.get(by.world_size), 1, MAX_RANKS + 1))
    own = _whole(by.rank, rank, environment.get(by.rank), 0, world)
    local = _whole(by.local_rank, local_rank, environment.get(by.local_rank), own, world)
    node = environment.get("TRAINWARDEN_NODE") or socket.gethostname()
    slot = _slot(told, own) or f"{node}:{local}"
    return Identity(
        job=_job(job, environment),
        rank=own,
        world_size=world,
        local_rank=local,
        local_world_size=_local_size(by, environment, world),
        attempt=_whole("attempt", (told or {}).get("attempt"), None, 0, _16_BITS),
        restart=_whole(by.restart, None, environment.get(by.restart), 0, _16_BITS),
        node=node,
        slot=slot,
        device=slot,
        coords=_coords(coords),
        told=told,
    )


def _launcher(environment: Mapping[str, str], *, alone: bool) -> Launcher:
    """Who is believed. alone: nothing but the environment tells the rank. Raises ConfigError."""
    torchrun, *others = LAUNCHERS
    if torchrun.rank in environment or torchrun.world_size in environment:
        return torchrun
    for by in others:
        needed = (by.rank, by.world_size, by.local_rank, by.only_with or by.rank)
        if all(name in environment for name in needed):
            return by
    lone = next((name for name in _RANK_WITHOUT_SIZE if name in environment), None)
    if alone and lone:
        raise ConfigError(f"{lone}={environment[lone]!r}: nothing tells size and local rank: give them to attach()")
    return torchrun


def _local_size(by: Launcher, environment: Mapping[str, str], world: int) -> int:
    text = environment.get(by.local_size, "")
    if by.only_with:
        text = str(tasks_of_node(text, environment.get("SLURM_NODEID", "")))
    return int(text) if text.isdigit() and 0 < int(text) <= world else world


def tasks_of_node(text: str, node: str) -> int:
    """How many tasks of a Slurm step a node has; 0 where it cannot be told.

    >>> [tasks_of_node("4(x2),3", node) for node in "0123x"]
    [4, 4, 3, 0, 0]
    """
    left = int(node) if node.isdigit() else MAX_RANKS
    for tasks, times in re.findall(r"(\d{1,7})(?:\(x(\d{1,7})\))?(?:,|\Z)", text):
        left -= int(times or 1)
        if left < 0:
            return int(tasks)
    return 0


def read_attempt_file(path: str | None) -> Mapping[str, Any] | None:
    """What the owner tells this attempt's ranks; None without a file. Raises ConfigError for one that is no good."""
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            told = json.loads(file.read(MAX_ATTEMPT_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"TRAINWARDEN_ATTEMPT_FILE: {path} cannot be read: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("slots", {}), dict):
        raise ConfigError(f"TRAINWARDEN_ATTEMPT_FILE: {path}: expected an object with a table `slots`")
    return told


def this_process() -> Process:
    """The calling process."""
    found = identify_process(os.getpid())
    return Process(pid=os.getpid(), start_time=0 if found is None else found.start_time, uid=os.geteuid())


def root_candidates(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where rings may lie, best first."""
    uid = os.geteuid()
    named = environment.get("TRAINWARDEN_DIR")
    usual = (Path(f"/run/trainwarden/{uid}"), Path(f"/dev/shm/trainwarden-{uid}"))
    return (Path(named), *usual) if named else usual


def choose_root(
    environment: Mapping[str, str] = os.environ, *, mounts: Path = Path("/proc/self/mountinfo")
) -> tuple[Path | None, str]:
    """The first candidate that is our own folder on a tmpfs, made if missing; else None and why each was refused.

    A disk is no good even where it is fast: the kernel's write-back can stall the store of a mark.
    """
    refused = []
    for path in root_candidates(environment):
        why = _why_not(path, mounts)
        if why is None:
            return path, ""
        refused.append(f"{path}: {why}")
    return None, "; ".join(refused)


def make_private(path: Path) -> str | None:
    """Make a folder for this user alone; why it is not one, or None. One that others could write to is refused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o022:
        return "others may write to it"
    return None


def filesystem_of(path: Path, mountinfo: str) -> str:
    """Type of the filesystem a path lies on: that of the longest mount point above it (proc_pid_mountinfo(5)).

    >>> table = "1 0 8:1 / / rw - ext4 a rw" + chr(10) + "2 1 0:2 / /dev/shm rw,nosuid shared:3 - tmpfs b rw"
    >>> filesystem_of(Path("/dev/shm/x/y"), table), filesystem_of(Path("/dev/shmx"), table)
    ('tmpfs', 'ext4')
    """
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, source = left.split(), right.split()
        if len(fields) < 5 or not source:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4]))
        depth = len(point.parts)
        if depth >= best and (point == path or point in path.parents):  # of two on one point the later one is on top
            best, kind = depth, source[0]
    return kind


def _why_not(path: Path, mounts: Path) -> str | None:
    if sys.byteorder != "little":
        return "a big-endian machine"
    try:
        kind = filesystem_of(Path(os.path.realpath(path)), mounts.read_text(errors="surrogateescape"))
    except OSError as error:
        return error.strerror or str(error)
    return make_private(path) if kind == "tmpfs" else f"on {kind}, not on tmpfs"


def _whole(name: str, given: object, text: str | None, default: int, end: int) -> int:
    """A whole number from 0 up to before `end`: the argument, else the text, else the default."""
    got = given if given is not None else text
    if got is None:
        return default
    try:
        number = int(got) if isinstance(got, int | str) else -1
    except ValueError:
        number = -1
    if not 0 <= number < end:
        raise ConfigError(f"{name}: expected a whole number from 0 to {end - 1}, got {got!r}")
    return number


def _job(given: str | None, environment: Mapping[str, str]) -> str:
    slurm, elastic = environment.get("SLURM_JOB_ID"), environment.get("TORCHELASTIC_RUN_ID")
    candidates = (given, environment.get("TRAINWARDEN_JOB"), slurm and f"slurm-{slurm}", elastic)
    name = next((name for name in candidates if name and name != "none"), "job")  # torchrun's own default is "none"
    if not JOB_NAME.match(name):
        raise ConfigError(f"job: expected letters, digits, '.', '_', '-' (at most 64), got {name!r}")
    return name


def _slot(told: Mapping[str, Any] | None, rank: int) -> str | None:
    slot = (told or {}).get("slots", {}).get(str(rank))
    if slot is not None and not isinstance(slot, str):
        raise ConfigError(f"attempt file: slots.{rank}: expected text as <node>:<index>, got {slot!r}")
    return slot


def _coords(given: Mapping[str, int] | None) -> Mapping[str, int]:
    unknown = sorted(set(given or {}) - set(AXES))
    if unknown:
        raise ConfigError(f"coords: {unknown[0]!r} is none of {', '.join(AXES)}")
    return {axis: _whole(f"coords.{axis}", place, None, 0, _15_BITS) for axis, place in (given or {}).items()}
