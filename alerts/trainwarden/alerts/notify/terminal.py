"""Notices on the terminal: one line each on stderr, in colour where somebody looks at it.

Reasons hold text that a job's tenant wrote (file names, messages): control characters never reach the terminal.
"""

import errno
import os
from collections import OrderedDict
from typing import IO

from rich.console import Console
from rich.text import Text

from trainwarden.core.errors import DeliveryError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Notice, Tier
from trainwarden.core.printable import printable

KEYS_MAX = 10_000
"""Keys remembered, so that a notice that is handed over again is printed once."""

_STYLES = {Tier.INFO: "dim", Tier.WARN: "yellow", Tier.ERROR: "bold red", Tier.CRITICAL: "bold white on red"}
_RESOLVED_STYLE = "green"
_LEADS = {"opened": "", "updated": "update: ", "escalated": "worse: ", "resolved": "over: "}


class ErrorConsole(Console):
    """stderr. A reader that went away is an error to be told, where rich would end the whole process."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(stderr=file is None, file=file)

    def on_broken_pipe(self) -> None:
        """Called by rich inside its `except BrokenPipeError`."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Terminal:
    """The notifier of channel `terminal`."""

    channel = "terminal"

    def __init__(self, console: Console | None = None) -> None:
        self._console = ErrorConsole() if console is None else console
        self._printed: OrderedDict[str, None] = OrderedDict()

    def notify(self, notice: Notice) -> str:
        """Print it once. Raises DeliveryError when there is no terminal (any more)."""
        if notice.key not in self._printed:
            try:
                self._console.print(_styled(notice), soft_wrap=True, highlight=False)
            except (OSError, ValueError) as error:  # ValueError: the file is closed
                raise DeliveryError(f"terminal: cannot be written: {error}", retryable=False) from error
            self._printed[notice.key] = None
            if len(self._printed) > KEYS_MAX:
                self._printed.popitem(last=False)
        return f"printed {notice.key}"


def in_words(notice: Notice) -> str:
    """A notice in one line that a person can act on."""
    return f"{_label(notice)} {_rest(notice)}"


def _styled(notice: Notice) -> Text:
    style = _RESOLVED_STYLE if notice.change == "resolved" else _STYLES[notice.incident.tier]
    return Text(no_wrap=True, overflow="ignore").append(_label(notice), style=style).append(f" {_rest(notice)}")


def _label(notice: Notice) -> str:
    return "[RESOLVED]" if notice.change == "resolved" else f"[{notice.incident.tier.name}]"


def _rest(notice: Notice) -> str:
    incident = notice.incident
    about = f"job {incident.job}: " if incident.job is not None else ""
    after = incident.lost_s.get("detect")
    when = f", {after:.1f} s after it happened" if after is not None and notice.change == "opened" else ""
    said = f"{about}{_LEADS[notice.change]}{incident.reason} (incident {incident.id}{when})."
    return printable(said if notice.change == "resolved" else said + _advice(notice))


def _advice(notice: Notice) -> str:
    """What would be done about it; once a plan is on its way the plan says so itself."""
    incident = notice.incident
    runbook = KINDS[incident.kind].runbook if incident.kind in KINDS else ""
    would = "" if incident.plans else f" Would do: {incident.action}."
    return would + (f" Runbook: {runbook}." if runbook and notice.change == "opened" else "")
