"""The kernel log as the system's journal kept it: for an agent that may not open /dev/kmsg (group systemd-journal).

`journalctl -k` is asked for what came after the cursor, a limited number of entries at a time, with a deadline: a
journal on a sick disk must not hold the agent. The journal rotates, so what it dropped between two polls is not known;
where its cursor is gone that is told as a gap of unknown length.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainwarden.collectors.kmsg import RETRY_NS, Gap
from trainwarden.core.child import run
from trainwarden.core.errors import ChildError
from trainwarden.core.model import Json

ENTRIES: Final = 5000
"""Of one call; some 300 bytes each."""

CALLS: Final = 4
"""Of one poll."""

_FIELDS = "--output-fields=MESSAGE,SYSLOG_FACILITY"


class Journal:
    """journalctl -k, from now on or from where an earlier process stood."""

    def __init__(
        self, *, command: Sequence[str] = ("journalctl",), deadline_s: float = 5.0, drills: bool = False
    ) -> None:
        """drills: take entries that programs wrote to /dev/kmsg for the kernel's."""
        self.why_blind, self.behind = "", False
        self.lost: list[Gap] = []
        self._command = [*command, "-k", "-q", "--no-pager", "-o", "json", _FIELDS]
        self._deadline_s, self._drills = deadline_s, drills
        self._cursor = ""
        self._retry_ns = 0

    @property
    def position(self) -> Mapping[str, Json]:
        """Cursor of the last entry read."""
        return {"cursor": self._cursor} if self._cursor else {}

    def resume(self, position: Mapping[str, Json]) -> None:
        """Entries after this one."""
        cursor = position.get("cursor")
        self._cursor = cursor if isinstance(cursor, str) else ""

    def read(self, now_ns: int) -> Iterator[tuple[int, str]]:
        """Messages of the kernel since the last call."""
        if now_ns < self._retry_ns:
            return
        if not self._cursor:
            self._ask("-n", "1", now_ns=now_ns)  # what was before us is not ours, its cursor is where we begin
            return
        for _ in range(CALLS):
            entries = self._ask("--after-cursor", self._cursor, "-n", str(ENTRIES), now_ns=now_ns)
            self.behind = len(entries) == ENTRIES
            for entry in entries:
                t_ns = min(_whole(entry.get("__REALTIME_TIMESTAMP")) * 1000 or now_ns, now_ns)
                if self._drills or entry.get("SYSLOG_FACILITY", "0") == "0":
                    yield from ((t_ns, line) for line in _message(entry).split("\n"))
            if not self.behind:
                return

    def close(self) -> None:
        """Nothing is open between two polls."""

    def _ask(self, *arguments: str, now_ns: int) -> list[dict[str, Any]]:
        try:
            ran = run([*self._command, *arguments], deadline_s=self._deadline_s)
        except ChildError as error:
            return self._fail(str(error), now_ns)
        if ran.code:
            if self._cursor and "cursor" in ran.err:
                self._cursor = ""
                self.lost.append((None, None))
            words = " ".join(ran.err.split())[:200] or f"status {ran.code}"
            return self._fail(f"{self._command[0]}: {words} (grant: group systemd-journal)", now_ns)
        entries = [entry for line in ran.out.splitlines() if (entry := _entry(line))]
        if entries:
            self._cursor = entries[-1]["__CURSOR"]
        self.why_blind = (
            "" if self._cursor else f"{self._command[0]}: no kernel messages (grant: group systemd-journal)"
        )
        return entries

    def _fail(self, why: str, now_ns: int) -> list[dict[str, Any]]:
        self.why_blind, self._retry_ns, self.behind = why, now_ns + RETRY_NS, False
        return []


def _entry(line: str) -> dict[str, Any] | None:
    """One line of output; None for one that is no entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("__CURSOR"), str) else None


def _message(entry: Mapping[str, Any]) -> str:
    """An entry's text: bytes that are no text come as a list of numbers, fields that are too long as null."""
    message = entry.get("MESSAGE")
    if isinstance(message, list) and all(isinstance(one, int) and 0 <= one < 256 for one in message):
        return bytes(message).decode(errors="replace")
    return message if isinstance(message, str) else ""


def _whole(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 17 else 0
