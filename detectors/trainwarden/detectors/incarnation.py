"""Which incarnation of a job an item belongs to: (attempt, restart) of its epoch, which only grow.

A lap (the step number fell back inside one process) is no new incarnation: the same processes go on.
"""

from typing import Literal

from trainwarden.core.model import Epoch, JobId, State
from trainwarden.core.records import attempt_of


class Incarnation:
    """The newest incarnation seen of one job.

    >>> now = Incarnation()
    >>> [now.meet(None, Epoch(attempt << 32)) for attempt in (1, 1, 2, 1)]
    ['new', 'same', 'new', 'old']
    """

    def __init__(self) -> None:
        self.job: JobId | None = None
        self.epoch = Epoch(-1)
        """Newest epoch of the incarnation; -1: nothing was seen."""

    def meet(self, job: JobId | None, epoch: Epoch | None) -> Literal["old", "same", "new"]:
        """How an item stands to what was seen; an item without an epoch belongs to the newest."""
        self.job = job or self.job
        if epoch is None:
            return "same"
        step = (epoch >> 16) - (self.epoch >> 16)
        self.epoch = max(self.epoch, epoch)
        return "new" if step > 0 else "same" if step == 0 else "old"

    def holds(self, epoch: Epoch | None) -> bool:
        """Whether a finding's epoch is of this incarnation."""
        return epoch is None or epoch >> 16 == self.epoch >> 16

    def outlived(self, attempt: int) -> bool:
        """Whether a newer attempt than this one was seen."""
        return self.epoch >= 0 and attempt_of(self.epoch) > attempt

    def snapshot(self) -> State:
        return {"job": self.job, "epoch": self.epoch}

    def restore(self, state: State) -> None:
        self.job, self.epoch = state["job"], Epoch(state["epoch"])
