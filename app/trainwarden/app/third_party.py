"""Sources of other packages: entry points of the group trainwarden.sources.

`NAME = "module:make"`, where make(node=..., start_ns=...) gives a Source that is called `NAME@<node>`. It is loaded at
its first poll, in the thread that app/isolation.py gives it: an import that hangs, fails or calls sys.exit() makes one
source blind, by its name, and the agent goes on. What it gives is checked as a receiver would, since the agent's own
loop encodes it.
"""

import math
import re
from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from trainwarden.core.codec import dumps, frame_from_bytes, frame_to_bytes, loads
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.kinds import KINDS, missing_data
from trainwarden.core.model import Event, Frame
from trainwarden.core.ports import Source

GROUP: Final = "trainwarden.sources"
SOURCES_MAX: Final = 32
"""Each costs a thread."""
_NAME: Final = re.compile(r"(?!agent)[a-z][a-z0-9-]{0,30}")
"""Not agent: the agent numbers events of its own."""
_PERIOD_S: Final = (0.05, 3600.0)
"""What a source may have: the agent hands on five times a second."""


class ThirdParty:
    """A source that another package brings, loaded when it is first polled. Its poll raises what is wrong with it."""

    def __init__(self, entry: EntryPoint, name: str, node: str, *, start_ns: int, why: str = "") -> None:
        """why: what forbids to load it at all."""
        self.name, self.period_s = name, 1.0
        self._entry, self._node, self._start_ns, self._why = entry, node, start_ns, why
        self._source: Source | None = None

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """What the package's own source gives. Raises DataError, and whatever the package does."""
        if self._source is None:
            self._source = self._load()
            self.period_s = float(self._source.period_s)
        for item in self._source.poll(now_ns):
            self._check(item)
            yield item

    def close(self) -> None:
        """Close the package's source, where it has a close()."""
        getattr(self._source, "close", lambda: None)()

    def _load(self) -> Source:
        if self._why:
            raise ConfigError(self._why)
        source: Source = self._entry.load()(node=self._node, start_ns=self._start_ns)
        least_s, most_s = _PERIOD_S
        if source.name != self.name:
            raise ConfigError(f"{self._entry.value}: need a source called {self.name}, got {str(source.name)[:60]!r}")
        if not (math.isfinite(source.period_s) and least_s <= source.period_s <= most_s):
            got = f"{source.period_s:g}"
            raise ConfigError(f"{self._entry.value}: need a period_s of {least_s:g} to {most_s:g}, got {got}")
        return source

    def _check(self, item: Frame | Event) -> None:
        """Raises DataError for what no receiver would take; TypeError for no frame or event at all."""
        if item.source != self.name:
            raise DataError(f"{self.name} gave an item of source {str(item.source)[:60]!r}")
        if isinstance(item, Frame):
            frame_from_bytes(frame_to_bytes(item))
        elif item.kind not in KINDS or KINDS[item.kind].of != "event":
            raise DataError(f"{self.name} gave an event {str(item.kind)[:60]!r}: no row of core/kinds.py")
        elif lacking := missing_data(item.kind, item.data):
            raise DataError(f"{self.name} gave an event {item.kind} without {', '.join(lacking)}")
        else:
            loads(dumps(item))


def third_party(node: str, taken: Collection[str], *, start_ns: int) -> list[ThirdParty]:
    """Every installed source that is not ours. One whose name is none, or taken, is blind under a number."""
    found: dict[str, ThirdParty] = {}
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    for number, entry in enumerate(entries[:SOURCES_MAX]):
        name, why = f"{entry.name}@{node}", ""
        if not _NAME.fullmatch(entry.name):
            why = f"entry point {entry.name[:60]!r} of {GROUP}: need a name of a-z, 0-9 and -, at most 31, not agent..."
        elif name in taken or name in found:
            why = f"entry point {entry.name} of {GROUP} ({entry.value}): {name} is the name of another source"
        if why:
            name = f"third-party-{number}@{node}"
        found[name] = ThirdParty(entry, name, node, start_ns=start_ns, why=why)
    return [*found.values()]
