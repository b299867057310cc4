"""Slurm's switches and blocks, as its files, scontrol and the environment of a step have them.

TREE and STEP were printed by Slurm 22.05.8 (Debian 12) of a small tree made for this; BLOCKS has the form that
topology_block.so of 24.11.5 prints (its format strings), the rest is as the manual pages say.
"""

import stat
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.collectors.slurm import Slurm, SlurmConfig, Tree, in_step, parse_conf, parse_yaml
from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.model import Event

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=400 Nodes=n[3-4]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[5-6]
SwitchName=leaf4 Level=0 LinkSpeed=1 Nodes=n[7-8]
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=n[5-8] Switches=leaf[3-4]
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=spine[1-2]
"""
TREE_FILE = """\
# two rows of leaf switches
SwitchName=leaf1 Nodes=n[1-2]
switchname=leaf2 nodes=n[3-4] LinkSpeed=400   # lower case is as good
SwitchName=leaf3 \\
    Nodes=n[5-6]
SwitchName=leaf4 Nodes=n[7-8]
SwitchName=spine1 Switches=leaf[1-2]
SwitchName=spine2 Switches="leaf[3-4]"
SwitchName=core Switches=spine[1-2]
"""
STEP = {
    "SLURM_TOPOLOGY_ADDR": "core.spine1.leaf2.n3",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node",
    "SLURMD_NODENAME": "n3",
}
N3 = {"leaf": "leaf2", "spine": "spine1", "core": "core"}
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
"""
YAML = """\
---
- topology: eth
  cluster_default: false
  tree:
    switches:
      - switch: eth-root
        children: eth[1-2]
      - {switch: eth1, nodes: "n[1-4]"}
      - {switch: eth2, nodes: "n[5-8]"}
- topology: ib
  cluster_default: true
  tree:
    switches:
      - switch: 7
        nodes: n[1-4]
- topology: nvl
  cluster_default: false
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: "n[1-2]"}
      - {block: b2, nodes: "n[3-4]"}
- topology: rest
  flat: true
"""


def domains(trees: list[Tree], node: str) -> dict[str, str]:
    (tree,) = trees
    return tree.domains(node)


@pytest.mark.parametrize("text", [TREE, TREE_FILE], ids=["scontrol", "topology.conf"])
def test_a_node_hangs_on_its_switches_from_the_leaf_upwards(text: str) -> None:
    assert domains(parse_conf(text), "n3") == N3
    assert domains(parse_conf(text), "n9") == {}


def test_a_node_stands_in_its_block() -> None:
    assert domains(parse_conf(BLOCKS), "n3") == {"block": "b2"}


def test_several_topologies_are_told_apart_and_the_clusters_default_comes_first() -> None:
    told = [(name, tree.domains("n3")) for name, tree in parse_yaml(YAML)]
    assert told == [
        ("ib", {"leaf": "7"}),
        ("eth", {"leaf": "eth1", "spine": "eth-root"}),
        ("nvl", {"block": "b2"}),
        ("rest", {}),
    ]


def test_a_node_on_several_leaf_switches_shares_them_only_with_its_like() -> None:
    """One line a rail."""
    text = (
        "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[1-2]\nSwitchName=c Nodes=n[2-3]\nSwitchName=r Switches=a,b,c"
    )
    tree = parse_conf(text)
    assert [domains(tree, f"n{number}")["leaf"] for number in (1, 2, 3)] == ["a+b", "a+b+c", "c"]
    assert domains(tree, "n2")["spine"] == "r"


def test_switches_in_a_circle_end_somewhere() -> None:
    tree = parse_conf("SwitchName=a Nodes=n1 Switches=c\nSwitchName=b Switches=a\nSwitchName=c Switches=b")
    assert domains(tree, "n1")["leaf"] == "a"


def test_a_switch_of_what_is_not_known_is_none() -> None:
    assert domains(parse_conf("SwitchName=root Switches=unknown\nSwitchName=unknown Nodes=n1"), "n1") == {
        "spine": "root"
    }


