"""Where ranks sit: from the hellos of one epoch to the table that steps and detectors index by rank.

A hello is written by the job's tenant, so every value in it is checked: what is not usable counts as not said.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Epoch, Event, JobId, Json, StepMatrix, Topology
from trainwarden.core.records import FEATURES

DIMENSIONS: Final = ("pp", "tp", "dp", "ep", "cp")
"""Columns of Topology.coords_RP: pipeline, tensor, data, expert and context parallel."""

_TOKENS: Final = FEATURES.index("tokens")
_COORD_MAX: Final = int(np.iinfo(np.int16).max)

DOMAIN_SOURCES: Final = ("site", "nvml", "slurm", "labels")
"""Who may tell fault domains. Of two that name one domain of a node differently the first counts: people who built the
site, the hardware itself, the scheduler, labels."""

SITE: Final = "site@server"
"""The one source that may speak of other nodes than its own."""

DOMAINS_MAX: Final = 256
"""Of a node and source: 8 devices with some domains each, and more than anybody needs."""

_NO_VALUE: Final = frozenset({"", "-", "?", "unknown", "none", "null", "(null)", "n/a", "na", "undefined", "default"})
"""What stands where nobody knew (a Slurm switch called `unknown` is real): nodes that have it share nothing."""


def usable_value(value: str) -> bool:
    """Whether a fault domain can be called this.

    >>> usable_value("r3"), usable_value("Unknown"), usable_value("a\\nb")
    (True, False, False)
    """
    return value.strip().lower() not in _NO_VALUE and len(value) <= 128 and value.isprintable()


class Domains:
    """Fault domains as events node.domains tell them: node -> who says so -> domain -> value."""

    def __init__(self, told: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None) -> None:
        self._told = {node: dict(sources) for node, sources in (told or {}).items()}

    def hear(self, event: Event) -> bool:
        """Take all that one source knows now of one node; False: it cannot be used."""
        node, by, told = event.subject.id, event.data.get("from"), event.data.get("domains")
        own = event.source.rpartition("@")[2] == node or (event.source == SITE and by == "site")
        if not (own and isinstance(by, str) and by in DOMAIN_SOURCES and isinstance(told, Mapping)):
            return False
        texts = ((name[:64], value) for name, value in told.items() if isinstance(value, str) and usable_value(value))
        self._told.setdefault(node, {})[by] = dict(islice(texts, DOMAINS_MAX))
        return True

    def by(self, source: str, node: str) -> Mapping[str, str]:
        """What one source says of a node."""
        return self._told.get(node, {}).get(source, {})

    def of(self, node: str) -> dict[str, str]:
        """What counts for a node, by name; what nobody told is absent."""
        merged: dict[str, str] = {}
        for source in reversed(DOMAIN_SOURCES):
            merged |= self.by(source, node)
        return dict(sorted(merged.items()))

    def differing(self, node: str) -> dict[str, dict[str, str]]:
        """Domain -> source -> value where sources differ; the first source counts."""
        found = {
            name: {by: told[name] for by in DOMAIN_SOURCES if name in (told := self.by(by, node))}
            for name in self.of(node)
        }
        return {name: values for name, values in found.items() if len(set(values.values())) > 1}

    def to_json(self) -> dict[str, dict[str, Mapping[str, str]]]:
        """As the initialiser takes it."""
        return {node: dict(sources) for node, sources in self._told.items()}


def make_topology(
    job: JobId,
    epoch: Epoch,
    hellos: Mapping[int, Event],
    world_size: int,
    domains: Callable[[str], Mapping[str, str]],
) -> Topology:
    """The topology of one epoch; ranks without a hello are in it, unknown.

    `domains` gives those of a node (rack, leaf, driver ...); the job's nodes are in the order of their lowest rank.
    """
    device_R = [""] * world_size
    node_R = np.full(world_size, -1, np.int32)
    coords_RP = np.full((world_size, len(DIMENSIONS)), -1, np.int16)
    nodes: dict[str, int] = {}
    for rank in sorted(rank for rank in hellos if 0 <= rank < world_size):
        data = hellos[rank].data
        device_R[rank] = _text(data.get("device")) or _text(data.get("slot"))
        coords_RP[rank] = _coords(data.get("coords"))
        if node := _text(data.get("node")):
            node_R[rank] = nodes.setdefault(node, len(nodes))
    return Topology(
        job=job,
        epoch=epoch,
        device_R=tuple(device_R),
        node_R=node_R,
        coords_RP=coords_RP,
        domains={node: dict(domains(node)) for node in nodes},
    )


def carried(old: Topology, new: Topology) -> NDArray[np.int32]:
    """For each rank of `new` the row in `old` of the same device, or -1: how detectors carry state across epochs.

    A rank that never said hello has no device and matches nothing. Of several old ranks on one device the lowest
    counts.
    """
    rows = {device: row for row, device in reversed(tuple(enumerate(old.device_R))) if device}
    return np.fromiter((rows.get(device, -1) for device in new.device_R), np.int32, len(new.device_R))


def peer_group_R(topology: Topology) -> NDArray[np.int32]:
    """Which ranks may be compared: dense group ids (0, 1, ...), one for each pipeline stage.

    Stages do different work (the last one has the head), so a rank is measured against its own stage only. All ranks
    that did not say their stage form one group.
    """
    _, group_R = np.unique(topology.coords_RP[:, DIMENSIONS.index("pp")], return_inverse=True)
    return group_R.astype(np.int32)


def tokens_of(matrix: StepMatrix) -> float:
    """Tokens of a step, over all ranks that tell; NaN: none does.

    Ranks of one data-parallel place (equal dp and ep, with a pp, tp or cp beside them) work on the same tokens and
    count once, with the most that one of them tells. A rank that did not say its dp counts for itself.
    """
    tokens_R = np.where(matrix.values_FR[_TOKENS] >= 0, matrix.values_FR[_TOKENS], np.nan)
    group_R = _replicas_R(matrix.topology)
    most_G = np.full(int(group_R.max(initial=-1)) + 1, np.nan)
    np.fmax.at(most_G, group_R, tokens_R)
    told_G = most_G[~np.isnan(most_G)]
    return float(told_G.sum()) if len(told_G) else np.nan


@lru_cache(maxsize=8)
def _replicas_R(topology: Topology) -> NDArray[np.int64]:
    """Dense group ids of ranks that work on the same tokens."""
    pp_R, tp_R, dp_R, ep_R, cp_R = topology.coords_RP.T.astype(np.int64)
    shares_R = (dp_R >= 0) & ((pp_R >= 0) | (tp_R >= 0) | (cp_R >= 0))
    key_R = np.where(shares_R, dp_R << 16 | ep_R & 0xFFFF, -1 - np.arange(len(dp_R)))
    return np.asarray(np.unique(key_R, return_inverse=True)[1])


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _coords(value: Json) -> list[int]:
    said = value if isinstance(value, Mapping) else {}
    return [_coord(said.get(name)) for name in DIMENSIONS]


def _coord(value: Json) -> int:
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COORD_MAX
    return value if usable and isinstance(value, int) else -1
