"""What leaves for other systems while a job is watched: open incidents to Alertmanager, past ones and some steps as
traces, metrics.

All are made before anything is launched, so that wrong settings are refused first, and none ever holds up the watching:
they have threads of their own.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainwarden.alerts.notify.alertmanager import Alertmanager
from trainwarden.app.step_traces import StepTraces
from trainwarden.app.story import IncidentStory, Story
from trainwarden.app.traces import is_over, open_traces
from trainwarden.app.wiring import Settings
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.model import Event, Frame, Incident, JobId, StepMatrix
from trainwarden.core.ports import Notifier

if TYPE_CHECKING:
    from trainwarden.app.otlp_metrics import Push


class Outlets:
    """begin() once the open incidents are known, turned() at every turn, close() on every path."""

    def __init__(
        self,
        settings: Settings,
        job: JobId,
        say: Callable[[str], None],
        clock: Clock = unix_ns,
        push: "Push | None" = None,
    ) -> None:
        """push: what sends this job's metrics, started by who has them. Raises ConfigError."""
        self._say, self._clock = say, clock
        self._alertmanager = Alertmanager(settings.alertmanager) if settings.alertmanager.urls else None
        self._traces = open_traces(settings.traces, job)
        self._steps = StepTraces(settings.traces.steps, settings.traces.rank) if settings.traces.steps else None
        self.push = push
        self._said: set[str] = set()

    @property
    def notifiers(self) -> Mapping[str, Notifier]:
        """Those that the server may call itself, since they never wait."""
        return {} if self._alertmanager is None else {self._alertmanager.channel: self._alertmanager}

    def peers_up(self) -> Mapping[str, bool]:
        """Alertmanagers, and whether each took what it was sent last."""
        return {} if self._alertmanager is None else self._alertmanager.peers_up

    def exported(self) -> Mapping[tuple[str, ...], int]:
        """Counters of what goes to receivers of OTLP, as exposition.Key."""
        spans = {} if self._traces is None else self._traces.counts
        pushes = {} if self.push is None else self.push.counts
        return {
            **{("otlp_spans_total", result): count for result, count in spans.items()},
            **{("otlp_pushes_total", result): count for result, count in pushes.items()},
        }

    def begin(self, told: Callable[[str], Sequence[Incident]]) -> None:
        """told: the open incidents that a channel has heard of."""
        if self._alertmanager is not None:
            self._alertmanager.sync(told(self._alertmanager.channel))

    def hear(self, items: Sequence[Frame | Event]) -> None:
        """What is about to be fed to the line."""
        if self._steps is not None:
            self._steps.hear(items)

    def stepped(self, matrix: StepMatrix) -> None:
        """A step has closed."""
        if self._traces is not None and self._steps is not None:
            self._traces.steps(partial(self._steps.closed, matrix))

    def trace(self, story: IncidentStory, evidence: Path) -> None:
        """Something has become of an incident: if it is over, it is exported. evidence: the job's folder of it."""
        if self._traces is None:
            return
        if self._steps is not None:
            self._traces.steps(partial(self._steps.around, story.newest.id, story.newest.onset_ns))
        if is_over(story):
            self._traces.export(story, self._clock(), _measured(evidence, story.newest.id))

    def turned(self) -> None:
        """Say once when no Alertmanager can be reached, or no receiver of traces."""
        failing = {} if self._alertmanager is None else {"alertmanager": self._alertmanager.failing}
        if self._traces is not None:
            failing["traces"] = "the OTLP receiver does not take traces" if self._traces.failing else ""
        for what, words in failing.items():
            if words and what not in self._said:
                self._say(words)
        self._said = {what for what, words in failing.items() if words}

    def close(self, story: Story | None) -> None:
        """story: of a job that has ended, whose open incidents stay as they are; None: the next owner tells it."""
        if self._alertmanager is not None:
            self._alertmanager.close(ended=story is not None)
        if self._traces is not None:
            for left in () if story is None else [story.incidents[name] for name in story.open]:
                self._traces.export(left, self._clock())
            if lost := self._traces.close():
                self._say(f"traces: {lost}")
        if self.push is not None:
            self.push.close()


def _measured(evidence: Path, incident: str) -> Mapping[str, float] | None:
    """Seconds by phase of a verified recovery; None: there was none."""
    with contextlib.suppress(OSError, ValueError):
        spent: dict[str, float] = json.loads((evidence / incident.replace("/", "_") / "lost.json").read_text())
        return spent
    return None
