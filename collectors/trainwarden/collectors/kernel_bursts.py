"""Bursts: the same error again and again is one event with a count (800,000 lines were 29 events).

The same kind, place, code and part (link, new recovery action ...) with no more than quiet_s between two lines is one
burst. It is told at its first line, then each time it has lasted twice as long as when it was last told (10 s, 20 s,
40 s ...), and when it is over: always with its whole count and the same first_ns, so that the newest event of a burst
says all, and a day of storm is some 15 events. 10 s of quiet between bursts: NVSentinel's rule.

A port's state, a kill, a crash and a lost GPU are edges: a burst of those is told once, its repetitions say nothing
new; another state of the port is told at once. Counting is done here, never from the last-value gauge of a driver.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from trainwarden.collectors.kernel_grammar import Fact
from trainwarden.core.errors import ConfigError

EDGES: Final = frozenset({"link.state", "kernel.segfault", "oom.kill", "gpu.off_bus"})

MAX_TOTALS: Final = 4096
"""(kind, place, code) that are counted apart; more are counted together under (kind, "", None)."""

OTHERS: Final = "others"
"""Part of the burst that holds what would be one burst too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstsConfig:
    """When lines are one burst."""

    quiet_s: float = 10.0
    """Seconds without a line after which the next one is a new event."""

    max_open: int = 256
    """Bursts of one kind at a time (a tenant's processes may crash in a loop); what is beyond is one burst together."""

    def __post_init__(self) -> None:
        if not 0 < self.quiet_s <= 3600:
            raise ConfigError(f"collectors.kernel_log.bursts.quiet_s: need 0 to 3600, got {self.quiet_s:g}")
        if self.max_open < 1:
            raise ConfigError(f"collectors.kernel_log.bursts.max_open: need at least 1, got {self.max_open}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is said of a burst."""

    fact: Fact
    """Its first line."""
    count: int
    """Lines so far."""
    first_ns: int
    last_ns: int


@dataclass(slots=True, kw_only=True)
class _Burst:
    fact: Fact
    first_ns: int
    last_ns: int
    count: int = 1
    told: int = 0
    due_ns: int = 0


_Place = tuple[str, str, object]


class Bursts:
    """Folds facts into bursts."""

    def __init__(self, config: BurstsConfig) -> None:
        self._quiet_ns = int(config.quiet_s * 1e9)
        self._max_open = config.max_open
        self._open: dict[tuple[_Place, str], _Burst] = {}
        self._newest: dict[_Place, str] = {}
        self._of_kind: Counter[str] = Counter()
        self._totals: dict[_Place, list[int]] = {}

    @property
    def totals(self) -> Mapping[_Place, tuple[int, int]]:
        """(kind, place, code) -> (bursts, lines) since the start."""
        return {place: (bursts, lines) for place, (bursts, lines) in self._totals.items()}

    def add(self, fact: Fact, t_ns: int) -> Iterator[Told]:
        """One more line, seen at t_ns; what is to be told now. To be iterated to its end."""
        place = (fact.kind, fact.where, fact.data.get("code"))
        key = self._key(place, fact)
        burst = self._open.get(key)
        if burst is not None and not self._goes_on(burst, fact, t_ns):
            yield from self._close(key)
            burst = None
        self._count(place, new=burst is None)
        if burst is None:
            burst = self._begin(key, fact, t_ns)
        else:
            burst.count += 1
            burst.last_ns = max(burst.last_ns, t_ns)
        if t_ns >= burst.due_ns or not burst.told:
            yield from self._tell(burst)

    def over(self, now_ns: int) -> list[Told]:
        """Ends the bursts that have been quiet for long enough; what is to be told of them."""
        ended = [key for key, burst in self._open.items() if now_ns > burst.last_ns + self._quiet_ns]
        return [told for key in ended for told in self._close(key)]

    def close(self) -> list[Told]:
        """Ends all bursts."""
        return [told for key in [*self._open] for told in self._close(key)]

    def _key(self, place: _Place, fact: Fact) -> tuple[_Place, str]:
        """Where a fact belongs: a line that names no link belongs to the newest burst of its error that is open."""
        part = "" if fact.kind in EDGES else fact.part or self._newest.get(place, "")
        key = (place, part)
        if key in self._open or self._of_kind[fact.kind] < self._max_open:
            return key
        return (fact.kind, "", None), OTHERS

    def _goes_on(self, burst: _Burst, fact: Fact, t_ns: int) -> bool:
        if fact.kind == "link.state" and fact.where == burst.fact.where and fact.part != burst.fact.part:
            return False
        return burst.first_ns - self._quiet_ns <= t_ns <= burst.last_ns + self._quiet_ns

    def _begin(self, key: tuple[_Place, str], fact: Fact, t_ns: int) -> _Burst:
        burst = self._open[key] = _Burst(fact=fact, first_ns=t_ns, last_ns=t_ns)
        self._newest[key[0]] = key[1]
        self._of_kind[fact.kind] += 1
        return burst

    def _close(self, key: tuple[_Place, str]) -> Iterator[Told]:
        burst = self._open.pop(key)
        self._of_kind[burst.fact.kind] -= 1
        if self._newest.get(key[0]) == key[1]:
            del self._newest[key[0]]
        if burst.count > burst.told and (burst.fact.kind not in EDGES or key[1] == OTHERS):
            yield self._said(burst)

    def _tell(self, burst: _Burst) -> Iterator[Told]:
        if burst.fact.kind in EDGES and burst.told:
            return
        burst.told = burst.count
        lasted_ns = burst.last_ns - burst.first_ns
        burst.due_ns = burst.last_ns + max(lasted_ns, self._quiet_ns)
        yield self._said(burst)

    def _said(self, burst: _Burst) -> Told:
        return Told(fact=burst.fact, count=burst.count, first_ns=burst.first_ns, last_ns=burst.last_ns)

    def _count(self, place: _Place, *, new: bool) -> None:
        if place not in self._totals and len(self._totals) >= MAX_TOTALS:
            place = (place[0], "", None)
        total = self._totals.setdefault(place, [0, 0])
        total[0] += new
        total[1] += 1
