"""Prometheus' text: what a line means, that a bad one costs itself only, and that fetching holds nobody up."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.web import Web, serving

from trainwarden.collectors.prometheus_text import BODY_MAX_BYTES, SAMPLES_MAX, Answer, Sample, parse, scrape

DEADLINE_S = 20.0


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as one:
        yield one


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        pytest.param("up 1", Sample("up", {}, 1.0, True), id="no labels"),
        pytest.param('up{a="1",b="2"} 1.5', Sample("up", {"a": "1", "b": "2"}, 1.5, False), id="labels"),
        pytest.param('up{a="1",} -3', Sample("up", {"a": "1"}, -3.0, True), id="comma at the end, negative"),
        pytest.param('\tup { a = "1" , b="2" }\t1 ', Sample("up", {"a": "1", "b": "2"}, 1.0, True), id="spaces"),
        pytest.param("up{} 1e3 1700000000000", Sample("up", {}, 1000.0, False), id="timestamp"),
        pytest.param('up{a="1"} 1 # {trace="x"} 3 1.5', Sample("up", {"a": "1"}, 1.0, True), id="exemplar"),
        pytest.param(r'up{a="x\"}\\\n, {"} 1', Sample("up", {"a": 'x"}\\\n, {'}, 1.0, True), id="escapes and braces"),
        pytest.param('{"gpu.temp",a="1"} 4', Sample("gpu.temp", {"a": "1"}, 4.0, True), id="a name in quotes"),
        pytest.param('up{"a.b"="1"} 4', Sample("up", {"a.b": "1"}, 4.0, True), id="a label in quotes"),
        pytest.param("up +Inf\r", Sample("up", {}, math.inf, False), id="infinity, carriage return"),
        pytest.param('up{a="\u00e9\u2028"} 1', Sample("up", {"a": "\u00e9\u2028"}, 1.0, True), id="other scripts"),
    ],
)
def test_what_a_line_means(line: str, sample: Sample) -> None:
    read = parse(line.encode())
    assert (read.samples, read.bad_lines) == ((sample,), 0)


@pytest.mark.parametrize(
    "line",
    [
        *("up", "up{", "up one", 'up{a="1} 1', "up{a=1} 1", 'up{a="1" b="2"} 1', "1up 1", "up{a} 1", "up1.5", "up 1_0"),
        *(
            'up{a="1",a="2"} 1',
            'up{"a","b"} 1',
            "{} 1",
            'up{"down"} 1',
            "up 1 2 3",
            "<html>",
            '{"json": 1}',
            "up 0x1p3",
        ),
    ],
)
def test_a_bad_line_costs_itself_only(line: str) -> None:
    read = parse(f"before 1\n{line}\nafter 2\n".encode())
    assert [sample.name for sample in read.samples] == ["before", "after"]
    assert (read.bad_lines, read.first_bad) == (1, ascii(line[:60]))


def test_comments_and_blank_lines_are_passed_over() -> None:
    assert parse(b"# HELP up \xff\n# TYPE up gauge\n\n#\n# EOF\n# UNIT up s\n").bad_lines == 0


def test_more_samples_than_anybody_has_are_counted_not_kept() -> None:
    read = parse(b"a 1\n" * (SAMPLES_MAX + 7))
    assert (len(read.samples), read.left_out) == (SAMPLES_MAX, 7)


PIECES = st.sampled_from(
    [
        "up",
        "{",
        "}",
        '"',
        "\\",
        "\\n",
        "=",
        ",",
        " ",
        "\n",
        "# TYPE up gauge",
        "1",
        "-",
        "e",
        ".",
        "NaN",
        "a",
        "\u2028",
        "_",
    ]
)


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=300), st.lists(PIECES, max_size=60).map(lambda pieces: "".join(pieces).encode())))
@example(b"up " + b"9" * 400)
@example(b"up " + b"9" * 5000)
def test_no_bytes_raise_and_every_line_is_accounted_for(body: bytes) -> None:
    read = parse(body)
    lines = [line.strip() for line in body.decode(errors="replace").split("\n")]
    assert len(read.samples) + read.bad_lines == sum(bool(line) and not line.startswith("#") for line in lines)


LABELS = st.dictionaries(st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,8}", fullmatch=True), st.text(max_size=8), max_size=4)


@settings(max_examples=200)
@given(LABELS, st.floats(allow_nan=False))
def test_what_prometheus_client_writes_is_read_as_it_was_meant(labels: dict[str, str], value: float) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("one", "a gauge", [*labels], registry=registry)
    (gauge.labels(*labels.values()) if labels else gauge).set(value)
    (sample,) = parse(generate_latest(registry)).samples
    assert (sample.name, sample.labels, sample.value) == ("one", labels, value)


@pytest.mark.parametrize("part", ["mig_590.48.01_load", "80gb-hbm3_590.48.01_load", "80gb-hbm3_590.48.01_idle"])
def test_real_exporters_are_read_as_prometheus_client_reads_them(shared: Path, part: str) -> None:
    body = (shared / "data" / "telemetry" / f"nvexp_nvidia-h100-{part}.prom").read_bytes()
    read = parse(body)
    assert read.bad_lines == read.left_out == 0
    families = [*text_string_to_metric_families(body.decode())]
    theirs = [
        (one.name.removesuffix("_total"), one.labels, float(one.value)) for kin in families for one in kin.samples
    ]
    ours = [(one.name.removesuffix("_total"), dict(one.labels), one.value) for one in read.samples]
    assert len(ours) > 100
    assert repr(ours) == repr(theirs), "NaN is unequal to itself"


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"a{" + b'x="1",' * 150_000, id="labels without end"),
        pytest.param(b"a{" + b'x="\\"' * 150_000, id="quotes without end"),
        pytest.param(b"a{x" + b" " * 900_000 + b"=", id="spaces without end"),
        pytest.param(b"a 1 " + b"1" * 900_000 + b"x", id="digits without end"),
    ],
)
def test_no_line_takes_for_ever(line: bytes) -> None:
    began_s = time.process_time()
    assert parse(line).bad_lines == 1
    assert time.process_time() - began_s < 5.0, "about 0.1 s where each character is looked at a few times"


def test_what_is_fetched_is_told(web: Web) -> None:
    web.body = b"up 1\n"
    answer = scrape(web.url, 5.0, lambda: 7)
    assert isinstance(answer, Answer)
    assert (answer.place, answer.t_ns, answer.parsed.samples) == (web.url, 7, (Sample("up", {}, 1.0, True),))
    assert len(web.asked) == 1


def test_a_server_that_hangs_is_left_at_the_deadline(web: Web) -> None:
    go_on = threading.Event()
    web.before = lambda: [go_on.wait(DEADLINE_S)].clear()
    try:
        assert scrape(web.url, 0.3, lambda: 7) == f"{web.url}: no answer within 0.3 s"
    finally:
        go_on.set()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        pytest.param("env:TRAINWARDEN_NOT_SET", "env:TRAINWARDEN_NOT_SET: is empty", id="no such variable"),
        pytest.param("file:/no/such/file", "file:/no/such/file: cannot be read: FileNotFoundError", id="no such file"),
        pytest.param("http://user:word@[::1/", "a URL that is none: not a request that can be sent", id="no URL"),
    ],
)
def test_why_nothing_was_fetched_is_said_without_secrets(url: str, why: str) -> None:
    assert scrape(url, 5.0, lambda: 7) == why


def test_an_answer_that_never_ends_is_refused(web: Web) -> None:
    web.body = b"a 1\n" * (BODY_MAX_BYTES // 4 + 1)
    assert scrape(web.url, 5.0, lambda: 7) == f"{web.url}: answered more than {BODY_MAX_BYTES} bytes"
