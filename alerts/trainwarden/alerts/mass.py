"""A mass alarm is our own fault until proved otherwise.

Slow means slower than the peers: when many ranks are it at once, and they share no node, the likelier fault is in what
measures them (a clock, an agent, the load of the hosts). Kinds that spread from one cause by nature explain themselves
in the tier table (a NaN by the all-reduce, a stall by the collective), and a hard fact has an outside witness; neither
is counted. Source of 3 % and 8 ranks: the rule of the architecture's section 8.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from trainwarden.alerts.tiers import TierRow
from trainwarden.alerts.verdict import say
from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Event, JobId, Json, Subject

JOBS_MAX = 64
"""Jobs whose hellos are remembered; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MassConfig:
    """How many findings of one kind at once mean that we are wrong."""

    window: timedelta = timedelta(seconds=60)
    """Findings seen within this time count together."""

    ranks: int = 8
    """More than this many ranks, whatever the size of the job."""

    share: float = 0.03
    """More than this part of the job's ranks."""

    def __post_init__(self) -> None:
        if self.window < timedelta(0):
            raise ConfigError(f"alerts.incidents.mass.window: need 0 or more, got {self.window}")
        if self.ranks < 1:
            raise ConfigError(f"alerts.incidents.mass.ranks: need at least 1, got {self.ranks}")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"alerts.incidents.mass.share: need 0 to 1, got {self.share:g}")


@dataclass(slots=True, kw_only=True)
class _Job:
    world_size: int = 0
    nodes: dict[str, str] = field(default_factory=dict)
    """rank:3 and device:GPU-8f3a -> node."""


class Crowd:
    """The ranks of each job and the nodes they sit on, as their hellos say."""

    def __init__(self, config: MassConfig) -> None:
        self._config = config
        self._jobs: dict[JobId, _Job] = {}

    def note(self, hello: Event) -> None:
        """A rank said who and where it is; whatever it says else, or wrongly, is passed over."""
        world_size, rank, node = (hello.data.get(key) for key in ("world_size", "rank", "node"))
        if hello.job is None or not isinstance(world_size, int) or not isinstance(node, str):
            return
        job = self._jobs.pop(hello.job, None)
        if job is None or job.world_size != world_size:
            job = _Job(world_size=world_size)
        job.nodes |= {f"rank:{rank}": node, f"device:{hello.data.get('device')}": node}
        self._jobs[hello.job] = job
        if len(self._jobs) > JOBS_MAX:
            self._jobs.pop(next(iter(self._jobs)))

    def too_many(self, job: JobId | None, count: int) -> bool:
        """Whether so many ranks of a job are more than can be a coincidence."""
        return count > max(self._config.ranks, self._config.share * self._known(job).world_size)

    def alarm(self, kind: str, job: JobId | None, subjects: Collection[Subject]) -> str:
        """Why so many findings of a kind accuse the measurement; empty if they do not."""
        known = self._known(job)
        if not self.too_many(job, len(subjects)) or self._share_a_node(known, subjects):
            return ""
        of_all = f" of {known.world_size}" if known.world_size else ""
        within_s = self._config.window.total_seconds()
        return (
            f"{len(subjects)}{of_all} ranks look {kind} within {within_s:g} s and share no node: "
            f"our own measurement is suspected ({say(subjects)})"
        )

    def _known(self, job: JobId | None) -> _Job:
        return self._jobs.get(job, _Job()) if job is not None else _Job()

    def snapshot(self) -> Json:
        """For Incidents.snapshot."""
        return {job: {"world_size": known.world_size, "nodes": known.nodes} for job, known in self._jobs.items()}

    def restore(self, saved: Mapping[str, Mapping[str, object]]) -> None:
        """Take up what snapshot gave."""
        self._jobs = {}
        for job, known in saved.items():
            nodes, world_size = known["nodes"], known["world_size"]
            assert isinstance(nodes, Mapping)
            assert isinstance(world_size, int)
            self._jobs[JobId(job)] = _Job(world_size=world_size, nodes=dict(nodes))

    @staticmethod
    def _share_a_node(job: _Job, subjects: Collection[Subject]) -> bool:
        """All on one node, in a job that has several: then the node is the likelier fault."""
        nodes = {job.nodes.get(str(subject), "") for subject in subjects}
        return len(nodes) == 1 and "" not in nodes and len(set(job.nodes.values())) > 1


def counts(row: TierRow, subject: Subject) -> bool:
    """Whether findings of this kind are counted towards a mass alarm."""
    hard = row.kind in KINDS and KINDS[row.kind].hard
    return subject.kind in ("rank", "device") and not hard and row.kind not in row.explains
