"""The CPU clock: what the scheduler says of this thread, in one read (Documentation/scheduler/sched-stats.rst).

Field 1 is time on the CPU, field 2 time runnable but waiting for one, both in nanoseconds. Wall time minus the second
tells a slow rank from a busy machine; the first tells computing from standing still.
"""

import os
import threading
from math import nan

from trainwarden.collectors.rank.descriptor import Descriptor
from trainwarden.collectors.rank.say import say

MAX_BYTES = 64


class Schedstat:
    """The calling thread's own schedstat, kept open, and its fields as they were last read.

    Whoever needs them reads and splits in place (Sums.enter), since that is on the way of every mark.
    """

    __slots__ = ("_file", "_queued_ns", "cpu", "fd", "queued")

    def __init__(self) -> None:
        """Raises OSError, ValueError where the kernel does not tell."""
        self._file = Descriptor(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self.fd = self._file.number
        self._queued_ns = 0
        self.cpu, queued, _ = os.pread(self.fd, MAX_BYTES, 0).split()
        self.queued_s(queued)

    def queued_s(self, queued: bytes) -> float:
        """Seconds by which the second field has grown since the last call."""
        before_ns, self.queued, self._queued_ns = self._queued_ns, queued, int(queued)
        return (self._queued_ns - before_ns) * 1e-9

    @property
    def cpu_ns(self) -> int:
        """Time on the CPU up to the last read."""
        return int(self.cpu)

    @property
    def queued_ns(self) -> int:
        """Time waiting for a CPU up to the last read."""
        return self._queued_ns

    @property
    def broken(self) -> bool:
        """Whether it could not be read any more."""
        return self.fd < 0

    def give_up(self) -> float:
        """It cannot be read any more (somebody closed our file): nothing is known of the time just spent, NaN."""
        if self.fd >= 0:
            say("CPU clock", "the CPU clock cannot be read any more: phases are not timed (the training goes on)")
        self.fd = -1
        return nan

    def close(self) -> None:
        self._file.close()
