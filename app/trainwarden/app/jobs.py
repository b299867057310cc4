"""Many jobs in one process: each its own line, engine, store and notifiers, below STATE, as `trainwarden run` has one.

A job begins with the first item that names it, and ends when nothing of it was seen for long. What says nothing of a
job (a node's own readings and kernel messages) goes to every job of that node. An item is known by its source and
number within one sender's life: what comes again is passed over, and what is missing is said as telemetry.lost.

Nothing is repaired from here: plans are made, and answered as refused. A job that fails by our own fault is set aside
and said; the others go on.
"""

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from trainwarden.app.asking import Asking, LooksConfig, Send
from trainwarden.app.domains import JobSite, ServerSite
from trainwarden.app.folders import JobFolder, choose_job
from trainwarden.app.outlets import Outlets
from trainwarden.app.server import LINE
from trainwarden.app.store import Store
from trainwarden.app.story import Story
from trainwarden.app.tries import Behind
from trainwarden.app.wiring import Settings, build_server, carried_notifiers, choose_policy
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError, FencedError, StoreError, TrainwardenError
from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, Outcome, Plan, State, Subject
from trainwarden.core.process import identify
from trainwarden.core.records import attempt_of
from trainwarden.core.site import Table
from trainwarden.core.topology import SITE

RENEW_NS: Final = 2_000_000_000
"""Of the lease of 5 s; each renewal waits for the disk."""

RESTARTED: Final = 1_000_000
"""A source numbers from its start time in microseconds: a gap as wide as one second is a new life, not a loss."""

RETRY_NS: Final = 10_000_000_000
"""Before a job that could not be opened (owned by another process, a full disk) is tried again."""

SERVED: Final = "served"
"""File in a job's folder: it is open, and is opened again after a restart."""

_POSITIONS: Final = "ingest"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig:
    """How many jobs, and for how long."""

    jobs: int = 200
    """At once; each takes some 10 MB and up to 2 % of a core of ticks."""

    idle: timedelta = timedelta(minutes=30)
    """Without an item of a job, it is over: longer than the longest start of a large job."""

    looks: LooksConfig = field(default_factory=LooksConfig)

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ConfigError(f"server.jobs.jobs: need at least 1, got {self.jobs}")
        if self.idle < timedelta(seconds=1):
            raise ConfigError(f"server.jobs.idle: need at least 1s, got {self.idle.total_seconds():g}s")


