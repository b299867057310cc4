"""The jobs of one node, found by their rings: which folders there are, whose they are, and when a job is over.

Rings lie below `/run/trainwarden/<uid>`, `/dev/shm/trainwarden-<uid>`, or what TRAINWARDEN_DIR named (core/identity.py;
such folders are named to the agent by its settings). All of it is written by tenants, so whose a job is comes from the
owner of the folder, never from what a file says: a folder whose name and owner differ, that others may write to, that
is no tmpfs, or below which something is mounted (a file system of the tenant's own could hang us) is refused by name.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

from trainwarden.collectors.blind import Blind
from trainwarden.collectors.folder import Folder
from trainwarden.collectors.nccl.debug_server import Fetched
from trainwarden.collectors.nccl.source import Dumps, DumpsConfig
from trainwarden.collectors.processes import Processes
from trainwarden.collectors.rings import Rings
from trainwarden.core.emit import Emitter
from trainwarden.core.identity import JOB_NAME, filesystem_of
from trainwarden.core.model import Epoch, Event, Frame, JobId, Subject
from trainwarden.core.process import ProcessId, alive

BASES: Final = (
    (Path("/run/trainwarden"), re.compile(r"(\d{1,10})")),
    (Path("/dev/shm"), re.compile(r"trainwarden-(\d{1,10})")),
)
"""Where the users' folders lie, and how they are called."""

JOBS_MAX: Final = 64
"""Jobs followed on one node, and users looked at; a node runs one job a GPU at most."""

_FOLLOWED: Final = re.compile(rf"(?!state-[0-9a-f]{{12}}\Z){JOB_NAME.pattern}")
"""Folders of jobs, but for those of `trainwarden run` (app/attempts.py), which watches its jobs itself."""

RINGS_S: Final = 0.25
"""Between two looks at a job's rings, and at whether a process of it has ended. A death must be said within a second:
this, a turn of the agent and one of the server (0.2 s each) are less, and still are where the agent's budget
doubles this (app/budget.py)."""

LIVE_NS: Final = 1_000_000_000
"""Between two live frames of a job while nobody leaves and all is finite: at each look they would be four in five of
all frames that a server of 12,500 nodes gets. The shortest budget of a hang is 10 s."""

PROCESSES_NS: Final = 450_000_000
"""At least this long between two looks at what else befalls processes (OOM kills) while none has ended."""

OVER_NS: Final = 60_000_000_000
"""A job is let go when nothing of it has lived for this long: a launcher restarts its ranks within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRoot:
    """One job's place on this node."""

    job: JobId
    root: Path
    """What the ranks were told (TRAINWARDEN_DIR)."""
    uid: int
    stamp: tuple[int, int]
    """When its rings and hellos were last added to: something new has begun when this changes."""


