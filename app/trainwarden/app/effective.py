"""Where a job's wall time went: every instant once, as one of core.signals.ACTIVITIES. Pure; a replay gives the same.

A closed step tells how long things took, not when, and it comes a little late. So time that passes is pending first.
A step that closes takes out of it what its rows tell; what it leaves is older than it: `starting` before the first step
of an attempt, else `other`. Time goes without a step's word where none will come: to `interrupted` when the attempt has
ended, to `checkpoint` and `evaluation` while ranks say that they have been in that phase for some time (their rows then
tell that much less), and to `starting` or `interrupted` when nothing has closed for longer than our patience.

Rows tell checkpoint_s and eval_s whether they lay inside the step or before its begin(), step_s is begin to end. What
the phases of a row add up to beyond step_s must have lain before it: exact for scripts that mark their phases, and at
most one step's time too much is taken out of training for those that do not.

Time is the receiver's (`seen_ns`), in whole nanoseconds, so that the activities add up to the wall time exactly.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Event, Frame, Json, State, StepMatrix, Tick
from trainwarden.core.records import FEATURES, attempt_of, epoch_of
from trainwarden.core.signals import ACTIVITIES

LAG_NS: Final = 500_000_000
"""What a step leaves is kept this far back for the next one: the end of a step is seen a poll (0.1 s) and a tick
(0.25 s) late at most, and that of the next one perhaps not late at all."""

PATIENCE: Final = timedelta(minutes=1)
"""Without a closed step: longer than most steps and a first one that compiles, and as long as Prometheus' usual windows
at least."""

PATIENCE_MAX: Final = timedelta(hours=1)
"""Three times the longest step of the job is waited for, but not longer than this: that step may itself have been a
hang which ended."""

LONG_NS: Final = 1_000_000_000
"""A phase that lasts longer counts while it lasts: ten polls, so that the grain of polls is small against it."""

_DOING: Final = {"checkpoint": "checkpoint", "eval": "evaluation"}
"""Phase -> activity, where a rank in that phase says all about the job."""

_LAPS: Final = 0xFFFF
"""The bits of an epoch that count laps: a lap is no new start."""

_STEP = FEATURES.index("step_s")
_CHECKPOINT, _EVALUATION = FEATURES.index("checkpoint_s"), FEATURES.index("eval_s")
_PHASES = [FEATURES.index(f"{name}_s") for name in ("data", "forward", "backward", "optimizer", "wait", "runq")]


class TimeSplit:
    """Feed it everything in the order of its seen_ns; `seconds()` and `wall_s` lag behind by what is pending."""

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self.highest_step = -1
        """The highest step that ever closed, of all attempts."""
        self.steps_new = self.steps_repeated = 0
        self._patience_ns = _ns(patience.total_seconds())
        self._spent_ns = dict.fromkeys(ACTIVITIES, 0)
        self._ahead_ns = dict.fromkeys(_DOING.values(), 0)
        """Of what ranks were doing: counted before their rows told it."""
        self._now_ns = self._cut_ns = 0
        """The newest stamp; everything before the cut is counted, what lies between the two is pending."""
        self._stage = "starting"
        """Or `running`: a step has closed; `ended`: the attempt has."""
        self._gap: str | None = None
        """What the time is that the steps of the newest instant leave; None: none has closed in it."""
        self._doing: str | None = None
        self._epoch = -1
        """Without its lap."""
        self._newest = (-1, -1)
        """Epoch and step that closed last."""
        self._longest_ns = 0

    @property
    def wall_s(self) -> float:
        """The wall time that is counted; what nobody watched (no supervisor, for longer than our patience) is not."""
        return sum(self._spent_ns.values()) / 1e9

    def seconds(self) -> Mapping[str, float]:
        """By activity; they add up to wall_s and never go down."""
        return {activity: spent_ns / 1e9 for activity, spent_ns in self._spent_ns.items()}

    def feed(self, item: StepMatrix | Frame | Event | Tick) -> bool:
        """Take the next item. False: a step that was told before (by a line that was restored to an earlier state)."""
        if isinstance(item, StepMatrix):
            return self._take(item)
        if isinstance(item, Event) and item.kind == "attempt.started":
            self._mind_unwatched(item)
        self._pass(item.seen_ns)
        match item:
            case Event(kind="attempt.started"):
                self._begin(epoch_of(_whole(item.data["attempt"]), 0, 0))
            case Event(kind="attempt.ended") if _whole(item.data["attempt"]) == attempt_of(self._epoch):
                self._end()
            case Event(kind="hello", epoch=int(epoch)) if self._epoch < 0 or _same_attempt(epoch, self._epoch):
                self._begin(epoch & ~_LAPS)
            case Frame(schema="live", epoch=int(epoch)) if _same_attempt(epoch, self._epoch):
                self._doing = None if self._stage == "ended" else _doing(item)
        return True

    def settle(self) -> None:
        """Nothing more will come (for now): count what is pending, so that wall_s reaches the newest item."""
        self._count(self._gap or {"starting": "starting", "running": "other"}.get(self._stage, "interrupted"))
        self._gap = None

    def snapshot(self) -> State:
        """JSON values."""
        return {
            "spent_ns": dict(self._spent_ns),
            "ahead_ns": dict(self._ahead_ns),
            "times_ns": [self._now_ns, self._cut_ns, self._longest_ns],
            "steps": [self.highest_step, self.steps_new, self.steps_repeated],
            "at": [self._stage, self._gap, self._epoch, *self._newest],
        }

    def restore(self, state: State) -> None:
        """Take up what snapshot gave."""
        self._spent_ns |= state["spent_ns"]
        self._ahead_ns |= state["ahead_ns"]
        self._now_ns, self._cut_ns, self._longest_ns = state["times_ns"]
        self.highest_step, self.steps_new, self.steps_repeated = state["steps"]
        self._stage, self._gap, self._epoch, *newest = state["at"]
        self._newest = (newest[0], newest[1])
        self._doing = None

    # attempts

    def _mind_unwatched(self, started: Event) -> None:
        """The first words of a supervisor that was away for too long: nobody knows what that time was spent on."""
        away_ns = started.seen_ns - self._now_ns
        if started.data.get("by") != "plan" and self._now_ns > 0 and away_ns > self._waits_ns:
            self.settle()
            self._now_ns = self._cut_ns = started.seen_ns

    def _begin(self, epoch: int) -> None:
        """A new attempt, or a launcher's own restart in it."""
        if epoch <= self._epoch:
            return
        self._count("starting" if self._stage == "starting" else "interrupted")
        self._epoch, self._stage, self._gap, self._doing = epoch, "starting", None, None
        self._ahead_ns = dict.fromkeys(self._ahead_ns, 0)

    def _end(self) -> None:
        if self._stage == "starting":
            self._count("starting")
        self._stage, self._doing = "ended", None

    # time

    @property
    def _waits_ns(self) -> int:
        return max(self._patience_ns, min(3 * self._longest_ns, _ns(PATIENCE_MAX.total_seconds())))

    def _pass(self, now_ns: int) -> None:
        if self._now_ns == 0:
            self._now_ns = self._cut_ns = now_ns
        if now_ns <= self._now_ns:
            return
        if self._gap is not None:
            self._count(self._gap, self._now_ns - LAG_NS)
            self._gap = None
        passed_ns, self._now_ns = now_ns - self._now_ns, now_ns
        if self._stage == "ended":
            self._count("interrupted")
        elif self._doing is not None:
            self._count(self._doing, self._cut_ns + passed_ns)
            self._ahead_ns[self._doing] += passed_ns
        else:
            self._count("starting" if self._stage == "starting" else "interrupted", now_ns - self._waits_ns)

    def _count(self, activity: str, until_ns: int | None = None) -> None:
        """Count what is pending, up to a moment or all of it, as this."""
        end_ns = self._now_ns if until_ns is None else until_ns
        if end_ns > self._cut_ns:
            self._spent_ns[activity] += end_ns - self._cut_ns
            self._cut_ns = end_ns

    # steps

    def _take(self, matrix: StepMatrix) -> bool:
        place = (int(matrix.topology.epoch), matrix.step)
        if place <= self._newest:
            return False
        self._newest, epoch = place, place[0] & ~_LAPS
        self._pass(matrix.seen_ns)
        self._begin(epoch)
        new = matrix.step > self.highest_step
        self.highest_step = max(self.highest_step, matrix.step)
        self.steps_new, self.steps_repeated = self.steps_new + new, self.steps_repeated + (not new)
        self._claim("training" if new else "repeated", matrix)
        if epoch == self._epoch and self._stage != "ended":
            self._gap = self._gap or ("starting" if self._stage == "starting" else "other")
            self._stage = "running"
        return True

    def _claim(self, activity: str, matrix: StepMatrix) -> None:
        """Take out of what is pending what a step tells; if that is more, all of it in the same proportions."""
        step_s, *told_s = _told_s(matrix)
        claims_ns = {activity: _ns(step_s)}
        self._longest_ns = max(self._longest_ns, claims_ns[activity])
        for name, seconds in zip(self._ahead_ns, told_s, strict=True):
            known_ns = min(self._ahead_ns[name], _ns(seconds))
            self._ahead_ns[name] -= known_ns
            claims_ns[name] = _ns(seconds) - known_ns
        pending_ns, total_ns = self._now_ns - self._cut_ns, sum(claims_ns.values())
        for name, claim_ns in claims_ns.items():
            given_ns = claim_ns if total_ns <= pending_ns else claim_ns * pending_ns // total_ns
            self._count(name, self._cut_ns + given_ns)


