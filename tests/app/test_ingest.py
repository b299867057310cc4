"""The network between agents and a server, in one process: cuts, half-open connections, slow readers, TLS, garbage."""

import contextlib
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.app.served import EPOCH, Node, step_frame, tokens_file, until, uplink

from trainwarden.app import jobs as jobs_module
from trainwarden.app.buffer import Buffer
from trainwarden.app.ingest import Ingest, IngestConfig, Link
from trainwarden.app.jobs import Job, Jobs, JobsConfig
from trainwarden.app.tries import Behind
from trainwarden.app.uplink import Uplink, UplinkConfig
from trainwarden.app.wiring import Settings
from trainwarden.core.auth import TlsFiles, read_tokens
from trainwarden.core.errors import ConfigError, DeliveryError
from trainwarden.core.model import Epoch, Event, Frame, JobId, Notice, Subject
from trainwarden.core.recording import Recording
from trainwarden.core.wire import FRAME, REFUSAL, WELCOME, Decoder, Hello, Refusal, heard, pack, say

SECOND_NS = 10**9


@dataclass
class Heard:
    """An Ingest and what it handed on."""

    folder: Path
    ingest: Ingest
    address: str
    items: list[Frame | Event] = field(default_factory=list)
    counts: dict[Link, int] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def ack(self) -> None:
        self.ingest.ack(self.counts)

    def steps(self) -> list[int]:
        return [int(item.rows["step"][0]) for item in self.items if isinstance(item, Frame)]

    def connect(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), 10)


@contextlib.contextmanager
def listening(
    folder: Path, *, port: int = 0, tls: TlsFiles | None = None, free: bool = True, **config: object
) -> Iterator[Heard]:
    """free: what is handed on is taken up at once."""
    made: Heard

    def take(link: Link, items: list[Frame | Event], count: int, size: int) -> None:
        made.items += items
        made.counts[link] = count
        if free:
            made.ingest.freed(size)

    tokens = read_tokens(tokens_file(folder, jobs=["mine"]))
    settings = replace(IngestConfig(), **config)  # type: ignore[arg-type]
    words: list[str] = []
    ingest = Ingest(settings, tokens, take, words.append, None if tls is None else tls.server())
    made = Heard(folder, ingest, "", words=words)
    host, got = ingest.start("127.0.0.1", port)
    made.address = f"{host}:{got}"
    try:
        yield made
    finally:
        ingest.close()


def node(name: str = "n0", job: str = "j") -> Node:
    return Node(name, job, [0], 1)


# one connection


def test_what_is_offered_arrives_in_order_and_is_kept_until_it_is_acknowledged(tmp_path: Path) -> None:
    with listening(tmp_path) as server, contextlib.closing(uplink(tmp_path, server.address)) as sending:
        sending.offer([*node().hellos(), *node().steps(1, 3)])
        sending.offer(node().steps(4, 4))
        until("all", lambda: len(server.items) == 5)
        assert isinstance(server.items[0], Event)
        assert server.steps() == [1, 2, 3, 4]
        assert not sending.flush(0.05)
        server.ack()
        assert sending.flush(10)
        assert (sending.counts.offered, sending.counts.acked, sending.counts.waiting_bytes) == (5, 5, 0)


def test_after_a_cut_everything_that_was_not_acknowledged_comes_again(tmp_path: Path) -> None:
    one = node()
    with listening(tmp_path) as server:
        sending = uplink(tmp_path, server.address)
        sending.offer(one.steps(1, 3))
        until("three", lambda: server.steps() == [1, 2, 3])
        server.ack()
        assert sending.flush(10)
        sending.offer(one.steps(4, 6))
        until("six", lambda: len(server.items) == 6)
        port = int(server.address.split(":")[1])
    until("a cut", lambda: sending.failing)
    sending.offer(one.steps(7, 8))
    with listening(tmp_path, port=port) as server:
        until("the rest", lambda: server.steps() == [4, 5, 6, 7, 8])
        server.ack()
        assert sending.flush(10)
        assert sending.counts.dropped_frames == 0
        sending.close()


