"""What the agent costs: measured each window, kept in its budget (app/budget.py), told.

CPU of the process is the kernel's count, children included; of a source that of its thread at the end of its last poll,
and of the children that the thread started and that live (the reader of NVML). What a source's own further threads
take, and all that the agent does beside polling, belongs to no source. A kernel without lists of children
(CONFIG_PROC_CHILDREN) tells of those that have ended only.
"""

import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainwarden.app.budget import Budget, BudgetConfig
from trainwarden.app.isolation import Isolation
from trainwarden.core.model import Event

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """CPU seconds since the start."""

    all_s: float
    by_thread_s: Mapping[int, float]
    """Of living children, by the thread that started them."""


def spent() -> Spent:
    """By this process so far."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    children_s = living_children_s()
    used_s = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return Spent(all_s=used_s + sum(children_s.values()), by_thread_s=children_s)


def living_children_s(pid: int | None = None) -> dict[int, float]:
    """Thread -> CPU seconds of the children that it started and that live, and of theirs that have ended."""
    found: dict[int, float] = {}
    for listing in Path(f"/proc/{pid or 'self'}/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:  # the thread has ended, or the kernel keeps no such lists
            continue
        if pids:
            found[int(listing.parent.name)] = sum(process_s(int(child)) for child in pids)
    return found


def process_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * _TICK_S


class Thrift:
    """The budget at work. turn() is called a few times a second and looks at the clock; once a window it measures."""

    def __init__(
        self,
        config: BudgetConfig,
        isolation: Isolation,
        say: Callable[[str], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
        measure: Callable[[], Spent] = spent,
    ) -> None:
        """say: told when periods begin to be stretched, and when none is any more."""
        self._budget, self._isolation, self._say = Budget(config), isolation, say
        self._now_s, self._measure = now_s, measure
        self._window_s = config.window.total_seconds()
        self._due_s = now_s() + self._window_s
        self._before: tuple[float, float, Mapping[str, float]] | None = None
        self.allowed = config.cores
        """Cores that it may take."""
        self.cores: float | None = None
        """Cores that it took in the last window; None: the first is not over yet."""

    def turn(self) -> list[Event]:
        """source.stretched for each source whose factor changes."""
        now_s = self._now_s()
        if now_s < self._due_s:
            return []
        self._due_s = now_s + self._window_s
        used, threads = self._measure(), self._isolation.cpu()
        sources_s = {name: used_s + used.by_thread_s.get(thread, 0.0) for name, (thread, used_s) in threads.items()}
        before, self._before = self._before, (now_s, used.all_s, sources_s)
        if before is None:
            return []
        took_s = now_s - before[0]
        self.cores = max(0.0, used.all_s - before[1]) / took_s
        cores = {name: max(0.0, at_s - before[2].get(name, at_s)) / took_s for name, at_s in sources_s.items()}
        return self._keep(self.cores, cores)

    def _keep(self, all_cores: float, cores: Mapping[str, float]) -> list[Event]:
        was = max(self._budget.factors.values(), default=1)
        factors = self._budget.weigh(all_cores, cores)
        told = f"the agent takes {100 * all_cores:.2g} % of a core, and may take {100 * self.allowed:.2g} %"
        events = self._isolation.stretch(factors, told)
        slower = [f"{name} x{factor}" for name, factor in factors.items() if factor > 1]
        if slower and was == 1:
            self._say(f"{told}: polled less often, by times of their periods: {', '.join(slower)}")
        elif was > 1 and not slower:
            self._say(f"{told}: every source is polled as set again")
        return events
