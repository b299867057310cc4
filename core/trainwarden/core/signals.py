"""Every number that is measured: one of the three tables that join the components.

A signal's id is its place here and never changes; units are base units (seconds, bytes, ratio, tokens). `cardinality`
says what one series stands for when the signal is exported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainwarden.core.records import FEATURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One row."""

    id: int
    name: str
    unit: str
    metric: str
    """Prometheus name of its per-step rollup."""
    cardinality: Literal["job", "node", "device", "rank"]


_UNITS = {"tokens": "tokens", "learning_rate": "1"}


def _row(number: int, name: str) -> Signal:
    unit = "seconds" if name.endswith("_s") else _UNITS.get(name, "1")
    stem = name.removesuffix("_s") + ("_seconds" if unit == "seconds" else "")
    metric = f"trainwarden_step_{stem.removeprefix('step_')}"
    return Signal(id=number, name=name, unit=unit, metric=metric, cardinality="job")


SIGNALS: Mapping[str, Signal] = {name: _row(number, name) for number, name in enumerate(FEATURES)}
