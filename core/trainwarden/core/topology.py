"""Where ranks sit: from the hellos of one epoch to the table that steps and detectors index by rank.

A hello is written by the job's tenant, so every value in it is checked: what is not usable counts as not said.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Epoch, Event, JobId, Json, Topology

DIMENSIONS: Final = ("pp", "tp", "dp", "ep", "cp")
"""Columns of Topology.coords_RP: pipeline, tensor, data, expert and context parallel."""

_COORD_MAX: Final = int(np.iinfo(np.int16).max)


def make_topology(
    job: JobId,
    epoch: Epoch,
    hellos: Mapping[int, Event],
    world_size: int,
    domains: Mapping[str, Mapping[str, str]],
) -> Topology:
    """The topology of one epoch; ranks without a hello are in it, unknown.

    `domains` is the site file (node -> rack, switch, driver ...); only the job's nodes are taken from it, in the order
    of their lowest rank.
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
        domains={node: dict(domains.get(node, {})) for node in nodes},
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


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _coords(value: Json) -> list[int]:
    said = value if isinstance(value, Mapping) else {}
    return [_coord(said.get(name)) for name in DIMENSIONS]


def _coord(value: Json) -> int:
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COORD_MAX
    return value if usable and isinstance(value, int) else -1
