"""`trainwarden doctor`: what can be seen from here, what cannot and why, and which settings contradict each other.

`examine` is pure: facts in, checks out, worst first. Who looks is app/doctor_facts.py.

Sources: PyTorch's variables and defaults are those of torch/csrc/distributed/c10d (ProcessGroupNCCL.hpp,
FlightRecorder.hpp); the older name of a variable counts where the newer is not set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Final, Literal

from trainwarden.app.isolation import SourceState
from trainwarden.core.durations import format_duration
from trainwarden.detectors.budgets import HangConfig

Level = Literal["ok", "note", "warning", "error"]
LEVELS: Final[Sequence[Level]] = ("error", "warning", "note", "ok")
EXIT_STATUS: Final[Mapping[Level, int]] = {"ok": 0, "note": 0, "warning": 1, "error": 2}

NCCL_TIMEOUT: Final = timedelta(minutes=10)
"""PyTorch's default of init_process_group(timeout=...) for NCCL."""
HEARTBEAT_S: Final = 480.0
DUMP_WAIT_MS: Final = 15_000.0
RING_BYTES: Final = 1 << 20
"""Of one rank, at most (core/records.py)."""
RANKS: Final = 16
"""Ranks that a node has room for."""
STATE_FREE_BYTES: Final = 1 << 30
"""A job's recording may take this (run.recording_max_bytes)."""
CLOCK_OFF_S: Final = 0.01
"""Events of two hosts that are further apart than a fast step cannot be ordered."""
SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})
"""Reading these leaves user space or takes a slow bus: about a microsecond a mark instead of 25 ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that something is to be kept in."""

    path: str
    kind: str
    """Type of its file system; empty: cannot be told."""
    network: bool = False
    free_bytes: int | None = None
    why_not: str = ""
    """Why it cannot be used at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found."""

    uid: int
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    """The launcher's command line, where it is known."""
    gpus: bool = False
    """Whether NVIDIA's driver is loaded here."""
    infiniband: bool = False
    ptrace_scope: int | None = None
    """kernel.yama.ptrace_scope; None: the kernel has no Yama."""
    may_trace: bool = False
    """CAP_SYS_PTRACE."""
    py_spy: bool = False
    clock_source: str = ""
    """Empty: cannot be read."""
    clock_synchronized: bool | None = None
    clock_offset_s: float | None = None
    rings: Sequence[Folder] = ()
    """Where rings may lie, best first."""
    state: Folder | None = None
    dumps: Folder | None = None
    """Where flight recorder dumps go."""
    sources: Sequence[SourceState] = ()
    hang: HangConfig = field(default_factory=HangConfig)
    nccl_timeout: timedelta = NCCL_TIMEOUT
    checkpoint_interval: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    area: str
    level: Level
    what: str
    do: str = ""
    """What to do about it; empty: nothing."""


def examine(facts: Facts) -> list[Check]:
    """Everything there is to say, worst first, in the order of the areas."""
    areas = (_sources, _rings, _timeouts, _recorder, _launcher, _stacks, _clock, _state)
    found = list(chain.from_iterable(area(facts) for area in areas))
    return sorted(found, key=lambda check: LEVELS.index(check.level))


def exit_status(checks: Sequence[Check]) -> int:
    """By the worst: 0 fine, 1 warnings, 2 errors."""
    return max((EXIT_STATUS[check.level] for check in checks), default=0)


_ADVICE: Final[Mapping[str, str]] = {
    "kernel-log": "let it read the kernel log: sysctl kernel.dmesg_restrict=0, CAP_SYSLOG, or "
    "collectors.kernel_log.source: journal with the group systemd-journal",
    "nvml": "install the driver's libnvidia-ml.so.1, or give the container the GPU (driver capability utility)",
    "dcgm": "run dcgm-exporter here and name it in collectors.dcgm.url, or leave dcgm out of agent.sources",
    "infiniband": "mount the host's /sys into the container, or leave infiniband out of agent.sources",
    "jobs": "run the agent as the job's user, or with CAP_DAC_READ_SEARCH",
}
"""By the name of a source before its `@`."""

