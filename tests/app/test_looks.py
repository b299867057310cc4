"""Looks that a server asks for: what it sends to whom, what an agent does and refuses, what is said of the silent."""

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.app.served import Node, tokens_file, until, uplink
from tests.collectors.world import World, a_world, tmpfs_folder
from tests.end_to_end.light import Meeting

from trainwarden.app import looking as looking_module
from trainwarden.app import node_jobs
from trainwarden.app.asking import Asking, LooksConfig
from trainwarden.app.isolation import Isolation, IsolationConfig
from trainwarden.app.jobs import JobsConfig
from trainwarden.app.looking import JobLooks, Looking
from trainwarden.app.node_agent import NodeAgent, Sent
from trainwarden.app.node_jobs import Jobs, JobSource
from trainwarden.app.posting import HttpConfig
from trainwarden.app.serving import ServerConfig, Serving
from trainwarden.app.uplink import UplinkConfig
from trainwarden.app.wiring import Settings
from trainwarden.collectors.nccl.source import DumpsConfig
from trainwarden.collectors.rank import FORWARD, WAIT, attach
from trainwarden.core.clock import Clock
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Event, Frame, Incident, JobId, Look, Subject
from trainwarden.core.recording import Recording
from trainwarden.core.wire import FRAME, HELLO, LOOK, Asked, Decoder, Hello, Welcome, heard, pack, say
from trainwarden.detectors.hang import HangConfig

SECOND_NS = 10**9
DEADLINE_S = 20.0
JOB = JobId("job")


def look(*ranks: int, key: str = "k", what: Any = "stack") -> Look:
    return Look(key=key, what=what, subjects=tuple(Subject(kind="rank", id=str(rank)) for rank in ranks))


def asked(*ranks: int, job: str = "job", **more: Any) -> Asked:
    return Asked(job=JobId(job), look=look(*ranks, **more))


# what a server asks


class Sending:
    """Asking of one job, and what it sent."""

    def __init__(self, **config: Any) -> None:
        self.sent: list[tuple[str, Asked]] = []
        self.why = ""
        self.counts: Counter[str] = Counter()
        emit = Emitter("server@ingest", job=JOB, start_ns=0)
        self.asking = Asking(LooksConfig(**{"dumps": False, **config}), JOB, emit, self._send, self.counts)
        self.now_ns = SECOND_NS

    def _send(self, asks: Sequence[tuple[str, Asked]]) -> list[str]:
        self.sent += asks
        return [self.why] * len(asks)

    def turn(self, after_s: float = 0.0) -> list[Event]:
        self.now_ns += int(after_s * 1e9)
        return list(self.asking.turn(self.now_ns))

    def hear(self, *items: Frame | Event) -> None:
        self.asking.hear(items, self.now_ns)

    def to(self) -> dict[str, list[str]]:
        """Node -> ranks, of what was sent since this was asked last."""
        sent, self.sent = self.sent, []
        return {node: [subject.id for subject in one.look.subjects] for node, one in sent}


def placed(**config: Any) -> Sending:
    """Ranks 0 and 1 on n0, 2 and 3 on n1."""
    sending = Sending(**config)
    for name, ranks in (("n0", [0, 1]), ("n1", [2, 3])):
        sending.hear(*Node(name, JOB, ranks, 4).hellos())
    return sending


def answered(node: str, key: str = "k", why: str = "") -> Event:
    data = {"key": key, "what": "stack", "ranks": [], "why": why}
    subject = Subject(kind="source", id=f"looks/job@{node}")
    return Event(kind="look.answer", subject=subject, source=subject.id, seq=1, t_ns=0, seen_ns=0, data=data)


def stack(node: str, rank: int) -> Event:
    subject = Subject(kind="rank", id=str(rank))
    return Event(
        kind="stack", subject=subject, source=f"stacks/job@{node}", seq=1, t_ns=0, seen_ns=0, data={"rank": rank}
    )


def test_a_look_goes_only_to_the_nodes_that_hold_its_ranks_and_once() -> None:
    sending = placed()
    sending.asking.ask(look(3, 2))
    assert sending.turn() == []
    assert sending.to() == {"n1": ["3", "2"]}
    sending.hear(stack("n1", 3), stack("n1", 2), answered("n1"))
    sending.asking.ask(look(3, 2))
    assert [*sending.turn(5), *sending.turn(30)] == []
    assert sending.to() == {}
    assert sending.counts == {"asked": 1, "answered": 1}


