"""Who a rank is, and where its ring may lie. Standard library only: this runs inside the training process.

Arguments win over torchrun's environment; without either the process is rank 0 of 1. What `trainwarden run` wants a new
attempt to know stands in a JSON file named by TRAINWARDEN_ATTEMPT_FILE. Whatever is wrong is a ConfigError with the
name, the value got and what is allowed; the collector counts it, says it once, and the training goes on without us.
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
    world = max(1, _whole("WORLD_SIZE", world_size, environment.get("WORLD_SIZE"), 1, MAX_RANKS + 1))
    own = _whole("RANK", rank, environment.get("RANK"), 0, world)
    local = _whole("LOCAL_RANK", local_rank, environment.get("LOCAL_RANK"), own, world)
    node = environment.get("TRAINWARDEN_NODE") or socket.gethostname()
    slot = _slot(told, own) or f"{node}:{local}"
    return Identity(
        job=_job(job, environment),
        rank=own,
        world_size=world,
        local_rank=local,
        attempt=_whole("attempt", (told or {}).get("attempt"), None, 0, _16_BITS),
        restart=_whole("TORCHELASTIC_RESTART_COUNT", None, environment.get("TORCHELASTIC_RESTART_COUNT"), 0, _16_BITS),
        node=node,
        slot=slot,
        device=slot,
        coords=_coords(coords),
        told=told,
    )


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