_OF_HARDWARE: Final = frozenset({"pcie", "host"})
"""Sources of files that a virtual machine, or a kernel without an option, has not; nobody can give them to it."""


def _sources(facts: Facts) -> Iterator[Check]:
    up = [state.name for state in facts.sources if state.word == "up"]
    if up:
        yield Check(area="sources", level="ok", what=f"can be read: {', '.join(up)}")
    nvml = any(state.name.startswith("nvml@") and state.word == "up" for state in facts.sources)
    for state in facts.sources:
        if state.word == "up":
            continue
        kind = state.name.partition("@")[0]
        idle = (kind in ("nvml", "dcgm") and not facts.gpus) or (kind == "dcgm" and nvml)
        idle |= kind == "infiniband" and not facts.infiniband
        idle |= kind in _OF_HARDWARE
        what = f"{state.name} is {state.word}: {state.why}"
        yield Check(area="sources", level="note" if idle else "warning", what=what, do=_ADVICE.get(kind, ""))


def _rings(facts: Facts) -> Iterator[Check]:
    if not facts.rings:
        return
    usable = next((folder for folder in facts.rings if folder.kind == "tmpfs" and not folder.why_not), None)
    if usable is None:
        whys = (one.why_not or f"on {one.kind or 'an unknown file system'}" for one in facts.rings)
        why = "; ".join(f"{one.path}: {why}" for one, why in zip(facts.rings, whys, strict=True))
        do = "mount a tmpfs at /dev/shm (docker --shm-size) or name one in TRAINWARDEN_DIR"
        yield Check(area="rings", level="error", what=f"ranks have no place for their rings: {why}", do=do)
        return
    needed = RANKS * RING_BYTES
    if usable.free_bytes is not None and usable.free_bytes < needed:
        what = f"{usable.path} has {_size(usable.free_bytes)} left, {RANKS} ranks take up to {_size(needed)}"
        yield Check(area="rings", level="warning", what=what, do="make the tmpfs larger (docker --shm-size)")
    else:
        yield Check(area="rings", level="ok", what=f"rings go to {usable.path} (tmpfs)")


