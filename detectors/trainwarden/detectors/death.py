"""Deaths: which process of the job ended first, and how; the others are its victims.

When one rank dies, torchrun ends the rest, so one death makes many and only the first is a finding. First is who died
first by the kernel's time of death (pidfd). Within torchrun's monitor interval of each other the kind of end says more
than the clock: a signal from outside or the OOM killer cannot be the consequence of a peer's loss that fast, an
exception or a SIGTERM can. Among equals it counts whom torchrun found dead when it first looked.

An exit status that nobody saw is never 0: it is process.unknown until torchrun's table, an error file, the OOM killer
or the keeper tells. Only where the rank's collector had said that the script ends in order is that held back, until the
launcher's own end says whether it was so. Said at the first tick after the death.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from signal import SIGKILL
from typing import Literal

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Event, Evidence, Finding, Frame, Input, JobId, State, Subject, Tick, Topology
from trainwarden.core.records import attempt_of, epoch_of
from trainwarden.detectors.case import (
    Said,
    ended,
    fact,
    job_subject,
    opened,
    put,
    rank_subject,
    read,
    restated,
    say_ranks,
    take,
    whole,
    written,
)
from trainwarden.detectors.ends import (
    ASKED,
    LAUNCHER,
    NO_TABLE,
    End,
    Table,
    first_cause,
    kind_of,
    read_exit,
    read_table,
    say_end,
)
from trainwarden.detectors.incarnation import Incarnation
from trainwarden.detectors.live import DETACHED, NEVER, Live

ALONE, CONTESTED = 0.98, 0.8
"""Our judgement of how often the first death is the cause: with none, with another within the monitor interval."""

KEPT = 64
"""OOM kills remembered."""

_PLAIN = ("stopping_ns", "ended", "attached", "attached_once", "heard", "news_ns", "found", "oom_pids", "oom_ns")
"""Attributes that a snapshot holds as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathConfig:
    """Times of the death detector."""

    monitor_interval: timedelta = timedelta(milliseconds=100)
    """How often torchrun looks at its processes (its --monitor-interval, by default 0.1 s)."""

    unknown_after: timedelta = timedelta(seconds=40)
    """Without news for this long an unknown status stays unknown: torchrun waits 30 s for a stopped rank to end
    before it writes its table."""

    launcher_grace: timedelta = timedelta(seconds=1)
    """After the launcher's end, before it alone is blamed: statuses of ranks come up to 0.3 s after their death."""

    oom_window: timedelta = timedelta(seconds=5)
    """A cgroup that counts an OOM kill names no process: the rank killed this near to it in time is taken for it."""

    def __post_init__(self) -> None:
        for name in ("monitor_interval", "unknown_after", "launcher_grace", "oom_window"):
            if getattr(self, name) < timedelta(0):
                raise ConfigError(f"detectors.death.{name}: need 0 or more, got {getattr(self, name)}")


