"""What people are told while the journal cannot be written, and when it can be again."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from trainwarden.core.model import Incident, Instruction, Notice, Subject, Tier

KIND = "journal.unwritable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One stretch of time without a journal, as an incident of our own."""

    incident: Incident

    @classmethod
    def begun(cls, why: str, key: str, seen_ns: int) -> "Outage":
        """Named after the first stimulus that could not be written."""
        return cls(
            incident=Incident(
                id="journal." + re.sub(r"[^A-Za-z0-9_-]+", ".", key.replace(":", "-")),
                revision=1,
                state="confirmed",
                tier=Tier.CRITICAL,
                kind=KIND,
                culprit=Subject(kind="source", id="journal"),
                victims=(),
                job=None,
                epoch=None,
                onset_ns=seen_ns,
                findings=(),
                events=(),
                reason=f"decisions cannot be written down, so nothing is repaired and a restart forgets them: {why}",
                action="mend what is named here; the training itself is untouched and is still watched",
                plans=(),
                lost_s={},
            )
        )

    def opened(self, channels: tuple[str, ...]) -> list[Instruction]:
        """The news, on every channel."""
        return _told(self.incident, "opened", channels)

    def over(self, channels: tuple[str, ...], caught_up: int) -> list[Instruction]:
        """The good news, on every channel."""
        reason = f"the journal is written again; {caught_up} stimuli that it had missed were written too"
        incident = replace(self.incident, revision=2, state="resolved", reason=reason)
        return _told(incident, "resolved", channels)


def _told(incident: Incident, change: Literal["opened", "resolved"], channels: tuple[str, ...]) -> list[Instruction]:
    keys = ((channel, f"{incident.id}/{incident.revision}/{channel}") for channel in channels)
    return [incident, *(Notice(key=key, channel=name, change=change, incident=incident) for name, key in keys)]
