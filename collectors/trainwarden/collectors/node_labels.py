"""Where Kubernetes says that this node stands: labels of the node that name zones, racks, switches, NVLink domains.

Asked of the API server with the pod's service account (it needs `get` on its node), or read from a file of KEY="VALUE"
lines as the downward API writes them. (That API gives a pod's labels, not its node's: newer Kubernetes copies zone and
region to pods by itself, anything else somebody has to copy.)
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from trainwarden.collectors.blind import Parts
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError, DataError, DeliveryError
from trainwarden.core.model import Event, Frame, Json, Subject
from trainwarden.core.net import get
from trainwarden.core.topology import DOMAINS_MAX, usable_value

LABELS: Final[Mapping[str, str]] = {
    "topology.kubernetes.io/region": "region",
    "topology.kubernetes.io/zone": "zone",
    "topology.kubernetes.io/rack": "rack",
    "nvidia.com/gpu.clique": "nvlink",
    "network.topology.nvidia.com/accelerator": "accelerator",
    "network.topology.nvidia.com/leaf": "leaf",
    "network.topology.nvidia.com/spine": "spine",
    "network.topology.nvidia.com/core": "core",
    "network.topology.nvidia.com/block": "leaf",
    "network.topology.nvidia.com/datacenter": "core",
    "accelerator.topograph.run/domain": "accelerator",
    "accelerator.topograph.run/sub-domain": "accelerator-part",
    "fabric.topograph.run/tier-0": "leaf",
    "fabric.topograph.run/tier-1": "spine",
    "fabric.topograph.run/tier-2": "core",
    "topology.k8s.aws/network-node-layer-3": "leaf",
    "topology.k8s.aws/network-node-layer-2": "spine",
    "topology.k8s.aws/network-node-layer-1": "core",
    "cloud.google.com/gce-topology-block": "gce-block",
    "cloud.google.com/gce-topology-subblock": "gce-subblock",
    "cloud.google.com/gce-topology-host": "gce-host",
}
"""Label -> domain. NVIDIA's network.topology labels are Topograph's: block and datacenter formerly, then leaf and core;
topograph.run since its 1.0 (docs.nvidia.com/topograph, Node labels). The NVLink clique is written by NVIDIA's
device plugin, as <ClusterUUID>.<CliqueId>; layers by AWS, of which the third is next to the node."""

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEADLINE_S: Final = 10.0
ANSWER_MAX_BYTES: Final = 1 << 20
"""etcd holds no larger object."""
RETRY_NS: Final = 60 * 10**9
FILE_MAX_BYTES: Final = 1 << 20

_LINE: Final = re.compile(r'([^=\s]+)=("(?:[^"\\]|\\.)*"|[^"\s]*)')


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLabelsConfig:
    """Where labels of the node are read."""

    file: Path | None = None
    """A file of KEY="VALUE" lines; it is read instead of asking the API server."""

    api: str = ""
    """URL of the API server; empty: the pod's own (KUBERNETES_SERVICE_HOST), or none outside of a pod."""

    node: str = ""
    """The node's name in Kubernetes; empty: $NODE_NAME (downward API, spec.nodeName), else the agent's name for it."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels that name domains: example.com/pdu: pdu. A domain "" leaves a built-in one out."""

    period: timedelta = timedelta(minutes=10)
    """Between two times that the API server is asked: 12,500 agents ask it 21 times a second."""

    def __post_init__(self) -> None:
        if self.api and not re.match(r"https://|http://(127\.|localhost[:/]|\[::1\])", self.api):
            raise ConfigError(f"collectors.node_labels.api: need https:// (a token is sent), got {self.api!r}")
        if self.period < timedelta(seconds=10):
            raise ConfigError(f"collectors.node_labels.period: need at least 10s, got {self.period.total_seconds():g}s")


