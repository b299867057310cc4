"""Every kind of event and finding there is: one of the three tables that join the components.

Xid -> kind lives in detectors, kind -> tier in alerts, kind -> ladder in remediation. A test checks that every finding
kind has a tier and a runbook page, and that every emitted event carries the data keys named here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainwarden.core.model import SubjectKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One row."""

    name: str
    of: Literal["event", "finding"]
    meaning: str
    scope: SubjectKind
    data: tuple[str, ...] = ()
    """Keys that Event.data must have (findings have none: their facts are evidence)."""
    hard: bool = False
    """A fact that the job's tenant cannot write: kernel, scheduler, BMC, NVML, an exit status seen by the kernel."""
    runbook: str = ""
    """Page below docs/runbooks, without .md; every finding has one."""


def _event(name: str, scope: SubjectKind, meaning: str, *data: str, hard: bool = False) -> Kind:
    return Kind(name=name, of="event", meaning=meaning, scope=scope, data=data, hard=hard)


def _finding(name: str, scope: SubjectKind, meaning: str, *, hard: bool = False) -> Kind:
    return Kind(name=name, of="finding", meaning=meaning, scope=scope, hard=hard, runbook=name.replace(".", "-"))


_ROWS = (
    _event(
        "hello",
        "rank",
        "a rank attached: who and where it is",
        *("rank", "world_size", "coords", "slot", "device", "node", "pid", "start_time", "uid", "ring", "clock"),
        *("blind", "attempt", "restart", "lap", "versions"),
    ),
    _event(
        "process.exit",
        "rank",
        "a process of the job ended; rank null = the launcher; code and signal null = nobody saw them",
        *("rank", "pid", "code", "signal", "oom", "by", "t_ns"),
        hard=True,
    ),
    _event("launcher.failure", "job", "torchrun's failure table or a rank's error file", "failures", "root", "file"),
    _event("attempt.started", "job", "an attempt began", "attempt", "term", "by"),
    _event("attempt.stopping", "job", "an attempt is about to be stopped on purpose", "attempt", "by"),
    _event("attempt.ended", "job", "an attempt ended; code null = nobody saw it", "attempt", "term", "by", "code"),
    _event("mark.phase", "rank", "the script announced a phase and how long it may take", "phase", "expect_s"),
    _event("mark.checkpoint_committed", "rank", "a rank finished writing its part", "step", "path", "rank"),
    _event("mark.note", "rank", "a named mark of the script", "name", "value"),
    _event("request.ack", "rank", "a rank answered a request", "seq", "at_step", "rank", "answer"),
    _event("look.answer", "source", "a node's agent has looked at ranks, or why not", "key", "what", "ranks", "why"),
    _event("stack", "rank", "where a rank's main thread stands", "rank", "frames", "state", "wchan", "denied"),
    _event("membership", "job", "the set of ranks of an epoch changed", "ranks"),
    _event("telemetry.lost", "source", "rows or frames of a source are missing", "from_seq", "to_seq"),
    _event("source.blind", "source", "a source cannot be read, or not usefully", "why"),
    _event("source.up", "source", "a source can be read again", "why"),
    _event("source.started", "source", "a source began", "why"),
    _event(
        "source.stretched",
        "source",
        "a source is polled at factor times its period, for the agent to cost no more than it may (1: as set again)",
        *("why", "factor", "period_s"),
    ),
    _event("oom.kill", "node", "the kernel's OOM killer ended a process", "pid", "line", hard=True),
    _event(
        "xid",
        "device",
        "an NVIDIA driver error of a GPU, lines of one burst folded; what it means is decided elsewhere",
        *("code", "pci", "pid", "process", "body", "count", "first_ns", "line"),
        hard=True,
    ),
    _event(
        "sxid",
        "device",
        "an NVSwitch error, lines of one burst folded",
        *("code", "pci", "severity", "link", "body", "count", "first_ns", "line"),
        hard=True,
    ),
    _event(
        "gpu.off_bus",
        "device",
        "the driver cannot reach a GPU any more (with or without Xid 79)",
        "pci",
        "line",
        hard=True,
    ),
    _event(
        "pcie.aer",
        "device",
        "a PCIe error report",
        *("pci", "severity", "error", "count", "first_ns", "line"),
        hard=True,
    ),
    _event("link.state", "link", "a network port changed its state", "port", "state", "line", hard=True),
    _event(
        "driver.error",
        "device",
        "a message of NVIDIA's driver that is no Xid (initialisation failed, crash dump); pci null = it names no GPU",
        *("pci", "error", "body", "count", "first_ns", "line"),
        hard=True,
    ),
    _event("kernel.segfault", "node", "a process crashed in a library", "pid", "process", "library", "line", hard=True),
    _event(
        "node.domains",
        "node",
        "the fault domains of a node (rack, leaf, nvlink, driver ...), all that one source knows of them",
        *("from", "domains"),
        hard=True,
    ),
    _event(
        "domains.differ",
        "node",
        "sources name a fault domain of a node differently, told once for each domain and set of sources",
        *("domain", "used", "values"),
    ),
    _event("device.found", "device", "a GPU answers", "uuid", "pci", "index", "name", "driver", hard=True),
    _event("device.lost", "device", "a GPU that answered does not any more", "why", hard=True),
    _event(
        "dump",
        "rank",
        "a flight recorder dump of a rank was read; its collectives are frames",
        *("rank", "version", "entries", "groups", "path"),
    ),
    _event("dump.refused", "source", "a dump that may not or cannot be read", "path", "why"),
    _event("mark.recompile", "rank", "torch.compile compiled again", "rank", "name", "count"),
    _event("command.approve", "job", "a person approved a plan", "plan", "who", "why", "expires_ns"),
    _event("command.deny", "job", "a person refused a plan", "plan", "who", "why", "expires_ns"),
    _event("command.stop_all", "job", "a person switched all actions off", "plan", "who", "why", "expires_ns"),
    _event("command.pin", "checkpoint", "a person pinned a checkpoint", "plan", "who", "why", "expires_ns"),
    _finding("process.killed", "rank", "a process was ended by a signal it did not send itself", hard=True),
    _finding("process.oom", "rank", "a process was ended by the kernel's OOM killer", hard=True),
    _finding("process.failed", "rank", "a process ended itself with an error", hard=True),
    _finding("process.unknown", "rank", "a process is gone and nobody saw its exit status", hard=True),
    _finding("rank.hung", "rank", "no rank progresses within what its phase allows; this one did not arrive"),
    _finding("rank.slow", "rank", "a rank's own work takes longer than its peers'"),
    _finding("loss.nonfinite", "rank", "a loss or gradient norm is NaN or infinite"),
)

KINDS: Mapping[str, Kind] = {row.name: row for row in _ROWS}


def missing_data(kind: str, data: Mapping[str, object]) -> tuple[str, ...]:
    """Which required keys an event's data lacks; raises KeyError for a kind that is no row.

    >>> missing_data("source.blind", {})
    ('why',)
    """
    return tuple(key for key in KINDS[kind].data if key not in data)
