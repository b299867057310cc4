"""What a node agent sees with, listed explicitly, and its settings file.

Each source can be left out by a setting (`agent.sources`), and is made by a line of BUILT_IN. Other packages bring more
(app/third_party.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from trainwarden.app.budget import BudgetConfig
from trainwarden.app.domains import NodeDomains
from trainwarden.app.endpoint import ExportConfig
from trainwarden.app.isolation import IsolationConfig
from trainwarden.app.looking import JobLooks
from trainwarden.app.node_jobs import JobDumps, Jobs, JobSource
from trainwarden.app.third_party import third_party
from trainwarden.app.uplink import UplinkConfig
from trainwarden.collectors.dcgm import Dcgm, DcgmConfig
from trainwarden.collectors.files.recordings import Recordings, RecordingsConfig
from trainwarden.collectors.host import Host, HostConfig
from trainwarden.collectors.infiniband import Infiniband, InfinibandConfig
from trainwarden.collectors.kernel_grammar import canonical_pci
from trainwarden.collectors.kmsg import KernelLog, KernelLogConfig
from trainwarden.collectors.mounts import Mounts, MountsConfig
from trainwarden.collectors.nccl.source import DumpsConfig
from trainwarden.collectors.node_labels import NodeLabelsConfig, node_labels
from trainwarden.collectors.nvml import Nvml, NvmlConfig
from trainwarden.collectors.pcie import PcieConfig, PcieErrors
from trainwarden.collectors.slurm import Slurm, SlurmConfig
from trainwarden.core.clock import unix_ns
from trainwarden.core.config import load_fields
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame
from trainwarden.core.ports import Source

Name = Literal[
    "jobs",
    "nvml",
    "dcgm",
    "kernel_log",
    "infiniband",
    "host",
    "pcie",
    "mounts",
    "slurm",
    "node_labels",
    "recordings",
    "dumps",
    "looks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """`trainwarden agent` itself."""

    node: str = ""
    """Name of the node, as jobs' ranks tell it (TRAINWARDEN_NODE); empty: that, else the host's name."""

    sources: tuple[Name, ...] = get_args(Name)
    """What is looked at; what is left out is never touched."""

    rings: tuple[Path, ...] = ()
    """Folders that TRAINWARDEN_DIR names on this node, beside /run/trainwarden/<uid> and /dev/shm/trainwarden-<uid>."""

    third_party: bool = True
    """Whether sources of other packages are used (entry point group trainwarden.sources)."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError(f"agent.sources: need at least one of {', '.join(get_args(Name))}, got none")
        if any(not path.is_absolute() for path in self.rings):
            raise ConfigError(f"agent.rings: need absolute paths, got {', '.join(map(str, self.rings))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Everything that an agent's settings file can say."""

    agent: AgentConfig = field(default_factory=AgentConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    uplink: UplinkConfig = field(default_factory=UplinkConfig)
    metrics: ExportConfig = field(default_factory=ExportConfig)
    nvml: NvmlConfig = field(default_factory=NvmlConfig)
    dcgm: DcgmConfig = field(default_factory=DcgmConfig)
    kernel_log: KernelLogConfig = field(default_factory=KernelLogConfig)
    infiniband: InfinibandConfig = field(default_factory=InfinibandConfig)
    host: HostConfig = field(default_factory=HostConfig)
    pcie: PcieConfig = field(default_factory=PcieConfig)
    mounts: MountsConfig = field(default_factory=MountsConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    node_labels: NodeLabelsConfig = field(default_factory=NodeLabelsConfig)
    recordings: RecordingsConfig = field(default_factory=RecordingsConfig)
    dumps: DumpsConfig = field(default_factory=DumpsConfig)


NODE_SECTIONS: Final[Mapping[str, tuple[str, type[object]]]] = {
    "agent": ("agent", AgentConfig),
    "agent.budget": ("budget", BudgetConfig),
    "agent.isolation": ("isolation", IsolationConfig),
    "uplink": ("uplink", UplinkConfig),
    "metrics": ("metrics", ExportConfig),
    "collectors.nvml": ("nvml", NvmlConfig),
    "collectors.dcgm": ("dcgm", DcgmConfig),
    "collectors.kernel_log": ("kernel_log", KernelLogConfig),
    "collectors.infiniband": ("infiniband", InfinibandConfig),
    "collectors.host": ("host", HostConfig),
    "collectors.pcie": ("pcie", PcieConfig),
    "collectors.mounts": ("mounts", MountsConfig),
    "collectors.slurm": ("slurm", SlurmConfig),
    "collectors.node_labels": ("node_labels", NodeLabelsConfig),
    "collectors.recordings": ("recordings", RecordingsConfig),
    "collectors.dumps": ("dumps", DumpsConfig),
}
"""Section of the file -> field of NodeSettings and its type."""


def load_node_settings(path: Path | None) -> NodeSettings:
    """Settings of a file, or the defaults. Raises ConfigError that names the key, the value and what is allowed."""
    return NodeSettings(**load_fields(path, NODE_SECTIONS))


class Devices:
    """Which GPU sits where, as device.found told, and the node's fault domains: one source's words for the others."""

    def __init__(self) -> None:
        self._uuid_at: dict[str, str] = {}
        self.domains = NodeDomains()

    def hear(self, items: Iterable[Frame | Event]) -> None:
        """Take note of GPUs that were found, and of fault domains."""
        items = [*items]
        self.domains.hear(items)
        for item in items:
            if isinstance(item, Event) and item.kind == "device.found":
                try:
                    self._uuid_at[canonical_pci(str(item.data["pci"]))] = str(item.data["uuid"])
                except ValueError:  # no PCI address
                    continue

    def uuid_at(self, pci: str) -> str | None:
        """UUID of the GPU at a canonical PCI address; None: not known (any thread)."""
        return self._uuid_at.get(pci)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a source is made of."""

    settings: NodeSettings
    node: str
    start_ns: int
    devices: Devices


BUILT_IN: Final[Mapping[Name, Callable[[Made], Source | None]]] = {
    "jobs": lambda of: Jobs(of.node, of.settings.agent.rings, start_ns=of.start_ns),
    "nvml": lambda of: Nvml(of.settings.nvml, node=of.node, start_ns=of.start_ns),
    "dcgm": lambda of: Dcgm(of.settings.dcgm, of.node, start_ns=of.start_ns),
    "kernel_log": lambda of: KernelLog(
        of.settings.kernel_log, of.node, start_ns=of.start_ns, device_of=of.devices.uuid_at
    ),
    "infiniband": lambda of: Infiniband(of.settings.infiniband, node=of.node, start_ns=of.start_ns),
    "host": lambda of: Host(of.settings.host, node=of.node, start_ns=of.start_ns),
    "pcie": lambda of: PcieErrors(of.settings.pcie, node=of.node, start_ns=of.start_ns),
    "mounts": lambda of: Mounts(of.settings.mounts, node=of.node, start_ns=of.start_ns),
    "slurm": lambda of: Slurm(of.settings.slurm, node=of.node, start_ns=of.start_ns),
    "node_labels": lambda of: node_labels(of.settings.node_labels, node=of.node, start_ns=of.start_ns),
    "recordings": lambda of: (
        Recordings(of.settings.recordings, node=of.node, start_ns=of.start_ns)
        if of.settings.recordings.folder
        else None
    ),
}
"""Every source of a node. `jobs` finds the rings of jobs; each job then has sources of its own (app/node_jobs.py): its
rings and processes, and PER_JOB. None: the settings say that there is nothing to look at."""

PER_JOB: Final[Mapping[Name, Callable[[NodeSettings, str, JobSource], Source]]] = {
    "dumps": lambda settings, node, job: JobDumps(settings.dumps, job, node),
    "looks": lambda settings, node, job: JobLooks(settings.dumps, job, node, start_ns=unix_ns()),
}
"""Every further source of a job."""


def build_sources(settings: NodeSettings, node: str, devices: Devices, *, start_ns: int) -> list[Source]:
    """Those that the settings name, in the order of BUILT_IN; then other packages'."""
    of = Made(settings=settings, node=node, start_ns=start_ns, devices=devices)
    made = [make(of) for name, make in BUILT_IN.items() if name in settings.agent.sources]
    ours = [source for source in made if source is not None]
    if not settings.agent.third_party:
        return ours
    return [*ours, *third_party(node, [source.name for source in ours], start_ns=start_ns)]


def build_job_sources(settings: NodeSettings, node: str, job: JobSource) -> list[Source]:
    """A job's own source, and those that the settings name."""
    return [job, *(make(settings, node, job) for name, make in PER_JOB.items() if name in settings.agent.sources)]
