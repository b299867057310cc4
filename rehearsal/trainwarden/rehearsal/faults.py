"""Faults that are made on purpose, as data. Standard library only: the training imports it.

Two ways in. A fault `in the rank` is made by the training process itself (injection.py): the environment variable
TRAINWARDEN_FAULTS holds a JSON list, and every rank picks those that name it. A fault `from outside` (kill -9, SIGSTOP)
is made by whoever runs the rehearsal, who watches the step and signals the pid; the ranks skip it. Faults from outside
are made in the order of the list: one waits for those before it.

When a fault strikes, one line goes to the file TRAINWARDEN_FAULTS_LOG (if set). A fault that strikes once and is in
that file already is over: a training that was restarted after its repair is not hit again.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainwarden.core.errors import ConfigError

FAULTS_VARIABLE = "TRAINWARDEN_FAULTS"
LOG_VARIABLE = "TRAINWARDEN_FAULTS_LOG"

Argument = str | float
"""A value of Fault.args; whole numbers come as int, which Python's typing counts as float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One row of the table of faults."""

    name: str
    where: Literal["rank", "outside"]
    """Who makes it: the training process itself, or the one who runs the rehearsal."""
    meaning: str
    needs: tuple[str, ...] = ()
    """Keys that args must have; numbers."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys that args may have, each with the words it allows; the first is the default."""
    target: Literal["rank", "slot", "any"] = "any"
    """What it must name. `any`: a rank, a slot, or neither, which means every rank."""
    once: bool = True
    """Strikes one incarnation of the job only; else it belongs to the batch or the place and stays."""