class Job:
    """One job while it is open. Raises whatever its store raises."""

    def __init__(
        self,
        settings: Settings,
        state: Path,
        job: JobId,
        say: Callable[[str], None],
        pool: ThreadPoolExecutor,
        counts: Counter[str],
        now_ns: int,
        looks: Callable[[JobId, Emitter], Asking],
    ) -> None:
        """pool: where notifiers may wait. counts: copies and lost items. looks: makes what asks the agents. Raises
        ConfigError, OwnedError, StoreError."""
        self.job, self.heard_ns = job, now_ns
        self.folder = JobFolder.make(state, choose_job(job, [], state))
        self._counts = counts
        self._emit = Emitter("server@ingest", job=job, start_ns=now_ns)
        self._asking = looks(job, self._emit)
        self.nodes: set[str] = set()
        """That anything of this job came from."""
        self._positions: dict[str, tuple[str, int]] = {}
        """By stream: the sender's life, and the newest number."""
        self._attempt, self._renew_ns = -1, 0
        self._unsaved, self._dropped = True, False
        self._ends: deque[Outcome] = deque()
        self.outlets = Outlets(settings, job, say)
        self._store = Store(self.folder.path / "journal.sqlite")
        try:
            self._begin(settings, pool, now_ns)
            self._site = JobSite(self.server.parts.assembler, SITE, job, say, start_ns=now_ns)
        except BaseException:
            self._store.close()
            self.outlets.close(None)
            raise

    def _begin(self, settings: Settings, pool: ThreadPoolExecutor, now_ns: int) -> None:
        own = identify(os.getpid())
        assert own is not None
        self.term = self._store.claim(self.job, own.pid, own.start_time, now_ns)
        carried = carried_notifiers(settings, self.folder.path)
        behind = {channel: Behind(one, pool) for channel, one in carried.items() if channel != "jsonl"}
        self.server = build_server(
            settings,
            job=self.job,
            folder=self.folder.path,
            store=self._store,
            fence=(self.job, self.term),
            policy=choose_policy(None),
            look=self._asking.ask,
            also={**self.outlets.notifiers, **behind},
        )
        self.server.start = self._refuse
        self.server.line.on_step = self.outlets.stepped
        self.server.on_news = partial(self.outlets.trace, evidence=self.folder.path / "evidence")
        saved = self._store.load_snapshot(_POSITIONS)
        if saved is not None:
            self._restore(saved[1])
        self.server.resume()
        self.outlets.begin(self.server.parts.incidents.told)
        with contextlib.suppress(OSError):
            (self.folder.path / SERVED).touch(mode=0o600)

    def take(self, uplink: str, items: Sequence[Frame | Event], now_ns: int, *, of_node: bool) -> None:
        """Items of this job, or of a node of it, in the order in which one sender sent them. of_node: the sender is the
        agent of its node."""
        self._unsaved = True
        if any(item.job is not None for item in items):  # what a node says of itself goes on when its jobs are over
            self.heard_ns = now_ns
        self.outlets.hear(items)
        if of_node:
            self._asking.hear(items, now_ns)
        self.server.ingest(self._new(uplink, items, now_ns), now_ns)

    def tell_site(self, nodes: Iterable[str], table: Table | None, now_ns: int) -> None:
        """What the site file says of nodes of this job."""
        self._unsaved = True
        self.server.ingest(self._site.tell(nodes, table, now_ns), now_ns)

    def renew(self, now_ns: int) -> None:
        """Stay the owner. Raises FencedError."""
        if now_ns >= self._renew_ns:
            self._renew_ns = now_ns + RENEW_NS
            with contextlib.suppress(StoreError):  # a full disk: the engine says so; the lease is tried again
                self._store.renew(self.job, self.term, now_ns)

    def tick(self, now_ns: int) -> None:
        """Let time pass. Raises FencedError."""
        self.renew(now_ns)
        ends = [self._ends.popleft() for _ in range(len(self._ends))]
        self.server.take(ends)
        self.server.tick(now_ns)
        self.server.ingest(self._asking.turn(now_ns), now_ns)
        self.outlets.turned()

    def save(self) -> None:
        """Write down everything that was taken. Raises StoreError.

        The line before the positions: what lies between is told twice after a crash, and never lost.
        """
        if not self._unsaved:
            return
        self.server.parts.recorder.close()
        seq = self._store.last_seq()
        self._store.save_snapshot(seq, LINE, self.server.line.snapshot())
        self._store.save_snapshot(seq, _POSITIONS, self._snapshot())
        if self.server.metrics is not None:
            self.server.metrics.save()
        self._unsaved = False

    def close(self, *, ended: bool) -> None:
        """Let it go. ended: the job is over; else the next server goes on with it, so nothing is closed early."""
        try:
            if ended:
                self.server.finish()
                (self.folder.path / SERVED).unlink(missing_ok=True)
            self.save()
            self._store.release(self.job, self.term)
        finally:
            self.drop(self.server.story if ended else None)

    def drop(self, story: Story | None = None) -> None:
        """Let go of files and threads only: the job is not ours any more, or cannot go on. Again is nothing."""
        if not self._dropped:
            self._dropped = True
            self._store.close()
            self.outlets.close(story)

    def uplinks(self) -> set[str]:
        """Lives of the senders whose streams are the newest of their sources."""
        return {life for life, _ in self._positions.values()}

    def _new(self, uplink: str, items: Iterable[Frame | Event], now_ns: int) -> Iterator[Frame | Event]:
        """Those that did not come before, and what has to be said before them."""
        for item in items:
            kind = "frame" if isinstance(item, Frame) else "event"
            stream = f"{kind} {item.source}" if item.job is None else f"{kind} {item.source} of the job"
            life, newest = self._positions.get(stream, ("", item.seq - 1))
            if life == uplink and item.seq <= newest:
                self._counts["copies"] += 1
                continue
            self._positions[stream] = uplink, item.seq
            missing = item.seq - newest - 1
            if life == uplink and 0 < missing < RESTARTED:
                self._counts["lost"] += missing
                lost: dict[str, Json] = {"from_seq": newest + 1, "to_seq": item.seq - 1, "what": kind}
                yield self._emit(
                    "telemetry.lost", Subject(kind="source", id=item.source), now_ns=now_ns, data=lost, epoch=item.epoch
                )
            if isinstance(item, Event):
                yield from self._attempt_of(item, now_ns)
            yield item
            if isinstance(item, Event) and item.kind == "node.domains" and item.job is not None:
                yield from self._site.differing(item.subject.id, now_ns)

    def _attempt_of(self, event: Event, now_ns: int) -> Iterator[Event]:
        """The first hello of an attempt that nobody announced announces it."""
        if event.epoch is None or event.kind not in ("hello", "attempt.started"):
            return
        number, known = attempt_of(event.epoch), self._attempt
        self._attempt = max(known, number)
        if event.kind == "hello" and number > known:
            data: dict[str, Json] = {"attempt": number, "term": self.term, "by": "agent"}
            subject = Subject(kind="job", id=self.job)
            yield self._emit("attempt.started", subject, now_ns=now_ns, data=data, epoch=Epoch(number << 32))

    def _refuse(self, plan: Plan) -> None:
        why = "observe only: this server repairs nothing"
        self._ends.append(Outcome(plan=plan.id, index=-1, result="refused", reason=why, retryable=False, found={}))

    def _snapshot(self) -> State:
        streams = {stream: [life, seq] for stream, (life, seq) in self._positions.items()}
        return {
            "streams": streams,
            "nodes": sorted(self.nodes),
            "attempt": self._attempt,
            "looks": self._asking.snapshot(),
        }

    def _restore(self, state: State) -> None:
        self._positions = {stream: (life, seq) for stream, (life, seq) in state["streams"].items()}
        self.nodes, self._attempt = set(state["nodes"]), state["attempt"]
        self._asking.restore(state.get("looks", {}))


