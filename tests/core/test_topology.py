"""From hellos to the table of ranks, and how state is carried from one table to the next."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tests.detectors.world import step_matrix

from trainwarden.core.model import Epoch, Event, JobId, Json, Subject, Topology
from trainwarden.core.topology import DOMAIN_SOURCES, SITE, Domains, carried, make_topology, peer_group_R, tokens_of

JOB = JobId("nano")
NAN = float("nan")


def hello(rank: int, **data: Json) -> Event:
    subject = Subject(kind="rank", id=str(rank))
    return Event(kind="hello", subject=subject, source="test", seq=rank, t_ns=0, seen_ns=0, data=data)


def made(*hellos: Event, world_size: int = 3) -> Topology:
    by_rank = {int(one.subject.id): one for one in hellos}
    site = {"n1": {"rack": "r1"}, "n9": {"rack": "r9"}}
    return make_topology(JOB, Epoch(1), by_rank, world_size, lambda node: site.get(node, {}))


def of_devices(*devices: str) -> Topology:
    return made(*(hello(rank, device=device) for rank, device in enumerate(devices)), world_size=len(devices))


def test_ranks_sit_where_their_hellos_say() -> None:
    topology = made(
        hello(0, node="n2", device="GPU-a", slot="n2:0", coords={"pp": 0, "tp": 1}),
        hello(2, node="n1", slot="n1:0", coords={"pp": 1, "dp": 2, "ep": 3, "cp": 4}),
    )
    assert topology.device_R == ("GPU-a", "", "n1:0")
    assert topology.node_R.tolist() == [0, -1, 1]
    assert topology.domains == {"n2": {}, "n1": {"rack": "r1"}}
    assert topology.coords_RP.tolist() == [[0, 1, -1, -1, -1], [-1] * 5, [1, -1, 2, 3, 4]]


@pytest.mark.parametrize("coords", [None, 3, "pp", [1], {"pp": "1"}, {"pp": True}, {"pp": -2}, {"pp": 2**15}], ids=str)
def test_coords_that_cannot_be_count_as_not_said(coords: Json) -> None:
    assert made(hello(0, coords=coords, node=3, device=None)).coords_RP.tolist() == [[-1] * 5] * 3


def test_hellos_of_ranks_outside_the_world_are_left_out() -> None:
    assert made(hello(3, device="d", node="n3")).domains == {}


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [
        pytest.param(["a", "b", "c"], ["a", "b", "c"], [0, 1, 2], id="the same"),
        pytest.param(["a", "b", "c"], ["c", "d", "a"], [2, -1, 0], id="renumbered, one replaced"),
        pytest.param(["a", ""], ["", "a", ""], [-1, 0, -1], id="the unknown match nothing"),
        pytest.param(["a", "b"], ["b"], [1], id="fewer ranks"),
        pytest.param(["a", "a"], ["a", "a"], [0, 0], id="of two on one device the lowest"),
    ],
)
def test_state_is_carried_by_device(old: list[str], new: list[str], rows: list[int]) -> None:
    assert carried(of_devices(*old), of_devices(*new)).tolist() == rows


@pytest.mark.parametrize(
    ("stages", "groups"),
    [
        pytest.param([0, 1, 0, 1], [0, 1, 0, 1], id="one group a stage"),
        pytest.param([None, None], [0, 0], id="nobody said: one group"),
        pytest.param([2, None, 5, None], [1, 0, 2, 0], id="ids are dense, the unknown are a group"),
    ],
)
def test_peers_are_ranks_of_one_stage(stages: list[int | None], groups: list[int]) -> None:
    hellos = [hello(rank, coords={} if pp is None else {"pp": pp}) for rank, pp in enumerate(stages)]
    assert_array_equal(peer_group_R(made(*hellos, world_size=len(stages))), groups)


# fault domains


def word(node: str, by: str, source: str = "", /, **told: Json) -> Event:
    subject = Subject(kind="node", id=node)
    data: dict[str, Json] = {"from": by, "domains": told}
    source = source or f"{by}@{node}"
    return Event(kind="node.domains", subject=subject, source=source, seq=0, t_ns=0, seen_ns=0, data=data)


def heard(*words: Event) -> Domains:
    domains = Domains()
    assert [domains.hear(one) for one in words] == [True] * len(words)
    return domains


def test_of_two_words_on_one_domain_the_better_source_counts() -> None:
    domains = heard(
        word("n1", "labels", rack="r1", zone="z", nvlink="c.2"),
        word("n1", "slurm", rack="r1", leaf="sw7"),
        word("n1", "site", rack="r1", leaf="leaf-7"),
        word("n1", "nvml", nvlink="c.1", driver="570.86"),
    )
    assert domains.of("n1") == {"driver": "570.86", "leaf": "leaf-7", "nvlink": "c.1", "rack": "r1", "zone": "z"}
    assert domains.differing("n1") == {
        "leaf": {"site": "leaf-7", "slurm": "sw7"},
        "nvlink": {"nvml": "c.1", "labels": "c.2"},
    }
    assert (domains.of("n2"), domains.differing("n2")) == ({}, {})
    assert DOMAIN_SOURCES.index("site") < DOMAIN_SOURCES.index("slurm") < DOMAIN_SOURCES.index("labels")


def test_a_later_word_takes_the_place_of_the_former() -> None:
    domains = heard(word("n1", "slurm", leaf="a", spine="b"), word("n1", "slurm", leaf="c"))
    assert domains.of("n1") == {"leaf": "c"}
    assert Domains(domains.to_json()).of("n1") == {"leaf": "c"}


@pytest.mark.parametrize(
    "bad", [word("n1", "slurm", "slurm@n2", leaf="x"), word("n1", "site", "x@n2", leaf="x"), word("n1", "me", leaf="x")]
)
def test_nobody_speaks_of_other_nodes_but_the_server_of_its_site(bad: Event) -> None:
    assert not Domains().hear(bad)
    assert heard(word("n1", "site", SITE, rack="r1")).of("n1") == {"rack": "r1"}


def test_what_stands_for_not_known_is_not_shared() -> None:
    """A Slurm cluster whose operator puts nodes without a place below a switch called unknown is real."""
    told: dict[str, Json] = {"rack": "unknown", "row": "N/A", "pdu": 3, "pod": None, "zone": " ", "hall": "x" * 200}
    assert heard(word("n1", "labels", "", **told, leaf="sw1")).of("n1") == {"leaf": "sw1"}


@pytest.mark.parametrize(
    "data", [{}, {"from": "slurm"}, {"from": ["slurm"], "domains": {}}, {"from": "slurm", "domains": 3}]
)
def test_a_word_that_is_none_is_refused(data: dict[str, Json]) -> None:
    subject = Subject(kind="node", id="n1")
    assert not Domains().hear(
        Event(kind="node.domains", subject=subject, source="slurm@n1", seq=0, t_ns=0, seen_ns=0, data=data)
    )


@pytest.mark.parametrize(
    ("coords", "tokens", "sum_"),
    [
        pytest.param([{}, {}, {}], [1, 2, 4], 7, id="nothing is said"),
        pytest.param([{"dp": 0}, {"dp": 0}, {"dp": 1}], [1, 2, 4], 7, id="nothing but dp"),
        pytest.param([{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}], [8, 8, 4], 12, id="tp"),
        pytest.param([{"dp": 0, "cp": 0}, {"dp": 0, "cp": 1}, {}], [8, 7, 4], 12, id="cp, and one that says nothing"),
        pytest.param([{"dp": 0, "pp": 0}, {"dp": 0, "pp": 1}, {"dp": 1, "pp": 1}], [NAN, 8, 4], 12, id="pp"),
        pytest.param([{"dp": 0, "ep": 0, "tp": 0}, {"dp": 0, "ep": 1, "tp": 0}, {"tp": 1}], [8, 4, 2], 14, id="ep"),
        pytest.param([{"dp": 0, "tp": 0}, {}, {}], [-5, NAN, NAN], NAN, id="no rank tells any"),
    ],
)
def test_ranks_that_work_on_the_same_tokens_count_once(
    coords: list[dict[str, Json]], tokens: list[float], sum_: float
) -> None:
    topology = made(*(hello(rank, coords=said) for rank, said in enumerate(coords)))
    assert_array_equal(tokens_of(step_matrix(topology, 1, {"tokens": np.array(tokens)})), sum_)
