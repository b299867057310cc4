"""Goal `verified`: a new attempt does what the old one did before the trouble began.

Verification only watches. What is compared is in checks.py (times, losses, gradient norms) and audit.py (where the run
stands), what it is compared with in resumed.py. Where the run stands, and values that are not finite, are judged at
once: a recovery that cannot be right is not waited for.

The new attempt must show its steps, their times and every rank. A check whose other side was never recorded (no loss
told, no steps before the onset, a supervisor that began to watch later) is `cannot tell`: that stands in what is found,
and does not fail a plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainwarden.core.errors import ActionError, ConfigError
from trainwarden.core.model import Json, Rung, StepMatrix
from trainwarden.core.records import attempt_of
from trainwarden.remediation import checks
from trainwarden.remediation.audit import audit, compared, expected, standing
from trainwarden.remediation.checks import Check, Floats
from trainwarden.remediation.resumed import (
    Origin,
    Resumed,
    flagged_S,
    ranks_of,
    step_S,
    step_time_S,
    told_S,
)

SIGNALS = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationConfig:
    """Windows and bars."""

    slow: float = 1.3
    """Median step time against the recorded one that is still accepted: the ratio from which on a rank is slow."""

    healthy: float = 1.15
    """Own work against the peers' below which nobody is slow: what clears a slow rank (straggler detector)."""

    recorded_steps: int = 64
    """Steps that are compared with: as many as can be open at once."""

    windows: int = 3
    """A time that is out of bounds is looked at again until this many windows of steps were seen: a busy machine slows
    single windows down."""

    exact: bool = False
    """The training gives the same bits for the same data, so other bits are a failed resume. Off: how many steps are
    equal to the last bit is told, the band decides, since atomics in GPU kernels add up in any order."""

    def __post_init__(self) -> None:
        for name in ("slow", "healthy"):
            if (value := getattr(self, name)) <= 1.0:
                raise ConfigError(f"remediation.verify.{name}: need more than 1, got {value:g}")
        for name, least in (("recorded_steps", checks.LEAST + 1), ("windows", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"remediation.verify.{name}: need at least {least}, got {value}")


class Steps(Protocol):
    """Closed steps of the past (app.history.History)."""

    def of_attempt(self, attempt: int) -> Sequence[StepMatrix]: ...
    def before(self, attempt: int) -> Sequence[StepMatrix]: ...
    def from_start(self, attempt: int) -> bool: ...


class Verification:
    """The actuator (core.ports.Actuator) of goal `verified` {attempt, steps}.

    origin: of the attempt that a rung names; asked once it has closed a step. slowness: each rank's own work against
    its peers' over some steps, NaN where that cannot be told.
    """

    goals = frozenset({"verified"})

    def __init__(
        self,
        history: Steps,
        origin: Callable[[Rung], Origin],
        slowness: Callable[[Sequence[StepMatrix]], Floats],
        config: VerificationConfig | None = None,
    ) -> None:
        self._history, self._origin, self._slowness = history, origin, slowness
        self._config = config or VerificationConfig()
        self._failed: frozenset[int] = frozenset()
        """Attempts that did not resume well: no measure for later ones."""

    def reached(self, rung: Rung) -> bool | None:
        """None: too few steps yet, or a time may still settle."""
        seen = self._look(rung)
        if seen is None:
            return None
        results = {check.result for check in self._checks(seen)}
        if "fails" in results:
            self._failed |= {_whole(rung, "attempt")}
            return False
        return True if seen.enough and "not yet" not in results else None

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        """What is found so far. Raises ActionError naming check, value got and expected where a check fails.

        Nothing is done to the world, so a stale owner does no harm here and the fence is not asked for.
        """
        seen = self._look(rung)
        if seen is None:
            return {"steps": 0}
        found = self._checks(seen)
        if failed := [str(check) for check in found if check.result == "fails"]:
            raise ActionError("; ".join(failed), retryable=False)
        return {
            "steps": len(seen.steps),
            "checks": {check.name: check.told() for check in found},
            "begun_ns": seen.begun_ns(),
            "normal_ns": seen.normal_ns(self._bar(seen)),
        }

    def _look(self, rung: Rung) -> Resumed | None:
        """None: the attempt has not closed a step."""
        attempt = _whole(rung, "attempt")
        steps = self._history.of_attempt(attempt)
        if not steps:
            return None
        return Resumed(
            origin=self._origin(rung),
            steps=steps,
            from_start=self._history.from_start(attempt),
            older=[m for m in self._history.before(attempt) if attempt_of(m.topology.epoch) not in self._failed],
            needed=_whole(rung, "steps"),
            recorded_steps=self._config.recorded_steps,
        )

    def _checks(self, seen: Resumed) -> list[Check]:
        at_once = [_resume(seen), checks.finite(step_S(seen.steps), flagged_S(seen.steps))]
        if not seen.enough:
            return at_once
        return [*at_once, *(check for name in SIGNALS for check in self._values(name, seen)), *self._times(seen)]

    def _values(self, name: str, seen: Resumed) -> list[Check]:
        spread = checks.spread_of(step_S(seen.around), told_S(seen.around, name))
        new_S, was_S, same_S = seen.pairs(name)
        found = [checks.same_steps(name, new_S, was_S, same_S, spread=spread, exact=self._config.exact)]
        if (point := seen.origin.checkpoint) is not None:
            level = point.loss if name == "loss" else point.grad_norm
            found.append(checks.no_rise(f"{name}_at_save", new_S, level, spread=spread))
        return found

    def _times(self, seen: Resumed) -> list[Check]:
        if len(seen.steps) < seen.needed:  # a few first steps are the warm-up
            return [Check(name="step_time", result="cannot tell", got=f"it ended after {len(seen.steps)} steps")]
        settled = seen.origin.ended or len(seen.steps) >= self._config.windows * seen.needed
        new_S, was_S = step_time_S(seen.timed), step_time_S(seen.healthy)
        found = [
            checks.step_time(new_S, was_S, bar=self._bar(seen), settled=settled),
            checks.present(np.stack([m.seen_R for m in seen.newest]), settled=settled),
        ]
        if seen.origin.kind == "rank.slow":
            ratio_R = self._slowness(seen.timed or seen.newest)
            found.append(checks.as_fast_as_peers(ratio_R, bar=self._config.healthy, settled=settled))
        return found

    def _bar(self, seen: Resumed) -> float:
        """Fewer ranks have more to do each."""
        return self._config.slow * max(1.0, ranks_of(seen.healthy) / ranks_of(seen.steps))


def _resume(seen: Resumed) -> Check:
    """Where the run stands at its first step."""
    if not seen.from_start:
        return Check(name="resume", result="cannot tell", got="the first step was not seen")
    origin, first = seen.origin, seen.steps[0]
    wanted, shown = expected(origin.checkpoint, seen.recorded, origin.skip, origin.ranks, first.step), standing(first)
    if (difference := audit(wanted, shown)) is not None:
        field = difference.field
        got, wish = f"{field} {difference.got}", f"{field} {difference.expected}"
        return Check(name="resume", result="fails", got=got, expected=wish)
    start = "started afresh" if origin.checkpoint is None else f"after {origin.checkpoint.name}"
    return Check(name="resume", result="holds", got=f"{start}; the same: {', '.join(compared(wanted, shown))}")


def _whole(rung: Rung, name: str) -> int:
    value = rung.args[name]
    assert isinstance(value, int), rung
    return value
