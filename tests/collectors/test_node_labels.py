"""Labels that Kubernetes gives a node: from the API server (a stand-in on the loopback), or from a file."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.web import Web, serving

from trainwarden.collectors.node_labels import (
    NodeLabels,
    NodeLabelsConfig,
    domains_of,
    node_labels,
    parse_labels,
    parse_node,
)
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.model import Event

LABELS = {
    "kubernetes.io/hostname": "gpu-7",
    "topology.kubernetes.io/region": "eu-north",
    "topology.kubernetes.io/zone": "eu-north-1",
    "nvidia.com/gpu.clique": "5a0d4d5e-0f0f-4a3c-8f6e-0123456789ab.4",
    "network.topology.nvidia.com/leaf": "sw-11",
    "network.topology.nvidia.com/spine": "",
    "fabric.topograph.run/tier-0": "sw-12",
    "example.com/pdu": "p-3",
}
TOLD = {
    "region": "eu-north",
    "zone": "eu-north-1",
    "nvlink": "5a0d4d5e-0f0f-4a3c-8f6e-0123456789ab.4",
    "leaf": "sw-11",
}
FILE = """\
topology.kubernetes.io/region="eu-north"
topology.kubernetes.io/zone="eu-north-1"
app="a \\"quoted\\" one"
"""


def said(labels: NodeLabels | None, now_s: float = 0.0) -> list[object]:
    """Domains, or why it is blind."""
    assert labels is not None
    events = [one for one in labels.poll(int(now_s * 1e9)) if isinstance(one, Event)]
    return [one.data["domains"] if one.kind == "node.domains" else f"{one.kind}: {one.data['why']}" for one in events]


def account(folder: Path) -> Path:
    """A pod's service account."""
    (folder / "token").write_text("secret-token\n")
    return folder


def asking(web: Web, folder: Path, **more: object) -> NodeLabels | None:
    config = NodeLabelsConfig(api=web.url, **more)  # type: ignore[arg-type]
    return node_labels(config, node="gpu-7", start_ns=0, env={}, account=account(folder))


def test_labels_that_name_domains_are_told_and_no_others() -> None:
    assert domains_of(LABELS, {}) == TOLD
    more = domains_of(LABELS, {"example.com/pdu": "pdu", "topology.kubernetes.io/region": ""})
    assert more == {name: value for name, value in TOLD.items() if name != "region"} | {"pdu": "p-3"}


def test_the_api_server_is_asked_for_this_node_with_the_pods_account(tmp_path: Path) -> None:
    with serving() as web:
        web.body = json.dumps({"kind": "PartialObjectMetadata", "metadata": {"labels": LABELS}}).encode()
        labels = asking(web, tmp_path)
        assert said(labels) == [TOLD]
        (asked,) = web.asked
        assert asked.path == "/api/v1/nodes/gpu-7"
        assert asked.headers["Authorization"] == "Bearer secret-token"
        assert "PartialObjectMetadata" in asked.headers["Accept"]
        assert said(labels, 300) == [], "asked again after ten minutes"
        (tmp_path / "token").write_text("renewed")
        assert said(labels, 601) == [], "and nothing has changed"
        assert [one.headers["Authorization"] for one in web.asked] == ["Bearer secret-token", "Bearer renewed"]


def test_an_account_that_may_not_is_blind_with_what_to_grant(tmp_path: Path) -> None:
    with serving() as web:
        web.status = 403
        labels = asking(web, tmp_path)
        (why,) = said(labels)
        assert str(why).startswith(
            f"source.blind: {web.url}: answered 403: the agent's service account needs the verb get"
        )
        assert "secret" not in str(why)
        web.status, web.body = 200, json.dumps({"metadata": {"labels": LABELS}}).encode()
        assert said(labels, 30) == []
        assert said(labels, 61) == ["source.up: it is not blind any more", TOLD]
        web.body = b"<html>"
        assert said(labels, 700) == ["source.blind: not a Node with labels: b'<html>'"], "what was known stays"


def test_a_node_without_such_labels_has_no_domains(tmp_path: Path) -> None:
    with serving() as web:
        web.body = b'{"metadata": {}}'
        assert said(asking(web, tmp_path)) == []


def test_in_a_pod_its_own_server_is_asked_and_elsewhere_none(tmp_path: Path) -> None:
    config, env = NodeLabelsConfig(), {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    assert node_labels(config, node="n1", start_ns=0, env={}, account=account(tmp_path)) is None
    assert node_labels(config, node="n1", start_ns=0, env=env, account=tmp_path / "none") is None
    (why,) = said(node_labels(config, node="n1", start_ns=0, env=env, account=tmp_path))
    assert str(why).startswith("source.blind: https://127.0.0.1:1: ")
    (tmp_path / "ca.crt").write_text("no certificate")
    (why,) = said(node_labels(config, node="n1", start_ns=0, env=env, account=tmp_path))
    assert str(why).startswith(f"source.blind: {tmp_path}/ca.crt: cannot be used: ")


def test_labels_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "labels"
    labels = node_labels(NodeLabelsConfig(file=file), node="n1", start_ns=0)
    assert said(labels) == [f"source.blind: {file}: No such file or directory"]
    file.write_text(FILE)
    assert said(labels, 61) == ["source.up: it is not blind any more", {"region": "eu-north", "zone": "eu-north-1"}]
    file.write_text("zone")
    assert said(labels, 700) == ["""source.blind: line 1: needs KEY="VALUE", got 'zone'"""]


def test_a_token_is_sent_to_nobody_in_the_clear() -> None:
    with pytest.raises(ConfigError, match=r"collectors\.node_labels\.api: need https://"):
        NodeLabelsConfig(api="http://10.0.0.1")


@settings(max_examples=200)
@given(st.text(alphabet='ab.=/"\\ \n#', max_size=40) | st.text(max_size=40))
def test_any_file_is_read_or_refused(text: str) -> None:
    try:
        found = parse_labels(text)
    except DataError:
        return
    assert "" not in found


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b.io/c", "x-y"]), st.text(st.characters(codec="ascii", categories=["L", "P", "Zs"]))
    )
)
def test_what_is_written_is_read_again(labels: dict[str, str]) -> None:
    assert parse_labels("".join(f"{key}={json.dumps(value)}\n" for key, value in labels.items())) == labels


JSON: st.SearchStrategy[object] = st.sampled_from(
    [{}, {"labels": {}}, {"labels": {"a": 3}}, {"labels": None}, [], None, "x", 3]
)


@settings(max_examples=200)
@given(
    JSON.map(lambda one: json.dumps({"metadata": one}).encode())
    | JSON.map(repr).map(str.encode)
    | st.binary(max_size=30)
)
def test_any_answer_is_a_node_or_refused(body: bytes) -> None:
    try:
        labels = parse_node(body)
    except DataError:
        return
    assert all(isinstance(value, str) for value in labels.values())
