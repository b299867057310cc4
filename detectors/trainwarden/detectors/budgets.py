"""How long each phase may take without a sign of progress: declared by the script, learnt, or generous until it is.

What is learnt is how long live words really stayed in a phase (the longest over the ranks of each frame) and how long
whole steps took. Stays shorter than a poll are not seen and do not matter: a phase seldom seen is held to the step's
figure, which it lies within. The 99.9th percentile times three, not mean plus deviations: gaps have heavy tails, and at
one test a job the false alarms left are those of stays three times longer than the worst of a thousand.
"""

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import State
from trainwarden.core.records import PHASES
from trainwarden.detectors.live import NEVER, Live, Moves
from trainwarden.detectors.robust import Floats, RollingQuantile

INIT, WAIT, BETWEEN = PHASES.index("init"), PHASES.index("wait"), PHASES.index("between")
LONG = frozenset(PHASES.index(name) for name in ("checkpoint", "eval", "compile"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HangConfig:
    """Budgets and deadlines of the hang detector."""

    init: timedelta = timedelta(minutes=20)
    """From attach() to the first step: loading, sharding, rendezvous of thousands of ranks."""

    first_step: timedelta = timedelta(minutes=30)
    """The first step of a process: allocation, compilation, autotuning. PyTorch's own default timeout of a gloo
    collective is as long."""

    step: timedelta = timedelta(seconds=60)
    """Any phase inside a step until `known_steps` steps have been seen."""

    known_steps: int = 20
    """Steps (or stays in a phase) from which on what was learnt counts instead of the generous figure."""

    long_phase: timedelta = timedelta(minutes=10)
    """checkpoint, eval, compile and phases of the script's own, neither declared nor learnt; also the end of a training
    once a rank has left. PyTorch's default timeout of an NCCL collective: ranks that wait longer are ended by it."""

    floor: timedelta = timedelta(seconds=10)
    """Nothing learnt goes below: pauses of this length have harmless reasons (garbage collection, a busy disk)."""

    factor: float = 3.0
    """Times the quantile."""

    quantile: float = 0.999
    """Of the stays in a phase, and of the steps."""

    window: int = 2048
    """Stays remembered of each phase."""

    fresh: timedelta = timedelta(seconds=3)
    """A rank whose last live frame is older is blind, not hung. An agent of a node tells of live ranks once a second,
    and sends once a second where it posts; three of those. At most a third of `floor` counts, or what an agent that
    went silent did not tell would look like a hang."""

    confirm: timedelta = timedelta(seconds=1)
    """Without progress for this long after the first suspicion, the finding is final also without a stack."""

    def __post_init__(self) -> None:
        for name in ("init", "first_step", "step", "long_phase", "floor", "fresh"):
            if getattr(self, name) <= timedelta(0):
                raise ConfigError(f"detectors.hang.{name}: need more than 0, got {getattr(self, name)}")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"detectors.hang.quantile: need between 0 and 1, got {self.quantile}")

    @property
    def fresh_ns(self) -> int:
        """What of `fresh` counts."""
        return int(min(self.fresh, self.floor / 3).total_seconds() * 1e9)


class Budgets:
    """What was learnt of the phases of one job; outlives its attempts."""

    def __init__(self, config: HangConfig) -> None:
        self._config = config
        self._stays: dict[int, RollingQuantile] = {}
        self._steps = RollingQuantile(config.window)
        self.steps_seen = 0
        """Steps that somebody was the first to finish."""
        self._newest_key = NEVER

    def new_run(self) -> None:
        """Step numbers begin anew."""
        self._newest_key = NEVER

    def learn(self, moves: Moves, *, blind_ns: int, not_before_ns: int) -> None:
        """Take the stays that ended in this frame.

        Not taken: the first step of a process, stays that were not watched throughout (no frame for blind_ns), and
        ordinary stays that began before not_before_ns (a hang must not teach that hangs are normal; a phase that is
        long by nature, or outside of a step, may).
        """
        if not len(moves.rank_K):
            return
        watched_K = moves.new_K["seen_ns"] - moves.old_K["seen_ns"] <= blind_ns
        taught_K = watched_K & (moves.old_K["key"] != moves.old_K["first_key"])
        calm_K = moves.old_K["moved_ns"] >= not_before_ns
        stay_K = 1e-9 * np.maximum(moves.new_K["since_ns"] - moves.old_K["since_ns"], 0)
        seen_K = 1e-9 * (moves.new_K["seen_ns"] - moves.old_K["moved_ns"]) + 1.0
        stay_K = np.minimum(stay_K, seen_K)  # a stamp that is garbage cannot claim more than was seen (and a second)
        for phase in np.unique(moves.old_K["phase"][taught_K]).tolist():
            chosen_K = taught_K & (moves.old_K["phase"] == phase) & (calm_K | self._is_long(phase) | (phase == BETWEEN))
            if chosen_K.any():
                self._of(phase).push([float(stay_K[chosen_K].max())])
        self._learn_steps(moves, taught_K & (moves.old_K["begun_seen_ns"] >= not_before_ns))

    def allowed_R(self, live: Live) -> Floats:
        """Seconds that each rank may stay where it is."""
        row_R = live.row_R
        generous_P, learnt_P = self._tables(len(live.names))
        generous_R = generous_P[row_R["phase"]]
        first_R = (row_R["key"] == row_R["first_key"]) & (row_R["phase"] != INIT)
        generous_R = np.where(first_R, self._config.first_step.total_seconds(), generous_R)
        declared_R = row_R["declared"] == row_R["phase"]
        generous_R = np.where(declared_R & ~first_R, row_R["expect_s"], generous_R)
        generous_R = np.where(declared_R & first_R, np.maximum(generous_R, row_R["expect_s"]), generous_R)
        floor_s = self._config.floor.total_seconds()
        return np.asarray(np.maximum(np.maximum(generous_R, learnt_P[row_R["phase"]]), floor_s))

    def snapshot(self, names: list[str]) -> State:
        stays = {f"stays.{names[phase]}": stays.snapshot() for phase, stays in self._stays.items()}
        return {"steps": self._steps.snapshot(), "steps_seen": self.steps_seen, "newest": self._newest_key, **stays}

    def restore(self, state: State, live: Live) -> None:
        window = self._config.window
        self._steps = RollingQuantile.of(window, state["steps"])
        self.steps_seen, self._newest_key = int(state["steps_seen"]), int(state["newest"])
        named = ((key.removeprefix("stays."), value) for key, value in state.items() if key.startswith("stays."))
        self._stays = {live.phase_id(name): RollingQuantile.of(window, value) for name, value in named}

    def _learn_steps(self, moves: Moves, taught_K: NDArray[np.bool_]) -> None:
        done_K = taught_K & (moves.new_K["key"] > moves.old_K["key"])
        if not done_K.any():
            return
        took_K = 1e-9 * (moves.new_K["begun_ns"] - moves.old_K["begun_ns"])
        self._steps.push([max(float(took_K[done_K].max()), 0.0)])
        newest = int(moves.new_K["key"][done_K].max())
        self.steps_seen += newest > self._newest_key
        self._newest_key = max(newest, self._newest_key)

    def _tables(self, names: int) -> tuple[Floats, Floats]:
        step_s = self._scaled(self._steps)
        generous_P, learnt_P = np.zeros(names), np.full(names, step_s)
        if self.steps_seen < self._config.known_steps:
            generous_P[:] = self._config.step.total_seconds()
        for phase, stays in self._stays.items():
            if self._is_long(phase) or stays.count >= self._config.known_steps:
                learnt_P[phase] = self._scaled(stays)
        learnt_P[WAIT] = max(learnt_P[WAIT], step_s)  # whoever waits does so as long as the slowest works
        for phase in (phase for phase in range(names) if self._is_long(phase)):
            known = phase in self._stays and self._stays[phase].count >= self._config.known_steps
            generous_P[phase] = 0.0 if known else self._config.long_phase.total_seconds()
        generous_P[INIT] = self._config.init.total_seconds()
        return generous_P, learnt_P

    def _scaled(self, values: RollingQuantile) -> float:
        return 0.0 if values.count == 0 else self._config.factor * values.value(self._config.quantile)

    def _of(self, phase: int) -> RollingQuantile:
        if phase not in self._stays:
            self._stays[phase] = RollingQuantile(self._config.window)
        return self._stays[phase]

    def _is_long(self, phase: int) -> bool:
        return phase in LONG or phase >= len(PHASES)
