"""A recording fed through a fresh line and fresh incidents, a job each: what would be said of it today.

The same items in the same order give the same findings bit by bit, however they were cut into frames (section "From
frames to steps" of docs/architecture.md, rule 10). Settings may differ from those of then: what a replay is for.
Findings and incidents only: what would be done needs a world that answers.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from trainwarden.alerts.incidents import Incidents
from trainwarden.app.line import Line
from trainwarden.app.server import NOT_JOURNALLED as NOT_JOURNALLED
from trainwarden.app.wiring import Settings, build_line
from trainwarden.core.model import Event, Finding, Frame, Incident, JobId, Stimulus, Tick

JOBS_MAX: Final = 1000
"""Jobs of one recording."""


class _Job:
    """One job's line and incidents."""

    def __init__(self, settings: Settings, job: JobId) -> None:
        self._line: Line = build_line(settings, job)
        self._incidents = Incidents(settings.incidents)

    def feed(self, item: Frame | Event | Tick) -> Iterator[Finding | Incident]:
        for finding in self._line.feed(item):
            yield finding
            yield from self._tell(finding)
        due_ns = self._incidents.due_ns()
        due = isinstance(item, Tick) and due_ns is not None and due_ns <= item.seen_ns
        if due or (isinstance(item, Event) and item.kind not in NOT_JOURNALLED):
            assert isinstance(item, Event | Tick)
            yield from self._tell(item)

    def finish(self) -> Iterator[Finding | Incident]:
        for finding in self._line.finish():
            yield finding
            yield from self._tell(finding)

    def _tell(self, stimulus: Stimulus) -> Iterator[Incident]:
        yield from (said for said in self._incidents.handle(stimulus) if isinstance(said, Incident))


def replay(items: Iterable[Frame | Event | Tick], settings: Settings) -> Iterator[Finding | Incident]:
    """What is found, in order: each revision of each finding, each revision of each incident.

    A job begins with its first item; what belongs to no job (its nodes' own) goes to all that have begun, as it does in
    a server.
    """
    jobs: dict[JobId, _Job] = {}
    for item in items:
        job = None if isinstance(item, Tick) else item.job
        if job is not None and job not in jobs and len(jobs) < JOBS_MAX:
            jobs[job] = _Job(settings, job)
        for name, one in jobs.items():
            if job is None or name == job:
                yield from one.feed(item)
    for one in jobs.values():
        yield from one.finish()