class Death:
    """One finding process.* for the first death of each incarnation of the job."""

    name = "death"
    wants = frozenset(
        {"topology", "live", "tick", "hello", "process.exit", "launcher.failure", "oom.kill"}
        | {"attempt.started", "attempt.stopping", "attempt.ended"}
    )

    def __init__(self, config: DeathConfig | None = None) -> None:
        self._config = config or DeathConfig()
        self._live = Live()
        self._now = Incarnation()
        self._case: Finding | None = None
        self._found = 0
        self._forget()

    def _forget(self) -> None:
        """A new incarnation: nobody has died."""
        self._live.forget()
        self._ends: dict[int, End] = {}
        self._table = NO_TABLE
        self._attached = self._attached_once = self._ended = self._heard = False
        self._stopping_ns: int | None = None
        self._news_ns = 0
        self._oom_pids: list[int] = []
        self._oom_ns: list[int] = []

    def update(self, item: Input) -> Sequence[Finding]:
        match item:
            case Tick():
                return self._judge(item.seen_ns)
            case Frame() if item.schema == "live" and self._current(item.job, item.epoch):
                self._live.take(item)
            case Topology() if self._current(item.job, item.epoch):
                self._attached = True
            case Event():
                self._hear(item)
                self._heard = True
                return self._judge(item.seen_ns) if item.kind == "attempt.ended" else []
        return []

    # what is seen

    def _current(self, job: JobId | None, epoch: Epoch | None) -> bool:
        """False for what belongs to an earlier incarnation; a later one begins anew."""
        met = self._now.meet(job, epoch)
        if met == "new":
            self._forget()
        return met != "old"

    def _hear(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case "attempt.started":
                self._current(event.job, Epoch(epoch_of(whole(data["attempt"]), 0, 0)))
            case "attempt.stopping" if self._of_attempt(event):
                self._stopping_ns = self._stopping_ns or event.t_ns
            case "attempt.ended" if self._of_attempt(event):
                self._ended = True
            case "oom.kill":
                self._note_oom(event)
            case "launcher.failure":
                self._table, self._news_ns = read_table(event), event.seen_ns
            case "process.exit" if data["rank"] is None:
                if self._of_attempt(event):
                    self._note_end(LAUNCHER, event)
            case "hello":
                self._attached_once |= self._current(event.job, event.epoch)
            case "process.exit" if self._current(event.job, event.epoch):
                self._note_end(whole(data["rank"]), event)

    def _of_attempt(self, event: Event) -> bool:
        """Whether an event about a whole attempt is about the newest (whatever the launcher restarted inside it)."""
        if event.epoch is not None and self._now.outlived(attempt_of(event.epoch)):
            return False
        self._current(event.job, event.epoch)
        return True

    def _note_oom(self, event: Event) -> None:
        self._news_ns = event.seen_ns
        if event.data["pid"] is None:
            self._oom_ns = [*self._oom_ns, event.t_ns][-KEPT:]
        else:
            self._oom_pids = [*self._oom_pids, whole(event.data["pid"])][-KEPT:]

    def _note_end(self, rank: int, event: Event) -> None:
        """The kernel's time of death stays, and so does a status once seen; what was not seen is filled in."""
        self._news_ns = event.seen_ns
        told = read_exit(rank, event)
        end = self._ends.get(rank, replace(told, step=self._step(rank)))
        if not end.known:
            end = replace(end, code=told.code, signal=told.signal, by=told.by)
        self._ends[rank] = replace(end, oom=end.oom or told.oom)

    def _step(self, rank: int) -> int | None:
        row_R = self._live.row_R
        return int(row_R["step"][rank]) if 0 <= rank < len(row_R) and row_R["key"][rank] > NEVER else None

    # what it means

    def _judge(self, now_ns: int) -> list[Finding]:
        old = self._outlive(now_ns)
        waits = self._case.status == "provisional" if self._case is not None else LAUNCHER in self._ends
        if not self._heard and not waits:
            return old
        self._heard = False
        cause = self._cause(now_ns)
        if cause is None:
            return old + self._take_back(now_ns)
        if self._case is not None and not self._now.holds(self._case.epoch):
            old += self._close("cleared", "the job was started anew", now_ns)
        return old + self._say(cause, now_ns)

    def _outlive(self, now_ns: int) -> list[Finding]:
        """The ranks of a later incarnation are there: what the earlier one died of is over."""
        if self._case is None or not self._attached or self._now.holds(self._case.epoch):
            return []
        return self._close("cleared", "the job runs again", now_ns)

    def _take_back(self, now_ns: int) -> list[Finding]:
        if self._case is None or not self._now.holds(self._case.epoch):
            return []
        why = "the job ended in order" if self._stopping_ns is None else "the job was stopped on purpose"
        return self._close("withdrawn", why, now_ns)

    def _cause(self, now_ns: int) -> End | None:
        ends = {rank: self._completed(end) for rank, end in self._ends.items()}
        root = self._table.unwatched_root(ends)
        if root is not None:
            ends[root.rank] = root
        launcher = ends.pop(LAUNCHER, None)
        failed = launcher is not None and not launcher.well and self._waited(launcher, now_ns)
        well = launcher is not None and launcher.well
        failed_ns = now_ns if failed or self._table.failures else self._asked_ns(ends.values())
        ranks = [end for end in ends.values() if self._counts(end, well=well, failed_ns=failed_ns)]
        if launcher is not None and self._on_purpose(launcher):
            launcher, failed = None, False
        if not ranks:
            return launcher if failed else None
        struck = [launcher] if launcher is not None and launcher.signal is not None else []
        return first_cause([*ranks, *struck], self._table, _ns(self._config.monitor_interval))

    def _completed(self, end: End) -> End:
        """With all that others told of it; a rank may be the keeper's own child (a command that is no torchrun)."""
        launcher = self._ends.get(LAUNCHER)
        if launcher is not None and launcher.pid == end.pid and not end.known:
            end = replace(end, code=launcher.code, signal=launcher.signal, by=launcher.by)
        oom = end.oom or end.pid in self._oom_pids or (self._near_oom(end) and end.signal in (None, SIGKILL))
        row_R = self._live.row_R
        said = 0 <= end.rank < len(row_R) and int(row_R["state"][end.rank]) == DETACHED
        return self._table.complete(replace(end, oom=oom and not end.well, in_order=said))

    def _near_oom(self, end: End) -> bool:
        return any(abs(t_ns - end.t_ns) <= _ns(self._config.oom_window) for t_ns in self._oom_ns) and end.code is None

    def _counts(self, end: End, *, well: bool, failed_ns: int) -> bool:
        """Whether an end can be a cause: not one on purpose, nor one that may well have been in order."""
        if end.well or self._on_purpose(end):
            return False
        return end.known or (not well and (not end.in_order or end.t_ns <= failed_ns))

    def _asked_ns(self, ends: Iterable[End]) -> int:
        """When ranks were last asked to end (not by us): torchrun does that when one that ended before had failed."""
        return max((end.t_ns for end in ends if end.signal in ASKED and not self._on_purpose(end)), default=0)

    def _on_purpose(self, end: End) -> bool:
        return self._stopping_ns is not None and end.t_ns >= self._stopping_ns

    def _waited(self, launcher: End, now_ns: int) -> bool:
        """The launcher's end is nearly always the consequence of a rank's: that may still be told."""
        told = self._ended or launcher.signal is not None
        return told or now_ns - launcher.t_ns >= _ns(self._config.launcher_grace)

    # what is said

    def _say(self, cause: End, now_ns: int) -> list[Finding]:
        case = self._case
        said = Said(
            status=self._status(cause, now_ns),
            kind=kind_of(cause),
            subject=self._subject(cause),
            suspects=((self._subject(cause), self._confidence(cause)),),
            onset_ns=cause.t_ns,
            onset_step=cause.step,
            confidence=self._confidence(cause),
            reason=self._reason(cause),
            evidence=self._evidence(cause),
        )
        if case is not None:
            found = restated(case, said, now_ns)
        else:
            found = [opened(self.name, self._found, said, job=self._now.job, epoch=self._now.epoch, seen_ns=now_ns)]
            self._found += 1
        self._case = found[-1] if found else case
        return found

    def _close(self, status: Literal["cleared", "withdrawn"], why: str, now_ns: int) -> list[Finding]:
        case, self._case = self._case, None
        return [] if case is None else ended(case, status, why, now_ns)

    def _subject(self, cause: End) -> Subject:
        return job_subject(self._now.job) if cause.rank == LAUNCHER else rank_subject(cause.rank)

    def _status(self, cause: End, now_ns: int) -> Literal["provisional", "final"]:
        waited = now_ns - self._news_ns >= _ns(self._config.unknown_after)
        final = self._case is not None and self._case.status == "final"
        return "final" if final or cause.known or waited or self._ended else "provisional"

    def _confidence(self, cause: End) -> float:
        near = _ns(self._config.monitor_interval)
        rivals = [end for end in self._ends.values() if abs(end.t_ns - cause.t_ns) <= near and not end.well]
        return ALONE if len(rivals) <= 1 else CONTESTED

    def _victims(self, cause: End) -> list[int]:
        others = (end for end in self._ends.values() if end.rank not in (cause.rank, LAUNCHER) and not end.well)
        return sorted(end.rank for end in others)

    def _reason(self, cause: End) -> str:
        words = say_end(cause)
        if cause.rank == LAUNCHER and not self._attached_once:
            words += "; no rank ever attached the collector"
        elif cause.rank == LAUNCHER:
            words += "; no rank had died before it"
        victims = self._victims(cause)
        return words + (f"; {say_ranks(victims)} ended after it" if victims else "")

    def _evidence(self, cause: End) -> tuple[Evidence, ...]:
        left = sorted(end.rank for end in self._ends.values() if end.well and end.rank != LAUNCHER)
        facts = {"pid": cause.pid, "exit_code": cause.code, "signal": cause.signal, "message": cause.message or None}
        launcher = self._ends.get(LAUNCHER)
        if launcher is not None and cause.rank != LAUNCHER:
            facts["launcher_exit_code"], facts["launcher_signal"] = launcher.code, launcher.signal
        return (
            *(fact(what, value, source=cause.by) for what, value in facts.items() if value is not None),
            fact("victims", self._victims(cause), source="process.exit"),
            *([fact("left_in_order", left, source="process.exit")] if left else []),
        )

    # snapshots

    def snapshot(self) -> State:
        return {
            **{name: getattr(self, f"_{name}") for name in _PLAIN},
            "case": written(self._case),
            "ends": [asdict(end) for end in self._ends.values()],
            "table": asdict(self._table),
            **put("now", self._now.snapshot()),
            **put("live", self._live.snapshot()),
        }

    def restore(self, state: State) -> None:
        for name in _PLAIN:
            setattr(self, f"_{name}", state[name])
        self._case = read(state["case"])
        self._ends = {int(end["rank"]): End(**end) for end in state["ends"]}
        self._table = Table.of(state["table"])
        self._now.restore(take("now", state))
        self._live.restore(take("live", state))


def _ns(time: timedelta) -> int:
    return int(time.total_seconds() * 1e9)
