"""The site file: which rack, power unit, leaf switch, row ... each node hangs on, as the people who built it know.

One entry names a domain of some nodes; a later one may add to it, and may not contradict it. What is not in the file is
not known: two nodes of unknown racks share none.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainwarden.core.config import load
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.hostlist import HOSTS_MAX, expand
from trainwarden.core.topology import usable_value

Table = Mapping[str, Mapping[str, str]]
"""node -> domain -> value."""

RAILS_MAX: Final = 64
"""Devices of a node that can have a rail."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConfig:
    """Where the fault domains of the site stand."""

    file: Path | None = None
    """The site file (docs/site.md), on a disk of this host; none: only what nodes can read of themselves is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEntry:
    """What some nodes have in common."""

    hosts: str
    """Their names, as agents and ranks tell them: gpu[001-128],login1."""

    domains: Mapping[str, str] = field(default_factory=dict)
    """Domain -> value, any names: rack: r3, pdu: p1, leaf: ib-leaf-07, row: "7"."""

    rails: tuple[str, ...] = ()
    """The rail of device 0, 1, ...: domains rail.0, rail.1, ..."""

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ConfigError("hosts: need a host list such as gpu[001-128], got none")
        if not self.domains and not self.rails:
            raise ConfigError("need domains or rails")
        if len(self.rails) > RAILS_MAX:
            raise ConfigError(f"rails: need at most {RAILS_MAX}, got {len(self.rails)}")
        try:
            expand(self.hosts)
        except DataError as error:
            raise ConfigError(f"hosts: {error}") from error
        for key, name, value in self.told():
            if _NAME.fullmatch(name) is None:
                raise ConfigError(f"{key}: need small letters, digits and _.-, at most 63, got {name!a}")
            if not usable_value(value):
                raise ConfigError(
                    f"{key}: need what all of it is called, at most 128 characters, got {value[:60]!a}; "
                    "leave out what is not known"
                )

    def told(self) -> Iterator[tuple[str, str, str]]:
        """(key in the file, domain, value)."""
        yield from ((f"domains.{name}", name, value) for name, value in self.domains.items())
        yield from ((f"rails[{index}]", f"rail.{index}", value) for index, value in enumerate(self.rails))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Section `site` of the site file."""

    nodes: tuple[SiteEntry, ...] = ()
    """Entries, in any order."""

    within: Mapping[str, str] = field(default_factory=dict)
    """Domain -> the larger one that holds all of it: rack: row says that no rack lies in two rows, which is how racks
    of one name in two rows are found out."""

    def __post_init__(self) -> None:
        table = self.table()
        for inner, outer in self.within.items():
            lies_in: dict[str, tuple[str, str]] = {}
            for node, told in table.items():
                if inner in told and outer in told:
                    known, first = lies_in.setdefault(told[inner], (told[outer], node))
                    if known != told[outer]:
                        raise ConfigError(
                            f"within.{inner}: {inner} {told[inner]} lies in {outer} {known} by {first} and in "
                            f"{told[outer]} by {node}: give the two {inner}s names of their own"
                        )

    def table(self) -> dict[str, dict[str, str]]:
        """Every node's domains. Raises ConfigError where two entries contradict each other."""
        table: dict[str, dict[str, str]] = {}
        entry_of: dict[tuple[str, str], int] = {}
        for number, entry in enumerate(self.nodes):
            for node in expand(entry.hosts):
                own = table.setdefault(node, {})
                for key, name, value in entry.told():
                    if own.setdefault(name, value) != value:
                        first = entry_of[node, name]
                        raise ConfigError(
                            f"nodes[{number}].{key}: {node} has {name} {own[name]} by site.nodes[{first}], got {value}"
                        )
                    entry_of.setdefault((node, name), number)
            if len(table) > HOSTS_MAX:
                raise ConfigError(f"nodes: need at most {HOSTS_MAX} nodes, got more")
        return table


def load_site(path: Path) -> Table:
    """What a site file says of each node. Raises ConfigError that names the key, the value and what is allowed."""
    return load(path, {"site": Site})["site"].table()


class SiteFile:
    """A site file that may change: what it said last that was right."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self._path, self._stamp = path, _stamp(path)
        self.table = load_site(path)

    def refresh(self) -> frozenset[str]:
        """The nodes of which it says something else now. Raises ConfigError for a change that cannot be used, once:
        what was known stays."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return frozenset()
        self._stamp = stamp
        before, self.table = self.table, load_site(self._path)
        return frozenset(node for node in before.keys() | self.table.keys() if before.get(node) != self.table.get(node))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes with the file; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