class Jobs:
    """Source that looks for jobs; emits only why a folder is refused. What was found is in `found`."""

    period_s: float = 2.0

    def __init__(
        self,
        node: str,
        named: Iterable[Path] = (),
        *,
        start_ns: int,
        bases: Iterable[tuple[Path, re.Pattern[str]]] = BASES,
        mounts: Path = Path("/proc/self/mountinfo"),
    ) -> None:
        """named: folders that TRAINWARDEN_DIR names on this node."""
        self.name = f"jobs@{node}"
        self._named, self._bases, self._mounts = tuple(named), tuple(bases), mounts
        self._blind = Blind(Emitter(self.name, job=None, start_ns=start_ns))
        self._mountinfo = ""
        self._mounted: dict[Path, str | None] = {}
        """What that table says of roots: a node has hundreds of mounts, and they seldom change."""
        self._below: dict[Path, Folder] = {}
        self.found: Mapping[JobId, JobRoot] = {}
        """Replaced as a whole: any thread may read it."""

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """Look again; why folders are refused, each reason once."""
        try:
            mountinfo = self._mounts.read_text(errors="surrogateescape")
        except OSError as error:
            yield from self._blind(f"{self._mounts}: {error.strerror}", now_ns)
            return
        if mountinfo != self._mountinfo:
            self._mountinfo, self._mounted = mountinfo, {}
        found: dict[JobId, JobRoot] = {}
        roots = dict(islice(self._roots(), JOBS_MAX))
        self._below = {root: self._below.get(root) or Folder(root, _FOLLOWED) for root in roots}
        for root, uid in roots.items():
            try:
                why = self._not_mounted(root) or _why_not(root, uid) or ""
                jobs = [] if why else list(_jobs_in(self._below[root], now_ns))
            except OSError as error:
                why, jobs = error.strerror or str(error), []
            for one in jobs[: JOBS_MAX - len(found)]:
                first = found.setdefault(one.job, one)
                if first is not one:
                    why = f"job {one.job} is user {first.uid}'s already, in {first.root}"
            if why:
                yield from self._blind(f"{root}: {why}", now_ns)
        self.found = found

    def _not_mounted(self, root: Path) -> str | None:
        """Why the mounts around a folder forbid to look into it; None: they do not."""
        if root not in self._mounted:
            kind, below = filesystem_of(root, self._mountinfo), f" {root}/"
            within = any(below in line for line in self._mountinfo.splitlines())
            why = "something is mounted below it" if within else None
            self._mounted[root] = why if kind == "tmpfs" else f"on {kind}, not on tmpfs"
        return self._mounted[root]

    def _roots(self) -> Iterator[tuple[Path, int | None]]:
        """(folder, user that its name says)."""
        yield from ((path, None) for path in self._named if os.path.lexists(path))
        for base, form in self._bases:
            try:
                names = sorted(os.listdir(base))
            except OSError:  # nobody has made it
                continue
            for name in names:
                if said := form.fullmatch(name):
                    yield base / name, int(said[1])


class JobSource:
    """Source of one job on this node: its rings, and the processes behind its hellos."""

    period_s = RINGS_S

    def __init__(
        self, where: JobRoot, node: str, *, start_ns: int, first: Callable[[int], Iterable[Event]] = lambda now_ns: ()
    ) -> None:
        """first: what the job has to be told before a hello of its ranks (the node's fault domains)."""
        self.where, self._node, self._first = where, node, first
        self.name = f"rings/{where.job}@{node}"
        self._rings = Rings(where.root, node, where.job, start_ns=start_ns, name=self.name, live_ns=LIVE_NS)
        self._processes: Processes | None = None
        self._attempt = -1
        self._lived_ns, self._next_ns = start_ns, 0
        self.fetched = Fetched(where.uid)
        """Dumps that its ranks' debug servers gave."""
        self.over = False
        """Nothing of it has lived for a while."""
        self.ranks: Mapping[int, ProcessId] = {}
        self.epoch: Epoch | None = None
        """Of the newest hello."""
        self.began_ns = 0
        """When the first rank of this attempt said hello. These three are replaced: any thread may read them."""

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """What its ranks tell, and which of them have ended."""
        yield from self._first(now_ns)
        for item in self._rings.poll(now_ns):
            if isinstance(item, Event) and item.kind == "hello":
                self._meet(item, now_ns)
            if isinstance(item, Frame) and item.schema != "live":
                self._lived_ns = now_ns
            yield item
        ended = self._processes is not None and self._processes.ended
        if now_ns < self._next_ns and not ended:
            return
        self._next_ns = now_ns + PROCESSES_NS
        if self._processes is not None:
            yield from (of_job(item, self.where.job) for item in self._processes.poll(now_ns))
            self.ranks = self._processes.ranks
        if now_ns - self._lived_ns > OVER_NS:
            ranks = self._processes.ranks.values() if self._processes is not None else ()
            self.over = not any(map(alive, ranks))

    def close(self) -> None:
        """Let its files go."""
        self._rings.close()
        self.fetched.close()
        if self._processes is not None:
            self._processes.close()

    def _meet(self, hello: Event, now_ns: int) -> None:
        """Watch the process behind a hello, if it is the job's user's: a tenant may write any pid."""
        attempt, pid = hello.data["attempt"], hello.data["pid"]
        assert isinstance(attempt, int)
        if attempt > self._attempt:
            if self._processes is not None:
                self._processes.close()
            self._attempt, self.began_ns = attempt, hello.t_ns
            self._processes = Processes(  # no keeper here: exit statuses are what pidfds tell, no file of the tenant's
                node=self._node, job=self.where.job, attempt=attempt, folder=None, start_ns=now_ns
            )
        self.epoch, self.began_ns = hello.epoch, min(self.began_ns, hello.t_ns)
        try:
            owner = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return
        if self._processes is not None and owner == self.where.uid:
            self._processes.watch(hello)


