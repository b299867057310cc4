"""What `trainwarden run` reads of its host beside the job's own ranks: the kernel log, GPUs, links, the host itself.

The same sources, isolation and words as in `trainwarden agent`. Unless the settings name sources, those are read that
this host lets us read: what is blind at its first word (a source, or a part of one such as its temperatures) is told in
a line and left out, since on a host without it, or without the right to it, it would be blind for ever. What is lost
later is blind, as everywhere.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, get_args

from trainwarden.app.isolation import Isolation, Item
from trainwarden.app.node_sources import BUILT_IN, NODE_SECTIONS, Devices, Made, NodeSettings
from trainwarden.app.wiring import SECTIONS, Beside, Settings
from trainwarden.core.config import load_fields
from trainwarden.core.model import Event

CLOSE_S: Final = 0.2
"""A poll takes milliseconds; the end of a job waits no longer for one that hangs."""

_LOOKED_FOR: Final[Mapping[Beside, Callable[[], bool]]] = {
    "kernel_log": lambda: True,
    "nvml": lambda: Path("/dev/nvidiactl").exists(),
    "infiniband": lambda: _any_in(Path("/sys/class/infiniband")),
    "host": lambda: True,
    "pcie": lambda: True,
}
"""What is read if the settings name nothing, and whether this host has it at all: NVML takes a process, and a driver's
library is looked for where there is a driver."""

_SECTIONS: Final = {
    section: NODE_SECTIONS[section]
    for section in ("agent.isolation", *(f"collectors.{name}" for name in get_args(Beside)))
}


def load_run_settings(path: Path | None) -> tuple[Settings, NodeSettings]:
    """Settings of a file of `trainwarden run`: its own, and those of the sources that it shares with the agent.

    Raises ConfigError that names the key, the value and what is allowed.
    """
    said = load_fields(path, {**SECTIONS, **_SECTIONS})
    beside = {field: said.pop(field) for field, _ in _SECTIONS.values() if field in said}
    return Settings(**said), NodeSettings(**beside)


class Surroundings:
    """poll() in every turn; close() in the end."""

    def __init__(
        self,
        settings: NodeSettings,
        node: str,
        wanted: Sequence[Beside] | None,
        *,
        start_ns: int,
        say: Callable[[str], None],
    ) -> None:
        """wanted: None: what this host lets us read."""
        self._say, self._choose = say, wanted is None
        names = [name for name, there in _LOOKED_FOR.items() if there()] if wanted is None else wanted
        self._devices = Devices()
        of = Made(settings=settings, node=node, start_ns=start_ns, devices=self._devices)
        self._isolation = Isolation(settings.isolation, node)
        self._new: set[str] = set()
        """Sources whose first answer was not seen yet."""
        self.names: tuple[str, ...] = ()
        for name in names:
            source = BUILT_IN[name](of)
            if source is not None:
                self._isolation.add(source)
                self._new.add(source.name)
                self.names += (source.name,)

    def poll(self, now_ns: int) -> list[Item]:
        """Everything that was seen since the last time; never waits."""
        if self._choose and self._new:
            answered = {state.name for state in self._isolation.states() if state.answered}
            items = self._chosen(self._isolation.drain())
            self._new -= answered  # asked before: what these said first is among the items
        else:
            items = self._isolation.drain()
        self._devices.hear(items)
        return items

    def close(self) -> None:
        """Stop reading. A source that hangs ends with the process."""
        self._isolation.close(CLOSE_S)

    def _chosen(self, items: Sequence[Item]) -> list[Item]:
        """Without the words of what this host does not let us read: whole sources, and parts of them."""
        kept = []
        for item in items:
            if item.source in self._new and isinstance(item, Event) and item.kind == "source.blind":
                self._say(f"not read on this host: {item.subject.id}: {item.data['why']}")
                if item.subject.id == item.source:
                    self._isolation.remove(item.source)
                    self.names = tuple(name for name in self.names if name != item.source)
            else:
                kept.append(item)
        return kept


def _any_in(folder: Path) -> bool:
    try:
        return bool(os.listdir(folder))
    except OSError:
        return False