def test_a_peer_that_went_without_a_word_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-open connection: the welcome came, and nothing ever after."""
    monkeypatch.setattr("trainwarden.app.uplink.SILENT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sending = uplink(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        first, _ = silent.accept()
        with first:
            first.sendall(pack(WELCOME, b'{"ack_s": 0.1, "protocol": 1, "software": "x"}'))
            sending.offer(node().steps(1, 1))
            second, _ = silent.accept()
        second.close()
        assert sending.counts.failures >= 1
        sending.close(0)


def test_a_server_that_does_not_read_costs_frames_and_never_the_caller(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as slow:
        sending = uplink(tmp_path, f"127.0.0.1:{slow.getsockname()[1]}", buffer_bytes=1024 * 1024)
        accepted, _ = slow.accept()
        with accepted:
            accepted.sendall(pack(WELCOME, b'{"ack_s": 0.1, "protocol": 1, "software": "x"}'))
            big = step_frame(1, range(1000), source="rings@n0", job=JobId("j"), seq=1)
            sending.offer(node().hellos())
            slowest_s = 0.0
            for _ in range(200):  # 18 MB, more than all buffers between the two
                began_s = time.monotonic()
                sending.offer([big])
                slowest_s = max(slowest_s, time.monotonic() - began_s)
            assert slowest_s < 1.0
            assert sending.counts.dropped_frames + sending.counts.forgotten >= 180
            assert sending.counts.dropped_events == 0
            assert sending.counts.waiting_bytes <= 1024 * 1024
            sending.close(0.1)


def test_frames_go_before_events_and_oldest_first() -> None:
    buffer = Buffer(100)
    gone = [buffer.add(bytes(30), is_frame=kind == "f") for kind in "effe"]
    assert gone == [[], [], [], ["dropped_frames"]]
    assert [held.number for held in buffer.take(10_000)] == [1, 3, 4]
    assert buffer.add(bytes(30), is_frame=True) == ["forgotten"], "sent, and the oldest frame"
    assert buffer.add(bytes(90), is_frame=False) == ["dropped_frames", "forgotten", "forgotten"]
    assert buffer.rewind() == 1


def test_what_was_sent_is_sent_again_in_its_order() -> None:
    buffer = Buffer(1000)
    for kind in "feffe":
        buffer.add(b"x", is_frame=kind == "f")
    assert [held.number for held in buffer.take(3)] == [1, 2, 3]
    buffer.acked(1)
    assert buffer.rewind() == 4
    assert [held.number for held in buffer.take(1000)] == [2, 3, 4, 5]
    buffer.acked(5)
    assert buffer.bytes == 0


# who comes, and what they send


def last_words(connection: socket.socket, data: bytes) -> str:
    """Send, read to the end, and give the refusal."""
    connection.settimeout(20)
    with connection, contextlib.suppress(ConnectionResetError):
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    kinds = dict(Decoder(WELCOME).feed(answer))
    return heard(Refusal, kinds[REFUSAL]).why


def greeting(name: str = "n0", token: str = "secret-n0", **more: object) -> bytes:
    return say(replace(Hello(node=name, token=token, uplink="u"), **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sent", "words", "reason"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "starts with b'GE'", "stream", id="another protocol"),
        pytest.param(greeting(token="wrong"), "the token is not one of node 'n0'", "token", id="wrong token"),
        pytest.param(greeting("n1"), "the token is not one of node 'n1'", "token", id="token of another node"),
        pytest.param(greeting(protocol=2), "protocol 2 was spoken", "protocol", id="newer protocol"),
        pytest.param(greeting() + b"garbage garbage", "starts with b'ga'", "stream", id="garbage later"),
        pytest.param(greeting() + greeting(), "a second hello", "protocol", id="two hellos"),
        pytest.param(greeting() + pack(WELCOME, b""), "not for a server", "stream", id="a message the wrong way"),
        pytest.param(b"", "no hello within", "hello", id="silence"),
    ],
)
def test_who_is_not_one_of_ours_hears_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, words: str, reason: str
) -> None:
    monkeypatch.setattr("trainwarden.app.ingest.HELLO_S", 0.2 if not sent else 10.0)
    with listening(tmp_path) as server:
        assert words in last_words(server.connect(), sent)
        assert server.ingest.counts["refused", reason] == 1
        until("nobody", lambda: server.ingest.open == 0)
        assert server.items == []


def test_a_connection_too_many_is_refused(tmp_path: Path) -> None:
    with listening(tmp_path, links=1) as server, server.connect() as first:
        first.sendall(greeting())
        until("the first", lambda: server.ingest.links)
        assert "server.ingest.links" in last_words(server.connect(), b"")


def test_a_bad_frame_costs_itself_only(tmp_path: Path) -> None:
    good = node()
    sent = greeting() + pack(FRAME, b"TWFRAME9" + bytes(40))
    with listening(tmp_path) as server, server.connect() as raw:
        raw.sendall(sent)
        until("refusal", lambda: server.ingest.counts["refused", "frame"] == 1)
        sending = uplink(tmp_path, server.address)
        sending.offer([*node("n1").steps(1, 1), *good.steps(2, 2)])
        until("the good one", lambda: server.steps() == [2])
        assert server.ingest.counts["refused", "grant"] == 1
        assert any("not of node n0" in one for one in server.words)
        server.ack()
        assert sending.flush(10), "what is refused is acknowledged: again would not help"
        sending.close()


def test_more_than_the_rate_is_read_later(tmp_path: Path) -> None:
    big = step_frame(1, range(1000), source="rings@n0", job=JobId("j"), seq=1)
    with (
        listening(tmp_path, rate_bytes=400_000) as server,
        contextlib.closing(uplink(tmp_path, server.address)) as sending,
    ):
        began_s = time.monotonic()
        sending.offer([big] * 8)
        until("all", lambda: len(server.items) == 8)
        assert time.monotonic() - began_s > 0.9, "700 kB at 400 kB/s, what was under way once more"
        assert server.ingest.counts["held", "rate"] >= 1


def test_nothing_is_read_while_too_much_waits(tmp_path: Path) -> None:
    big = step_frame(1, range(1000), source="rings@n0", job=JobId("j"), seq=1)
    with listening(tmp_path, free=False, waiting_bytes=500_000) as server:
        sending = uplink(tmp_path, server.address)
        sending.offer([big] * 100)  # 8.8 MB
        until("full", lambda: server.ingest.full)
        taken = len(server.items)
        assert taken < 20
        server.ingest.freed(100_000_000)
        until("more", lambda: len(server.items) > taken)
        sending.close(0)


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pem")
    for name in ("ours", "theirs"):
        made = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
        ]
        made += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        made += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        subprocess.run(made, check=True, capture_output=True, timeout=30)
    return folder


def test_telemetry_goes_through_tls_and_only_to_the_right_server(tmp_path: Path, certificates: Path) -> None:
    ours, theirs = certificates / "ours.pem", certificates / "theirs.pem"
    both = TlsFiles(cert=ours, key=certificates / "ours.key", ca=ours)
    with listening(tmp_path, tls=both) as server:
        mine = uplink(tmp_path, server.address, tls=True, files=both)
        mine.offer(node().steps(1, 50))
        until("all", lambda: len(server.items) == 50)
        server.ack()
        assert mine.flush(10)
        mine.close()
        wrong: dict[str, dict[str, Any]] = {
            "another CA": {"tls": True, "files": replace(both, ca=theirs)},
            "no certificate": {"tls": True, "files": TlsFiles(ca=ours)},
            "plain text": {"tls": False},
        }
        for what, how in wrong.items():
            one = uplink(tmp_path, server.address, connect_s=2.0, **how)
            one.offer(node().steps(1, 1))
            until(what, lambda one=one: one.failing and one.counts.failures)  # type: ignore[misc]
            assert one.counts.acked == one.counts.connects == 0, what
            one.close(0)
        assert len(server.items) == 50


def test_plain_text_stays_on_the_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"uplink\.tls: need true"):
        UplinkConfig(server="10.0.0.1:9401", tls=False)
    UplinkConfig(server="10.0.0.1:9401", tls=False, plaintext=True)
    with pytest.raises(ConfigError, match=r"uplink\.token"):
        Uplink(UplinkConfig(server="127.0.0.1:1", tls=False, token="secret"), "n0")
    ingest = Ingest(IngestConfig(), read_tokens(tokens_file(tmp_path)), lambda *_: None, print, None)
    with pytest.raises(ConfigError, match="--cert and --key"):
        ingest.start("0.0.0.0", 0)
    ingest.loop.close()


# jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[Jobs, list[str]]]:
    said: list[str] = []
    made = Jobs(Settings(), JobsConfig(jobs=3), tmp_path / "state", said.append)
    yield made, said
    made.close()


def recorded(tmp_path: Path, job: str) -> list[Frame | Event]:
    return [item for item in Recording(tmp_path / "state" / job / "frames") if isinstance(item, Frame | Event)]


def test_what_comes_again_is_passed_over_and_what_is_missing_is_said(
    jobs: tuple[Jobs, list[str]], tmp_path: Path
) -> None:
    all_, one = jobs[0], node()
    for number, (first, last) in enumerate([(1, 3), (2, 4), (8, 9)]):
        all_.take("life", one.steps(first, last), number + 1, of_node=True)
    again = node()
    again.seq = one.seq + 5_000_000
    all_.take("life", again.steps(10, 10), 5, of_node=True)  # a source that began anew 5 s later
    all_.take("another life", node().steps(20, 20), 6, of_node=True)
    assert all_.save()
    items = recorded(tmp_path, "j")
    steps = [int(item.rows["step"][0]) for item in items if isinstance(item, Frame)]
    assert steps == [1, 2, 3, 4, 8, 9, 10, 20]
    (lost,) = [item for item in items if isinstance(item, Event) and item.kind == "telemetry.lost"]
    assert (lost.data["from_seq"], lost.data["to_seq"]) == (one.seq + 5, one.seq + 7)
    assert str(lost.subject) == "source:rings@n0"
    assert all_.counts == Counter(taken=10, copies=2, lost=3)


def test_what_is_of_no_job_goes_to_the_jobs_of_its_node(jobs: tuple[Jobs, list[str]], tmp_path: Path) -> None:
    all_ = jobs[0]
    all_.take("n0", node("n0", "a").steps(1, 1), 1, of_node=True)
    all_.take("n0", node("n0", "b").steps(1, 1), 1, of_node=True)
    all_.take("n1", node("n1", "c").steps(1, 1), 1, of_node=True)
    all_.take("mine", node("n0", "c").steps(2, 2), 1, of_node=False)  # c's tenant says that he is on n0, too
    subject = Subject(kind="device", id="GPU-1")
    xid = Event(kind="xid", subject=subject, source="kmsg@n0", seq=1, t_ns=1, seen_ns=1, data={"code": 79})
    all_.take("n0", [xid, replace(xid, source="kmsg@n9")], 2, of_node=True)
    assert all_.counts["no_job"] == 1
    assert all_.save()
    for job, expected in (("a", 1), ("b", 1), ("c", 0)):
        assert sum(isinstance(item, Event) and item.kind == "xid" for item in recorded(tmp_path, job)) == expected, job


def test_the_first_hello_of_an_attempt_announces_it(jobs: tuple[Jobs, list[str]], tmp_path: Path) -> None:
    all_, one = jobs[0], Node("n0", "j", [0, 1], 2)
    all_.take("life", one.hellos(), 1, of_node=True)
    later = [replace(hello, epoch=Epoch(EPOCH + (1 << 32)), seq=hello.seq + 10) for hello in one.hellos()]
    all_.take("life", later, 2, of_node=True)
    assert all_.save()
    kinds = [item.kind for item in recorded(tmp_path, "j") if isinstance(item, Event)]
    assert [kind for kind in kinds if kind != "telemetry.lost"] == ["attempt.started", "hello", "hello"] * 2


def test_a_job_that_cannot_be_opened_is_said_once_and_costs_no_other(
    jobs: tuple[Jobs, list[str]], tmp_path: Path
) -> None:
    all_, said = jobs
    state, pool, made = tmp_path / "state", ThreadPoolExecutor(1), all_._asking
    owner = Job(Settings(), state, JobId("owned"), print, pool, Counter(), time.time_ns(), made)
    now_ns = time.time_ns()
    for name in ("../evil", "owned", "a", "b", "c", "d"):
        for step in (1, 2):
            all_.take("life", node("n0", name).steps(step, step), now_ns, of_node=True)
    assert sorted(all_.open) == ["a", "b", "c"]
    assert len(said) == 3
    assert "is owned by process" in said[1]
    assert "3 jobs are open" in said[2]
    assert all_.counts["not_open"] == 6
    owner.close(ended=False)
    owner.outlets.close(None)


def test_a_job_that_fails_by_our_own_fault_is_set_aside(
    jobs: tuple[Jobs, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_, said = jobs
    for name in ("good", "bad"):
        all_.take("life", node("n0", name).steps(1, 1), 1, of_node=True)

    def broken(item: object) -> list[object]:
        raise IndexError(item)

    monkeypatch.setattr(all_.open[JobId("bad")].server.line, "feed", broken)
    for name in ("good", "bad"):
        all_.take("life", node("n0", name).steps(2, 2), 2, of_node=True)
    all_.tick(3)
    assert list(all_.open) == ["good"]
    assert "our own fault: IndexError" in said[-1]


def test_a_job_nobody_speaks_of_any_more_is_over_and_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    all_ = Jobs(Settings(), JobsConfig(idle=timedelta(seconds=2)), tmp_path, said.append)
    all_.take("life", node().steps(1, 1), SECOND_NS, of_node=True)
    all_.tick(2 * SECOND_NS)
    assert list(all_.open) == ["j"]
    all_.tick(4 * SECOND_NS)
    assert not all_.open
    assert "over" in said[-1]
    assert not list(tmp_path.glob(f"*/{jobs_module.SERVED}"))
    all_.take("life", node().steps(5, 5), 5 * SECOND_NS, of_node=True)
    assert list(all_.open) == ["j"]
    all_.close()
    assert list(tmp_path.glob(f"*/{jobs_module.SERVED}")), "closed for the next server, not over"


def test_a_notifier_that_waits_holds_up_nobody() -> None:
    class Slow:
        channel = "webhook"
        answers: tuple[str | DeliveryError, ...] = (DeliveryError("no", retryable=True), "taken")
        asked = 0

        def notify(self, notice: Notice) -> str:
            answer = self.answers[self.asked]
            self.asked += 1
            if isinstance(answer, DeliveryError):
                raise answer
            return answer

    from tests.app.test_delivery import NOTICE

    with ThreadPoolExecutor(1) as pool:
        behind = Behind(Slow(), pool)

        def tried() -> str:
            try:
                return behind.notify(NOTICE)
            except DeliveryError:
                return ""

        assert until("receipt", tried) == "taken"


def test_tls_contexts_ask_for_modern_tls(certificates: Path) -> None:
    context = TlsFiles(cert=certificates / "ours.pem", key=certificates / "ours.key").server()
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
