"""What is built in, listed explicitly, and how it is put together from the settings file."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias

from trainwarden.alerts.incidents import Incidents, IncidentsConfig
from trainwarden.alerts.notify.alertmanager import Alertmanager, AlertmanagerConfig
from trainwarden.alerts.notify.jsonl import JsonLines
from trainwarden.alerts.notify.terminal import Terminal
from trainwarden.alerts.notify.webhook import Webhook, WebhookConfig
from trainwarden.alerts.routes import RoutesConfig
from trainwarden.app.endpoint import MetricsConfig
from trainwarden.app.engine import DurableMachine, Engine
from trainwarden.app.line import Line, LineDetector
from trainwarden.app.server import Parts, Server
from trainwarden.app.store import Fence, Store
from trainwarden.app.story import Story
from trainwarden.app.traces import TracesConfig
from trainwarden.core.config import load_fields
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import JobId, Look
from trainwarden.core.ports import Notifier
from trainwarden.core.recording import Recorder
from trainwarden.core.site import SiteConfig
from trainwarden.core.steps import StepAssembler, StepsConfig
from trainwarden.detectors.death import Death, DeathConfig
from trainwarden.detectors.hang import Hang, HangConfig
from trainwarden.detectors.loss import NonFinite, NonFiniteConfig
from trainwarden.detectors.straggler import Straggler, StragglerConfig
from trainwarden.remediation.policy import Policy, load_policy, shipped_policy
from trainwarden.remediation.repairs import Repairs

Beside: TypeAlias = Literal["kernel_log", "nvml", "dcgm", "infiniband", "host", "pcie", "mounts"]
"""Sources of a node that `trainwarden run` can read beside the ranks (app/surroundings.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """`trainwarden run` itself."""

    slots: int | None = None
    """Places for ranks on this host, in the order of local ranks; more than ranks means spares. None: one a rank."""

    poll: timedelta = timedelta(milliseconds=100)
    """Between two looks at the ranks: a death must be said within a second, and a look costs well under 1 ms."""

    recording_max_bytes: int = 1 << 30
    """Size of a job's recording; beyond it the oldest part goes. 8 ranks fill it in about a week."""

    sources: tuple[Beside, ...] | None = None
    """What is read of this host beside the ranks, each set up by its section `collectors.*`. None: what this host has
    and lets us read; what it does not is told in a line."""

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"run.slots: need at least 1, got {self.slots}")
        if not timedelta(milliseconds=10) <= self.poll <= timedelta(seconds=1):
            raise ConfigError(f"run.poll: need 10ms to 1s, got {self.poll.total_seconds():g}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a settings file can say."""

    run: RunConfig = field(default_factory=RunConfig)
    site: SiteConfig = field(default_factory=SiteConfig)
    steps: StepsConfig = field(default_factory=StepsConfig)
    death: DeathConfig = field(default_factory=DeathConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    non_finite: NonFiniteConfig = field(default_factory=NonFiniteConfig)
    incidents: IncidentsConfig = field(default_factory=IncidentsConfig)
    webhook: WebhookConfig = field(default_factory=WebhookConfig)
    alertmanager: AlertmanagerConfig = field(default_factory=AlertmanagerConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)


SECTIONS: Mapping[str, tuple[str, type[object]]] = {
    "run": ("run", RunConfig),
    "site": ("site", SiteConfig),
    "steps": ("steps", StepsConfig),
    "detectors.death": ("death", DeathConfig),
    "detectors.hang": ("hang", HangConfig),
    "detectors.straggler": ("straggler", StragglerConfig),
    "detectors.non_finite": ("non_finite", NonFiniteConfig),
    "alerts.incidents": ("incidents", IncidentsConfig),
    "alerts.webhook": ("webhook", WebhookConfig),
    "alerts.alertmanager": ("alertmanager", AlertmanagerConfig),
    "metrics": ("metrics", MetricsConfig),
    "traces": ("traces", TracesConfig),
}
"""Section of the file -> field of Settings and its type."""


def load_settings(path: Path | None) -> Settings:
    """Settings of a file, or the defaults. Raises ConfigError that names the key, the value and what is allowed."""
    return Settings(**load_fields(path, SECTIONS))


def detectors(settings: Settings) -> Sequence[LineDetector]:
    """Every built-in job detector, first causes first."""
    return (
        Death(settings.death),
        NonFinite(settings.non_finite),
        Hang(replace(settings.hang, fresh=max(settings.hang.fresh, 3 * settings.run.poll))),
        Straggler(settings.straggler),
    )


def build_line(settings: Settings, job: JobId) -> Line:
    """A fresh line for one job."""
    return Line(StepAssembler(job, settings.steps), detectors(settings))


def build_server(
    settings: Settings,
    *,
    job: JobId,
    folder: Path,
    store: Store,
    fence: Fence,
    policy: Policy,
    look: Callable[[Look], None],
    terminal: Notifier | None = None,
    also: Mapping[str, Notifier] | None = None,
) -> Server:
    """The in-process server of one job; `terminal` takes the place of the built-in one, `also` are further channels."""
    notifiers: Mapping[str, Notifier] = {
        "terminal": terminal or Terminal(),
        "jsonl": JsonLines(folder / "notices.jsonl"),
        **(also or {}),
    }
    assembler, watching = StepAssembler(job, settings.steps), detectors(settings)
    repairs = Repairs(policy, job)
    incidents = Incidents(replace(settings.incidents, routes=routes(settings)))
    machines: dict[str, DurableMachine] = {"incidents": incidents, "repairs": repairs}
    parts = Parts(
        incidents=incidents,
        assembler=assembler,
        straggler=next(one for one in watching if isinstance(one, Straggler)),
        repairs=repairs,
        recorder=Recorder(folder / "frames", max_bytes=settings.run.recording_max_bytes),
    )
    decisions = folder / "story.jsonl"
    with suppress(OSError):  # that it is there says that decisions are kept, also where there were none
        decisions.touch(mode=0o600)
    return Server(
        line=Line(assembler, watching),
        engine=Engine(store, machines, channels=tuple(notifiers), fence=fence),
        parts=parts,
        notifiers=notifiers,
        look=look,
        store=store,
        story=Story(decisions),
    )


def routes(settings: Settings) -> RoutesConfig:
    """Who is told of what: a channel that is configured and that no route names is told of WARN and above."""
    chosen = settings.incidents.routes
    configured = {Webhook.channel: settings.webhook.url, Alertmanager.channel: settings.alertmanager.urls}
    for channel, where in configured.items():
        chosen = chosen.also(channel) if where else chosen
    return chosen


def carried_notifiers(settings: Settings, folder: Path) -> Mapping[str, Notifier]:
    """What plans' threads deliver to, in the order in which the next is told when one is given up.

    Instances of their own: they are called from other threads than the main one's.
    """
    if not settings.webhook.url:
        return {}
    return {"webhook": Webhook(settings.webhook), "jsonl": JsonLines(folder / "notices.jsonl")}


def choose_policy(named: str | None) -> Policy:
    """The policy of a file, or a shipped one: `demo`, `default` (observe only). Raises ConfigError."""
    match named:
        case None | "default":
            return shipped_policy("default")
        case "demo":
            return shipped_policy("demo")
    return load_policy(Path(named))


def acts(policy: Policy) -> bool:
    """Whether any rule may do something."""
    return any(rule.mode != "observe" for rule in policy.rules.values())
