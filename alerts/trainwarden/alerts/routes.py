"""Which channels hear of an incident: a list a tier, in the order in which they are told."""

from dataclasses import dataclass, replace

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Tier

_STANDARD = ("terminal", "jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesConfig:
    """Channel names by tier; each names a notifier's `channel`."""

    critical: tuple[str, ...] = _STANDARD
    """Told of CRITICAL incidents: a person now."""

    error: tuple[str, ...] = _STANDARD
    """Told of ERROR incidents: a page."""

    warn: tuple[str, ...] = _STANDARD
    """Told of WARN incidents: working hours."""

    info: tuple[str, ...] = _STANDARD
    """Told of INFO incidents: recorded."""

    def __post_init__(self) -> None:
        for tier in Tier:
            named = self.channels(tier)
            if any("/" in name or not name.isprintable() or not name for name in named):
                raise ConfigError(
                    f"alerts.incidents.routes.{tier.name.lower()}: a channel is a plain name, got {list(named)!r}"
                )
            if len(set(named)) < len(named):
                raise ConfigError(
                    f"alerts.incidents.routes.{tier.name.lower()}: a channel is named twice: {list(named)!r}"
                )
            if tier >= Tier.ERROR and not named:
                raise ConfigError(
                    f"alerts.incidents.routes.{tier.name.lower()}: nobody would hear of it: name a channel"
                )

    def channels(self, tier: Tier) -> tuple[str, ...]:
        """Who is told of an incident of this tier.

        >>> RoutesConfig(warn=("jsonl",)).channels(Tier.WARN)
        ('jsonl',)
        """
        return {Tier.CRITICAL: self.critical, Tier.ERROR: self.error, Tier.WARN: self.warn, Tier.INFO: self.info}[tier]

    def also(self, channel: str) -> "RoutesConfig":
        """The same if a tier names this channel; else it is told of WARN and above: it was configured to be used.

        >>> RoutesConfig().also("webhook").error
        ('terminal', 'jsonl', 'webhook')
        """
        if channel in self.everyone:
            return self
        add = (channel,)
        return replace(self, critical=self.critical + add, error=self.error + add, warn=self.warn + add)

    @property
    def everyone(self) -> tuple[str, ...]:
        """Each channel once, the loudest tier's first."""
        return tuple(dict.fromkeys((*self.critical, *self.error, *self.warn, *self.info)))
