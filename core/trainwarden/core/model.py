"""The words of trainwarden as types: what is seen, what it means, who must know, what is done.

Times: `_ns` are Unix int64 nanoseconds, `_s` float seconds. Ids are made from what they name, never random and never
from a clock of ours, so that a replay gives the same ids. Classes that hold arrays compare by identity (eq=False).
Array names end in their shape: R ranks, F features (records.FEATURES), P parallel dimensions, M micro-batches.
Changed only by an ADR (docs/adr).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

JobId = NewType("JobId", str)
Epoch = NewType("Epoch", int)
"""Only grows: attempt << 32 | restart << 16 | lap. Data is fenced by `attempt`, actions by the owner's term."""

Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None
State: TypeAlias = Mapping[str, Any]
"""A snapshot: NumPy arrays and JSON values (npz + JSON, never pickle)."""

Schema: TypeAlias = Literal["step", "live", "span", "reading", "collective"]
SubjectKind: TypeAlias = Literal["rank", "device", "node", "link", "group", "domain", "job", "checkpoint", "source"]


class Tier(IntEnum):
    """How loudly an incident is said."""

    INFO = 0
    """Recorded."""
    WARN = 1
    """Working hours; only planned, reversible action at a safe point, where policy allows."""
    ERROR = 2
    """A page; unplanned action allowed by policy."""
    CRITICAL = 3
    """A page, a person now; actions as for ERROR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a finding, event or incident is about.

    >>> str(Subject(kind="rank", id="3"))
    'rank:3'
    """

    kind: SubjectKind
    id: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.id}"


# seen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """A columnar batch of rows of one schema, source and epoch: the unit of wire, recording and replay."""

    schema: Schema
    source: str
    job: JobId | None
    epoch: Epoch | None
    """One epoch a frame; job and epoch None: the node's own."""
    seq: int
    """Counts the frames of one source; a gap is Event telemetry.lost."""
    sent_ns: int
    seen_ns: int
    """The receiver's stamp; the only clock that closes a step."""
    names: tuple[str, ...]
    """What the small integers of the rows index."""
    rows: NDArray[np.void]
    """One dtype a schema: schemas.DTYPES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something discrete; its kind is a row of core/kinds.py."""

    kind: str
    subject: Subject
    source: str
    seq: int
    """Counts the events of one source, from the source's start time in microseconds."""
    t_ns: int
    seen_ns: int
    job: JobId | None = None
    epoch: Epoch | None = None
    data: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passing, four times a second, recorded like the rest: silence is data, and nobody needs a clock."""

    seen_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """Where the ranks of one epoch sit; made from the ranks' hellos and the site file."""

    job: JobId
    epoch: Epoch
    device_R: tuple[str, ...]
    """GPU UUID, else `<node>:<slot>`; "" for a rank that never said hello."""
    node_R: NDArray[np.int32]
    """Index into tuple(domains), -1 for a rank that never said hello."""
    coords_RP: NDArray[np.int16]
    """P = pp, tp, dp, ep, cp; -1 where the rank did not say."""
    domains: Mapping[str, Mapping[str, str]]
    """node -> {"rack": "r3", "driver": "570.86", ...}, in the order that node_R indexes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMatrix:
    """A closed step: emitted in order, exactly once."""

    topology: Topology
    step: int
    batch: int
    seen_ns: int
    partial: bool
    values_FR: NDArray[np.float32]
    """Rows as records.FEATURES; unseen = NaN (what was seen and not finite is told by flags_R)."""
    seen_R: NDArray[np.bool_]
    flags_R: NDArray[np.uint32]
    micro_MKR: NDArray[np.float32] | None = None
    """M micro-batches x (forward_s, backward_s, tokens) x R, from span rows."""


Input: TypeAlias = Topology | StepMatrix | Frame | Event | Tick

# meant


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measured fact behind a finding. Values are finite JSON: NaN and Inf are written as strings."""

    what: str
    value: Json
    expected: Json = None
    unit: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one detector concluded; revisable. Never a tier, never an action."""

    id: str
    """detector/job/epoch/first subject/n: stable while culprit, onset and cause are revised."""
    revision: int
    status: Literal["provisional", "final", "cleared", "withdrawn"]
    kind: str
    subject: Subject
    suspects: tuple[tuple[Subject, float], ...]
    job: JobId | None
    epoch: Epoch | None
    onset_ns: int
    onset_step: int | None
    seen_ns: int
    confidence: float
    reason: str
    evidence: tuple[Evidence, ...]
    lost_s_per_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """All findings and events of one cause, ordered by first abnormal sign."""

    id: str
    revision: int
    state: Literal["suspected", "confirmed", "mitigating", "recovering", "resolved", "reopened"]
    tier: Tier
    kind: str
    culprit: Subject | None
    victims: tuple[Subject, ...]
    job: JobId | None
    epoch: Epoch | None
    onset_ns: int
    findings: tuple[Finding, ...]
    events: tuple[Event, ...]
    reason: str
    action: str
    plans: tuple[str, ...]
    lost_s: Mapping[str, float]
    """detect, decide, stop, start, load, warm_up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What one channel is told about an incident; key = id/revision/channel."""

    key: str
    channel: str
    change: Literal["opened", "updated", "escalated", "resolved"]
    incident: Incident


# done


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A request to look closer at subjects: stacks or dumps. Sent on the first provisional hang."""

    key: str
    what: Literal["stack", "dump"]
    subjects: tuple[Subject, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A state of the world to reach, with its deadline; goals are rows of core/goals.py."""

    goal: str
    target: Subject
    args: Mapping[str, Json]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A ladder of rungs for one incident."""

    id: str
    incident: str
    rule: str
    mode: Literal["observe", "approve", "act"]
    fence: int
    """The owner's term."""
    deadline_ns: int
    ladder: tuple[Rung, ...]
    why: str = ""
    """What stands against it: why it only observes though its rule acts, or would be refused if it acted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rung ended; index -1 = the plan as a whole."""

    plan: str
    index: int
    result: Literal["reached", "already", "failed", "refused", "expired"]
    reason: str
    retryable: bool
    found: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Carry this plan out; key = plan.id."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Something a running plan must hear: an approval, a revised verdict, a cancel."""

    key: str
    plan: str
    message: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint as its manifest tells it."""

    name: str
    job: JobId
    epoch: Epoch
    step: int
    t_ns: int
    loss: float | None
    grad_norm: float | None
    data_position: Json
    topology: Json
    rank_steps: Mapping[int, int]
    trust: Literal["unverified", "good", "distrusted"]
    pinned: bool
    files: Mapping[str, tuple[int, str]]
    """path -> (bytes, "sha256:..." or "blake3:...")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What a runtime knows of its job."""

    attempt: int
    state: Literal["starting", "running", "stopping", "ended"]
    slots: Mapping[int, str]
    """rank -> slot."""
    pids: Mapping[int, tuple[int, int]]
    """rank -> (pid, start time)."""
    exits: Mapping[int, int]
    """rank -> exit status as a shell shows it; only what somebody saw."""
    restarts: Literal["us", "launcher", "scheduler"]
    """Who restarts an attempt."""


Stimulus: TypeAlias = Finding | Event | Incident | Start | Outcome | Tick
Instruction: TypeAlias = Incident | Notice | Look | Start | Tell
