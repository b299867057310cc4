"""Scenarios: a real training, what goes wrong in it, and what must be said about it. One file each in scenarios/.

A scenario without expectations must pass in silence: any notice is a false alarm, and any repair is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

from trainwarden.core.config import load
from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Tier
from trainwarden.rehearsal.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """One incident that must be told."""

    kind: str
    """Kind of its cause: a finding of core/kinds.py."""

    tier: Literal["INFO", "WARN", "ERROR", "CRITICAL"]
    """How loudly."""

    culprit: str
    """Who is named, as rank:2."""

    within_s: float | None = None
    """Seconds from the fault to the first notice that is right in all of kind, tier and culprit."""

    within_steps: int | None = None
    """The same in optimizer steps, for faults that last."""

    fault: int = 0
    """Which of the scenario's faults it is about: an index."""

    checkpoint: int | None = None
    """Step of the checkpoint that a repair goes back to."""

    without: tuple[int, ...] = ()
    """Slots that a repair leaves out."""

    skip: tuple[int, ...] = ()
    """Batches that a repair leaves out."""

    final_loss: Literal["undisturbed", "reference"] | None = None
    """What the loss after a repair equals to the last bit: that of the undisturbed run, or of a run with `skip`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or KINDS[self.kind].of != "finding":
            findings = ", ".join(name for name, row in KINDS.items() if row.of == "finding")
            raise ConfigError(f"kind: no finding {self.kind!r}; there are {findings}")
        if self.within_s is None and self.within_steps is None:
            raise ConfigError("within_s: is missing (or within_steps): an alarm that may come at any time is none")

    @property
    def repairs(self) -> bool:
        """Whether a repair must follow."""
        return self.checkpoint is not None or bool(self.without or self.skip) or self.final_loss is not None

    @property
    def loudness(self) -> Tier:
        """The tier as the model has it."""
        return Tier[self.tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One rehearsal."""

    name: str = ""
    """That of its file."""

    title: str
    """What happens, in a few words."""

    faults: tuple[Fault, ...] = ()
    """What goes wrong, if anything."""

    expect: tuple[Expect, ...] = ()
    """What must be told; nothing else may be."""

    steps: int = 80
    """Optimizer steps of the training: about 8 a second on two cores."""

    checkpoint_every: int = 20
    """Steps."""

    eval_every: int = 25
    """Steps."""

    skip: tuple[int, ...] = ()
    """Batches that the training never uses, from the beginning."""

    final_loss: Literal["undisturbed", "reference"] | None = None
    """As Expect.final_loss, where nothing is to be told."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """What the file given to `trainwarden run --config` holds."""

    def __post_init__(self) -> None:
        for index, expected in enumerate(self.expect):
            if not 0 <= expected.fault < len(self.faults):
                raise ConfigError(f"expect[{index}].fault: there is no fault {expected.fault}")
        for index, fault in enumerate(self.faults):
            if not 1 <= fault.at_step <= self.steps:
                raise ConfigError(f"faults[{index}].at_step: need 1 to {self.steps}, got {fault.at_step}")

    @property
    def repairs(self) -> bool:
        """Whether a repair must follow."""
        return any(expected.repairs for expected in self.expect)

    @property
    def compared_with(self) -> str | None:
        """Name of the scenario that ends with the same loss, if one does."""
        return next((one.final_loss for one in self.expect if one.final_loss), self.final_loss)

    def arguments(self, checkpoint_dir: Path, out: Path) -> list[str]:
        """What follows examples/train.py on the command line."""
        lengths = {"--steps": self.steps, "--checkpoint-every": self.checkpoint_every, "--eval-every": self.eval_every}
        places = {"--checkpoint-dir": checkpoint_dir, "--out": out}
        left_out = {"--skip": ",".join(map(str, self.skip))} if self.skip else {}
        return [word for key, value in {**lengths, **places, **left_out}.items() for word in (key, str(value))]


_PLACES = {"undisturbed": 0, "reference": 1}


def read(path: Path) -> Scenario:
    """The scenario of a file. Raises ConfigError with file, key, value and what is allowed."""
    return replace(load(path, {"scenario": Scenario})["scenario"], name=path.stem)


@cache
def built_in() -> Mapping[str, Scenario]:
    """Those that come with trainwarden, by name: first what others are compared with, then by letter."""
    with as_file(files("trainwarden.rehearsal") / "scenarios") as folder:
        scenarios = [read(path) for path in folder.glob("*.yaml")]
    return {one.name: one for one in sorted(scenarios, key=lambda one: (_PLACES.get(one.name, len(_PLACES)), one.name))}
