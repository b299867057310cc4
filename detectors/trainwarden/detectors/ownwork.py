"""Own work of the ranks over a window of steps, against that of their peers.

Own work is data + forward + backward + optimizer, each without run-queue wait and without waiting for others. A device
that runs its own clock needs no run-queue wait; elsewhere, where that is not measured, own work is blind, and so it is
where a rank's phases contain communication. Blind is not healthy: it is said (blind_reason), never compared.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import State, StepMatrix, Topology
from trainwarden.core.records import CONTAINS_COMM, DEVICE_TIMED, FEATURES
from trainwarden.core.topology import peer_group_R
from trainwarden.detectors.case import say_ranks
from trainwarden.detectors.robust import Bools, Floats, carry, mean_over, median_over, peer_median

OWN = ("data_s", "forward_s", "backward_s", "optimizer_s")
"""Phases of own work."""

COMPUTING = 0.5
"""Share of the excess that CPU time must cover to call it computing: the nearer of two explanations."""

GPU = "GPU-"
"""How NVML begins a device's UUID; its phases are timed on the device."""

BLIND = {
    "told": "the collector cannot tell own work there",
    "comm": "forward or backward contains communication that was not taken out",
    "runq": "run-queue wait is not measured (attach with clock `cpu`)",
}

_OWN_ROWS = [FEATURES.index(name) for name in OWN]
_CPU_ROW, _RUNQ_ROW = FEATURES.index("cpu_s"), FEATURES.index("runq_s")
_CPU, _WORK, _PEERS, _RATIO, _KEPT = 4, 5, 6, 7, 8
"""Kept of each step: the four phases (0 to 3), CPU time, own work, that of the peers, the ratio of the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """What one rank does more of than its peers, a step."""

    ratio: float
    work_s: float
    peers_s: float
    excess_s: float
    phase: str
    """The phase that carries most of it."""
    phase_s: float
    """How much of it that is."""
    cpu_s: float | None
    """Excess CPU time; None: not measured."""

    @property
    def cause(self) -> str:
        """computing: CPU time covers half of the excess or more; else stalling (asleep, or waiting for input)."""
        if self.cpu_s is None:
            return "unknown"
        return "computing" if self.cpu_s >= COMPUTING * self.excess_s else "stalling"


class Window:
    """A window of steps as one: medians over its steps, of each rank and of its peers."""

    def __init__(self, ring_SKR: Floats, group_R: NDArray[np.int32]) -> None:
        steps = len(ring_SKR)
        median_KR = median_over(ring_SKR.reshape(steps, -1)).reshape(ring_SKR.shape[1:])
        # CPU time is the mean: some kernels account it in ticks of 4 ms, longer than what a short phase takes
        median_KR[_CPU] = mean_over(ring_SKR[:, _CPU])
        self._median_KR = median_KR
        self._over_KR = np.stack([row - peer_median(row, group_R) for row in median_KR[:_WORK]])
        self._excess_R = median_over(ring_SKR[:, _WORK] - ring_SKR[:, _PEERS])

    def excess(self, rank: int) -> Excess:
        """What a rank does more of than its peers."""
        over_K = self._over_KR[:, rank]
        worst = int(np.argmax(over_K[: len(OWN)]))
        return Excess(
            ratio=float(self._median_KR[_RATIO, rank]),
            work_s=float(self._median_KR[_WORK, rank]),
            peers_s=float(self._median_KR[_PEERS, rank]),
            excess_s=float(self._excess_R[rank]),
            phase=OWN[worst].removesuffix("_s"),
            phase_s=float(over_K[worst]),
            cpu_s=None if np.isnan(over_K[_CPU]) else float(over_K[_CPU]),
        )


class OwnWork:
    """The last steps of all ranks."""

    def __init__(self, window_steps: int) -> None:
        self._window_steps = window_steps
        self._ring_SKR: Floats = np.full((window_steps, _KEPT, 0), np.nan)
        self._group_R: NDArray[np.int32] = np.zeros(0, np.int32)
        self._gpu_R: Bools = np.zeros(0, np.bool_)
        self._told_R: Bools = np.zeros(0, np.bool_)
        self._blind: dict[str, Bools] = {}
        self.steps = 0
        """Steps ever kept."""

    @property
    def blind_reason(self) -> str | None:
        """Why own work of some ranks could not be told in the newest step; None: of all that were seen it could."""
        found = (
            f"{say_ranks(np.flatnonzero(mask_R).tolist())}: {BLIND[why]}"
            for why, mask_R in self._blind.items()
            if mask_R.any()
        )
        return "; ".join(found) or None

    def adopt(self, topology: Topology, row_R: NDArray[np.int32]) -> None:
        """A new numbering of the ranks: row_R holds each one's old row, -1 for none."""
        self._ring_SKR = carry(self._ring_SKR, row_R, np.nan)
        self._group_R = peer_group_R(topology)
        self._gpu_R = np.array([device.startswith(GPU) for device in topology.device_R], np.bool_)
        self._told_R = np.zeros(len(row_R), np.bool_)

    def tell_blind(self, ranks: Iterable[int]) -> None:
        """Ranks whose collector says that it cannot tell their own work."""
        self._told_R = np.isin(np.arange(len(self._told_R)), list(ranks))

    def keep(self, matrix: StepMatrix) -> Floats:
        """Take a step in; the ratio of each rank to its peers in this step, NaN where there is none."""
        own_PR = matrix.values_FR[_OWN_ROWS].astype(np.float64)
        known_R = matrix.seen_R & ~np.isnan(own_PR).all(axis=0) & ~self._blind_in(matrix)
        row_KR = np.full((_KEPT, len(known_R)), np.nan)
        row_KR[: len(OWN)] = np.where(known_R, np.nan_to_num(own_PR, nan=0.0), np.nan)
        row_KR[_CPU] = np.where(known_R, matrix.values_FR[_CPU_ROW], np.nan)
        row_KR[_WORK] = row_KR[: len(OWN)].sum(axis=0)
        row_KR[_PEERS] = peer_median(row_KR[_WORK], self._group_R)
        usable_R = (row_KR[_PEERS] > 0) & (row_KR[_WORK] > 0)
        row_KR[_RATIO] = np.divide(row_KR[_WORK], row_KR[_PEERS], out=np.full(len(known_R), np.nan), where=usable_R)
        self._ring_SKR[self.steps % self._window_steps] = row_KR
        self.steps += 1
        return np.asarray(row_KR[_RATIO])

    def ratio_R(self) -> Floats:
        """Each rank's median ratio over the window; NaN where more than half of the steps tell none."""
        return median_over(self._ring_SKR[:, _RATIO], least=self._window_steps // 2 + 1)

    def window(self) -> "Window":
        """The last steps as one."""
        return Window(self._ring_SKR, self._group_R)

    def snapshot(self) -> State:
        return {"ring": self._ring_SKR.copy(), "steps": self.steps}

    def restore(self, state: State, topology: Topology | None) -> None:
        """After adopt() of the same topology."""
        self._ring_SKR, self.steps = state["ring"].copy(), int(state["steps"])
        if topology is not None:
            self.adopt(topology, np.arange(len(topology.device_R), dtype=np.int32))

    def _blind_in(self, matrix: StepMatrix) -> Bools:
        comm_R = (matrix.flags_R & CONTAINS_COMM) != 0
        timed_R = self._gpu_R | ((matrix.flags_R & DEVICE_TIMED) != 0)
        no_runq_R = np.isnan(matrix.values_FR[_RUNQ_ROW]) & ~timed_R
        # one reason a rank, the most telling first; only of ranks that were seen
        self._blind = {
            "told": matrix.seen_R & self._told_R,
            "comm": matrix.seen_R & comm_R & ~self._told_R,
            "runq": matrix.seen_R & no_runq_R & ~comm_R & ~self._told_R,
        }
        return np.asarray(self._told_R | comm_R | no_runq_R)