_SLOW_CHOICES = {"how": ("compute", "sleep"), "where": ("all", "forward", "backward")}
_ROWS = (
    FaultKind(name="poison_batch", where="rank", meaning="a batch gives NaN", needs=("batch",), once=False),
    FaultKind(
        name="slow_slot",
        where="rank",
        meaning="the rank on this slot needs `factor` times the CPU time in forward and backward",
        needs=("factor",),
        target="slot",
        once=False,
    ),
    FaultKind(
        name="slow_rank",
        where="rank",
        meaning="as slow_slot for a rank; `how` it is slow and in which phase",
        needs=("factor",),
        choices=_SLOW_CHOICES,
        target="rank",
        once=False,
    ),
    FaultKind(name="slow_checkpoint", where="rank", meaning="a checkpoint waits for its storage", needs=("seconds",)),
    FaultKind(name="slow_eval", where="rank", meaning="an evaluation computes for long", needs=("seconds",)),
    FaultKind(name="stop_self", where="rank", meaning="SIGSTOP to itself, before it loads its data"),
    FaultKind(name="kill_self", where="rank", meaning="SIGKILL to itself, before it loads its data"),
    FaultKind(name="exit_code", where="rank", meaning="the script ends itself with this status", needs=("code",)),
    FaultKind(name="raise", where="rank", meaning="the script raises"),
    FaultKind(name="stall_python", where="rank", meaning="loading the data never ends"),
    FaultKind(name="process.kill", where="outside", meaning="SIGKILL by somebody else", target="rank"),
    FaultKind(name="process.stop", where="outside", meaning="SIGSTOP by somebody else: a silent hang", target="rank"),
    FaultKind(
        name="checkpoint.corrupt",
        where="outside",
        meaning="bytes of one shard change once a checkpoint of `step` or later is published",
        needs=("step",),
    ),
)
FAULT_KINDS: Mapping[str, FaultKind] = {row.name: row for row in _ROWS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong; ConfigError when it does not make sense.

    >>> Fault(kind="process.kill", rank=2, at_step=30).outside
    True
    >>> Fault(kind="slow_rank", rank=1)
    Traceback (most recent call last):
    trainwarden.core.errors.ConfigError: slow_rank: args.factor is missing
    """

    kind: str
    """A row of FAULT_KINDS."""
    rank: int | None = None
    slot: int | None = None
    """Index of the slot on its node; the fault stays there when ranks move."""
    at_step: int = 1
    """Optimizer step at which it strikes, or from which on it lasts; poison_batch goes by its batch instead."""
    args: Mapping[str, Argument] = field(default_factory=dict)

    def __post_init__(self) -> None:
        row = FAULT_KINDS.get(self.kind)
        if row is None:
            raise ConfigError(f"kind: no fault {self.kind!r}; there are {', '.join(FAULT_KINDS)}")
        if row.target != "any" and getattr(self, row.target) is None:
            raise ConfigError(f"{self.kind}: needs a {row.target}")
        for key in row.needs:
            if key not in self.args:
                raise ConfigError(f"{self.kind}: args.{key} is missing")
        for key, value in self.args.items():
            self._check_argument(row, key, value)

    def _check_argument(self, row: FaultKind, key: str, value: Argument) -> None:
        where = f"{self.kind}: args.{key}"
        if key in row.needs:
            if isinstance(value, str) or not math.isfinite(value):
                raise ConfigError(f"{where}: need a number, got {value!r}")
        elif key not in row.choices:
            raise ConfigError(f"{where}: unknown key; allowed: {', '.join((*row.needs, *row.choices)) or 'none'}")
        elif value not in row.choices[key]:
            raise ConfigError(f"{where}: need one of {', '.join(row.choices[key])}, got {value!r}")

    @property
    def outside(self) -> bool:
        """Made by the one who runs the rehearsal, not by the rank."""
        return FAULT_KINDS[self.kind].where == "outside"

    @property
    def once(self) -> bool:
        """Over once it has struck, also for later incarnations of the job."""
        return FAULT_KINDS[self.kind].once

    def names(self, rank: int, slot: int) -> bool:
        """Does it strike this rank on this slot?"""
        return self.rank in (None, rank) and self.slot in (None, slot)

    def number(self, key: str) -> float:
        """A numeric argument."""
        return float(self.args[key])

    def choice(self, key: str) -> str:
        """A word argument, or its default."""
        default = FAULT_KINDS[self.kind].choices.get(key, ("all",))[0]
        return str(self.args.get(key, default))


def to_json(faults: Iterable[Fault]) -> str:
    """The text for TRAINWARDEN_FAULTS.

    >>> to_json([Fault(kind="raise", rank=1, at_step=7)])
    '[{"kind": "raise", "rank": 1, "slot": null, "at_step": 7, "args": {}}]'
    """
    rows = [
        {"kind": f.kind, "rank": f.rank, "slot": f.slot, "at_step": f.at_step, "args": dict(f.args)} for f in faults
    ]
    return json.dumps(rows)


def from_json(text: str) -> tuple[Fault, ...]:
    """The faults of a TRAINWARDEN_FAULTS text; ConfigError says which one is wrong."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{FAULTS_VARIABLE}: not JSON: {error}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{FAULTS_VARIABLE}: need a list of faults, got {type(rows).__name__}")
    return tuple(_fault_of(index, row) for index, row in enumerate(rows))


def _fault_of(index: int, row: object) -> Fault:
    where = f"{FAULTS_VARIABLE}[{index}]"
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: need an object, got {row!r}")
    try:
        return Fault(**row)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """That a fault struck: which one of the list, when and at which step."""

    fault: int
    """Index in the list of faults."""
    step: int
    t_ns: int
    """Unix."""
    rank: int | None = None


def log_strike(path: Path, strike: Strike) -> None:
    """Append one line. Whole lines also when several processes write: one write() to a file opened to append."""
    line = json.dumps({"fault": strike.fault, "step": strike.step, "t_ns": strike.t_ns, "rank": strike.rank}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_strikes(path: Path) -> tuple[Strike, ...]:
    """What a log holds, in the order of writing; no file, no strikes."""
    if not path.exists():
        return ()
    return tuple(Strike(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
