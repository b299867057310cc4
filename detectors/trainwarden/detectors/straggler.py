"""Slow ranks: a rank whose own work takes longer than that of its peers.

Step time tells nothing: in a job that moves in step all ranks have the same. Compared is own work (ownwork.py), with
the ranks of the same pipeline stage, the rank itself left out.

In a window of 8 steps a rank counts by the median of its ratio to its peers *in the same step*. Measured with four
processes on two busy cores, healthy: this reaches 1.12, the ratio of medians 1.27, the ratio of sums 1.58 (one stall of
one step is enough), of wall times 1.72; a rank 1.6 times slower stands at 1.57-1.60 by the median of ratios. Two
windows in succession, each 1.30 or more, make a finding; two below 1.15 end it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Event, Finding, Input, JobId, State, StepMatrix, Topology
from trainwarden.core.topology import carried
from trainwarden.detectors.case import (
    Said,
    Status,
    ended,
    fact,
    opened,
    put,
    rank_subject,
    read,
    restated,
    take,
    whole,
    written,
)
from trainwarden.detectors.incarnation import Incarnation
from trainwarden.detectors.ownwork import Excess, OwnWork, Window
from trainwarden.detectors.robust import CusumBank, Floats, Streak, carry

SUSPECTED, CONFIRMED = 0.6, 0.95
"""Our judgement after one slow window, and after two."""

TWO_WINDOWS = 3
"""Looks in a row, half a window apart: the first and the last of three have no step in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerConfig:
    """Windows and bars of the straggler detector."""

    window_steps: int = 8
    """Steps of a window. It is looked at every half window, so that a slowness is found 13 to 16 steps after it began,
    wherever in a window it began."""

    slow: float = 1.30
    """Ratio to the peers from which on a window is slow: healthy windows on a busy CPU reach 1.12 (see above)."""

    healthy: float = 1.15
    """Ratio below which a window is healthy: half of what makes a slow one, so that nobody flaps."""

    warm_up_steps: int = 3
    """First steps of an epoch that are not looked at: allocation, compilation, cold caches."""

    def __post_init__(self) -> None:
        if self.window_steps < 4 or self.window_steps % 2:
            raise ConfigError(f"detectors.straggler.window_steps: need an even number >= 4, got {self.window_steps}")
        if not 1.0 < self.healthy <= self.slow:
            raise ConfigError(f"detectors.straggler.healthy: need 1 < healthy <= slow, got {self.healthy}, {self.slow}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnWorkSeen:
    """Own work as it was when a window was last looked at: for those who show it."""

    ratio_R: Floats
    """Over that of the peers, median of the window; NaN: cannot be told."""

    device_R: tuple[str, ...]
    """As Topology.device_R."""

    blind: bool
    """Whether that of some ranks could not be told (blind_reason says why)."""


class Straggler:
    """One finding rank.slow for each slow device."""

    name = "straggler"
    wants = frozenset({"steps", "hello"})

    def __init__(self, config: StragglerConfig | None = None) -> None:
        self._config = config or StragglerConfig()
        self._now = Incarnation()
        self._told_blind: frozenset[int] = frozenset()  # ranks
        self._topology: Topology | None = None
        self._work = OwnWork(self._config.window_steps)
        self._streak = Streak(above=self._config.slow, below=self._config.healthy)
        self._onset = CusumBank([float(np.log(self._config.slow))])
        self._began_R: NDArray[np.int64] = np.zeros(0, np.int64)  # the step at which the CUSUM last left zero
        self._began_ns_R: NDArray[np.int64] = np.zeros(0, np.int64)
        self._cases: dict[int, Finding] = {}  # by rank
        self._steps_of_epoch = self._found = 0
        self.own_work: OwnWorkSeen | None = None
        """None: no window of this numbering of the ranks was looked at. Replaced as a whole."""

    @property
    def blind_reason(self) -> str | None:
        """Why own work of some ranks cannot be told; None: that of all ranks seen can."""
        return self._work.blind_reason

    def update(self, item: Input) -> Sequence[Finding]:
        match item:
            case Event() if item.kind == "hello":
                self._greet(item)
            case StepMatrix():
                return self._take(item)
        return []

    # what is seen

    def _greet(self, hello: Event) -> None:
        met = self._now.meet(hello.job, hello.epoch)
        if met == "old":
            return
        if met == "new":
            self._told_blind = frozenset()
        blind, rank = hello.data["blind"], whole(hello.data["rank"])
        says_so = isinstance(blind, Sequence) and "own_work" in blind
        self._told_blind = self._told_blind | {rank} if says_so else self._told_blind - {rank}
        self._work.tell_blind(self._told_blind)

    def _take(self, matrix: StepMatrix) -> list[Finding]:
        found = self._adopt(matrix.topology, matrix.seen_ns)
        self._steps_of_epoch += 1
        if self._steps_of_epoch <= self._config.warm_up_steps:
            return found
        self._watch_onset(self._work.keep(matrix), matrix)
        window = self._config.window_steps
        if self._work.steps < window or self._work.steps % (window // 2):
            return found
        return found + self._judge(matrix)

    def _adopt(self, topology: Topology, seen_ns: int) -> list[Finding]:
        """Carry what is known over to a new epoch, by device; a device that is left out has nothing to answer for."""
        old, self._topology = self._topology, topology
        if topology is old or (old is not None and old.epoch == topology.epoch and old.device_R == topology.device_R):
            return []
        self._now.meet(topology.job, topology.epoch)
        self._steps_of_epoch, self.own_work = 0, None
        row_R = carried(old, topology) if old is not None else np.full(len(topology.device_R), -1, np.int32)
        self._work.adopt(topology, row_R)
        self._work.tell_blind(self._told_blind)
        self._began_R, self._began_ns_R = carry(self._began_R, row_R, 0), carry(self._began_ns_R, row_R, 0)
        self._streak.carry(row_R)
        self._onset.carry(row_R)
        return self._carry_cases(row_R, seen_ns)

    def _carry_cases(self, row_R: NDArray[np.int32], seen_ns: int) -> list[Finding]:
        new = {int(old): rank for rank, old in reversed(tuple(enumerate(row_R.tolist()))) if old in self._cases}
        gone = [case for old, case in self._cases.items() if old not in new]
        self._cases = {new[old]: case for old, case in self._cases.items() if old in new}
        return [f for case in gone for f in ended(case, "cleared", "its device is no longer part of the job", seen_ns)]

    def _watch_onset(self, ratio_R: Floats, matrix: StepMatrix) -> None:
        self._onset.update(np.log(ratio_R))
        begins_R = self._onset.age_KR[0] == 1
        self._began_R = np.where(begins_R, matrix.step, self._began_R)
        self._began_ns_R = np.where(begins_R, matrix.seen_ns, self._began_ns_R)

    # what it means

    def _judge(self, matrix: StepMatrix) -> list[Finding]:
        ratio_R = self._work.ratio_R()
        self.own_work = OwnWorkSeen(
            ratio_R=ratio_R, device_R=matrix.topology.device_R, blind=self.blind_reason is not None
        )
        self._streak.update(ratio_R)
        slow = np.flatnonzero(self._streak.high_R > 0).tolist()
        ranks = sorted({*slow, *self._cases})
        window = self._work.window() if ranks else None
        return [found for rank in ranks if window for found in self._follow(rank, window, matrix)]

    def _follow(self, rank: int, window: Window, matrix: StepMatrix) -> list[Finding]:
        case, high, low = self._cases.get(rank), self._streak.high_R[rank], self._streak.low_R[rank]
        if case is None:
            return self._open(rank, window, matrix, "final" if high >= TWO_WINDOWS else "provisional")
        if low and case.status == "provisional":
            return self._end(rank, "withdrawn", "it did not last", matrix)
        if low >= TWO_WINDOWS:
            return self._end(rank, "cleared", "as fast as its peers for two windows", matrix)
        if high >= TWO_WINDOWS and case.status == "provisional":
            found = restated(case, self._say(rank, window, matrix, "final"), matrix.seen_ns)
            self._cases[rank] = found[-1]
            return found
        return []

    def _open(self, rank: int, window: Window, matrix: StepMatrix, status: Status) -> list[Finding]:
        said, now = self._say(rank, window, matrix, status), self._now
        case = opened(self.name, self._found, said, job=now.job, epoch=now.epoch, seen_ns=matrix.seen_ns)
        self._cases[rank] = case
        self._found += 1
        return [case]

    def _end(self, rank: int, status: Literal["cleared", "withdrawn"], why: str, matrix: StepMatrix) -> list[Finding]:
        return ended(self._cases.pop(rank), status, why, matrix.seen_ns)

    def _say(self, rank: int, window: Window, matrix: StepMatrix, status: Status) -> Said:
        excess = window.excess(rank)
        confidence = CONFIRMED if status == "final" else SUSPECTED
        began = self._onset.age_KR[0, rank] > 0
        device = matrix.topology.device_R[rank]
        return Said(
            status=status,
            kind="rank.slow",
            subject=rank_subject(rank),
            suspects=((rank_subject(rank), confidence),),
            onset_ns=int(self._began_ns_R[rank]) if began else matrix.seen_ns,
            onset_step=int(self._began_R[rank]) if began else matrix.step,
            confidence=confidence,
            reason=_reason(rank, device, excess),
            evidence=(
                fact("ratio", excess.ratio, expected=1.0),
                fact("own_work", excess.work_s, expected=excess.peers_s, unit="s"),
                fact("cause", excess.cause),
                fact("phase", excess.phase),
                fact("phase_excess", excess.phase_s, unit="s"),
                fact("cpu_excess", excess.cpu_s, expected=excess.excess_s, unit="s"),
                fact("device", device),
            ),
            lost_s_per_step=excess.excess_s,
        )

    # snapshots

    def snapshot(self) -> State:
        topology = self._topology
        return {
            "topology": None if topology is None else [topology.job, topology.epoch, list(topology.device_R)],
            "coords": np.zeros((0, 0), np.int16) if topology is None else topology.coords_RP.copy(),
            "told_blind": sorted(self._told_blind),
            "cases": {str(rank): written(case) for rank, case in self._cases.items()},
            "counts": [self._steps_of_epoch, self._found],
            "began": np.stack([self._began_R, self._began_ns_R]),
            **put("streak", self._streak.snapshot()),
            **put("onset", self._onset.snapshot()),
            **put("work", self._work.snapshot()),
            **put("now", self._now.snapshot()),
        }

    def restore(self, state: State) -> None:
        self._topology = _topology_of(state)
        self._work.restore(take("work", state), self._topology)
        self._told_blind = frozenset(state["told_blind"])
        self._work.tell_blind(self._told_blind)
        self._cases = {int(rank): case for rank, text in state["cases"].items() if (case := read(text)) is not None}
        self._steps_of_epoch, self._found = state["counts"]
        self._began_R, self._began_ns_R = state["began"].copy()
        self._streak.restore(take("streak", state))
        self._onset.restore(take("onset", state))
        self._now.restore(take("now", state))


def _reason(rank: int, device: str, excess: Excess) -> str:
    times = f"{1e3 * excess.work_s:.3g} ms against {1e3 * excess.peers_s:.3g} ms a step"
    where = f" ({device})" if device else ""
    return (
        f"rank {rank}{where} needs {excess.ratio:.2f} times its peers' own work, {times}: {excess.cause}, "
        f"most of it in {excess.phase}"
    )


def _topology_of(state: State) -> Topology | None:
    if state["topology"] is None:
        return None
    job, epoch, devices = state["topology"]
    return Topology(
        job=JobId(job),
        epoch=Epoch(epoch),
        device_R=tuple(devices),
        node_R=np.full(len(devices), -1, np.int32),
        coords_RP=state["coords"].copy(),
        domains={},
    )