class Jobs:
    """All jobs below STATE. Not thread-safe: one thread calls it."""

    def __init__(self, settings: Settings, config: JobsConfig, state: Path, say: Callable[[str], None]) -> None:
        """Raises ConfigError."""
        self._settings, self._config, self._state, self._say = settings, config, state, say
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="trainwarden-notify")
        self._site = ServerSite(settings.site.file, say, self._pool)
        self.open: dict[JobId, Job] = {}
        self.counts: Counter[str] = Counter()
        """Items by their fate, as the metric trainwarden_server_items_total says."""
        self.on_open: Callable[[Job], None] | None = None
        self.send: Send = lambda asks: ["nobody listens to agents"] * len(asks)
        """How agents are asked."""
        self.looks: Counter[str] = Counter()
        """By their fate, as the metric trainwarden_server_looks_total says."""
        self._by_node: dict[str, set[JobId]] = {}
        self._refused: dict[JobId, int] = {}
        """Jobs that cannot be opened, and until when nobody tries again."""

    @property
    def uplinks(self) -> frozenset[str]:
        """Lives of all senders that the open jobs had something from lately."""
        return frozenset(life for job in self.open.values() for life in job.uplinks())

    def resume(self, now_ns: int) -> None:
        """Open again what was open when the last server of this STATE ended."""
        for served in sorted(self._state.glob(f"*/{SERVED}")):
            job = self._opened(JobId(served.parent.name), now_ns)
            for node in () if job is None else job.nodes:
                self._by_node.setdefault(node, set()).add(job.job)  # type: ignore[union-attr]
            if job is not None:
                self._tell_site(job, job.nodes, now_ns)

    def take(self, uplink: str, items: Sequence[Frame | Event], now_ns: int, *, of_node: bool) -> None:
        """Hand what one sender sent to the jobs that it is about. of_node: the sender is the agent of its node; who
        else says that a job runs there is not believed."""
        parts: dict[JobId, list[Frame | Event]] = {}
        for item in items:
            node = item.source.rpartition("@")[2]
            if item.job is None:
                mine = self._by_node.get(node, ())
                self.counts["taken" if mine else "no_job"] += 1
                for job in mine:
                    parts.setdefault(job, []).append(item)
                continue
            parts.setdefault(item.job, []).append(item)
            if of_node and item.job not in self._by_node.get(node, ()):
                self._place(item.job, node, now_ns)
        for job, part in parts.items():
            if (opened := self._opened(job, now_ns)) is None:
                self.counts["not_open"] += len(part)
            elif self._safely(opened, partial(opened.take, uplink, part, now_ns, of_node=of_node)):
                self.counts["taken"] += sum(item.job is not None for item in part)

    def renew(self, now_ns: int) -> None:
        """Stay the owner of all of them, while nobody listens to what they say: silence is no sign then."""
        for job in [*self.open.values()]:
            self._safely(job, partial(job.renew, now_ns))

    def tick(self, now_ns: int) -> None:
        """Let time pass for all of them, and end those that are over."""
        changed = self._site.changed()
        for job in [*self.open.values()] if changed else ():
            self._tell_site(job, job.nodes & changed, now_ns)
        for job in [*self.open.values()]:
            if now_ns - job.heard_ns > self._config.idle // timedelta(microseconds=1) * 1000:
                self._say(f"job {job.job}: nothing was heard of it for {self._config.idle}: over")
                self._forget(job)
                self._safely(job, partial(job.close, ended=True))
            else:
                self._safely(job, partial(job.tick, now_ns))

    def save(self) -> bool:
        """Write everything down; False: not all of it could be."""
        return all([self._safely(job, job.save) for job in [*self.open.values()]])

    def close(self) -> None:
        """Leave all jobs to the next server."""
        for job in [*self.open.values()]:
            self._safely(job, partial(job.close, ended=False))
        self.open.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _place(self, name: JobId, node: str, now_ns: int) -> None:
        """This node works for this job, if there is such a job."""
        job = self._opened(name, now_ns)
        if job is not None:
            self._by_node.setdefault(node, set()).add(name)
            job.nodes.add(node)
            self._tell_site(job, {node}, now_ns)

    def _tell_site(self, job: Job, nodes: Iterable[str], now_ns: int) -> None:
        self._safely(job, partial(job.tell_site, nodes, self._site.table, now_ns))

    def _opened(self, name: JobId, now_ns: int) -> Job | None:
        job = self.open.get(name)
        if job is not None or now_ns < self._refused.get(name, 0):
            return job
        try:
            if len(self.open) >= self._config.jobs:
                raise ConfigError(f"server.jobs.jobs: {self._config.jobs} jobs are open, at most so many")
            job = self.open[name] = Job(
                self._settings, self._state, name, self._say, self._pool, self.counts, now_ns, self._asking
            )
        except TrainwardenError as error:
            if name not in self._refused:
                self._say(f"job {str(name)[:80]!r} is not watched: {error}")
            if len(self._refused) > 10 * self._config.jobs:
                self._refused.clear()
            self._refused[name] = now_ns + RETRY_NS
            return None
        self._refused.pop(name, None)
        if self.on_open is not None:
            self.on_open(job)
        return job

    def _asking(self, job: JobId, emit: Emitter) -> Asking:
        return Asking(self._config.looks, job, emit, lambda asks: self.send(asks), self.looks)

    def _safely(self, job: Job, what: Callable[[], None]) -> bool:
        """Whether it was done. What one job cannot do is no reason to end the others."""
        try:
            what()
        except StoreError as error:  # the engine says so, and mends it; what is not written is not acknowledged
            self._say(f"job {job.job}: {error}")
            return False
        except Exception as error:
            why = str(error) if isinstance(error, FencedError) else f"our own fault: {error!r}"
            self._say(f"job {job.job} is not watched any more: {why}")
            self._refused[job.job] = 1 << 62 if not isinstance(error, FencedError) else job.heard_ns + RETRY_NS
            self._forget(job)
            job.drop()
            return False
        return True

    def _forget(self, job: Job) -> None:
        self.open.pop(job.job, None)
        for jobs in self._by_node.values():
            jobs.discard(job.job)
