"""The processes of one job on this host: who ended, when, how, and what torchrun said about it.

Ranks are known from their hellos and watched by pidfd (exits.py). The launcher is the keeper's child: its exit status,
and that of ranks that outlived it, stand in the keeper's exits.jsonl. When the launcher is gone its failure table is
read once. A status nobody saw stays null.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainwarden.collectors.exits import Exit, ExitWatch
from trainwarden.collectors.oom import KernelKills, count_kills, memory_cgroup
from trainwarden.collectors.torchrun import read_error_file, read_failures
from trainwarden.core.emit import Emitter
from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, Subject
from trainwarden.core.process import ProcessId, say_status
from trainwarden.core.records import epoch_of

_HELLO_NUMBERS = ("rank", "pid", "start_time", "attempt", "restart", "lap")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """One end, whoever told it; what nobody saw is None."""

    rank: int | None
    pid: int | None
    by: str
    t_ns: int
    epoch: Epoch
    code: int | None = None
    number: int | None = None
    oom: bool = False


class Processes:
    """Source of process.exit, oom.kill and launcher.failure for one attempt of a job."""

    period_s = 0.1
    UNSEEN_NS = 1_000_000_000
    """How long the keeper has to write down the launcher's end before the pidfd's word is taken instead."""

    def __init__(self, *, node: str, job: JobId, attempt: int, folder: Path | None, start_ns: int) -> None:
        """folder: the attempt's (keeper's) folder, None without a keeper; attempt: what it is the folder of."""
        self.name = f"processes@{node}"
        self._node, self._job, self._attempt, self._folder = node, job, attempt, folder
        self._emit = Emitter(self.name, job=job, start_ns=start_ns)
        self._exits = ExitWatch()
        self._kernel_log = KernelKills()
        self._said_blind = False
        self._rank_of: dict[ProcessId, tuple[int, Epoch]] = {}
        self._cgroups: dict[Path, int] = {}
        self._read_bytes = 0
        self._launcher: ProcessId | None = None
        self._launcher_exit: Exit | None = None
        self._launcher_ended = False

    @property
    def launcher_ended(self) -> bool:
        """Whether the launcher's end was told: by the keeper, or by its pidfd where the keeper is gone too."""
        return self._launcher_ended

    @property
    def ranks(self) -> dict[int, ProcessId]:
        """The newest process of each rank that said hello in this attempt."""
        return {rank: process for process, (rank, _) in self._rank_of.items()}

    @property
    def ended(self) -> bool:
        """Whether a process has ended that no poll has told yet (any thread)."""
        return self._exits.waiting

    def watch(self, hello: Event) -> None:
        """Watch the process behind a hello of this attempt (others are ignored)."""
        data = hello.data
        if data["attempt"] != self._attempt:
            return
        rank, pid, start, _, restart, lap = (int(str(data[key])) for key in _HELLO_NUMBERS)
        process = ProcessId(pid=pid, start_time=start)
        new = process not in self._rank_of
        self._rank_of[process] = (rank, Epoch(epoch_of(self._attempt, restart, lap)))
        if not new:
            return
        cgroup = memory_cgroup(pid)
        if cgroup is not None and cgroup not in self._cgroups:
            self._cgroups[cgroup] = count_kills(cgroup) or 0
        self._exits.add(process)

    def watch_launcher(self, launcher: ProcessId) -> None:
        """Watch the launcher too, in case its keeper dies."""
        self._launcher = launcher
        self._exits.add(launcher)

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """What happened to the processes since the last poll."""
        events = [*self._blindness(now_ns)]
        kernel_kills = dict(self._kernel_log.kills(now_ns))
        events += (self._oom_kill(pid, line, now_ns) for pid, line in kernel_kills.items())
        events += self._cgroup_kills(now_ns)
        events += self._keeper_exits(now_ns)
        for ended in self._exits.drain():
            if ended.process == self._launcher:
                self._launcher_exit = ended
            else:
                events.append(self._rank_exit(ended, now_ns, kernel_kills))
        events += self._unkept_launcher(now_ns)
        return events

    def close(self) -> None:
        """Stop watching; nothing happens to the processes."""
        self._exits.close()
        self._kernel_log.close()

    def _blindness(self, now_ns: int) -> Iterator[Event]:
        if self._kernel_log.why_blind and not self._said_blind:
            self._said_blind = True
            subject = Subject(kind="source", id=f"kernel-log@{self._node}")
            yield self._emit("source.blind", subject, now_ns=now_ns, data={"why": self._kernel_log.why_blind})

    def _oom_kill(self, pid: int | None, line: str, now_ns: int) -> Event:
        node = Subject(kind="node", id=self._node)
        return self._emit("oom.kill", node, now_ns=now_ns, data={"pid": pid, "line": line})

    def _cgroup_kills(self, now_ns: int) -> Iterator[Event]:
        for file, known in self._cgroups.items():
            count = count_kills(file)
            if count is None or count <= known:
                continue
            self._cgroups[file] = count
            yield self._oom_kill(None, f"{file}: oom_kill {known} -> {count}", now_ns)

    def _rank_exit(self, exit_: Exit, now_ns: int, kernel_kills: dict[int, str]) -> Event:
        rank, epoch = self._rank_of[exit_.process]
        pid = exit_.process.pid
        code, number = say_status(exit_.status) if exit_.status is not None else (None, None)
        ended = _Ended(rank=rank, pid=pid, by=exit_.by, t_ns=exit_.t_ns, epoch=epoch, code=code, number=number)
        return self._say(replace(ended, oom=pid in kernel_kills), now_ns)

    def _keeper_exits(self, now_ns: int) -> Iterator[Event]:
        for record in self._new_records():
            ended = self._kept(record)
            if record["launcher"]:
                self._launcher_ended = True
                yield from self._failure_table(now_ns)
                yield self._say(ended, now_ns)
                continue
            for process, (rank, epoch) in self._rank_of.items():
                if process.pid == ended.pid:
                    yield self._say(replace(ended, rank=rank, epoch=epoch), now_ns)

    def _unkept_launcher(self, now_ns: int) -> Iterator[Event]:
        gone = self._launcher_exit
        if gone is None or self._launcher_ended or now_ns < gone.t_ns + self.UNSEEN_NS:
            return
        self._launcher_ended = True
        yield from self._failure_table(now_ns)
        code, number = say_status(gone.status) if gone.status is not None else (None, None)
        epoch = Epoch(epoch_of(self._attempt, 0, 0))
        pid = gone.process.pid
        ended = _Ended(rank=None, pid=pid, by=gone.by, t_ns=gone.t_ns, epoch=epoch, code=code, number=number)
        yield self._say(ended, now_ns)

    def _kept(self, record: Mapping[str, Any]) -> _Ended:
        epoch = Epoch(epoch_of(self._attempt, 0, 0))
        code, number = record["code"], record["signal"]
        return _Ended(
            rank=None, pid=record["pid"], by="keeper", t_ns=record["t_ns"], epoch=epoch, code=code, number=number
        )

    def _new_records(self) -> list[Mapping[str, Any]]:
        if self._folder is None:
            return []
        try:
            with (self._folder / "exits.jsonl").open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _failure_table(self, now_ns: int) -> Iterator[Event]:
        if self._folder is None:
            return
        failures, root = read_failures(self._folder / "err.log")
        message = read_error_file(self._folder / "error.json")
        if failures or message is not None:
            data: dict[str, Json] = {"failures": list(failures), "root": root, "file": message}
            yield self._emit("launcher.failure", Subject(kind="job", id=self._job), now_ns=now_ns, data=data)

    def _say(self, ended: _Ended, now_ns: int) -> Event:
        job = Subject(kind="job", id=self._job)
        subject = job if ended.rank is None else Subject(kind="rank", id=str(ended.rank))
        data: dict[str, Json] = {"rank": ended.rank, "pid": ended.pid, "code": ended.code, "signal": ended.number}
        t_ns = min(ended.t_ns, now_ns)  # what was noticed during this poll is not of the future
        data |= {"oom": ended.oom or None, "by": ended.by, "t_ns": t_ns}
        return self._emit("process.exit", subject, now_ns=now_ns, data=data, t_ns=t_ns, epoch=ended.epoch)
