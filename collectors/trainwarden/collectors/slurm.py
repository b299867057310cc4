"""Where Slurm says that this node hangs: its switches and blocks.

From topology.yaml or topology.conf, else from `scontrol show topology` (off: it asks the controller), and from the
environment of a Slurm step where this process runs in one. A tree's switches are domains leaf, spine, core, switch-3
and up; a block (an NVLink domain, where topology/block is used for those) is domain block. A node without a place in
them has none: that is said, and nothing is made up.

Formats: topology.conf(5), topology.yaml(5), and what topology/tree and topology/block print (Slurm 22.05 to 25.11).
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import yaml

from trainwarden.collectors.blind import Parts
from trainwarden.core.child import run
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ChildError, ConfigError, DataError
from trainwarden.core.hostlist import expand
from trainwarden.core.model import Event, Frame, Json, Subject
from trainwarden.core.topology import usable_value

LEVELS: Final = ("leaf", "spine", "core")
"""Domains of a tree's switches, from the node upwards; then switch-3, switch-4."""
LEVELS_MAX: Final = 8
FILE_MAX_BYTES: Final = 16 << 20
SCONTROL_S: Final = 30.0
"""A busy controller answers after seconds (MessageTimeout is 10 s by default, and one try more)."""
FILES: Final = ("topology.yaml", "topology.conf")
"""In the order in which Slurm looks: the first that is there counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """Where Slurm's topology is read."""

    folders: tuple[Path, ...] = (Path("/etc/slurm"), Path("/run/slurm/conf"))
    """Where topology.yaml or topology.conf lie; the second is where slurmd keeps them without files of its own."""

    node: str = ""
    """The node's NodeName; empty: the agent's name for it, up to the first dot, as slurmd does."""

    scontrol: str = ""
    """Path of scontrol, to be asked where no file is found; empty: not asked. Each agent asks the controller then."""

    period: timedelta = timedelta(minutes=10)
    """Between two times that scontrol is asked; files are read again when they change."""

    def __post_init__(self) -> None:
        if self.period < timedelta(seconds=10):
            raise ConfigError(f"collectors.slurm.period: need at least 10s, got {self.period.total_seconds():g}s")


@dataclass(slots=True)
class Tree:
    """One topology: what hangs on each switch, or stands in each block. Host lists as Slurm wrote them."""

    nodes: dict[str, str] = field(default_factory=dict)
    children: dict[str, str] = field(default_factory=dict)
    """Switch -> switches below it."""
    blocks: dict[str, str] = field(default_factory=dict)

    def domains(self, node: str) -> dict[str, str]:
        """Those of a node; several switches of one level are one domain, joined by +. Raises DataError."""
        found = {"block": "+".join(sorted(_holding(self.blocks, node)))}
        at, level = self._leaves(node), 0
        while at and level < LEVELS_MAX:
            found[_level(level)] = "+".join(sorted(at))
            at, level = {switch for one in at for switch in _holding(self.children, one) - at}, level + 1
        return {name: value for name, value in found.items() if usable_value(value)}

    def _leaves(self, node: str) -> set[str]:
        """Switches that hold the node, and no switch below them does (scontrol lists a node at each level)."""
        holding = _holding(self.nodes, node)
        return {one for one in holding if holding.isdisjoint(expand(self.children.get(one, "")))}


def parse_conf(text: str) -> list[Tree]:
    """topology.conf, or what scontrol prints. Raises DataError where there is neither switch nor block in it."""
    tree = Tree()
    for line in text.replace("\\\n", " ").splitlines():
        said = dict(_PAIR.findall(line.partition("#")[0]))
        told = {key.lower(): value.strip('"') for key, value in said.items()}
        if name := told.get("switchname"):
            tree.nodes[name], tree.children[name] = _list(told, "nodes"), _list(told, "switches")
        elif name := told.get("blockname"):
            tree.blocks[name] = _list(told, "nodes")
    if not tree.nodes and not tree.blocks:
        raise DataError("neither SwitchName nor BlockName in it")
    return [tree]


_PAIR: Final = re.compile(r"(\w+)=(\"[^\"]*\"|\S*)")


def _list(told: Mapping[str, str], key: str) -> str:
    """A host list; what scontrol prints for none is none."""
    return "" if told.get(key, "").lower() in ("(null)", "none") else told.get(key, "")


def parse_yaml(text: str) -> list[tuple[str, Tree]]:
    """topology.yaml: (name, topology), the cluster's default first. Raises DataError."""
    try:
        said = yaml.load(text, yaml.BaseLoader)  # everything is text
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(f"no YAML: {str(error).splitlines()[0]}") from error
    found: list[tuple[bool, str, Tree]] = []
    for one in _mappings(said):
        tree = Tree()
        for switch in _mappings(_inner(one, "tree", "switches")):
            name = _text(switch, "switch")
            tree.nodes[name], tree.children[name] = _text(switch, "nodes"), _text(switch, "children")
        for block in _mappings(_inner(one, "block", "blocks")):
            tree.blocks[_text(block, "block")] = _text(block, "nodes")
        found.append((_text(one, "cluster_default") != "true", _text(one, "topology"), tree))
    if not found:
        raise DataError("needs a list of topologies")
    return [(name, tree) for _, name, tree in sorted(found, key=lambda one: one[0])]