def _timeouts(facts: Facts) -> Iterator[Check]:
    """Who gives up first: we must see a hang, and dumps must be written, before PyTorch ends the ranks."""
    hang, nccl = facts.hang, facts.nccl_timeout
    heartbeat = timedelta(seconds=_number(facts, HEARTBEAT_S, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"))
    wait = timedelta(milliseconds=_number(facts, DUMP_WAIT_MS, *_DUMP_WAIT))
    said = {name: format_duration(value) for name, value in (("nccl", nccl), ("beat", heartbeat), ("wait", wait))}
    step, long_phase = format_duration(hang.step), format_duration(hang.long_phase)
    fine = True
    if hang.step >= nccl:
        fine = False
        what = f"a hang inside a step is found after {step}, but PyTorch ends the ranks after {said['nccl']}"
        do = f"give init_process_group a timeout above {step}, or set detectors.hang.step below {said['nccl']}"
        yield Check(area="timeouts", level="error", what=what, do=do)
    elif hang.long_phase > nccl:
        fine = False
        what = f"checkpoint and evaluation may take {long_phase}, but PyTorch ends ranks that wait {said['nccl']}"
        do = "give init_process_group the longer timeout, or set detectors.hang.long_phase below it"
        yield Check(area="timeouts", level="warning", what=what, do=do)
    if _flag(facts, True, "TORCH_NCCL_ENABLE_MONITORING") and heartbeat <= hang.step < nccl:
        fine = False
        what = f"PyTorch's monitor may end a rank after {said['beat']}, a hang is found after {step}"
        do = f"set TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC above {hang.step.total_seconds():.0f}"
        yield Check(area="timeouts", level="warning", what=what, do=do)
    if wait >= heartbeat:
        fine = False
        what = f"ranks wait {said['wait']} for dumps, the monitor ends them after {said['beat']}"
        yield Check(area="timeouts", level="warning", what=what, do=f"set {_DUMP_WAIT[0]} below the heartbeat")
    if (interval := facts.checkpoint_interval) is not None and interval < hang.step:
        fine = False
        what = f"checkpoints are {format_duration(interval)} apart, a hang is found only after {step}"
        yield Check(area="timeouts", level="note", what=what, do="set detectors.hang.step to what a step takes at most")
    if fine:
        what = f"hang {step} < NCCL {said['nccl']}; dump wait {said['wait']} < monitor {said['beat']}"
        yield Check(area="timeouts", level="ok", what=what)


_BUFFER: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ON_TIMEOUT: Final = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_DUMP_WAIT: Final = ("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
DUMP_FILE: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def _recorder(facts: Facts) -> Iterator[Check]:
    env, area = facts.environment, "flight recorder"
    size = _said(facts, *_BUFFER)
    hint = f"set {_BUFFER[0]}=2000 (and {_BUFFER[1]}=2000 for older releases) in the job's environment"
    level: Level = "warning" if facts.gpus else "note"
    if size is None:
        what = "its size is not set: most PyTorch releases then record nothing"
        yield Check(area=area, level=level, what=what, do=hint)
    elif _number(facts, 0, *_BUFFER) <= 0:
        yield Check(area=area, level="warning", what=f"switched off ({_BUFFER[0]}={size})", do=hint)
    else:
        yield Check(area=area, level="ok", what=f"records {size} entries")
    for new, old in (_BUFFER, _ON_TIMEOUT, _DUMP_WAIT, DUMP_FILE):
        if new in env and old in env and env[new] != env[old]:
            what = f"{new}={env[new]} and {old}={env[old]} contradict each other"
            yield Check(area=area, level="warning", what=what, do="set both to the same: releases read either")
    if not _flag(facts, True, *_ON_TIMEOUT):
        yield Check(
            area=area, level="warning", what="no dump when a collective times out", do=f"set {_ON_TIMEOUT[0]}=1"
        )
    if not _flag(facts, True, "TORCH_NCCL_ENABLE_MONITORING"):
        what = "the monitor thread, which writes dumps, is switched off"
        yield Check(area=area, level="warning", what=what, do="unset TORCH_NCCL_ENABLE_MONITORING")
    if env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        what = "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 ends ranks before their dumps are written"
        yield Check(area=area, level="warning", what=what, do="set TORCH_NCCL_ASYNC_ERROR_HANDLING=3")
    if facts.dumps is not None and facts.dumps.why_not:
        what = f"dumps go to {facts.dumps.path}: {facts.dumps.why_not}"
        yield Check(area=area, level="warning", what=what, do=f"name a folder that exists in {DUMP_FILE[0]}")
    elif facts.dumps is not None and facts.dumps.network:
        what = f"dumps go to {facts.dumps.path}, on {facts.dumps.kind}: all ranks write there in the moment of a hang"
        yield Check(area=area, level="note", what=what, do=f"name a local folder in {DUMP_FILE[0]}")


def _launcher(facts: Facts) -> Iterator[Check]:
    options = dict(_options(facts.command))
    restarts = options.get("max-restarts", "0")
    if restarts != "0":
        what = f"torchrun --max-restarts {restarts}: the launcher restarts ranks by itself"
        do = "give --max-restarts 0 where a policy of trainwarden is to restart the job: exactly one may"
        yield Check(area="launcher", level="warning", what=what, do=do)
    try:
        interval_s = float(options.get("monitor-interval", "0.1"))
    except ValueError:
        interval_s = 0.1
    if interval_s > 5:
        what = f"torchrun --monitor-interval {interval_s:g}: a dead rank is noticed that late"
        yield Check(area="launcher", level="note", what=what, do="leave it at its default")


def _stacks(facts: Facts) -> Iterator[Check]:
    scope, area = facts.ptrace_scope, "stacks"
    if not facts.py_spy:
        do = "pip install py-spy beside the agent"
        yield Check(area=area, level="note", what="py-spy is not there: stacks come from faulthandler or /proc", do=do)
    elif scope == 3:
        what = "nobody may trace a process here (kernel.yama.ptrace_scope=3): stacks come from faulthandler or /proc"
        yield Check(area=area, level="warning", what=what, do="sysctl kernel.yama.ptrace_scope=1 (needs a reboot)")
    elif scope and not facts.may_trace:
        what = f"user {facts.uid} may not trace a rank (kernel.yama.ptrace_scope={scope})"
        do = "give CAP_SYS_PTRACE (docker --cap-add SYS_PTRACE), or sysctl kernel.yama.ptrace_scope=0"
        yield Check(area=area, level="warning", what=what, do=do)
    else:
        yield Check(area=area, level="ok", what="a hung rank's stack can be read")


def _clock(facts: Facts) -> Iterator[Check]:
    source, off_s = facts.clock_source, facts.clock_offset_s
    if source in SLOW_CLOCKS:
        what = f"the kernel's clock source is {source}: each mark of a rank takes about a microsecond"
        do = "boot with tsc=reliable, or choose a paravirtual clock"
        yield Check(area="clock", level="warning", what=what, do=do)
    if facts.clock_synchronized is None:
        yield Check(area="clock", level="note", what="cannot tell whether the clock is synchronized")
    elif not facts.clock_synchronized:
        do = "run chrony or another time daemon: events of several hosts are ordered by it"
        yield Check(area="clock", level="warning", what="the clock is not synchronized", do=do)
    elif off_s is not None and off_s > CLOCK_OFF_S:
        what = f"the clock may be off by {off_s * 1e3:.0f} ms"
        yield Check(area="clock", level="warning", what=what, do="look at the time daemon (chronyc tracking)")
    elif source not in SLOW_CLOCKS:
        yield Check(area="clock", level="ok", what=f"{source or 'source unknown'}, synchronized")


def _state(facts: Facts) -> Iterator[Check]:
    if (state := facts.state) is None:
        return
    do = "name a folder on a disk of this host: --state or TRAINWARDEN_STATE"
    if state.network:
        what = f"{state.path} is on {state.kind}: the journal (SQLite) is refused there"
        yield Check(area="state", level="error", what=what, do=do)
    elif state.why_not:
        yield Check(area="state", level="error", what=f"{state.path}: {state.why_not}", do=do)
    elif state.free_bytes is not None and state.free_bytes < STATE_FREE_BYTES:
        what = f"{state.path} has {_size(state.free_bytes)} left, a recording may take {_size(STATE_FREE_BYTES)}"
        yield Check(area="state", level="warning", what=what, do="make room, or set run.recording_max_bytes")
    else:
        yield Check(area="state", level="ok", what=f"{state.path} ({state.kind or 'file system unknown'})")


def _said(facts: Facts, *names: str) -> str | None:
    """The first of these variables that is set."""
    return next((facts.environment[name] for name in names if facts.environment.get(name)), None)


def _number(facts: Facts, default: float, *names: str) -> float:
    try:
        return float(_said(facts, *names) or default)
    except ValueError:
        return default


def _flag(facts: Facts, default: bool, *names: str) -> bool:
    """As c10d reads a switch: 0, n, no, f, false are off."""
    said = _said(facts, *names)
    return default if said is None else said.lower() not in ("0", "n", "no", "f", "false")


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Long options with their values, `_` as `-`; those of the script count too, which does no harm."""
    for place, word in enumerate(command):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            after = command[place + 1] if place + 1 < len(command) else ""
            yield name.replace("_", "-"), value if equals else after


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
