"""What the agent may cost: where it is too much, sources are polled less often; where there is room, as set again.

What a source costs halves where its period is doubled. So, over the budget, periods are doubled until what is left
would fit: of ordinary sources first, the costliest first, up to STRETCH_MAX times; then, at most as URGENT says, of
those by which hangs, deaths and Xids are seen, so that these are still told in time. Under it, one period is halved a
window, the urgent first, if what that costs fits into EASE of the budget: without this distance the two would take
turns. Sources that hardly cost anything are left alone.

Pure: told numbers, it gives factors. app/own_cost.py measures, and does it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from trainwarden.core.errors import ConfigError

STRETCH_MAX: Final = 8
"""Of ordinary sources: 5 s become 40. /metrics keeps a value for three of the periods that it sees, at most 2 minutes
each (app/readings.py)."""

URGENT: Final[Mapping[str, int]] = {"rings": 2, "looks": 2, "kernel-log": 4}
"""By the first word of a source's name. rings: 0.25 s, and a death must be said within a second (app/node_jobs.py);
looks: what a server asks while it confirms a
hang (1 s); kernel-log: 0.5 s, for Xids that are to page within seconds."""

EASE: Final = 0.8
"""Of the budget."""

WORTH: Final = 0.01
"""Of the budget: what a source must cost at least for its period to be doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """What the agent may cost, its children included."""

    cores: float = 0.02
    """CPU, in cores: 0.02 is 2 % of one. With default sources, 8 ranks and no GPU it takes less than 0.01 (`make
    bench`); this leaves room for the driver's calls, whose cost we do not know beforehand."""

    window: timedelta = timedelta(seconds=60)
    """Over which it is measured: long enough for what is done seldom (the driver's reader is started again once a
    minute where there is none). The first begins when the agent has run this long: a start costs what it costs."""

    def __post_init__(self) -> None:
        if not 0.001 <= self.cores <= 64:
            raise ConfigError(f"agent.budget.cores: need 0.001 to 64, got {self.cores:g}")
        if not timedelta(seconds=1) <= self.window <= timedelta(hours=1):
            raise ConfigError(f"agent.budget.window: need 1s to 1h, got {self.window.total_seconds():g}s")


class Budget:
    """How many times its period each source is polled at: 1, 2, 4, 8.

    >>> budget = Budget(BudgetConfig(cores=0.01))
    >>> budget.weigh(0.016, {"host@n1": 0.008, "mounts@n1": 0.001, "rings/j@n1": 0.006})
    {'host@n1': 4, 'mounts@n1': 1, 'rings/j@n1': 1}
    >>> budget.weigh(0.003, {"host@n1": 0.001, "mounts@n1": 0.001, "rings/j@n1": 0.001})["host@n1"]
    2
    """

    def __init__(self, config: BudgetConfig) -> None:
        self._cores = config.cores
        self.factors: dict[str, int] = {}
        """As weigh() gave them last."""

    def weigh(self, all_cores: float, cores: Mapping[str, float]) -> dict[str, int]:
        """all_cores: what the agent took in the last window; cores: what of it went to each source that there is."""
        self.factors = {name: self.factors.get(name, 1) for name in cores}
        if all_cores > self._cores:
            self._save(all_cores, dict(cores))
        elif all_cores < EASE * self._cores:
            self._ease(all_cores, cores)
        return dict(self.factors)

    def _save(self, left: float, cores: dict[str, float]) -> None:
        least = WORTH * self._cores
        while left > self._cores:
            free = [name for name in cores if self.factors[name] < most(name) and cores[name] > least]
            if not free:
                return
            name = min(free, key=lambda name: (_urgent(name), -cores[name], name))
            self.factors[name] *= 2
            cores[name] /= 2
            left -= cores[name]

    def _ease(self, all_cores: float, cores: Mapping[str, float]) -> None:
        stretched = [name for name, factor in self.factors.items() if factor > 1]
        if stretched:
            name = min(stretched, key=lambda name: (not _urgent(name), cores[name], name))
            if all_cores + cores[name] <= EASE * self._cores:
                self.factors[name] //= 2


def most(name: str) -> int:
    """The largest factor of a source.

    >>> most("rings/job@n1"), most("kernel-log@n1"), most("nvml@n1")
    (2, 4, 8)
    """
    return URGENT.get(_word(name), STRETCH_MAX)


def _urgent(name: str) -> bool:
    return _word(name) in URGENT


def _word(name: str) -> str:
    return name.partition("@")[0].partition("/")[0]
