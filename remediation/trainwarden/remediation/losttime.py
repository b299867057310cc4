"""Where the time went, from the first abnormal sign until steps take as long as before.

Every instant between the two belongs to exactly one phase, so the phases add up to the whole outage.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """What happened when, Unix ns, in the order in which it should happen; None: did not happen, or nobody saw it."""

    onset_ns: int
    """First abnormal sign."""
    noticed_ns: int | None = None
    """The incident was opened."""
    planned_ns: int | None = None
    """Its plan began: emitted, or approved by a person."""
    stopped_ns: int | None = None
    """Outcome of the rung `stopped`."""
    started_ns: int | None = None
    """Event attempt.started of the new attempt."""
    hello_ns: int | None = None
    """First hello of the new attempt."""
    begun_ns: int | None = None
    """It began its first step (Verification tells: found["begun_ns"])."""
    normal_ns: int | None = None
    """Its step time was back to normal (found["normal_ns"])."""


_PHASES = (
    ("detect", "noticed_ns"),
    ("decide", "planned_ns"),
    ("stop", "stopped_ns"),
    ("start", "started_ns"),
    ("start", "hello_ns"),
    ("load", "begun_ns"),
    ("warm_up", "normal_ns"),
)
"""Phase and what ends it."""


def lost_s(instants: Instants) -> Mapping[str, float]:
    """Seconds of each phase that has ended.

    Where an instant is missing, its phase is, and the time counts to the next one. An instant that lies before the one
    before it (an onset that was revised, clocks that differ) takes no time.

    >>> lost_s(Instants(onset_ns=0, noticed_ns=800_000_000, stopped_ns=3_000_000_000))
    {'detect': 0.8, 'stop': 2.2}
    """
    spent_ns: dict[str, int] = {}
    now_ns = instants.onset_ns
    for phase, end in _PHASES:
        end_ns: int | None = getattr(instants, end)
        if end_ns is not None:
            spent_ns[phase] = spent_ns.get(phase, 0) + max(0, end_ns - now_ns)
            now_ns = max(now_ns, end_ns)
    return {phase: ns / 1e9 for phase, ns in spent_ns.items()}
