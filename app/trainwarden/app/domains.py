"""Fault domains on their way: each job is told those of its nodes, as events of the job, before its ranks say hello.

So they are recorded with the job and stand in its topology; a replay needs no site file, and a site file that changes
changes no replay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trainwarden.app.isolation import Item
from trainwarden.collectors.slurm import in_step
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.model import Event, JobId, Json, Subject
from trainwarden.core.site import SiteFile, Table
from trainwarden.core.steps import StepAssembler


class NodeDomains:
    """What the sources of one node said last; any thread may read it."""

    def __init__(self) -> None:
        self.told: Mapping[str, Event] = {}
        """By who says so; replaced as a whole."""

    def hear(self, items: Iterable[Item]) -> None:
        """Take note of what is said of no job."""
        for item in items:
            if isinstance(item, Event) and item.kind == "node.domains" and item.job is None:
                self.told = {**self.told, str(item.data["from"]): item}


class JobDomains:
    """The same as events of one job, each once."""

    def __init__(self, of: NodeDomains, job: JobId, node: str, *, start_ns: int) -> None:
        self._of, self._said = of, dict[str, Event]()
        self._emit = Emitter(f"domains/{job}@{node}", job=job, start_ns=start_ns)

    def __call__(self, now_ns: int) -> Iterator[Event]:
        """What was not said yet."""
        for by, event in self._of.told.items():
            if self._said.get(by) is not event:
                self._said[by] = event
                yield self._emit("node.domains", event.subject, now_ns=now_ns, data=event.data, t_ns=event.t_ns)


class ServerSite:
    """The site file of a server, if it has one; what can be used of it. It is looked at in a thread: one of 12,500
    nodes takes seconds to read, and the file's own disk may hang."""

    def __init__(self, file: Path | None, say: Callable[[str], None], pool: ThreadPoolExecutor) -> None:
        """Raises ConfigError."""
        self._file, self._say, self._pool = None if file is None else SiteFile(file), say, pool
        self._looking: Future[frozenset[str]] | None = None

    @property
    def table(self) -> Table | None:
        """What it says."""
        return None if self._file is None else self._file.table

    def changed(self) -> frozenset[str]:
        """Nodes of which it says something else, each time once; they get it with their next topology."""
        if self._file is None or (self._looking is not None and not self._looking.done()):
            return frozenset()
        looked, self._looking = self._looking, self._pool.submit(self._file.refresh)
        try:
            return frozenset() if looked is None else looked.result()
        except ConfigError as error:
            self._say(f"the site file as it was before holds: {error}")
            return frozenset()


class JobSite:
    """What a job is told of its nodes from here: the site file's word, and where sources differ."""

    def __init__(
        self, steps: StepAssembler, source: str, job: JobId, say: Callable[[str], None], *, start_ns: int
    ) -> None:
        """steps: the job's, which knows what the job was told so far. source: SITE, to speak of several nodes."""
        self._steps, self._job, self._say = steps, job, say
        self._emit = Emitter(source, job=job, start_ns=start_ns)
        self._said: set[tuple[str, ...]] = set()

    def tell(self, nodes: Iterable[str], table: Table | None, now_ns: int) -> Iterator[Event]:
        """What a site file says of nodes, if that is news; None: there is no such file."""
        for node in nodes if table is not None else ():
            told = (table or {}).get(node, {})
            if not told and () not in self._said:
                self._said.add(())
                self._say(f"job {self._job}: the site file says nothing of node {node} (nor, it may be, of others)")
            if told != self._steps.domains.by("site", node):
                yield self._event(node, "site", told, now_ns)
                yield from self.differing(node, now_ns)

    def tell_step(self, node: str, env: Mapping[str, str], now_ns: int) -> Iterator[Event]:
        """What the environment of a Slurm step says, where this is one."""
        try:
            if told := in_step(env):
                yield self._event(node, "slurm", told, now_ns)
                yield from self.differing(node, now_ns)
        except DataError as error:
            self._say(f"fault domains: {error}")

    def differing(self, node: str, now_ns: int) -> Iterator[Event]:
        """To be asked when the job was told of a node: which sources differ, once for each domain and set of them."""
        for name, values in self._steps.domains.differing(node).items():
            if (key := (name, *values)) not in self._said:
                self._said.add(key)
                words = ", ".join(f"{by} says {value!a}" for by, value in values.items())
                used = next(iter(values))
                self._say(f"job {self._job}: fault domain {name} of node {node}: {words}; what {used} says counts")
                data: dict[str, Json] = {"domain": name, "used": used, "values": values}
                yield self._emit("domains.differ", Subject(kind="node", id=node), now_ns=now_ns, data=data)

    def _event(self, node: str, by: str, told: Mapping[str, str], now_ns: int) -> Event:
        data: dict[str, Json] = {"from": by, "domains": dict(told)}
        return self._emit("node.domains", Subject(kind="node", id=node), now_ns=now_ns, data=data)
