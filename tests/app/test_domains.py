"""Fault domains on their way from a node and from the site file into a job's topology, and out of its recording."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.app.served import Node, until
from tests.app.test_node_agent import Kept, an_agent, jobs_of, turn_until
from tests.collectors.world import World, a_world

from trainwarden.app.domains import JobSite
from trainwarden.app.jobs import Jobs, JobsConfig
from trainwarden.app.replay import replay
from trainwarden.app.wiring import Settings
from trainwarden.core.codec import dumps
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, JobId, Json, Subject, Topology
from trainwarden.core.recording import Recording
from trainwarden.core.site import SiteConfig
from trainwarden.core.steps import StepAssembler, StepsConfig

SECOND_NS = 10**9
JOB = JobId("j")


class Told:
    """A source of a node that says what a test wants."""

    name, period_s = "slurm@n1", 0.02

    def __init__(self) -> None:
        self._emit = Emitter(self.name, job=None, start_ns=0)
        self.words: list[dict[str, Json]] = []

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        while self.words:
            data: dict[str, Json] = {"from": "slurm", "domains": self.words.pop(0)}
            yield self._emit("node.domains", Subject(kind="node", id="n1"), now_ns=now_ns, data=data)


@pytest.fixture
def world() -> Iterator[World]:
    with a_world() as made:
        yield made


def of_the_job(kept: Kept) -> list[Event]:
    """What the job is told, in order: fault domains and hellos."""
    return [
        one
        for one in kept.items
        if isinstance(one, Event) and one.job == "job" and one.kind in ("node.domains", "hello")
    ]


def test_an_agent_tells_a_job_of_its_node_before_its_ranks_say_hello(world: World) -> None:
    told = Told()
    told.words.append({"leaf": "sw1"})
    with an_agent(told, jobs_of(world.root)) as (agent, kept):
        turn_until(agent, lambda: kept.events("node.domains"), "the node's word")
        assert [one.job for one in kept.events("node.domains")] == [None]
        world.attach()
        turn_until(agent, lambda: kept.events("hello"), "the hello")
        first, second = of_the_job(kept)
        assert (first.kind, second.kind) == ("node.domains", "hello")
        assert (first.source, str(first.subject)) == ("domains/job@n1", "node:n1")
        assert first.data == {"from": "slurm", "domains": {"leaf": "sw1"}}
        told.words.append({"leaf": "sw2"})
        turn_until(agent, lambda: len(of_the_job(kept)) > 2, "the news")
        assert of_the_job(kept)[2].data["domains"] == {"leaf": "sw2"}
        assert of_the_job(kept)[2].seq > first.seq


# a server


@dataclass
class Served:
    """All jobs of a server with a site file; items as the agents of nodes send them."""

    folder: Path
    said: list[str] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    now_ns: int = SECOND_NS

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        settings = Settings(site=SiteConfig(file=self.folder / "site.yaml"))
        self.jobs = Jobs(settings, JobsConfig(), self.folder / "state", self.said.append)
        self.jobs.resume(self.now_ns)

    def take(self, node: str, items: Sequence[Frame | Event]) -> None:
        self.now_ns += SECOND_NS // 10
        self.jobs.take(f"life of {node}", items, self.now_ns, of_node=True)

    def begin(self) -> None:
        """Two ranks say hello, each on its node; a step is done."""
        for rank, name in enumerate(("n0", "n1")):
            node = self.nodes[name] = Node(name, JOB, [rank], 2)
            hello = node.hellos()[0]
            self.take(name, [domains(name, slurm={"leaf": "sw1", "row": "9"}), with_node(hello, name)])
        for name, node in self.nodes.items():
            self.take(name, node.steps(1, 1))
        self.tick(2)

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_ns += SECOND_NS
            self.jobs.tick(self.now_ns)

    def tick_until(self, met: Callable[[], object], what: str) -> None:
        """The site file is looked at in a thread."""

        def tick() -> object:
            self.tick()
            return met()

        until(what, tick)

    def rack(self, node: str) -> str | None:
        """What a topology that began now would have."""
        return self.jobs.open[JOB].server.parts.assembler.domains.of(node).get("rack")

    def topology(self) -> Topology:
        found = self.jobs.open[JOB].server.line.topology
        assert found is not None
        return found

    def recorded(self) -> list[Frame | Event]:
        assert self.jobs.save()
        return [*Recording(self.folder / "state" / JOB / "frames")]

    def words(self, kind: str) -> list[Event]:
        return [one for one in self.recorded() if isinstance(one, Event) and one.kind == kind]


def site(folder: Path, **racks: str) -> None:
    entries = [{"hosts": node, "domains": {"rack": rack, "row": "7"}} for node, rack in racks.items()]
    (folder / "site.yaml").write_text(json.dumps({"site": {"nodes": entries}}))


def with_node(hello: Event, node: str) -> Event:
    data = {**hello.data, "node": node}
    return Event(**{name: getattr(hello, name) for name in hello.__slots__} | {"data": data})


def domains(node: str, **told: dict[str, Json]) -> Event:
    ((by, named),) = told.items()
    emit = Emitter(f"domains/{JOB}@{node}", job=JOB, start_ns=0)
    return emit("node.domains", Subject(kind="node", id=node), now_ns=1, data={"from": by, "domains": named})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    site(tmp_path, n0="r1", n1="r2", n5="r3")
    made = Served(tmp_path)
    yield made
    made.jobs.close()


def test_a_topology_has_what_the_site_file_and_the_nodes_say(served: Served) -> None:
    served.begin()
    assert served.topology().domains == {
        "n0": {"leaf": "sw1", "rack": "r1", "row": "7"},
        "n1": {"leaf": "sw1", "rack": "r2", "row": "7"},
    }
    site_words = [one for one in served.words("node.domains") if one.data["from"] == "site"]
    assert [one.subject.id for one in site_words] == ["n0", "n1"], "nodes of others are no matter of this job"


def test_sources_that_differ_are_told_once_each_value_with_its_source(served: Served) -> None:
    served.begin()
    served.take("n1", [domains("n1", slurm={"row": "8"})])
    (differ,) = served.words("domains.differ")
    assert str(differ.subject) == "node:n0"
    assert differ.data == {"domain": "row", "used": "site", "values": {"site": "7", "slurm": "9"}}
    assert [line for line in served.said if "fault domain" in line] == [
        "job j: fault domain row of node n0: site says '7', slurm says '9'; what site says counts"
    ]


def test_a_site_file_that_changes_holds_from_the_next_topology_on_and_changes_no_replay(served: Served) -> None:
    served.begin()
    before = served.recorded()
    found = [dumps(one) for one in replay(before, Settings())]
    site(served.folder, n0="r1", n1="r9")
    served.tick_until(lambda: served.rack("n1") == "r9", "the change")
    assert served.topology().domains["n1"]["rack"] == "r2"
    assert [dumps(one) for one in replay(before, Settings())] == found
    assert replayed(before).domains == replayed(served.recorded()).domains == served.topology().domains
    (served.folder / "site.yaml").write_text("site: {nodes: [{host: n1}]}")
    served.tick_until(lambda: "as it was" in served.said[-1], "words of the file that is wrong")
    served.tick(4)
    assert [line for line in served.said if "as it was before holds" in line] == [
        f"the site file as it was before holds: {served.folder}/site.yaml: 2 problems\n"
        '  site.nodes[0].host: is not known here, got "n1"; allowed: domains, hosts, rails\n'
        "  site.nodes[0].hosts: is missing"
    ]
    words = len(served.words("node.domains"))
    site(served.folder, n1="r9")
    served.tick_until(lambda: served.rack("n0") is None, "that a node was taken out")
    assert len(served.words("node.domains")) == words + 1


def replayed(items: Sequence[Frame | Event]) -> Topology:
    assembler = StepAssembler(JOB, StepsConfig())
    (found,) = [one for item in items for one in assembler.feed(item) if isinstance(one, Topology)]
    return found


def test_a_server_that_begins_anew_knows_what_was_told(served: Served) -> None:
    served.begin()
    words, topology = len(served.words("node.domains")), served.topology()
    served.jobs.close()
    site(served.folder, n0="r1", n1="r9")
    served.open()
    assert len(served.words("node.domains")) == words + 1, "only what is news"
    for name, node in served.nodes.items():
        served.take(name, node.steps(2, 2))
    served.tick(2)
    last = served.jobs.open[JOB].server.line.last
    assert last is not None
    assert (last.step, last.topology.domains) == (2, topology.domains)


def test_nodes_that_the_site_file_lacks_are_named_once(served: Served) -> None:
    for name in ("n7", "n8"):
        served.take(name, Node(name, JOB, [0], 1).steps(1, 1))
    assert [line for line in served.said if "site file" in line] == [
        "job j: the site file says nothing of node n7 (nor, it may be, of others)"
    ]


def test_a_site_file_that_is_wrong_at_the_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("site: {node: []}")
    with pytest.raises(ConfigError, match=r"site\.node: is not known here"):
        Served(tmp_path)


# `trainwarden run`


def test_a_run_in_a_slurm_step_knows_where_it_runs() -> None:
    said: list[str] = []
    assembler = StepAssembler(JOB, StepsConfig())
    told = JobSite(assembler, "domains@n1", JOB, said.append, start_ns=1)
    step = {"SLURM_TOPOLOGY_ADDR": "top.sw1.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    for one in [*told.tell(["n1"], None, 2), *told.tell_step("n1", step, 2), *told.tell_step("n1", {}, 2)]:
        assembler.feed(one)
    assert assembler.domains.of("n1") == {"leaf": "sw1", "spine": "top"}
    assert [*told.tell_step("n1", step | {"SLURM_TOPOLOGY_ADDR": "n1"}, 2)] == []
    assert said == ["fault domains: SLURM_TOPOLOGY_ADDR 'n1' is not 'switch.switch.node'"]
