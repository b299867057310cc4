"""What a node's agent does when its server asks: takes stacks of ranks, asks their flight recorders for dumps. No more.

A look reaches the source of its job (JobLooks), which works in a thread of its own like every source (isolation.py), so
that a process that cannot be looked at holds up nobody; py-spy is a child with a deadline. Only ranks of that job are
looked at: processes that its own user's hellos name. Each key is carried out once; asked again, it is answered again.
A dump is not waited for: the job's dumps are read when they are whole (node_jobs.JobDumps).
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainwarden.app.node_jobs import JobSource, of_job
from trainwarden.collectors.nccl.source import DumpRequests, DumpsConfig
from trainwarden.collectors.stacks import Stacks
from trainwarden.core.emit import Emitter
from trainwarden.core.model import Event, Frame, Json, Look, Subject
from trainwarden.core.ports import Source, Witness
from trainwarden.core.wire import Asked

A_MINUTE: Final = 12
"""Looks of each sort at one job: twice what a server asks (asking.LooksConfig), so that two servers may follow."""
RANKS_A_POLL: Final = 2
"""Stacks are taken two at a time: what is seen goes to the server before the next two begin."""
ASKED_MAX: Final = 256
"""On their way; a server asks again for what it gets no answer for."""
KEYS_MAX: Final = 256
MINUTE_NS: Final = 60_000_000_000


class Looking:
    """Looks between the uplink's thread and the sources of the jobs."""

    def __init__(self, node: str, *, start_ns: int) -> None:
        self._emit = Emitter(f"looks@{node}", job=None, start_ns=start_ns)
        self._asked: deque[Asked] = deque(maxlen=ASKED_MAX)
        self.counts: Counter[str] = Counter()
        """taken, and refused."""

    def take(self, asked: Asked) -> None:
        """What the server asks. Any thread; never waits."""
        self._asked.append(asked)

    def hand_on(self, sources: Iterable[Source], now_ns: int) -> list[Event]:
        """Give each look to the source of its job; the answer to those that cannot be."""
        if not self._asked:
            return []
        at = {source.job: source for source in sources if isinstance(source, JobLooks)}
        said = []
        for _ in range(len(self._asked)):
            asked = self._asked.popleft()
            source = at.get(asked.job)
            why = f"job {asked.job[:80]} is not on this node" if source is None else source.ask(asked.look, now_ns)
            self.counts["refused" if why else "taken"] += 1
            if why:
                said.append(answer(self._emit, asked.look, [], why, now_ns))
        return said


@dataclass(slots=True)
class _Task:
    look: Look
    left: list[Subject]


class JobLooks:
    """Source of what was asked for about one job's ranks on this node, the next two ranks each poll."""

    period_s = 0.25

    def __init__(self, config: DumpsConfig, job: JobSource, node: str, *, start_ns: int) -> None:
        self.job = job.where.job
        self.name = f"looks/{self.job}@{node}"
        self._job = job
        hellos = job.where.root / self.job / "hello"
        self._witnesses: Mapping[str, Witness] = {
            "stack": Stacks(node=node, job=self.job, ranks=lambda: job.ranks, start_ns=start_ns, hellos=hellos),
            "dump": DumpRequests(
                config,
                node=node,
                job=self.job,
                owner_uid=job.where.uid,
                ranks=lambda: job.ranks,
                start_ns=start_ns,
                fetched=job.fetched,
            ),
        }
        self._emit = Emitter(self.name, job=self.job, start_ns=start_ns)
        self._todo: deque[_Task] = deque()
        self._known: dict[str, bool] = {}
        """Keys, and whether they are carried out."""
        self._lately: dict[str, deque[int]] = {what: deque(maxlen=A_MINUTE) for what in self._witnesses}

    def ask(self, look: Look, now_ns: int) -> str:
        """Carry it out with the next polls, if it is new; why not. The agent's thread."""
        lately = self._lately[look.what]
        if look.key in self._known:
            if self._known[look.key]:
                self._todo.append(_Task(look, []))
            return ""
        if len(lately) == A_MINUTE and now_ns - lately[0] < MINUTE_NS:
            return f"{A_MINUTE} {look.what}s of this job were taken in the last minute"
        lately.append(now_ns)
        if len(self._known) == KEYS_MAX:
            del self._known[next(iter(self._known))]
        self._known[look.key] = False
        self._todo.append(_Task(look, [*look.subjects]))
        return ""

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """What is seen of the next ranks; after the last ones the answer. Takes as long as it takes."""
        if not self._todo:
            return
        task = self._todo.popleft()
        some, rest = task.left[:RANKS_A_POLL], task.left[RANKS_A_POLL:]
        if rest:
            self._todo.appendleft(_Task(task.look, rest))
        if some:
            seen = self._witnesses[task.look.what].look(replace(task.look, subjects=tuple(some)))
            yield from (of_job(event, self.job) for event in seen)
        if not rest:
            self._known[task.look.key] = True
            here = [rank for rank in self._job.ranks if Subject(kind="rank", id=str(rank)) in task.look.subjects]
            yield answer(self._emit, task.look, here, "", now_ns)


def answer(emit: Emitter, look: Look, ranks: Iterable[int], why: str, now_ns: int) -> Event:
    """That a look is done with: what was looked at, or why nothing was."""
    data: Mapping[str, Json] = {"key": look.key, "what": look.what, "ranks": sorted(ranks), "why": why}
    return emit("look.answer", Subject(kind="source", id=emit.source), now_ns=now_ns, data=data)