def test_ranks_are_where_their_newest_hello_came_from() -> None:
    sending = placed()
    moved = Node("n5", JOB, [3], 4).hellos()[0]
    sending.hear(replace(moved, epoch=Epoch(2 << 32)), *Node("n1", JOB, [3], 4).hellos())
    sending.asking.ask(look(3))
    sending.turn()
    assert sending.to() == {"n5": ["3"]}
    node = Look(key="of a node", what="stack", subjects=(Subject(kind="node", id="n0"), Subject(kind="rank", id="x")))
    sending.asking.ask(node)
    sending.turn()
    assert sending.to() == {"n0": ["0", "1"]}


def test_who_does_not_answer_is_asked_again_then_said_and_costs_no_other() -> None:
    sending = placed(answer=timedelta(seconds=5))
    sending.asking.ask(look(0, 1, 2, 3))
    assert sending.turn() == []
    sending.hear(stack("n0", 0), stack("n0", 1), answered("n0"), stack("n1", 2))
    assert sending.turn(3) == []
    assert sending.to() == {"n0": ["0", "1"], "n1": ["2", "3"]}
    blind, denied = sending.turn(3)
    assert (blind.kind, str(blind.subject)) == ("source.blind", "source:looks/job@n1")
    assert "stack of rank 3: its agent was asked, no answer for 5 s" in str(blind.data["why"])
    assert (denied.kind, denied.data["rank"], denied.data["frames"]) == ("stack", 3, [])
    assert str(denied.data["denied"]).startswith("n1: its agent was asked")
    assert sending.counts == {"asked": 2, "answered": 1, "unanswered": 1}
    sending.asking.ask(look(2, key="later"))
    sending.turn()
    sending.hear(answered("n1", "later"))
    assert [event.kind for event in sending.turn()] == ["source.up", "stack"]


def test_an_agent_at_work_on_many_ranks_is_not_silent() -> None:
    sending = placed(answer=timedelta(seconds=5), dumps=True)
    sending.asking.ask(look(2, 3))
    sending.turn()
    assert [(node, one.look.what, one.look.key) for node, one in sending.sent] == [
        ("n1", "dump", "k/dump"),
        ("n1", "stack", "k"),
    ]
    for rank in (2, 3):
        sending.hear(stack("n1", rank))
        assert sending.turn(4) == []
    assert sending.turn(2)[0].kind == "source.blind"


def test_what_cannot_be_asked_is_said() -> None:
    sending = placed(ranks=3)
    sending.why = "its agent is not connected"
    sending.asking.ask(look(0, 9, 2, 3))
    too_many, nowhere, denied = sending.turn()
    assert "3 of 4 ranks are asked" in str(too_many.data["why"])
    assert "stack of rank 9: no agent has said that it is on its node" in str(nowhere.data["why"])
    assert denied.data["rank"] == 9
    said = sending.turn(16)
    assert [event.data["why"] for event in said if event.kind == "source.blind"] == [
        "stack of rank 0: its agent is not connected",
        "stack of rank 2: its agent is not connected",
    ]


def test_more_looks_than_the_limit_of_a_minute_are_not_asked() -> None:
    sending = placed(a_minute=2)
    for number in range(3):
        sending.asking.ask(look(0, key=f"k{number}"))
    (blind,) = sending.turn()
    assert "2 looks were asked in the last minute" in str(blind.data["why"])
    assert sending.counts == {"asked": 2, "too_often": 1}
    sending.asking.ask(look(0, key="k9"))
    sending.turn(61)
    assert sending.counts["asked"] == 3


def test_the_next_server_knows_where_ranks_are_and_asks_again_only_what_was_under_way() -> None:
    first, second = placed(), Sending()
    for key, rank in (("done", 0), ("under way", 2)):
        first.asking.ask(look(rank, key=key))
    first.turn()
    first.hear(answered("n0", "done"))
    first.turn()
    second.asking.restore(first.asking.snapshot())
    for key, rank in (("done", 0), ("under way", 2)):
        second.asking.ask(look(rank, key=key))
    second.turn()
    assert second.to() == {"n1": ["2"]}
    Sending().asking.restore({})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 0}, r"server\.jobs\.looks\.ranks: need 1 to 1024, got 0"),
        ({"a_minute": 61}, r"server\.jobs\.looks\.a_minute: need 1 to 60, got 61"),
        ({"answer": timedelta(0)}, r"server\.jobs\.looks\.answer: need at least 1s, got 0s"),
    ],
)
def test_settings_that_are_wrong_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LooksConfig(**changes)


