"""The runtime of a job that torchrun launches on one host: reaches the goals `stopped` and `running`.

It owns the job's processes only through its host (the app, which knows folders, keepers and rings). Both goals are read
from the world before anything is done, so that a plan that was interrupted goes on where it was: an attempt without a
living process is stopped, and an attempt number that exists is never issued twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainwarden.core.errors import ActionError
from trainwarden.core.model import JobId, JobStatus, Json, Rung
from trainwarden.core.process import ProcessId, alive
from trainwarden.remediation.killing import end
from trainwarden.remediation.plans import BY_PLAN

GOALS = frozenset({"stopped", "running"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of one attempt; ranks are those that said hello."""

    launcher: ProcessId | None
    ranks: Mapping[int, ProcessId]
    slots: Mapping[int, str]
    others: Sequence[ProcessId] = ()
    """What else runs below the attempt's keeper: children that left their launcher."""

    @property
    def living(self) -> Sequence[ProcessId]:
        """All of them that are alive."""
        known = [*self.ranks.values(), *self.others, *([self.launcher] if self.launcher is not None else [])]
        return [process for process in known if alive(process)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a new attempt is to start from."""

    attempt: int
    before_ns: int | None
    """A checkpoint must be older than this; None: any."""
    without: tuple[str, ...]
    skip: tuple[tuple[int, int], ...]


class Host(Protocol):
    """What the runtime needs of the host that it runs on."""

    def newest(self) -> int:
        """Number of the newest attempt."""
        ...

    def processes(self, attempt: int) -> Processes: ...

    def begun(self, attempt: int) -> bool:
        """Whether every rank of the attempt has begun a step."""
        ...

    def found(self, attempt: int) -> Mapping[str, Json]:
        """The checkpoint that an attempt was started from."""
        ...

    def announce_stop(self, attempt: int, by: str) -> None:
        """Say that the attempt is stopped on purpose, before its processes end: their ends are no new faults."""
        ...

    def begin(self, begin: Begin, fence: int) -> Mapping[str, Json]:
        """Close the old attempt, choose a checkpoint, issue the attempt. Returns {checkpoint, refused}.

        Raises FencedError, ActionError.
        """
        ...


class Torchrun:
    """The actuator."""

    goals = GOALS

    def __init__(self, host: Host) -> None:
        self._host = host

    def reached(self, rung: Rung) -> bool | None:
        """Read from processes and rings alone. Raises ActionError for an attempt that died before it ran."""
        attempt = _attempt(rung)
        if rung.goal == "stopped":
            return not self._host.processes(attempt).living
        if self._host.newest() < attempt:
            return False
        processes = self._host.processes(attempt)
        if processes.launcher is not None and not processes.living and not self._host.begun(attempt):
            raise ActionError(f"attempt {attempt} ended before every rank had begun a step", retryable=True)
        return self._host.begun(attempt)

    def found(self, rung: Rung) -> Mapping[str, Json]:
        """What was found when the goal was pursued, for a goal that is reached by now (after an interruption)."""
        return self._host.found(_attempt(rung)) if rung.goal == "running" else {}

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        """Stop an attempt, or issue the next one. Raises ActionError, FencedError."""
        return self._stop(_attempt(rung), fence) if rung.goal == "stopped" else self._run(rung, fence)

    def status(self, job: JobId) -> JobStatus:
        """The newest attempt. Exits are told by events, not asked for here."""
        number = self._host.newest()
        processes = self._host.processes(number)
        state: Literal["starting", "running", "ended"] = "running" if self._host.begun(number) else "starting"
        return JobStatus(
            attempt=number,
            state=state if processes.living else "ended",
            slots=processes.slots,
            pids={rank: (process.pid, process.start_time) for rank, process in processes.ranks.items()},
            exits={},
            restarts="us",
        )

    def _stop(self, attempt: int, fence: int) -> Mapping[str, Json]:
        self._host.announce_stop(attempt, f"{BY_PLAN} of term {fence}")
        processes = self._host.processes(attempt)
        left = end([*processes.ranks.values(), *processes.others], processes.launcher)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise ActionError(f"attempt {attempt}: still alive after SIGKILL: pid {pids} (state D?)", retryable=False)
        return {"ended": len(processes.ranks)}

    def _run(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        attempt = _attempt(rung)
        newest = self._host.newest()
        if newest >= attempt:
            return {"attempt": newest}  # issued before we were interrupted: what is left is to see it begin
        if newest != attempt - 1:
            raise ActionError(f"attempt {attempt} cannot follow attempt {newest}", retryable=False)
        living = self._host.processes(newest).living
        if living:
            pids = ", ".join(str(process.pid) for process in living)
            raise ActionError(f"attempt {newest} is not over: pid {pids} is alive", retryable=True)
        begin = Begin(
            attempt=attempt,
            before_ns=_whole(rung.args.get("before_ns")),
            without=tuple(_texts(rung.args.get("without"))),
            skip=tuple(_ranges(rung.args.get("skip"))),
        )
        return {"attempt": attempt, **self._host.begin(begin, fence)}


def _attempt(rung: Rung) -> int:
    attempt = _whole(rung.args.get("attempt"))
    assert attempt is not None, f"{rung.goal}: args.attempt is missing"
    return attempt


def _whole(value: Json) -> int | None:
    return value if isinstance(value, int) else None


def _texts(value: Json) -> Sequence[str]:
    return [str(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


def _ranges(value: Json) -> Sequence[tuple[int, int]]:
    found = []
    for item in value if isinstance(value, Sequence) and not isinstance(value, str) else ():
        assert isinstance(item, Sequence)
        first, last = (int(str(bound)) for bound in item)
        found.append((first, last))
    return found
