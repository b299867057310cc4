"""Hangs: no rank of the job progresses within what the phases its ranks are in allow.

One test a job, not one a rank: in a job that moves in step a real hang stops everybody within a step, and false alarms
do not grow with the ranks. The longest budget of all ranks counts, so one rank in a declared checkpoint makes the
waiting of the others legal. Silence of an agent is blindness, not a hang: only fresh live frames without progress
count. While a member is dead the others wait for the dead, which is the death detector's business.

Time is the receiver's (seen_ns of frames and ticks). All judging happens at ticks, so the order of frames between two
of them does not matter. Suspected at the budget; final with the witness's stacks or a second later; cleared when the
culprit moves on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import numpy as np

from trainwarden.core.model import Epoch, Event, Finding, Frame, Input, JobId, Json, State, Tick, Topology
from trainwarden.core.records import attempt_of, epoch_of
from trainwarden.detectors.budgets import Budgets, HangConfig
from trainwarden.detectors.case import (
    Said,
    Status,
    confirmed,
    ended,
    opened,
    put,
    read,
    restated,
    take,
    whole,
    written,
)
from trainwarden.detectors.culprit import Stack
from trainwarden.detectors.incarnation import Incarnation
from trainwarden.detectors.live import DETACHED, LEFT, NEVER, NOT_A_MEMBER, Live
from trainwarden.detectors.robust import Bools
from trainwarden.detectors.standstill import Stand, say

__all__ = ["Hang", "HangConfig"]

UNWATCHED_NS = 1_000_000_000
"""Ticks further apart than this (they come 4 a second) mean that nobody looked in the rest of the time."""

CAUSE_NS = 1_000_000_000
"""A death up to this long after the last progress was there first: it takes the others that long to feel it."""

_PLAIN = ("over", "dead_ns", "case_key", "news", "opened_ns", "found", "tick_ns", "calm_ns")
"""Attributes that a snapshot holds as they are."""


class Hang:
    """One finding rank.hung for each time that the job stands still."""

    name = "hang"
    wants = frozenset(
        {"topology", "live", "tick", "hello", "membership", "mark.phase", "process.exit", "stack"}
        | {"attempt.started", "attempt.stopping", "attempt.ended"}
    )

    def __init__(self, config: HangConfig | None = None) -> None:
        self._config = config or HangConfig()
        self._live, self._budgets = Live(), Budgets(self._config)
        self._now = Incarnation()
        self._over = False  # being stopped, or ended
        self._dead_ns: int | None = None
        self._case: Finding | None = None
        self._case_key = NEVER
        self._stacks: dict[int, Stack] = {}
        self._news = False
        self._opened_ns = 0
        self._found = 0
        self._tick_ns = 0
        self._calm_ns = 0

    def update(self, item: Input) -> Sequence[Finding]:
        match item:
            case Tick():
                return self._judge(item.seen_ns)
            case Frame() if item.schema == "live":
                self._see(item)
            case Topology() if self._current(item.job, item.epoch):
                self._live.reserve(len(item.device_R))
            case Event():
                self._hear(item)
        return []

    # what is seen

    def _current(self, job: JobId | None, epoch: Epoch | None) -> bool:
        """False for what belongs to an earlier incarnation; a later one begins a new life of everything but budgets."""
        met = self._now.meet(job, epoch)
        if met == "new":
            self._live.forget()
            self._budgets.new_run()
            self._over, self._dead_ns = False, None
            self._stacks.clear()
        return met != "old"

    def _of_attempt(self, event: Event) -> bool:
        """Whether an event about a whole attempt is about the newest (whatever the launcher restarted inside it)."""
        if event.epoch is not None and self._now.outlived(attempt_of(event.epoch)):
            return False
        self._current(event.job, event.epoch)
        return True

    def _see(self, frame: Frame) -> None:
        if not self._current(frame.job, frame.epoch):
            return
        moves = self._live.take(frame)
        calm_ns = self._calm_ns if self._case is None else frame.seen_ns
        self._budgets.learn(moves, blind_ns=self._config.fresh_ns, not_before_ns=calm_ns)

    def _hear(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case "attempt.started":
                self._current(event.job, Epoch(epoch_of(whole(data["attempt"]), 0, 0)))
            case "attempt.stopping" | "attempt.ended":
                self._over |= self._of_attempt(event)
            case "process.exit" if data["rank"] is None:
                self._over |= self._of_attempt(event)
            case _ if not self._current(event.job, event.epoch):
                pass
            case "hello":
                self._live.reserve(whole(data["world_size"]))
            case "membership":
                self._leave_out(cast(Sequence[int], data["ranks"]))
            case "mark.phase":
                self._declare(int(event.subject.id), data)
            case "process.exit":
                self._bury(whole(data["rank"]), data)
            case "stack":
                self._stacks[whole(data["rank"])] = {key: data[key] for key in ("frames", "state", "wchan", "denied")}
                self._news = self._case is not None

    def _leave_out(self, ranks: Sequence[int]) -> None:
        self._live.reserve(max(ranks, default=-1) + 1)
        row_R = self._live.row_R
        row_R["gone"] = np.where(np.isin(np.arange(len(row_R)), ranks), 0, NOT_A_MEMBER)

    def _declare(self, rank: int, data: Mapping[str, Json]) -> None:
        self._live.reserve(rank + 1)
        expect_s = data["expect_s"]
        said = isinstance(expect_s, int | float) and math.isfinite(expect_s) and expect_s > 0
        if said and 0 <= rank < len(self._live.row_R):
            self._live.row_R["declared"][rank] = self._live.phase_id(str(data["phase"]))
            self._live.row_R["expect_s"][rank] = expect_s

    def _bury(self, rank: int, data: Mapping[str, Json]) -> None:
        self._live.reserve(rank + 1)
        if not 0 <= rank < len(self._live.row_R):
            return
        unseen = data["code"] is None and data["signal"] is None
        if data["code"] == 0 or (unseen and self._live.row_R["state"][rank] == DETACHED):
            self._live.row_R["gone"][rank] = LEFT
            return
        died_ns = whole(data["t_ns"])
        self._dead_ns = died_ns if self._dead_ns is None else min(died_ns, self._dead_ns)

    # what it means

    def _judge(self, now_ns: int) -> list[Finding]:
        lost_ns = now_ns - self._tick_ns
        if self._tick_ns and lost_ns > UNWATCHED_NS and self._case is None:
            self._live.skip(lost_ns - UNWATCHED_NS, now_ns)
        self._tick_ns = now_ns
        stand = self._stand(now_ns)
        if self._case is not None:
            return self._follow(self._case, stand, now_ns)
        return self._open(stand, now_ns) if stand is not None and self._stuck(stand) else []

    def _stand(self, now_ns: int) -> Stand | None:
        """None where too little is seen to say."""
        row_R = self._live.row_R
        seen_R = row_R["seen_ns"] > 0
        left_R = (row_R["gone"] == LEFT) | (row_R["state"] == DETACHED)
        member_R = ~left_R & (row_R["gone"] == 0) & (seen_R | self._absent())
        fresh_R = member_R & seen_R & (now_ns - row_R["seen_ns"] <= self._config.fresh_ns)
        judged_R = fresh_R | (member_R & ~seen_R)
        if not fresh_R.any() or 2 * np.count_nonzero(judged_R) < np.count_nonzero(member_R):
            return None
        allowed_s = float(self._budgets.allowed_R(self._live)[member_R].max())
        if left_R.any():
            allowed_s = max(allowed_s, self._config.long_phase.total_seconds())
        newest_ns = int(row_R["moved_ns"][member_R].max())
        return Stand(
            rank_K=np.flatnonzero(judged_R),
            blind=tuple(np.flatnonzero(member_R & ~judged_R).tolist()),
            newest_ns=newest_ns,
            quiet_s=1e-9 * (now_ns - newest_ns),
            allowed_s=allowed_s,
        )

    def _absent(self) -> Bools:
        """Ranks that never attached; once somebody finished a step they are merely not watched."""
        row_R = self._live.row_R
        return np.asarray((row_R["seen_ns"] == 0) & ~np.any(row_R["key"] > row_R["first_key"]))

    def _open(self, stand: Stand, now_ns: int) -> list[Finding]:
        self._stacks.clear()
        self._news = False
        row_R = self._live.row_R
        self._case_key = int(row_R["key"].max())
        said = self._say(stand, now_ns, "provisional")
        epoch = self._now.epoch
        self._case = opened(self.name, self._found, said, job=self._now.job, epoch=epoch, seen_ns=now_ns)
        self._opened_ns = now_ns
        self._found += 1
        return [self._case]

    def _follow(self, case: Finding, stand: Stand | None, now_ns: int) -> list[Finding]:
        if self._moves_again(case):
            return self._close(case, now_ns, "cleared", "the job moves again")
        if self._dead_ns is not None and self._dead_ns <= case.onset_ns + CAUSE_NS:
            return self._close(case, now_ns, "withdrawn", "a rank had died and the others wait for the dead one")
        if self._now.holds(case.epoch):
            return self._confirm(case, stand, now_ns) if stand is not None and not self._excused() else []
        return self._close(case, now_ns, "cleared", "the job was started anew") if self._stuck(stand) else []

    def _confirm(self, case: Finding, stand: Stand, now_ns: int) -> list[Finding]:
        waited = now_ns - self._opened_ns >= self._config.confirm.total_seconds() * 1e9
        if self._news:
            said = self._say(stand, now_ns, "final")
            found = restated(case, replace(said, onset_ns=case.onset_ns, onset_step=case.onset_step), now_ns)
        else:
            found = confirmed(case, now_ns) if waited else []
        self._news = False
        self._case = found[-1] if found else case
        return found

    def _say(self, stand: Stand, now_ns: int, status: Status) -> Said:
        return say(stand, self._live, self._stacks, job=self._now.job, now_ns=now_ns, status=status)

    def _close(self, case: Finding, now_ns: int, status: Literal["cleared", "withdrawn"], why: str) -> list[Finding]:
        self._case = None
        self._calm_ns = now_ns
        self._stacks.clear()
        return ended(case, status, why, now_ns)

    def _moves_again(self, case: Finding) -> bool:
        row_R = self._live.row_R
        if not self._now.holds(case.epoch):
            return bool(np.any((row_R["key"] > row_R["first_key"]) & (row_R["first_key"] != NEVER)))
        if row_R["key"].max(initial=NEVER) > self._case_key:
            return True
        moved_R = row_R["moved_ns"] > case.onset_ns
        return bool(moved_R[int(case.subject.id)] if case.subject.kind == "rank" else moved_R.any())

    def _excused(self) -> bool:
        return self._over or self._dead_ns is not None

    def _stuck(self, stand: Stand | None) -> bool:
        return stand is not None and not self._excused() and stand.quiet_s > stand.allowed_s

    # snapshots

    def snapshot(self) -> State:
        return {
            **{name: getattr(self, f"_{name}") for name in _PLAIN},
            "case": written(self._case),
            "stacks": {str(rank): dict(stack) for rank, stack in self._stacks.items()},
            **put("now", self._now.snapshot()),
            **put("live", self._live.snapshot()),
            **put("budgets", self._budgets.snapshot(self._live.names)),
        }

    def restore(self, state: State) -> None:
        for name in _PLAIN:
            setattr(self, f"_{name}", state[name])
        self._case = read(state["case"])
        self._stacks = {int(rank): stack for rank, stack in state["stacks"].items()}
        self._now.restore(take("now", state))
        self._live.restore(take("live", state))
        self._budgets.restore(take("budgets", state), self._live)