def parse_labels(text: str) -> dict[str, str]:
    """KEY="VALUE" or KEY=VALUE lines. Raises DataError that names the line.

    >>> parse_labels('a.io/rack="r\\\\"3"\\nzone=eu')
    {'a.io/rack': 'r"3', 'zone': 'eu'}
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        said = _LINE.fullmatch(line.strip())
        if said is None:
            raise DataError(f'line {number}: needs KEY="VALUE", got {line[:60]!r}')
        found[said[1]] = re.sub(r"\\(.)", r"\1", said[2][1:-1]) if said[2].startswith('"') else said[2]
    return found


def parse_node(body: bytes) -> dict[str, str]:
    """Labels of a Node as the API server answers. Raises DataError."""
    try:
        labels = json.loads(body)["metadata"].get("labels", {})
        return {str(key): str(value) for key, value in labels.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"not a Node with labels: {body[:60]!r}") from error


def domains_of(labels: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Fault domains that labels name; of two labels for one domain the first in the table counts."""
    found: dict[str, str] = {}
    for label, name in {**LABELS, **more}.items():
        value = labels.get(label, "").strip()
        if name and usable_value(value) and len(found) < DOMAINS_MAX:
            found.setdefault(name, value)
    return found


class NodeLabels:
    """Source of node.domains of one node, as Kubernetes labels it (made by node_labels)."""

    period_s = 15.0

    def __init__(
        self, config: NodeLabelsConfig, ask: Callable[[], dict[str, str]], *, node: str, start_ns: int
    ) -> None:
        """ask: gives the labels. Raises OSError, DataError, DeliveryError."""
        self.name = f"node-labels@{node}"
        self._config, self._ask, self._node = config, ask, node
        self._emit = Emitter(self.name, job=None, start_ns=start_ns)
        self._parts = Parts(self._emit)
        self._next_ns = 0
        self._told: Mapping[str, str] = {}

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """The domains, where they changed."""
        if now_ns < self._next_ns:
            return
        try:
            domains = domains_of(self._ask(), self._config.labels)
        except (OSError, DataError, DeliveryError) as error:
            self._next_ns = now_ns + RETRY_NS
            yield from self._parts("", _words(error), now_ns)
            return  # what was known is as true as it was
        self._next_ns = now_ns + int(self._config.period.total_seconds() * 1e9)
        yield from self._parts("", "", now_ns)
        if domains != self._told:
            self._told = domains
            data: dict[str, Json] = {"from": "labels", "domains": domains}
            yield self._emit("node.domains", Subject(kind="node", id=self._node), now_ns=now_ns, data=data)


def node_labels(
    config: NodeLabelsConfig,
    *,
    node: str,
    start_ns: int,
    env: Mapping[str, str] = os.environ,
    account: Path = ACCOUNT,
) -> NodeLabels | None:
    """The source; None where nothing is named and this is no pod with a service account."""
    if (file := config.file) is not None:
        return NodeLabels(config, lambda: parse_labels(_read(file)), node=node, start_ns=start_ns)
    url = config.api or _own_server(env)
    if not url or not (account / "token").exists():
        return None
    asked = f"{url.rstrip('/')}/api/v1/nodes/{config.node or env.get('NODE_NAME') or node}"
    return NodeLabels(config, lambda: _from_server(asked, account), node=node, start_ns=start_ns)


def _own_server(env: Mapping[str, str]) -> str:
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def _from_server(url: str, account: Path) -> dict[str, str]:
    """Tokens are replaced by the hour: read each time."""
    authority = account / "ca.crt"
    headers = {
        "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
        "Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json",
    }
    ca = authority if authority.exists() else None
    return parse_node(get(url, headers, DEADLINE_S, ANSWER_MAX_BYTES, ca=ca).body)


def _read(file: Path) -> str:
    with file.open("rb") as opened:
        text = opened.read(FILE_MAX_BYTES + 1)
    if len(text) > FILE_MAX_BYTES:
        raise DataError(f"{file}: needs at most {FILE_MAX_BYTES} bytes")
    return text.decode(errors="replace")


def _words(error: Exception) -> str:
    if isinstance(error, DeliveryError) and str(error).endswith(("answered 401", "answered 403")):
        return f"{error}: the agent's service account needs the verb get on nodes (docs/privileges.md)"
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
