"""What may be done without a person: a rule for each kind of finding, and limits. By default everything observes.

A *guard* compares a plan with these numbers. What will pass soon (a cool-down, a budget that frees itself) makes a plan
wait, for at most `limits.patience`: a repair that starts hours later, when nobody expects it, is worse than none. All
else refuses it, and what the rule would have done is recorded with the reason. Limits count over all rules of a job and
stop harm only: looking, verifying and observing go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final, Literal

from trainwarden.core.config import load
from trainwarden.core.durations import format_duration
from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """So many plans within so much time."""

    plans: int
    """Plans that may start within the window."""

    window: timedelta
    """Counted back from the newest start."""

    def __post_init__(self) -> None:
        if self.plans < 1:
            raise ConfigError(f"plans: need at least 1 (mode: observe does nothing), got {self.plans}")
        _need_positive(self, "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class RungsConfig:
    """How long each goal may take, and how much of it is asked for."""

    evidence_collected: timedelta = timedelta(seconds=15)
    """Stacks of all ranks: the witness gives up after 10 s."""

    checkpoint_taken: timedelta = timedelta(minutes=30)
    """The longest saves that issue trackers tell of (and of watchdogs of 15 min that cut them off)."""

    quiesced: timedelta = timedelta(minutes=2)
    """Two steps of the slowest jobs; a rank obeys at the end of a step."""

    stopped: timedelta = timedelta(seconds=30)
    """SIGTERM 3 s and SIGKILL 5 s, for the ranks and then for the launcher, is 16 s at most, and the proof of it."""

    running: timedelta = timedelta(minutes=20)
    """What users call a slow recovery took 16 min (948 s; torchft#329 and others), and that did end well."""

    verified: timedelta = timedelta(minutes=10)
    """Ten steps of a minute each."""

    within_steps: int = 10
    """A checkpoint is to be taken within this many steps."""

    verified_steps: int = 10
    """First steps of the new attempt that are compared: fewer are the warm-up of allocator and caches."""

    def __post_init__(self) -> None:
        _need_positive(self, *(one.name for one in fields(self)))

    def deadline_s(self, goal: str) -> float:
        """How long this goal may take."""
        allowed: timedelta = getattr(self, goal)
        return allowed.total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleConfig:
    """What may be done about one kind of finding."""

    mode: Literal["observe", "approve", "act"] = "observe"
    """observe: say what would be done; approve: do it when a person agrees; act: do it."""

    min_confidence: float = 0.0
    """Confidence that a finding needs. That it is final says that the trouble is real; its confidence says how sure the
    culprit is, and a hang or a NaN that is blamed on nobody (0.45 and less) needs its restart all the same."""

    leave_out: Literal["never", "witnessed", "alone"] = "witnessed"
    """Whether the culprit's slot may be left out for a spare one. witnessed: only with a fact that the job itself
    cannot write (an exit status, the kernel's log); alone: the ranks' own measurements are enough."""

    leave_out_confidence: float = 0.9
    """Confidence without which no slot is left out: two slow windows give 0.95, one death among several 0.8."""

    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig(plans=1, window=timedelta(minutes=10)))
    """Plans of this rule. At the rate of the largest public job (8 faults a day, see BreakerConfig) another fault comes
    within 10 min in one case of twenty: what comes so soon is rather the same trouble, which the repair did not end."""

    cool_down: timedelta = timedelta(minutes=2)
    """After the end of a plan before the next one of this rule: detectors need 20 steps to know the new attempt."""

    approval: timedelta = timedelta(minutes=30)
    """How long a plan waits for a person: a page is answered within 15 min or goes to the next person, twice."""

    rungs: RungsConfig = field(default_factory=RungsConfig)
    """Deadlines of its ladder."""

    def __post_init__(self) -> None:
        for name in ("min_confidence", "leave_out_confidence"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: need 0 to 1, got {getattr(self, name):g}")
        if self.cool_down < timedelta(0):
            raise ConfigError(f"cool_down: need 0 or more, got {format_duration(self.cool_down)}")
        _need_positive(self, "approval")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When repairing is given up until somebody has looked."""

    failed: int = 2
    """Failed plans in a row: the first may have met a second fault, two mean that the repair is wrong."""

    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig(plans=10, window=timedelta(hours=24)))
    """Plans, failed or not: the largest public job, 16,384 GPUs, was interrupted 8 times a day (Llama 3: 419 unexpected
    interruptions in 54 days)."""

    cool_off: timedelta = timedelta(hours=12)
    """After which an open breaker closes by itself: the next shift has come. A person may close it at any time."""

    def __post_init__(self) -> None:
        if self.failed < 1:
            raise ConfigError(f"failed: need at least 1, got {self.failed}")
        _need_positive(self, "cool_off")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What holds for all rules of a job together."""

    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig(plans=3, window=timedelta(hours=6)))
    """Plans of the whole job: half more than the largest public job needed (8 a day are 2 in 6 h), and as many restarts
    as torch.distributed.launcher allows by default (LaunchConfig.max_restarts)."""

    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    """The switch that opens by itself."""

    patience: timedelta = timedelta(minutes=15)
    """Longest wait for a cool-down or a budget; a plan that would have to wait longer is refused."""

    strikes: timedelta = timedelta(hours=24)
    """A slot that is struck a second time within this time is left out, where a spare is there: a healthy GPU of the
    largest public job was struck once in 6 years (16,384 x 54 days / 419), so twice in a day is no coincidence."""

    def __post_init__(self) -> None:
        _need_positive(self, "strikes")
        if self.patience < timedelta(0):
            raise ConfigError(f"patience: need 0 or more, got {format_duration(self.patience)}")


FINDING_KINDS: Final = tuple(name for name, row in KINDS.items() if row.of == "finding")

LIMITS: Final = "limits"

SECTIONS: Final[Mapping[str, type[Any]]] = {
    **{f"rules.{kind}": RuleConfig for kind in FINDING_KINDS},
    LIMITS: LimitsConfig,
}
"""Section of the policy file -> its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A rule for each kind of finding, and the limits."""

    rules: Mapping[str, RuleConfig] = field(default_factory=lambda: dict.fromkeys(FINDING_KINDS, RuleConfig()))
    """By kind; a kind without a rule is left to people."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """For all of them together."""


def load_policy(path: Path) -> Policy:
    """The policy in a file; what it does not say has its default. Raises ConfigError."""
    said = load(path, SECTIONS)
    return Policy(rules={kind: said[f"rules.{kind}"] for kind in FINDING_KINDS}, limits=said[LIMITS])


def shipped_policy(name: Literal["default", "demo"]) -> Policy:
    """One of the policies that come with trainwarden."""
    with as_file(files("trainwarden.remediation") / "policies" / f"{name}.yaml") as path:
        return load_policy(path)


def _need_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, timedelta) and value <= timedelta(0):
            raise ConfigError(f"{name}: need more than 0, got {format_duration(value)}")
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name}: need at least 1, got {value}")