@pytest.mark.parametrize(
    ("env", "told"),
    [
        pytest.param(STEP, N3, id="a real step"),
        pytest.param({}, {}, id="no step"),
        pytest.param({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, {}, id="flat"),
        pytest.param(
            {"SLURM_TOPOLOGY_ADDR": "b2.n3", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}, {"block": "b2"}, id="a block"
        ),
        pytest.param(
            {"SLURM_TOPOLOGY_ADDR": "s[1-2].s0.n3.local", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
            {"leaf": "s0", "spine": "s[1-2]"},
            id="two roots, and a node with dots",
        ),
    ],
)
def test_a_step_knows_where_it_runs(env: Mapping[str, str], told: dict[str, str]) -> None:
    assert in_step(env) == told


def test_an_address_that_is_not_as_its_pattern_says_is_refused() -> None:
    with pytest.raises(DataError, match=r"SLURM_TOPOLOGY_ADDR 's0\.n1' is not 'switch\.switch\.node'"):
        in_step({"SLURM_TOPOLOGY_ADDR": "s0.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})


LINES = st.lists(
    st.sampled_from([*TREE.splitlines(), *BLOCKS.splitlines(), "SwitchName=x Nodes=n[", "# x", "BlockSizes=2"])
    | st.text(alphabet='=#\\ nS[]0-1,."', max_size=20),
    max_size=8,
)


@settings(max_examples=200)
@given(LINES.map("\n".join) | st.text(max_size=60), st.sampled_from(["n1", "n3", ""]))
def test_any_topology_conf_is_read_or_refused(text: str, node: str) -> None:
    try:
        told = domains(parse_conf(text), node)
    except DataError:
        return
    assert all(told.values())


YAML_LINES = st.lists(st.sampled_from([*YAML.splitlines(), "  - [", "x: {", "- 3", "    nodes: n[3-1]"]), max_size=12)


@settings(max_examples=200)
@given(YAML_LINES.map("\n".join) | st.text(max_size=40))
def test_any_topology_yaml_is_read_or_refused(text: str) -> None:
    try:
        told = [tree.domains("n1") for _, tree in parse_yaml(text)]
    except DataError:
        return
    assert all(value for one in told for value in one.values())


def test_yaml_without_a_bottom_is_refused() -> None:
    with pytest.raises(DataError, match="no YAML"):
        parse_yaml("[" * 500)


# the source


def source(folder: Path, *, env: Mapping[str, str] | None = None, node: str = "n3", scontrol: str = "") -> Slurm:
    return Slurm(SlurmConfig(folders=(folder,), scontrol=scontrol), node=node, start_ns=0, env=env or {})


def said(slurm: Slurm, now_s: float = 0.0) -> list[object]:
    """Domains, or why it is blind."""
    events = [one for one in slurm.poll(int(now_s * 1e9)) if isinstance(one, Event)]
    return [one.data["domains"] if one.kind == "node.domains" else f"{one.kind}: {one.data['why']}" for one in events]


def test_domains_are_told_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(TREE_FILE)
    slurm = source(tmp_path, node="n3.cluster.local")
    (event,) = slurm.poll(5)
    assert isinstance(event, Event)
    assert (event.source, str(event.subject)) == ("slurm@n3.cluster.local", "node:n3.cluster.local")
    assert event.data == {"from": "slurm", "domains": N3}
    assert said(slurm, 60) == []
    (tmp_path / "topology.conf").write_text("SwitchName=leaf9 Nodes=n[1-3]")
    assert said(slurm, 75) == [{"leaf": "leaf9"}]
    (tmp_path / "topology.yaml").write_text(YAML)
    assert said(slurm, 90) == [{"leaf": "7", "eth.leaf": "eth1", "spine": "eth-root", "block": "b2"}], "as Slurm does"


def test_a_node_without_slurm_says_nothing(tmp_path: Path) -> None:
    assert said(source(tmp_path)) == []


def test_the_step_that_an_agent_runs_in_tells_it(tmp_path: Path) -> None:
    assert said(source(tmp_path, env=STEP)) == [N3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("ClusterName=x", "neither SwitchName nor BlockName in it", id="no topology"),
        pytest.param(
            "SwitchName=s Nodes=n[3-1]",
            "host list 'n[3-1]': needs a range that counts up, both ends as wide, got 3-1",
            id="a bad range",
        ),
        pytest.param("SwitchName=s Nodes=n[4-5]", "node n3 is in no switch and no block of it", id="not this node"),
    ],
)
def test_what_cannot_be_used_is_said_and_what_was_known_stays(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "topology.conf"
    slurm = source(tmp_path)
    file.write_text(text)
    assert said(slurm) == [f"source.blind: {file}: {why}"]
    file.write_text(TREE)
    assert said(slurm) == ["source.up: it is not blind any more", N3]
    file.write_text("SwitchName=s Nodes=n[")
    assert [str(one)[:12] for one in said(slurm)] == ["source.blind"], "and no word that it hangs nowhere now"


def test_a_file_that_cannot_be_read_is_blind(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").mkdir()
    assert said(source(tmp_path)) == [f"source.blind: {tmp_path}/topology.conf: Is a directory"]


def test_scontrol_is_asked_where_there_is_no_file(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\n[ "$*" = "show topology" ] && cat <<E\n{TREE}E\n')
    program.chmod(stat.S_IRWXU)
    slurm = source(tmp_path / "none", scontrol=str(program))
    assert said(slurm) == [N3]
    program.write_text("#!/bin/sh\necho 'slurm_load_topo error: Unable to contact slurm controller' >&2; exit 1")
    assert said(slurm, 300) == [], "once in ten minutes"
    assert said(slurm, 601) == [
        f"source.blind: Slurm: {program}: status 1: slurm_load_topo error: Unable to contact slurm controller"
    ]


def test_the_controller_is_not_asked_too_often() -> None:
    with pytest.raises(ConfigError, match=r"collectors\.slurm\.period: need at least 10s, got 1s"):
        SlurmConfig(period=SlurmConfig().period / 600)
