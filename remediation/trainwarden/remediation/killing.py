"""Ends an attempt's processes for certain: ranks first, then their launcher, each by pidfd.

A launcher that is told to stop waits for its ranks (torchrun: 30 s for one that is stopped by SIGSTOP), so the ranks
are ended first: SIGTERM, a grace of 3 s, SIGKILL. A process that ignores both is in the kernel's hands (state D), and
that is what is returned.
"""

import signal
import time
from collections.abc import Iterable, Sequence

from trainwarden.core.process import ProcessId, alive, descendants, identify, send

TERM_GRACE_S = 3.0
"""From SIGTERM to SIGKILL: enough to flush a log, too short for a checkpoint (asked for by its own rung before)."""

KILL_GRACE_S = 5.0
"""From SIGKILL to giving up: an exiting process unmaps memory; one in state D does not answer at all."""

_LOOK_S = 0.02


def end(ranks: Iterable[ProcessId], launcher: ProcessId | None) -> tuple[ProcessId, ...]:
    """End ranks, launcher and all that runs below the launcher; return what is still alive (empty: proved gone)."""
    below = [] if launcher is None or not alive(launcher) else [identify(pid) for pid in descendants(launcher.pid)]
    known = list(dict.fromkeys([*ranks, *(process for process in below if process is not None)]))
    _end_all(known)
    if launcher is not None:
        _end_all([launcher])
        known.append(launcher)
    return tuple(process for process in known if alive(process))


def _end_all(processes: Sequence[ProcessId]) -> None:
    for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
        for process in processes:
            if alive(process):
                send(process, number)
        if _gone(processes, grace_s):
            return


def _gone(processes: Sequence[ProcessId], within_s: float) -> bool:
    end_s = time.monotonic() + within_s
    while any(alive(process) for process in processes):
        if time.monotonic() > end_s:
            return False
        time.sleep(_LOOK_S)
    return True
