"""What `trainwarden doctor` looks at: this host, this user, this environment. Nothing is changed: no folder is made.

Run it where the job runs, with the job's variables: inside its container, under its user.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from shutil import which
from sysconfig import get_path
from typing import Final

from trainwarden.app.doctor import DUMP_FILE, NCCL_TIMEOUT, Facts, Folder
from trainwarden.app.folders import state_folder
from trainwarden.app.isolation import Isolation, SourceState
from trainwarden.app.mounts import mount_of
from trainwarden.app.node_sources import Devices, NodeSettings, build_sources
from trainwarden.collectors.clockstate import ClockState, kernel_clock
from trainwarden.core.identity import root_candidates
from trainwarden.core.ports import Source
from trainwarden.detectors.budgets import HangConfig

LOOK_S: Final = 6.0
"""For all sources to answer; who has not by then is told as it stands."""
SETTLE_S: Final = 2.0
"""At least: some ask a child or a server, and know only later (opening NVML takes seconds without persistence mode)."""
_CAP_SYS_PTRACE: Final = 19
"""linux/capability.h."""


def gather(
    settings: NodeSettings,
    node: str,
    *,
    hang: HangConfig,
    command: Sequence[str] = (),
    state: Path | None = None,
    nccl_timeout: timedelta | None = None,
    checkpoint_interval: timedelta | None = None,
    environment: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    look_s: float = LOOK_S,
) -> Facts:
    """Look once; takes as long as the slowest source, at most look_s and a second."""
    scope, clock = _text(proc / "sys/kernel/yama/ptrace_scope"), _clock()
    effective = dict(line.split(":", 1) for line in _text(proc / "self/status").splitlines() if ":" in line)
    may_trace = bool(int(effective.get("CapEff", "0").strip(), 16) >> _CAP_SYS_PTRACE & 1)
    return Facts(
        uid=os.geteuid(),
        environment={key: value for key, value in environment.items() if key.startswith(("TORCH_", "NCCL_"))},
        command=command,
        gpus=(proc / "driver/nvidia").is_dir(),
        infiniband=(sys / "class/infiniband").is_dir(),
        ptrace_scope=int(scope) if scope.isdecimal() else None,
        may_trace=may_trace,
        py_spy=bool(which("py-spy", path=get_path("scripts")) or which("py-spy")),
        clock_source=_text(sys / "devices/system/clocksource/clocksource0/current_clocksource"),
        clock_synchronized=None if clock is None else clock.synchronized,
        clock_offset_s=None if clock is None else clock.offset_s,
        rings=[folder(path) for path in root_candidates(environment)],
        state=folder(state_folder(state)),
        dumps=_dumps(environment),
        sources=_sources(settings, node, look_s),
        hang=hang,
        nccl_timeout=nccl_timeout or NCCL_TIMEOUT,
        checkpoint_interval=checkpoint_interval,
    )


def folder(path: Path) -> Folder:
    """What can be told of a folder that exists or is still to be made."""
    there = next(one for one in (path, *path.parents) if one.exists())
    mount = mount_of(there)
    try:
        stats = os.statvfs(there)
    except OSError as error:
        return Folder(path=str(path), kind="", why_not=error.strerror or str(error))
    why_not = "" if os.access(there, os.W_OK | os.X_OK) else f"user {os.geteuid()} may not write to {there}"
    return Folder(
        path=str(path),
        kind=mount.kind if mount else "",
        network=mount is not None and mount.is_network,
        free_bytes=stats.f_bavail * stats.f_frsize,
        why_not=why_not,
    )


def _dumps(environment: Mapping[str, str]) -> Folder | None:
    """Where c10d writes dumps: the prefix that is named, else below the user's cache; None: no home."""
    prefix = next((environment[name] for name in DUMP_FILE if environment.get(name)), None)
    if prefix is not None:
        named = Path(prefix).absolute().parent
        return folder(named) if named.is_dir() else Folder(path=str(named), kind="", why_not="there is no such folder")
    cache = environment.get("XDG_CACHE_HOME") or (environment["HOME"] + "/.cache" if environment.get("HOME") else None)
    return None if cache is None else folder(Path(cache).absolute() / "torch")


class _Often:
    """A source that is asked twice a second: some ask a child or a server, and know the next time."""

    period_s = 0.5

    def __init__(self, source: Source) -> None:
        self.name, self.poll = source.name, source.poll
        self.close: Callable[[], object] = getattr(source, "close", lambda: None)


def _sources(settings: NodeSettings, node: str, look_s: float) -> Sequence[SourceState]:
    isolation = Isolation(settings.isolation, node)
    for source in build_sources(settings, node, Devices(), start_ns=time.time_ns()):
        isolation.add(_Often(source))
    until_s = time.monotonic() + look_s
    states: list[SourceState] = []
    while time.monotonic() < until_s:
        isolation.drain()
        states = isolation.states()
        if time.monotonic() > until_s - look_s + SETTLE_S and all(state.answered for state in states):
            break
        time.sleep(0.05)
    isolation.close()
    return states


def _clock() -> ClockState | None:
    try:
        return kernel_clock()
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
