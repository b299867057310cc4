"""attach(): from who I am to a recorder, or to one that does nothing. Never raises for what the surroundings do."""

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Literal

from trainwarden.collectors.rank.dumps import Dumps
from trainwarden.collectors.rank.hello import Hello
from trainwarden.collectors.rank.pending import time_on
from trainwarden.collectors.rank.rank import Rank
from trainwarden.collectors.rank.requests import Desk
from trainwarden.collectors.rank.ring import SIDE, NoRing, Ring
from trainwarden.collectors.rank.say import say
from trainwarden.collectors.rank.schedstat import Schedstat
from trainwarden.core.errors import ConfigError
from trainwarden.core.identity import OFF, Identity, choose_root, identify, make_private, this_process
from trainwarden.core.records import CLOCKS

_OWN_FILE: Final = re.compile(r"rank-(\d+)-(\d+)-(\d+)[.-]")

_ranks: Final[list[Rank]] = []
"""Those of this process; more than one only in tests."""

_registered: Final[list[Callable[[], None]]] = []


def attach(
    coords: Mapping[str, int] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    job: str | None = None,
    clock: Literal["wall", "cpu", "device"] = "wall",
) -> Rank:
    """The recorder of this rank, to be used by the calling thread.

    Who we are is told by the arguments, else by a launcher's environment (core/identity.py), else this is rank 0 of 1.
    A worker of a DataLoader is no rank, and neither is a spawned process that only imports the script. coords: this
    rank's place in the parallel layout, some of pp, tp, dp, ep, cp. clock: `cpu` also asks the scheduler at each mark
    (about 1 us each) and is what a CPU job needs; `device` has CUDA time the phases, as watch() does by itself for a
    model that is there (`wall` then becomes `device`). Whatever prevents a ring is said once, and the recorder is then
    a no-op: the training goes on as without us.
    """
    if os.environ.get(OFF) == "0":
        return Rank(None, why_off=f"{OFF}=0")
    worker = _worker()
    if worker:
        return Rank(None, why_off=worker)
    try:
        me = identify(rank=rank, world_size=world_size, local_rank=local_rank, job=job, coords=coords)
        recorder = _record(me, clock)
    except (NoRing, ConfigError) as why:
        say("no recording", f"no recording of this rank: {why}")
        return Rank(None, why_off=str(why))
    except Exception as error:  # ours, and no reason to stop a training
        say("no recording", f"no recording of this rank: {type(error).__name__}: {error}")
        return Rank(None, why_off=str(error))
    _remember(recorder)
    return recorder


def _worker() -> str:
    """What this process is, if it has a rank's environment but is none; else empty. Nothing is imported to find out."""
    multiprocessing, data = sys.modules.get("multiprocessing"), sys.modules.get("torch.utils.data")
    if multiprocessing is not None and getattr(multiprocessing.current_process(), "_inheriting", False):
        return "a spawned process that is still importing the script"
    if data is not None and data.get_worker_info() is not None:
        return "a worker of a DataLoader"
    return ""


def _record(me: Identity, clock: str) -> Rank:
    if (asked := clock) not in (*CLOCKS, "device"):
        raise ConfigError(f"clock: expected one of {', '.join(CLOCKS)}, device, got {clock!r}")
    rings, hellos = _folders(me)
    _remove_old(me, rings, hellos)
    schedstat = _schedstat() if clock == "cpu" else None
    clock = "wall" if schedstat is None else "cpu"
    process = this_process()
    ring = Ring(rings, me, process, CLOCKS.index(clock))
    hello = Hello(hellos, me, process, ring, clock)
    hello(ring.first_lap)
    side = partial(Ring, rings, me, process, CLOCKS.index(clock), SIDE)
    dumps = _dumps(hellos, process.pid)
    desk = Desk(ring, me)
    made = Rank(ring, schedstat=schedstat, attempt=me.told, hello=hello, side_ring=side, desk=desk, dumps=dumps)
    if asked == "device":
        _time_on_device(made)
    return made


def _time_on_device(recorder: Rank) -> None:
    try:
        time_on(recorder, "cuda")
    except Exception as error:
        say("no device clock", f"no device clock, the wall clock is used: {error}")


def _dumps(hellos: Path, pid: int) -> Dumps | None:
    try:
        return Dumps(hellos, pid)
    except (OSError, RuntimeError, ValueError) as error:
        say("no dumps", f"no stacks on request: {error}")
        return None


def _folders(me: Identity) -> tuple[Path, Path]:
    """rings/ and hello/ of this job. Raises NoRing."""
    root, why = choose_root()
    if root is None:
        raise NoRing(f"no tmpfs to put a ring on: {why}")
    for folder in (root / me.job, root / me.job / "rings", root / me.job / "hello"):
        refused = make_private(folder)
        if refused is not None:
            raise NoRing(f"{folder}: {refused}")
    return root / me.job / "rings", root / me.job / "hello"


def _remove_old(me: Identity, *folders: Path) -> None:
    """Memory is not given away for ever: of this rank's incarnations only the one before this one is left."""
    for folder in folders:
        matches = [found for found in map(_OWN_FILE.match, os.listdir(folder)) if found and int(found[1]) == me.rank]
        files = {found.string: (int(found[2]), int(found[3])) for found in matches}
        before = sorted({incarnation for incarnation in files.values() if incarnation < (me.attempt, me.restart)})
        for name in (name for name, incarnation in files.items() if incarnation in before[:-1]):
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _schedstat() -> Schedstat | None:
    try:
        return Schedstat()
    except (OSError, ValueError) as error:
        say("no CPU clock", f"no CPU clock, the wall clock is used: {error}")
        return None


def _remember(recorder: Rank) -> None:
    """Detach it when the process ends in order; a forked child must not write into its parent's ring."""
    _ranks[:] = [*(known for known in _ranks if not known.why_off), recorder]
    if not _registered:
        _registered.append(_close_all)
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_let_go_all)


def _close_all() -> None:
    while _ranks:
        _ranks.pop().close()


def _let_go_all() -> None:
    while _ranks:
        _ranks.pop().let_go("forked from a process that records")