def working_s(matrix: StepMatrix) -> float | None:
    """Wall time of a step on its slowest rank without checkpoint and evaluation; None: no rank tells it."""
    return None if _largest(matrix.values_FR[_STEP]) is None else _told_s(matrix)[0]


def _told_s(matrix: StepMatrix) -> tuple[float, float, float]:
    """What a step tells: the step itself, checkpoint and evaluation, without what is counted twice."""
    step_s = _largest(matrix.values_FR[_STEP]) or 0.0
    pauses_R = np.fmax(matrix.values_FR[_CHECKPOINT], 0) + np.fmax(matrix.values_FR[_EVALUATION], 0)
    if not pauses_R.any():
        return step_s, 0.0, 0.0
    # of one rank, so that one that evaluates while another saves is not counted twice
    row_F = matrix.values_FR[:, int(np.argmax(np.where(np.isfinite(pauses_R), pauses_R, -1)))].astype(np.float64)
    row_F = np.where(np.isfinite(row_F) & (row_F > 0), row_F, 0.0)
    checkpoint_s, evaluation_s = float(row_F[_CHECKPOINT]), float(row_F[_EVALUATION])
    pause_s = checkpoint_s + evaluation_s
    before_s = min(max(float(row_F[_PHASES].sum()) + pause_s - float(row_F[_STEP]), 0.0), pause_s)
    return max(step_s - (pause_s - before_s), 0.0), checkpoint_s, evaluation_s


def _largest(values_R: NDArray[np.float32]) -> float | None:
    """The largest that is a number; None: there is none."""
    largest = float(np.fmax.reduce(values_R))
    if not np.isfinite(largest):
        known = values_R[np.isfinite(values_R)]
        return max(float(known.max()), 0.0) if len(known) else None
    return max(largest, 0.0)


def _doing(live: Frame) -> str | None:
    """What the job does when any rank has long been doing it: the others wait for that one."""
    for phase, activity in _DOING.items():
        if phase not in live.names:
            continue
        since_N = live.rows["since_ns"][live.rows["phase"] == live.names.index(phase)]
        if len(since_N) and live.seen_ns - int(since_N.min()) > LONG_NS:
            return activity
    return None


def _same_attempt(one: int, other: int) -> bool:
    return attempt_of(one) == attempt_of(other)


def _whole(value: Json) -> int:
    return value if isinstance(value, int) else -1


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