def in_step(env: Mapping[str, str]) -> dict[str, str]:
    """What the environment of a Slurm step says of its node; nothing outside of one. Raises DataError.

    >>> in_step({"SLURM_TOPOLOGY_ADDR": "root.sw7.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})
    {'leaf': 'sw7', 'spine': 'root'}
    """
    words = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "node").split(".")
    parts = env.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(words) - 1)  # the node comes last, its name may have dots
    if words == ["node"] or parts == [""]:
        return {}
    if len(parts) != len(words):
        raise DataError(f"SLURM_TOPOLOGY_ADDR {'.'.join(parts)[:80]!r} is not {'.'.join(words)[:80]!r}")
    pairs = [*zip(words, parts, strict=True)]
    switches = [part for word, part in reversed(pairs) if word == "switch"][:LEVELS_MAX]
    found = {_level(number): part for number, part in enumerate(switches)}
    found["block"] = dict(pairs).get("block", "")
    return {name: value for name, value in found.items() if usable_value(value)}


class Slurm:
    """Source of node.domains of one node, as Slurm's files (or scontrol, or a step's environment) have them."""

    period_s = 15.0

    def __init__(self, config: SlurmConfig, *, node: str, start_ns: int, env: Mapping[str, str] = os.environ) -> None:
        self.name = f"slurm@{node}"
        self._config, self._env = config, env
        self._node, self._slurm_node = node, config.node or node.partition(".")[0]
        self._emit = Emitter(self.name, job=None, start_ns=start_ns)
        self._parts = Parts(self._emit)
        self._stamp: object = None
        self._next_ns = 0
        self._told: Mapping[str, str] = {}

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """The domains, where they changed."""
        file: Path | None = None
        try:
            file = next((path for path in self._files() if path.exists()), None)
            if file is not None:
                found = file.stat()
                stamp: object = (file, found.st_ino, found.st_ctime_ns, found.st_size)  # ctime: rights count too
                due = stamp != self._stamp
                self._stamp = stamp
            else:
                due = now_ns >= self._next_ns
            if not due:
                return
            self._next_ns = now_ns + int(self._config.period.total_seconds() * 1e9)
            domains, why = self._domains(file), ""
        except (OSError, ChildError, DataError) as error:
            words = (isinstance(error, OSError) and error.strerror) or error
            yield from self._parts("", f"{file or 'Slurm'}: {words}", now_ns)
            return  # what was known is as true as it was
        if not domains and file is not None:
            why = f"{file}: node {self._slurm_node} is in no switch and no block of it"
        yield from self._parts("", why, now_ns)
        if domains != self._told:
            self._told = domains
            data: dict[str, Json] = {"from": "slurm", "domains": domains}
            yield self._emit("node.domains", Subject(kind="node", id=self._node), now_ns=now_ns, data=data)

    def _files(self) -> Iterable[Path]:
        return (folder / name for folder in self._config.folders for name in FILES)

    def _domains(self, file: Path | None) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, tree in self._trees(file):
            own = tree.domains(self._slurm_node)
            found |= {f"{name}.{key}" if key in found else key: value for key, value in own.items()}
        return in_step(self._env) | found

    def _trees(self, file: Path | None) -> list[tuple[str, Tree]]:
        if file is None:
            return [("", tree) for tree in (parse_conf(self._asked()) if self._config.scontrol else ())]
        with file.open("rb") as opened:
            text = opened.read(FILE_MAX_BYTES + 1)
        if len(text) > FILE_MAX_BYTES:
            raise DataError(f"needs at most {FILE_MAX_BYTES} bytes")
        said = text.decode(errors="replace")
        return parse_yaml(said) if file.suffix == ".yaml" else [("", tree) for tree in parse_conf(said)]

    def _asked(self) -> str:
        ran = run([self._config.scontrol, "show", "topology"], deadline_s=SCONTROL_S)
        if ran.code:
            raise ChildError(f"{self._config.scontrol}: status {ran.code}: {ran.err.strip()[:200]}")
        return ran.out[:FILE_MAX_BYTES]


def _holding(lists: Mapping[str, str], name: str) -> set[str]:
    return {key for key, members in lists.items() if name in expand(members)}


def _level(number: int) -> str:
    return LEVELS[number] if number < len(LEVELS) else f"switch-{number}"


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, dict):
            yield one


def _inner(value: Mapping[str, Any], *keys: str) -> object:
    for key in keys:
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return value


def _text(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key, "")
    return text if isinstance(text, str) else ""