# what an agent does


@pytest.fixture
def world() -> Iterator[World]:
    with a_world() as made:
        yield made


@contextmanager
def job_looks(world: World, config: DumpsConfig | None = None) -> Iterator[JobLooks]:
    """Of the job of this world, whose ranks have said hello."""
    jobs = Jobs("n1", [world.root], start_ns=0, bases=())
    list(jobs.poll(time.time_ns()))
    source = JobSource(jobs.found[JOB], "n1", start_ns=time.time_ns())
    list(source.poll(time.time_ns()))
    with closing(source):
        yield JobLooks(config or DumpsConfig(), source, "n1", start_ns=time.time_ns())


def polled(source: JobLooks) -> list[Event]:
    return [item for _ in range(4) for item in source.poll(time.time_ns()) if isinstance(item, Event)]


def test_a_key_that_comes_again_is_answered_again_and_carried_out_once(world: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fr_0.pipe")
    reader = os.open(tmp_path / "fr_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    world.attach()
    with job_looks(world, DumpsConfig(pipe=f"{tmp_path}/fr_")) as source, os.fdopen(reader, "rb", buffering=0) as pipe:
        answers = []
        for _ in range(2):
            assert source.ask(look(0, 5, what="dump"), time.time_ns()) == ""
            answers += polled(source)
        assert pipe.read(10) == b"1"
        assert [(event.kind, event.source) for event in answers] == [("look.answer", "looks/job@n1")] * 2
        assert answers[0].data == {"key": "k", "what": "dump", "ranks": [0], "why": ""}


def test_stacks_come_from_a_source_of_their_job_two_ranks_at_a_time(world: World) -> None:
    world.attach()
    with job_looks(world) as source:
        source.ask(look(5, 6, 0), time.time_ns())
        assert list(source.poll(time.time_ns())) == [], "ranks 5 and 6 are not here"
        seen, answer = source.poll(time.time_ns())
        assert isinstance(seen, Event)
        assert (seen.source, seen.job, seen.data["rank"]) == ("stacks/job@n1", "job", 0)
        assert seen.data["frames"] or seen.data["denied"]
        assert isinstance(answer, Event)
        assert answer.data["ranks"] == [0]


def test_looks_without_end_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.attach()
    monkeypatch.setattr(looking_module, "KEYS_MAX", 4)
    with job_looks(world) as source:
        now_ns = time.time_ns()
        whys = [source.ask(look(7, key=str(number)), now_ns) for number in range(20)]
        assert whys[:12] == [""] * 12
        assert whys[12] == "12 stacks of this job were taken in the last minute"
        assert source.ask(look(7, key="a", what="dump"), now_ns) == ""
        assert source.ask(look(7, key="b"), now_ns + 61 * SECOND_NS) == ""
        assert len(source._known) == 4


def test_a_look_for_a_job_that_is_not_here_is_refused_and_counted(world: World) -> None:
    looking = Looking("n1", start_ns=0)
    world.attach()
    with job_looks(world) as source:
        looking.take(asked(0, job="another"))
        looking.take(asked(0))
        (refused,) = looking.hand_on([source], 1)
    assert (refused.kind, refused.source, refused.job) == ("look.answer", "looks@n1", None)
    assert refused.data["why"] == "job another is not on this node"
    assert looking.counts == {"taken": 1, "refused": 1}
    assert looking.hand_on([], 1) == []


# between them


def test_an_agent_takes_nothing_but_looks_and_passes_over_what_a_newer_server_says(tmp_path: Path) -> None:
    got: list[Asked] = []
    newer = pack(LOOK, b'{"job": "j", "look": {"key": "k", "what": "core", "subjects": []}}')
    unknown = say(asked(1)).replace(b"TW\x07", b"TW\x4d")
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = uplink(tmp_path, f"127.0.0.1:{server.getsockname()[1]}", on_look=got.append)
        peer, _ = server.accept()
        with peer, closing(sending):
            hello = dict(Decoder(HELLO).feed(peer.recv(4096)))[HELLO]
            assert heard(Hello, hello).takes == ("look",)
            # what comes in one piece with the welcome counts too
            peer.sendall(
                say(Welcome(ack_s=1)) + say(asked(1)) + newer + unknown + pack(FRAME, b"x") + say(asked(2))[:20]
            )
            peer.sendall(say(asked(2))[20:])
            until("two looks", lambda: len(got) == 2)
            assert got == [asked(1), asked(2)]
            until("what is passed over", lambda: sending.counts.not_taken == 3)
            assert sending.failing == ""


def test_an_agent_of_before_looks_says_nothing_of_them() -> None:
    old = say(Hello(node="n1", token="t", uplink="u", takes=("look",))).replace(b', "takes": ["look"]', b"")
    assert heard(Hello, old[8:]).takes == ()


def test_looks_are_taken_only_from_a_server_that_cannot_be_another() -> None:
    for certain, config in (
        (True, UplinkConfig(server="10.0.0.1:9401")),
        (True, UplinkConfig(server="127.0.0.1:9401", tls=False)),
        (False, UplinkConfig(server="10.0.0.1:9401", tls=False, plaintext=True)),
    ):
        assert config.certain == certain, config


@contextmanager
def serving(folder: Path, clock: Clock = time.time_ns, http: str = "", **config: Any) -> Iterator[tuple[Serving, str]]:
    """And its address: for POSTs, if it listens for them."""
    words: list[str] = []
    tokens, quick = tokens_file(folder), timedelta(seconds=2)
    made = Serving(
        ServerConfig(
            host="127.0.0.1",
            port=0,
            state=folder / "state",
            tokens=tokens,
            settings=Settings(hang=HangConfig(step=quick, first_step=quick, floor=quick)),
            jobs=JobsConfig(looks=LooksConfig(**config)),
            http=HttpConfig(listen=http),
        ),
        words.append,
        clock,
    )
    host, port = made.start()
    try:
        yield made, words[0].split()[-1] if http else f"{host}:{port}"
    finally:
        made.finish()


def turned(server: Serving, met: Callable[[], Any]) -> Callable[[], Any]:
    def turn() -> Any:
        server.turn()
        return met()

    return turn


def hellos(server: Serving) -> list[Hello]:
    return [link.hello for link in server.ingest.links.copy() if link.hello is not None]


def recorded(folder: Path, kind: str) -> list[Event]:
    items = Recording(folder / "state" / "job" / "frames")
    return [item for item in items if isinstance(item, Event) and item.kind == kind]


def test_an_agent_that_never_answers_stops_no_other_and_an_old_one_is_not_asked(tmp_path: Path) -> None:
    asked_n1, later_ns = list[Asked](), 0
    looking = Looking("n0", start_ns=time.time_ns())
    with serving(tmp_path, lambda: time.time_ns() + later_ns, dumps=False) as (server, address), ExitStack() as stack:
        silent = stack.enter_context(closing(uplink(tmp_path, address, "n1", on_look=asked_n1.append)))
        answers = stack.enter_context(closing(uplink(tmp_path, address, "n0", on_look=looking.take)))
        for sending, node, ranks in ((answers, "n0", [0]), (silent, "n1", [1])):
            sending.offer([*Node(node, JOB, ranks, 2).hellos(), *Node(node, JOB, ranks, 2).steps(1, 1)])
        until("the job", turned(server, lambda: len(server.jobs.open[JOB].nodes) == 2 if server.jobs.open else False))
        tenant = Node("n0", JOB, [7], 8)  # with the token of his job he cannot have a node asked
        server.jobs.take("of the job", tenant.hellos(), time.time_ns(), of_node=False)
        server.jobs.open[JOB].server._look(look(0, 1, 7))

        def answer() -> int:
            answers.offer(looking.hand_on([], time.time_ns()))
            return server.jobs.looks["refused"]

        until("the answer of n0", turned(server, answer))
        until("the question at n1", lambda: asked_n1)
        later_ns = 20 * SECOND_NS
        until("the end of our patience", turned(server, lambda: server.jobs.looks["unanswered"]))
        assert server.jobs.looks == {"asked": 2, "refused": 1, "unanswered": 1}
        assert {one.look.key for one in asked_n1} == {"k"}
        old = stack.enter_context(closing(uplink(tmp_path, address, "n1")))
        silent.close()
        until("the old one", lambda: [one.takes for one in hellos(server) if one.node == "n1"] == [()])
        assert server.jobs.send([("n1", asked(1)), ("n7", asked(2)), ("n0", asked(0))]) == [
            "its agent takes no looks: upgrade it, or let agent.sources name looks",
            "its agent is not connected",
            "",
        ]
        assert old.counts.not_taken == 0
    denied = {event.data["rank"]: event.data["denied"] for event in recorded(tmp_path, "stack")}
    assert denied == {
        0: "n0: job job is not on this node",
        1: "n1: its agent was asked, no answer for 15 s",
        7: "no agent has said that it is on its node",
    }


def test_a_look_rides_in_the_answer_to_a_post(tmp_path: Path) -> None:
    got: list[Asked] = []
    with ExitStack() as stack:
        server, url = stack.enter_context(serving(tmp_path, http="127.0.0.1:0"))
        stack.enter_context(closing(uplink(tmp_path, url, "n0", on_look=got.append, post_s=0.05)))
        until("the agent", lambda: hellos(server))
        assert server.jobs.send([("n0", asked(0))]) == [""]
        until("the look", lambda: got)
    assert got == [asked(0)]


def be_a_rank(root: Path, rank: int, meeting: Meeting) -> None:
    os.environ["TRAINWARDEN_DIR"] = str(root)
    w, end_s = attach(rank=rank, world_size=2, local_rank=0), time.monotonic() + 2 * DEADLINE_S
    for step in range(100_000):
        w.begin(step)
        w.mark(FORWARD)
        time.sleep(0.02)
        w.mark(WAIT)
        meeting.wait(rank, step)
        w.end()
        if time.monotonic() > end_s:
            return


def test_a_stopped_rank_is_named_by_the_server_with_its_stack(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: ranks on two nodes, agents, wire, line, finding, look, and back with what was seen."""
    monkeypatch.setattr(node_jobs, "LIVE_NS", 100_000_000)  # as seldom as they are made, they are stale in this hang
    with serving(tmp_path) as (server, address), tmpfs_folder() as other:
        meeting, roots = Meeting(2), (world.root, other)
        agents = []
        for number, root in enumerate(roots):
            name, found = f"n{number}", Jobs(f"n{number}", [root], start_ns=time.time_ns(), bases=())
            found.period_s = 0.05
            looking = Looking(name, start_ns=time.time_ns())
            sent = Sent(uplink(tmp_path, address, name, on_look=looking.take), print)
            agents.append(NodeAgent(name, Isolation(IsolationConfig(), name), [found], [sent], looking=looking))

        def turn(met: Callable[[], Any]) -> Callable[[], Any]:
            def one() -> Any:
                for agent in agents:
                    agent.turn()
                return met()

            return turned(server, one)

        try:
            pids = [world.fork(lambda rank=rank: be_a_rank(roots[rank], rank, meeting)) for rank in (0, 1)]  # type: ignore[misc]
            until("steps", turn(lambda: JOB in server.jobs.open and server.jobs.open[JOB].server.line.last))
            os.kill(pids[1], signal.SIGSTOP)
            hung = until("its stack in the finding", turn(lambda: stack_of_rank_1(server)), DEADLINE_S)
            assert "stopped (state T)" in hung.reason
            until("answers", turn(lambda: server.jobs.looks["answered"] >= 4))  # stacks and dumps of two nodes
        finally:
            for agent in agents:
                agent.close()
    stacks = recorded(tmp_path, "stack")
    assert {(event.source, event.data["rank"]) for event in stacks} == {("stacks/job@n0", 0), ("stacks/job@n1", 1)}
    refused = {str(event.data["why"]) for event in recorded(tmp_path, "dump.refused")}
    assert all("TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set" in why for why in refused)
    assert len(refused) == 2


def stack_of_rank_1(server: Serving) -> Incident | None:
    """The hang, once what was seen of rank 1's process is in it."""
    for incident in server.jobs.open[JOB].server.incidents.values():
        seen = {fact.what: fact.value for one in incident.findings for fact in one.evidence}
        if str(incident.culprit) == "rank:1" and seen.get("process_state") == "T":
            return incident
    return None