class JobDumps:
    """Source of the flight recorder dumps of one job (collectors/nccl): apart from its rings, since dumps lie anywhere,
    also on file systems that hang."""

    period_s = Dumps.period_s

    def __init__(self, config: DumpsConfig, job: JobSource, node: str) -> None:
        self._config, self._job, self._node = config, job, node
        self.name = f"dumps/{job.where.job}@{node}"
        self._dumps: Dumps | None = None
        self._began_ns = 0

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """Dumps that were finished since; nothing before a rank has said hello."""
        job = self._job
        if job.epoch is None:
            return
        if self._dumps is None or job.began_ns > self._began_ns:
            self._began_ns = job.began_ns
            self._dumps = Dumps(
                self._config,
                node=self._node,
                job=job.where.job,
                owner_uid=job.where.uid,
                ranks=lambda: job.ranks,
                epoch=lambda: job.epoch or Epoch(0),
                since_ns=job.began_ns,
                start_ns=now_ns,
                fetched=job.fetched,
            )
        yield from (of_job(item, job.where.job) for item in self._dumps.poll(now_ns))


def of_job(item: Frame | Event, job: JobId) -> Frame | Event:
    """The same from a source of this job's own, `rings/<job>@<node>`: numbers count within a source."""
    name = item.source.replace("@", f"/{job}@", 1)
    if isinstance(item, Event) and item.subject.kind == "source" and item.subject.id.startswith(item.source):
        subject = Subject(kind="source", id=name + item.subject.id.removeprefix(item.source))  # it, or a part of it
        return replace(item, source=name, subject=subject)
    return replace(item, source=name)


def _why_not(root: Path, uid: int | None) -> str | None:
    """Why a folder itself may not be looked into; None: it may. Raises OSError."""
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "not a folder"
    if uid is not None and found.st_uid != uid:
        return f"belongs to user {found.st_uid}, not to the one that its name says"
    if found.st_mode & 0o022:
        return "others may write to it"
    if not os.access(root, os.R_OK | os.X_OK):
        own = os.geteuid()
        return f"user {found.st_uid}'s, and user {own} may not read it: give the agent CAP_DAC_READ_SEARCH or that user"
    return None


def _jobs_in(folder: Folder, now_ns: int) -> Iterator[JobRoot]:
    """The folders of jobs, of the folder's own user only."""
    root = folder.path
    for name, _ in sorted(folder.files(now_ns)):
        stamps = [_stamp(f"{root}/{name}{part}", folder.owner_uid) for part in ("/rings", "", "/hello")]
        if stamps[0] >= 0 and stamps[1] >= 0:
            yield JobRoot(job=JobId(name), root=root, uid=folder.owner_uid, stamp=(stamps[0], stamps[2]))


def _stamp(folder: str, uid: int) -> int:
    """When a folder of this user was last changed; -1: there is none."""
    try:
        found = os.lstat(folder)
    except OSError:
        return -1
    return found.st_mtime_ns if stat.S_ISDIR(found.st_mode) and found.st_uid == uid else -1
