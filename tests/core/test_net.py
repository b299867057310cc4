"""One POST or GET: what is taken, which failures are worth another try, and that its deadline holds for all of it."""

import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.fakes.web import Web, serving

from trainwarden.core.errors import DeliveryError
from trainwarden.core.net import BODY_MAX_BYTES, RETRY_AFTER_MAX_S, get, post_json, retry_after_s

NOW_S = 1_800_000_000.0


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as one:
        yield one


def test_what_was_taken_is_answered(web: Web) -> None:
    reply = post_json(f"{web.url}/in?a=1", b'{"a":1}', {"X-Own": "yes"}, 5.0)
    assert (reply.status, reply.body) == (200, b"ok")
    (asked,) = web.asked
    assert (asked.path, asked.body) == ("/in?a=1", b'{"a":1}')
    assert (asked.headers["Content-Type"], asked.headers["X-Own"]) == ("application/json", "yes")


@pytest.mark.parametrize(
    ("status", "retryable"),
    [
        *((status, False) for status in (301, 400, 401, 404, 410)),
        *((status, True) for status in (408, 425, 429, 500, 503, 599)),
    ],
)
def test_what_was_not_taken_says_whether_again_can_help(web: Web, status: int, retryable: bool) -> None:
    web.status, web.headers = status, {"Retry-After": "7", "Location": "/elsewhere"}
    with pytest.raises(DeliveryError, match=f"answered {status}") as caught:
        post_json(web.url, b"{}", {}, 5.0)
    assert caught.value.retryable is retryable
    assert caught.value.retry_after_s == (7.0 if retryable else 0.0)
    assert len(web.asked) == 1, "no redirect is followed: the body would go to whom nobody named"


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [
        pytest.param(None, 0.0, id="nothing said"),
        pytest.param("120", 120.0, id="seconds"),
        pytest.param("Fri, 15 Jan 2027 08:00:30 GMT", 30.0, id="a date"),
        pytest.param("Fri, 15 Jan 2027 07:00:00 GMT", 0.0, id="a date that is over"),
        pytest.param("-5", 0.0, id="negative"),
        pytest.param("9" * 400, RETRY_AFTER_MAX_S, id="for ever"),
        pytest.param("nan", 0.0, id="not a number"),
        pytest.param("Fri, 99 Jan 2027 08:00:30 GMT", 0.0, id="a day that is none"),
        pytest.param("\u0663", 3.0, id="a digit of another script"),
    ],
)
def test_patience_that_is_asked_for(said: str | None, wait_s: float) -> None:
    assert retry_after_s(said, NOW_S) == wait_s


def test_nobody_there_is_worth_another_try() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(DeliveryError, match=f"http://127.0.0.1:{port}: ") as caught:
            post_json(f"http://127.0.0.1:{port}/", b"{}", {}, 5.0)
    assert caught.value.retryable


@pytest.mark.parametrize(
    "url",
    ["", "ftp://127.0.0.1/", "http://127.0.0.1:no/", "http://[::1/", "127.0.0.1", "http://127.0.0.1:99999/", "http://"],
)
def test_a_url_that_is_none_is_not_tried_again(url: str) -> None:
    with pytest.raises(DeliveryError, match="not a request that can be sent") as caught:
        post_json(url, b"{}", {}, 5.0)
    assert not caught.value.retryable


def test_a_header_that_is_none_is_not_tried_again(web: Web) -> None:
    with pytest.raises(DeliveryError, match="not a request that can be sent") as caught:
        post_json(web.url, b"{}", {"X-Own": "a\nb"}, 5.0)
    assert not caught.value.retryable
    assert web.asked == []


def drip(listener: socket.socket, stop: threading.Event) -> None:
    """A header that never ends: a byte at a time, each soon enough for a limit that holds for a byte only."""
    peer, _ = listener.accept()
    with peer:
        peer.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not stop.wait(0.02):
            try:
                peer.sendall(b"x")
            except OSError:
                return


def test_the_deadline_holds_for_the_whole_of_a_dripping_answer() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener, stop))
        thread.start()
        began_s = time.monotonic()
        try:
            with pytest.raises(DeliveryError, match=r"no answer within 0\.3 s") as caught:
                post_json(f"http://127.0.0.1:{listener.getsockname()[1]}/", b"{}", {}, 0.3)
            assert time.monotonic() - began_s < 5.0
        finally:
            stop.set()
            thread.join()
    assert caught.value.retryable


def test_an_answer_without_end_is_cut(web: Web) -> None:
    web.body = b"x" * (4 * BODY_MAX_BYTES)
    assert len(post_json(web.url, b"{}", {}, 5.0).body) == BODY_MAX_BYTES


def test_a_secret_url_is_neither_logged_nor_told(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = web.url.replace("http://", "http://user:word@") + "/services/hidden?token=hidden"
    post_json(secret, b"{}", {"Authorization": "Bearer hidden"}, 5.0)
    web.status = 400
    with pytest.raises(DeliveryError) as caught:
        post_json(secret, b"{}", {}, 5.0)
    assert "hidden" not in caplog.text + str(caught.value)
    assert "word" not in caplog.text + str(caught.value)


def test_what_is_there_is_got_uncompressed(web: Web) -> None:
    web.body = b"x" * (2 * BODY_MAX_BYTES)
    assert get(f"{web.url}/metrics", {"X-Own": "yes"}, 5.0, len(web.body)).body == web.body, "the limit is the caller's"
    (asked,) = web.asked
    assert (asked.path, asked.body, asked.headers["X-Own"]) == ("/metrics", b"", "yes")
    assert asked.headers["Accept-Encoding"] == "identity"


def test_an_answer_longer_than_wanted_is_no_answer(web: Web) -> None:
    web.body = b"x" * 1001
    with pytest.raises(DeliveryError, match=f"{web.url}: answered more than 1000 bytes"):
        get(web.url, {}, 5.0, 1000)


def test_what_is_not_there_is_told_as_for_a_post(web: Web) -> None:
    web.status = 404
    with pytest.raises(DeliveryError, match=f"{web.url}: answered 404") as caught:
        get(f"{web.url}/secret", {}, 5.0, 1000)
    assert not caught.value.retryable
