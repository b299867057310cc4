"""POSTs in place of a connection: raw requests, real agents' sending sides, a proxy that fails, tokens that end."""

import contextlib
import http.client
import json
import secrets
import socket
import ssl
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.app.served import Node, step_frame, tokens_file, until, uplink
from tests.app.test_ingest import Heard, certificates, greeting, listening, node
from typer.testing import CliRunner

from trainwarden.app.cli.tokens import tokens as tokens_command
from trainwarden.app.ingest import IngestConfig
from trainwarden.app.posted import AT, PATH, SESSION
from trainwarden.app.posting import HttpConfig, Posting
from trainwarden.app.serving import ServerConfig, Serving
from trainwarden.app.uplink import Uplink, UplinkConfig
from trainwarden.core.auth import TlsFiles, change_tokens, hashed, read_tokens
from trainwarden.core.codec import frame_to_bytes
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Frame, JobId
from trainwarden.core.recording import Recording
from trainwarden.core.wire import ACK, FRAME, WELCOME, Decoder, ack_from_bytes, pack

__all__ = ["certificates"]


@dataclass
class Posted:
    """What a request came to."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def why(self) -> str:
        return str(json.loads(self.body)["why"])


@dataclass
class Web:
    """An Ingest that POSTs reach."""

    heard: Heard
    posting: Posting
    address: str
    session: str = "session-1"

    def ask(
        self,
        body: bytes,
        at: int = 0,
        session: str | None = None,
        token: str = "secret-n0",
        path: str = PATH,
        method: str = "POST",
        **headers: str,
    ) -> Posted:
        said = {"Authorization": f"Bearer {token}", SESSION: session or self.session, AT: str(at), **headers}
        asking = http.client.HTTPConnection(self.address, timeout=20)
        with contextlib.closing(asking):
            asking.request(method, path, body, {name.replace("_", "-"): value for name, value in said.items() if value})
            answer = asking.getresponse()
            return Posted(answer.status, answer.read(), dict(answer.headers))


@contextlib.contextmanager
def posting(
    folder: Path, *, port: int = 0, tls: TlsFiles | None = None, body_bytes: int = 1 << 20, **config: Any
) -> Iterator[Web]:
    with listening(folder, **config) as heard:
        made = Posting(
            HttpConfig(body_bytes=body_bytes), heard.ingest, None if tls is None else tls.server(), lambda: True
        )
        host, got = made.start("127.0.0.1", port)
        try:
            yield Web(heard, made, f"{host}:{got}")
        finally:
            made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with posting(tmp_path_factory.mktemp("posting"), body_bytes=100_000) as made:
        yield made


@pytest.fixture
def web(server: Web) -> Iterator[Web]:
    """A session of its own to a server that took nothing yet."""
    server.heard.items.clear()
    yield replace(server, session=secrets.token_hex(8))
    for link in [*server.heard.ingest.links]:
        server.heard.ingest.loop.call_soon_threadsafe(link.end)
    until("nobody", lambda: not server.heard.ingest.open)


def posts(folder: Path, address: str, name: str = "n0", **more: Any) -> Uplink:
    scheme = "http" if more.get("files") is None else "https"
    return uplink(folder, f"{scheme}://{address}", name, **{"post_s": 0.02, **more})


def frames(one: Node, first: int, last: int) -> bytes:
    return b"".join(pack(FRAME, frame_to_bytes(frame)) for frame in one.steps(first, last))


# one session, by hand


def test_a_session_is_a_connection_cut_into_requests(web: Web) -> None:
    one = node()
    first = greeting() + frames(one, 1, 2)
    taken = web.ask(first)
    assert taken.status == 200
    assert [kind for kind, _ in Decoder(WELCOME).feed(taken.body)] == [WELCOME]
    again = web.ask(first)
    assert (again.status, again.body) == (200, b""), "asked twice: nothing is taken again"
    assert web.ask(frames(one, 3, 3), at=len(first)).status == 200
    assert web.heard.steps() == [1, 2, 3]
    web.heard.ack()
    rest = web.ask(b"", at=len(first) + len(frames(one, 3, 3)))
    ((kind, body),) = Decoder(ACK).feed(rest.body)
    assert (kind, ack_from_bytes(body)) == (ACK, 3)


def test_bytes_that_are_missing_begin_a_new_session(web: Web) -> None:
    one, first = node(), greeting() + frames(node(), 1, 1)
    unknown = web.ask(frames(one, 2, 2), at=100)
    assert (unknown.status, "begin a new one" in unknown.why) == (409, True)
    assert web.ask(first).status == 200
    for at in (len(first) + 1, len(first) - 1):
        assert web.ask(frames(one, 2, 2), at=at).status == 409
    assert web.heard.steps() == [1]


def test_a_body_that_is_cut_is_not_taken(web: Web) -> None:
    body = greeting() + frames(node(), 1, 3)
    host, port = web.address.split(":")
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-n0\r\n{SESSION}: {web.session}\r\n{AT}: 0\r\n"
    )
    with socket.create_connection((host, int(port)), 10) as cut:
        cut.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:-100])
        until("half a body", lambda: web.posting._reading)
    until("the cut", lambda: not web.posting._reading)
    assert web.heard.items == []
    assert web.ask(body).status == 200
    assert web.heard.steps() == [1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        pytest.param({"token": "guess"}, 401, "a token that is known", id="unknown token"),
        pytest.param({"token": "", "Authorization": ""}, 401, "need Authorization", id="no token"),
        pytest.param({"body": greeting("n1")}, 403, "not one of node 'n1'", id="the name of another node"),
        pytest.param({"body": greeting(token="wrong")}, 403, "not one of node 'n0'", id="another token in the hello"),
        pytest.param({"body": bytes(200_000)}, 413, "at most 100000 bytes", id="too large"),
        pytest.param({"body": b"{}garbage"}, 400, "starts with b'{}'", id="no messages"),
        pytest.param({"body": greeting(protocol=2)}, 400, "protocol 2 was spoken", id="newer protocol"),
        pytest.param({"session": "short"}, 400, SESSION, id="no session"),
        pytest.param({"at": -1}, 400, AT, id="no place in the session"),
        pytest.param({"Content_Encoding": "gzip"}, 415, "no encoding", id="compressed"),
        pytest.param({"method": "PUT"}, 405, "", id="another method"),
        pytest.param({"path": "/"}, 404, "", id="another path"),
    ],
)
def test_what_is_refused_is_refused_with_its_reason(web: Web, asked: dict[str, Any], status: int, words: str) -> None:
    answer = web.ask(**{"body": greeting() + frames(node(), 1, 1), **asked})
    assert answer.status == status
    assert words in (answer.why if words else "")
    assert web.heard.items == []
    assert not web.heard.ingest.links


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        pytest.param(b"garbage garbage", "starts with b'ga'", id="garbage"),
        pytest.param(frames(node(), 9, 9)[:-1], "ends inside a message", id="half a message"),
    ],
)
def test_what_stands_before_a_mistake_is_kept(web: Web, tail: bytes, words: str) -> None:
    answer = web.ask(greeting() + frames(node(), 1, 2) + tail)
    assert (answer.status, words in answer.why) == (400, True)
    assert web.heard.steps() == [1, 2]
    assert web.ask(b"", at=1).status == 409, "the session is over"


def test_who_is_not_taken_up_is_asked_to_wait(tmp_path: Path) -> None:
    big = pack(FRAME, frame_to_bytes(step_frame(1, range(1000), source="rings@n0", job=JobId("j"), seq=1)))
    with posting(tmp_path, free=False, waiting_bytes=100_000) as web:
        first = greeting() + big * 2
        assert web.ask(first).status == 200, "taken whole"
        busy = web.ask(big, at=len(first))
        assert (busy.status, busy.headers["retry-after"]) == (503, "1")
        web.heard.ingest.freed(1_000_000)
        until("room", lambda: not web.heard.ingest.full)
        assert web.ask(big, at=len(first)).status == 200


def test_a_stranger_cannot_go_on_with_a_session(web: Web) -> None:
    first = greeting()
    assert web.ask(first).status == 200
    assert web.ask(frames(node("n1"), 1, 1), at=len(first), token="secret-n1").status == 403
    assert web.heard.items == []


def test_health_is_asked_without_a_token(tmp_path: Path) -> None:
    with listening(tmp_path) as heard:
        well = [True]
        made = Posting(HttpConfig(), heard.ingest, None, lambda: well[0])
        host, port = made.start("127.0.0.1", 0)
        web = Web(heard, made, f"{host}:{port}")
        assert web.ask(b"", path="/healthz", method="GET", token="").status == 200
        well[0] = False
        assert web.ask(b"", path="/healthz", method="GET", token="").status == 503
        made.close()


def test_posts_listen_only_where_they_may(tmp_path: Path) -> None:
    with listening(tmp_path) as heard, socket.create_server(("127.0.0.1", 0)) as taken:
        made = Posting(HttpConfig(), heard.ingest, None, lambda: True)
        with pytest.raises(ConfigError, match="--cert and --key"):
            made.start("0.0.0.0", 0)
        with pytest.raises(ConfigError, match="cannot listen"):
            made.start(*taken.getsockname())
    with pytest.raises(ConfigError, match=r"server\.http\.body_bytes: need at least"):
        HttpConfig(body_bytes=1)


# agents


def test_an_agent_posts_what_it_is_offered_until_it_is_acknowledged(web: Web, tmp_path: Path) -> None:
    one = node()
    with contextlib.closing(posts(tmp_path, web.address)) as sending:
        sending.offer([*one.hellos(), *one.steps(1, 3)])
        until("four", lambda: len(web.heard.items) == 4)
        sending.offer(one.steps(4, 9))
        until("all", lambda: web.heard.steps() == [*range(1, 10)])
        assert not sending.flush(0.05)
        web.heard.ack()
        assert sending.flush(10)
        assert (sending.counts.offered, sending.counts.acked, sending.counts.sent) == (10, 10, 10)
        assert sending.counts.connects == 1, "one session"


def test_after_another_server_came_everything_that_was_not_acknowledged_comes_again(tmp_path: Path) -> None:
    one = node()
    with posting(tmp_path) as web:
        sending = posts(tmp_path, web.address)
        sending.offer(one.steps(1, 3))
        until("three", lambda: len(web.heard.items) == 3)
        web.heard.ack()
        assert sending.flush(10)
        sending.offer(one.steps(4, 6))
        until("six", lambda: len(web.heard.items) == 6)
        port = int(web.address.split(":")[1])
    until("a cut", lambda: sending.failing)
    sending.offer(one.steps(7, 8))
    with posting(tmp_path, port=port) as web:
        until("the rest", lambda: web.heard.steps() == [4, 5, 6, 7, 8])
        web.heard.ack()
        assert sending.flush(10)
        sending.close()


def test_last_words_are_posted_at_once(web: Web, tmp_path: Path) -> None:
    sending = posts(tmp_path, web.address, post_s=10.0)
    until("welcome", lambda: sending.counts.connects)
    sending.offer(node().steps(1, 1))
    sending.close(5.0)
    assert web.heard.steps() == [1]


class Proxy(ThreadingHTTPServer):
    """Stands between an agent and a server, and does what it is told with each request in turn."""

    daemon_threads = True

    def __init__(self, behind: str, plan: list[str], most_bytes: int = 1 << 30) -> None:
        super().__init__(("127.0.0.1", 0), _Hop)
        self.behind, self.plan, self.most_bytes = behind, plan, most_bytes
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Hop(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    server: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        todo = self.server.plan.pop(0) if self.server.plan else "pass"
        status, answer, kind = 502, b"<html><h1>Bad Gateway</h1>", "text/html"
        if len(body) > self.server.most_bytes:
            status = 413
        elif todo != "502":
            with contextlib.closing(http.client.HTTPConnection(self.server.behind, timeout=20)) as on:
                on.request("POST", self.path, body, dict(self.headers))
                got = on.getresponse()
                if todo == "pass":
                    status, answer, kind = got.status, got.read(), "application/octet-stream"
        self.send_response(200 if todo == "login page" else status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_a_proxy_that_fails_costs_nothing(tmp_path: Path) -> None:
    """502 before, a login page, an answer that is lost after the server took the body: no row is lost or doubled."""
    plan = ["502", "login page", "pass", "pass", "lost", "502", "pass", "lost"]
    with (
        serving(tmp_path) as served,
        contextlib.closing(Proxy(served.address, plan)) as proxy,
        contextlib.closing(posts(tmp_path, proxy.address, backoff_max_s=0.05)) as sending,
    ):
        one, told = node(), set[str]()
        sending.offer(one.hellos())
        for number in range(1, 41):
            sending.offer([one.step(number)])
            served.serving.turn()
            told.add(sending.failing)
        served.until("all", lambda: not sending.counts.waiting_bytes and not plan)
        assert sending.counts.sent > sending.counts.acked == 41
        assert any("answered 502" in one for one in told)
        assert not any("<html>" in one for one in told)
    recording = Recording(tmp_path / "state" / "j" / "frames")
    steps = [int(item.rows["step"][0]) for item in recording if isinstance(item, Frame)]
    assert steps == [*range(1, 41)]


def test_a_message_too_large_for_a_proxy_is_given_up_and_counted(web: Web, tmp_path: Path) -> None:
    one = node()
    big = step_frame(3, range(1000), source="rings@n0", job=JobId("j"), seq=one.seq + 3)
    with contextlib.closing(Proxy(web.address, [], most_bytes=50_000)) as proxy:
        sending = posts(tmp_path, proxy.address)
        sending.offer([*one.steps(1, 2), big, *one.steps(4, 5)])
        until("the others", lambda: {1, 2, 4, 5} == set(web.heard.steps()))
        until("count", lambda: sending.counts.too_large == 1)
        web.heard.ack()
        assert sending.flush(10)
        sending.close()


def test_an_agent_waits_while_it_is_asked_to(tmp_path: Path) -> None:
    big = step_frame(1, range(1000), source="rings@n0", job=JobId("j"), seq=1)
    with posting(tmp_path, free=False, waiting_bytes=100_000) as web:
        sending = posts(tmp_path, web.address)
        sending.offer([big] * 2)
        until("two", lambda: len(web.heard.items) == 2)
        sending.offer([replace(big, seq=2)])
        assert "more is sent than is taken up" in until("words", lambda: sending.failing)
        web.heard.ingest.freed(1_000_000)
        until("three", lambda: len(web.heard.items) == 3)
        until("no words", lambda: not sending.failing)
        assert sending.counts.failures == 0, "the session goes on"
        sending.close(0)


def test_posts_go_through_tls_and_only_to_the_right_server(tmp_path: Path, certificates: Path) -> None:
    ours, theirs = certificates / "ours.pem", certificates / "theirs.pem"
    with posting(tmp_path, tls=TlsFiles(cert=ours, key=certificates / "ours.key")) as web:
        mine = posts(tmp_path, web.address, tls=True, files=TlsFiles(ca=ours))
        mine.offer(node().steps(1, 5))
        until("all", lambda: len(web.heard.items) == 5)
        mine.close()
        wrong = posts(tmp_path, web.address, tls=True, files=TlsFiles(ca=theirs))
        assert "certificate" in until("refusal", lambda: wrong.failing if wrong.counts.failures else "").lower()
        wrong.close(0)
        assert len(web.heard.items) == 5
    context = ssl.create_default_context()
    assert context.check_hostname


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("http://10.0.0.1:80", r"uplink\.server: need https:// \(or uplink\.plaintext"),
        ("https://", "need HOST:PORT or http"),
        ("https://u:word@h", "got 'https://h'"),
        ("https://h:99999", "got 'a URL that is none'"),
        ("ftp://h", "need HOST:PORT or http"),
    ],
)
def test_a_url_that_is_none_of_a_server_is_refused(server: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        UplinkConfig(server=server)
    assert "word" not in str(refusal.value)


# tokens of a running server


@dataclass
class Served:
    """A whole server; its turns are made by whoever waits for something."""

    serving: Serving
    stream: str
    address: str
    words: list[str] = field(default_factory=list)

    def until(self, what: str, found: Any) -> Any:
        def look() -> Any:
            self.serving.turn()
            return found()

        return until(what, look)


@contextlib.contextmanager
def serving(folder: Path, http: str = "127.0.0.1:0") -> Iterator[Served]:
    words: list[str] = []
    config = ServerConfig(
        host="127.0.0.1",
        port=0,
        state=folder / "state",
        tokens=tokens_file(folder),
        ingest=IngestConfig(ack=timedelta(milliseconds=100)),
        http=HttpConfig(listen=http),
    )
    made = Serving(config, words.append)
    host, port = made.start()
    said = [one for one in words if "POSTs are taken at http://" in one]
    try:
        yield Served(made, f"{host}:{port}", "".join(said).rpartition("/")[2], words)
    finally:
        made.finish()


def command(*words: str, code: int = 0) -> str:
    ran = CliRunner().invoke(tokens_command, words)
    if code and isinstance(ran.exception, ConfigError):
        return str(ran.exception)
    assert ran.exit_code == code, ran.output
    return ran.output.strip()


def test_a_token_is_made_once_listed_by_its_hash_and_revoked(tmp_path: Path) -> None:
    file, out = tmp_path / "tokens.yaml", tmp_path / "n1.token"
    token = command("add", "node", "n7", "--tokens", str(file))
    command("add", "job", "on", "--tokens", str(file), "--out", str(out))
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(out.stat().st_mode) == 0o600
    assert token not in file.read_text()
    assert str(read_tokens(file).grant(token)) == "the token of agent n7"
    assert str(read_tokens(file).grant(out.read_text().strip())) == "the token of job on", "`on` is a name here"
    listed = command("list", "--tokens", str(file)).splitlines()
    assert [line.split() for line in listed] == [
        ["node", "n7", hashed(token)[7:15]],
        ["job", "on", hashed(out.read_text().strip())[7:15]],
    ]
    assert "has a token already" in command("add", "node", "n7", "--tokens", str(file), code=2)
    newer = command("add", "node", "n7", "--replace", "--tokens", str(file))
    assert read_tokens(file).grant(token) is None
    assert "need 1 to 128 characters" in command("add", "node", " n", "--tokens", str(file), code=2)
    assert "cannot make" in command("add", "node", "n8", "--out", str(out), "--tokens", str(file), code=2)
    assert "need a node with a token" in command("revoke", "node", "n8", "--tokens", str(file), code=2)
    command("revoke", "node", "n7", "--tokens", str(file))
    assert read_tokens(file).grant(newer) is None
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".new"] == []


def test_two_who_write_at_once_do_not_lose_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"

    def change(told: Any) -> Any:
        with pytest.raises(ConfigError, match=r"tokens\.yaml\.new: is there"):
            change_tokens(file, lambda other: other)
        return replace(told, agents={"n0": hashed("x")})

    change_tokens(file, change)
    assert read_tokens(file).grant("x")


def test_a_running_server_takes_up_new_tokens_and_ends_revoked_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwarden.app.serving.TOKENS_NS", 50_000_000)
    file = tmp_path / "tokens.yaml"
    with serving(tmp_path) as served:
        stream, web = uplink(tmp_path, served.stream), posts(tmp_path, served.address, "n1")
        served.until("both", lambda: stream.counts.connects == web.counts.connects == 1)
        command("revoke", "node", "n0", "--tokens", str(file))
        served.until("the end of one", lambda: "revoked" in stream.failing or "token" in stream.failing)
        assert not web.failing
        command("revoke", "node", "n1", "--tokens", str(file))
        served.until("the end of the other", lambda: "answered 401" in web.failing)
        assert not served.serving.ingest.links
        (tmp_path / "token-n2").write_text(command("add", "node", "n2", "--tokens", str(file)))
        new = uplink(tmp_path, served.stream, "n2")
        served.until("a new one", lambda: new.counts.connects)
        for one in (stream, web, new):
            one.close(0)


@pytest.mark.parametrize(
    ("text", "words"), [("", "is empty"), ("tokens: {agents: {n0: word}}", "need sha256:"), ("tokens: [", "line 1")]
)
def test_a_broken_file_of_tokens_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr("trainwarden.app.serving.TOKENS_NS", 50_000_000)
    file = tmp_path / "tokens.yaml"
    with serving(tmp_path, http="") as served:
        file.write_text(text)
        said = served.until("words", lambda: [one for one in served.words if "what was said before holds" in one])
        assert words in said[0]
        assert "word" not in said[0]
        sending = uplink(tmp_path, served.stream)
        served.until("the old token", lambda: sending.counts.connects)
        sending.close(0)
        assert sum("what was said before holds" in one for one in served.words) == 1
