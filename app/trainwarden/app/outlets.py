"""What leaves for other systems while a job is watched: open incidents to Alertmanager, past ones as traces.

Both are made before anything is launched, so that wrong settings are refused first, and neither ever holds up the
watching: they have threads of their own.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainwarden.alerts.notify.alertmanager import Alertmanager
from trainwarden.app.story import IncidentStory, Story
from trainwarden.app.traces import is_over, open_traces
from trainwarden.app.wiring import Settings
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.model import Incident, JobId
from trainwarden.core.ports import Notifier


class Outlets:
    """begin() once the open incidents are known, turned() at every turn, close() on every path."""

    def __init__(self, settings: Settings, job: JobId, say: Callable[[str], None], clock: Clock = unix_ns) -> None:
        """Raises ConfigError."""
        self._say, self._clock = say, clock
        self._alertmanager = Alertmanager(settings.alertmanager) if settings.alertmanager.urls else None
        self._traces = open_traces(settings.traces, job)
        self._failing = ""

    @property
    def notifiers(self) -> Mapping[str, Notifier]:
        """Those that the server may call itself, since they never wait."""
        return {} if self._alertmanager is None else {self._alertmanager.channel: self._alertmanager}

    def peers_up(self) -> Mapping[str, bool]:
        """Alertmanagers, and whether each took what it was sent last."""
        return {} if self._alertmanager is None else self._alertmanager.peers_up

    def begin(self, told: Callable[[str], Sequence[Incident]]) -> None:
        """told: the open incidents that a channel has heard of."""
        if self._alertmanager is not None:
            self._alertmanager.sync(told(self._alertmanager.channel))

    def trace(self, story: IncidentStory, evidence: Path) -> None:
        """Something has become of an incident: if it is over, it is exported. evidence: the job's folder of it."""
        if self._traces is not None and is_over(story):
            self._traces.export(story, self._clock(), _measured(evidence, story.newest.id))

    def turned(self) -> None:
        """Say once when no Alertmanager can be reached."""
        failing = "" if self._alertmanager is None else self._alertmanager.failing
        if failing and not self._failing:
            self._say(failing)
        self._failing = failing

    def close(self, story: Story | None) -> None:
        """story: of a job that has ended, whose open incidents stay as they are; None: the next owner tells it."""
        if self._alertmanager is not None:
            self._alertmanager.close(ended=story is not None)
        if self._traces is not None:
            for left in () if story is None else [story.incidents[name] for name in story.open]:
                self._traces.export(left, self._clock())
            if lost := self._traces.close():
                self._say(f"traces: {lost}")


def _measured(evidence: Path, incident: str) -> Mapping[str, float] | None:
    """Seconds by phase of a verified recovery; None: there was none."""
    with contextlib.suppress(OSError, ValueError):
        spent: dict[str, float] = json.loads((evidence / incident.replace("/", "_") / "lost.json").read_text())
        return spent
    return None
