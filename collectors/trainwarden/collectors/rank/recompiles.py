"""What torch.compile compiles again while the training runs: each time costs seconds, and says that shapes change."""

import sys
from typing import Any, Final

from trainwarden.collectors.rank.rank import Rank
from trainwarden.core.records import NAME_BYTES, RECOMPILED


class Recompiles:
    """Looks at the compiler's own counters: two look-ups of a dictionary a step, more only when they have changed."""

    def __init__(self) -> None:
        self._graphs = self._count = 0
        self._newest_us = 0

    def look(self, w: Rank) -> None:
        """Note each function compiled again since the last look, with how many there were so far in this process."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return
        graphs = dynamo.counters["stats"]["unique_graphs"]
        if graphs != self._graphs:
            self._graphs = graphs
            for name in self._new(dynamo):
                self._count += 1
                w.note(name, self._count)

    def _new(self, dynamo: Any) -> list[str]:
        """Names of notes. The compiler keeps its last 64 compilations, oldest first; only a second one has a reason."""
        new = [one for one in dynamo.get_compilation_metrics() if (one.start_time_us or 0) > self._newest_us]
        self._newest_us = max((one.start_time_us for one in new), default=self._newest_us)
        again = [one for one in new if one.recompile_reason]
        return [f"{RECOMPILED}{one.co_name}".encode()[:NAME_BYTES].decode(errors="ignore") for one in again]


RECOMPILES: Final = Recompiles()
"""One a process, as the compiler is."""
