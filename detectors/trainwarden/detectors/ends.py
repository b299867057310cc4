"""Ends of processes: what each end was, and which of several was the first cause."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from signal import Signals
from typing import Any

from trainwarden.core.model import Event, Json
from trainwarden.core.process import signal_name
from trainwarden.detectors.case import whole

LAUNCHER = -1
"""Rank of the launcher among the ends."""

ASKED = frozenset({Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP})
"""Signals that ask a process to end: torchrun sends SIGTERM to the ranks that outlive a failure."""

CRASHES = frozenset({Signals.SIGSEGV, Signals.SIGBUS, Signals.SIGFPE, Signals.SIGILL, Signals.SIGSYS, Signals.SIGTRAP})
"""Signals that a process brings upon itself by what it executes (signal(7))."""

TORCHRUN = "torchrun"
"""Who told of an end: torchrun's table (else what the process.exit event says: zombie, pidfd, keeper, nobody)."""

SELF = CRASHES | {Signals.SIGABRT}

STOCK = re.compile(r"^(To enable traceback see|Signal \d+ \(|<NO_OTHER_FAILURES>)")
"""What torchrun writes in place of a message."""

MESSAGE_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of one process; what nobody saw is None."""

    rank: int
    pid: int | None
    t_ns: int
    code: int | None = None
    signal: int | None = None
    oom: bool = False
    by: str = ""
    in_order: bool = False
    """Its collector had said that the script ended in order (it says so on every exit that Python carries out)."""
    unwatched: bool = False
    """Only torchrun saw it end."""
    step: int | None = None
    message: str = ""

    @property
    def known(self) -> bool:
        """Whether anybody told how it ended."""
        return self.code is not None or self.signal is not None or self.oom or bool(self.message)

    @property
    def well(self) -> bool:
        """Exit code 0, seen."""
        return self.code == 0 and self.signal is None


def read_exit(rank: int, event: Event) -> End:
    """The end that a process.exit event tells of. A negative code is a signal (subprocess, torchrun)."""
    data = event.data
    code, number = _status(_number(data["code"]), _number(data["signal"]))
    return End(
        rank=rank,
        pid=_number(data["pid"]),
        t_ns=whole(data["t_ns"]),
        code=code,
        signal=number,
        oom=data["oom"] is True,
        by=str(data["by"]),
    )


def kind_of(end: End) -> str:
    """The finding's kind."""
    if end.oom:
        return "process.oom"
    if end.signal is not None:
        return "process.failed" if end.signal in SELF else "process.killed"
    return "process.failed" if end.known else "process.unknown"


def first_cause(ends: Sequence[End], table: "Table", interval_ns: int) -> End:
    """The first of the ends by time of death; near-ties are told apart by what can be a consequence of what."""
    start_ns = min(end.t_ns for end in ends)
    near = [end for end in ends if end.t_ns <= start_ns + interval_ns]
    weight = min(_weight(end) for end in near)
    alike = [end for end in near if _weight(end) == weight]
    launcher = [end for end in alike if end.rank == LAUNCHER]
    if launcher:
        return launcher[0]  # its ranks were ended with it
    listed = [end for end in alike if end.rank in table.failures] or alike
    root = [end for end in listed if end.rank == table.root and table.root_is_earlier]
    return min(root or listed, key=lambda end: (end.t_ns, end.rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """torchrun's failure table: whom it found dead when it first looked, which it does every 0.1 s."""

    failures: Mapping[int, Mapping[str, Json]]
    root: int | None
    t_ns: int = 0
    """When it was read."""

    @property
    def root_is_earlier(self) -> bool:
        """Its times are whole seconds: a root that shares its second with others is only the lowest rank of them."""
        times = {rank: str(row.get("time") or "") for rank, row in self.failures.items()}
        mine = times.pop(self.root, "") if self.root is not None else ""
        return bool(mine) and all(mine < other for other in times.values())

    def complete(self, end: End) -> End:
        """An end with what the table knows of it."""
        row = self.failures.get(end.rank)
        if row is None:
            return end
        message = end.message or brief(row.get("message"))
        if end.known:
            return replace(end, message=message)
        code, number = _status(_number(row.get("exitcode")), None)
        return replace(end, code=code, signal=number, message=message, by=TORCHRUN)

    def unwatched_root(self, ends: Mapping[int, End]) -> End | None:
        """The root cause, where nobody else saw it end: it died before it said hello, and before all others."""
        if self.root is None or self.root in ends or self.root not in self.failures:
            return None
        t_ns = min((end.t_ns for end in ends.values()), default=self.t_ns)
        pid = _number(self.failures[self.root].get("pid"))
        return self.complete(End(rank=self.root, pid=pid, t_ns=t_ns, unwatched=True))

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Table":
        """From a snapshot (whose keys went through JSON)."""
        failures = {int(rank): row for rank, row in state["failures"].items()}
        return cls(failures=failures, root=state["root"], t_ns=int(state["t_ns"]))


NO_TABLE = Table(failures={}, root=None)


def read_table(event: Event) -> Table:
    """From a launcher.failure event; rows that make no sense are left out.

    A root without a row (only the launcher's own error file could be read) gives a table that blames nobody.
    """
    rows, root = event.data["failures"], event.data["root"]
    failures: dict[int, Mapping[str, Json]] = {}
    for row in rows if isinstance(rows, Sequence) and not isinstance(rows, str) else ():
        if isinstance(row, Mapping) and isinstance(row.get("rank"), int):
            failures[whole(row["rank"])] = row
    message = brief(event.data["file"])
    if isinstance(root, int) and root in failures and message and not brief(failures[root].get("message")):
        failures[root] = {**failures[root], "message": message}
    return Table(failures=failures, root=root if isinstance(root, int) else None, t_ns=event.t_ns)


def brief(message: Json) -> str:
    """The line of a traceback that says what happened: its last; nothing for torchrun's stock texts.

    >>> brief("Traceback:\\n  File x\\nValueError: no such batch\\n")
    'ValueError: no such batch'
    """
    text = message.strip() if isinstance(message, str) else ""
    return "" if not text or STOCK.match(text) else text.splitlines()[-1].strip()[:MESSAGE_CHARS]


def say_end(end: End) -> str:
    """What happened to it, in words."""
    who = "the launcher" if end.rank == LAUNCHER else f"rank {end.rank}"
    who += f" (pid {end.pid})" if end.pid is not None else ""
    at = f" at step {end.step}" if end.step is not None and end.step >= 0 else ""
    return f"{who} {_how(end)}{at}" + (f": {end.message}" if end.message else "")


def _how(end: End) -> str:
    if end.oom:
        return "was ended by the kernel's OOM killer"
    if end.signal is not None:
        return f"{'crashed with' if end.signal in SELF else 'was killed by'} {signal_name(end.signal)}"
    if end.code is not None:
        return f"ended itself with exit code {end.code}"
    return "ended itself with an error" if end.message else "is gone and nobody saw its exit status"


def _weight(end: End) -> int:
    """How far an end can be a consequence of a peer's end within the monitor interval: 0 not, 1 perhaps, 2 well."""
    struck = end.signal is not None and end.signal not in ASKED and end.signal != Signals.SIGABRT
    if end.oom or struck:
        return 0
    # torchrun ended the others because of one that only it saw end
    return 1 if end.unwatched or not (end.known or end.in_order) else 2


def _status(code: int | None, number: int | None) -> tuple[int | None, int | None]:
    return (None, -code) if code is not None and code < 0 else (code, number)


def _number(value: Json) -> int | None:
    return None if value is None or isinstance(value, bool) else whole(value)
