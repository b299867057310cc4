"""The places of one job: where its ranks sit, what is left out, what was struck, and whether a spare is there."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainwarden.core.model import Json


class Slots:
    """Slots by name, `<node>:<index>`."""

    def __init__(self, strikes_ns: int) -> None:
        self._strikes_ns = strikes_ns
        self._known: list[str] = []
        """All that there are, spares included."""
        self._of_rank: dict[int, str] = {}
        """In the running attempt."""
        self._ranks = 0
        """How many the job has; 0: not known."""
        self.without: tuple[str, ...] = ()
        """Left out by plans that got the job running; the job's end is the end of it."""
        self._strikes: list[tuple[str, int, int]] = []
        """Slot, attempt and time of what was acted upon."""

    def begin(self) -> None:
        """A new attempt: nobody sits anywhere yet."""
        self._of_rank = {}

    def know(self, slots: Sequence[str]) -> None:
        """These slots are there."""
        self._known = list(dict.fromkeys([*self._known, *slots]))

    def seat(self, rank: int, slot: str, ranks: int) -> None:
        """A rank says where it sits, and how many there are."""
        self.know([slot])
        self._of_rank[rank], self._ranks = slot, ranks

    def of_rank(self, rank: str) -> str:
        """Where a rank sits; empty: not known."""
        return self._of_rank.get(int(rank), "") if rank.isdecimal() else ""

    def used(self, slot: str) -> bool:
        """Whether a rank of the running attempt sits there."""
        return slot in self._of_rank.values()

    def spare_for(self, slot: str) -> bool:
        """Whether the job can do without this slot."""
        left = set(self._known) - {*self.without, slot}
        return slot in self._known and 0 < self._ranks <= len(left)

    def leave_out(self, slots: Sequence[str]) -> None:
        """The job runs without these."""
        self.without = tuple(dict.fromkeys([*self.without, *slots]))

    def strike(self, slot: str, attempt: int, now_ns: int) -> None:
        """A fault struck this slot."""
        recent = [one for one in self._strikes if now_ns - one[2] <= self._strikes_ns]
        self._strikes = [*recent, (slot, attempt, now_ns)]

    def struck_before(self, slot: str, attempt: int, now_ns: int) -> bool:
        """Whether a fault of an earlier attempt struck this slot not long ago."""
        return any(
            one == slot and before < attempt and now_ns - t_ns <= self._strikes_ns
            for one, before, t_ns in self._strikes
        )

    def snapshot(self) -> Json:
        """As JSON."""
        return {
            "known": list(self._known),
            "of_rank": {str(rank): slot for rank, slot in self._of_rank.items()},
            "ranks": self._ranks,
            "without": list(self.without),
            "strikes": [list(one) for one in self._strikes],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take up what snapshot gave."""
        self._known, self._ranks, self.without = list(saved["known"]), saved["ranks"], tuple(saved["without"])
        self._of_rank = {int(rank): slot for rank, slot in saved["of_rank"].items()}
        self._strikes = [(slot, attempt, t_ns) for slot, attempt, t_ns in saved["strikes"]]
