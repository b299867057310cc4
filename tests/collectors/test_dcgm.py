"""What dcgm-exporter says: every field under every name in base units, blanks never numbers, other hosts' series
refused, and what is not said any more told as blind.

DCGM needs a data-centre GPU and its daemon, so the exporter here is an imitation: its text forms (labels, names, how
numbers are written) are those of its own templates, over HTTP.
"""

import csv
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from tests.fakes.web import Web, serving

from trainwarden.collectors.dcgm import FIELDS, GPUS_MAX, LEFT_OUT, Dcgm, DcgmConfig, is_blank, value_of
from trainwarden.collectors.prometheus_text import Answer, Sample, parse
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame
from trainwarden.core.readings import READINGS

DEADLINE_S = 20.0
UUID = "GPU-9a23bc58-0000-0000-0000-000000000000"
OTHER = "GPU-5f075965-0000-0000-0000-000000000000"
S = 10**9
NOW_NS = 1_800_000_000 * S


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as one:
        yield one


class Node:
    """Node n17 with its source, and a clock that a test moves."""

    def __init__(self, url: str, *, hosts: tuple[str, ...] = ()) -> None:
        self.now_ns = NOW_NS
        config = DcgmConfig(url=url, hosts=hosts, period=timedelta(seconds=90), deadline=timedelta(seconds=60))
        self.source = Dcgm(config, "n17", start_ns=NOW_NS, clock=lambda: self.now_ns)

    def scrape(self) -> list[Frame | Event]:
        """What the next answer of the exporter brings; [] where nothing is told of it."""
        return self.source.poll(self.now_ns)

    def rows(self) -> dict[tuple[str, str], float]:
        """Subject and reading -> value, of one scrape that is expected to tell nothing else."""
        (frame,) = self.scrape()
        return rows_of(frame)


@pytest.fixture
def node(web: Web) -> Node:
    return Node(f"{web.url}/metrics")


def rows_of(frame: Frame | Event) -> dict[tuple[str, str], float]:
    assert isinstance(frame, Frame)
    return {(frame.names[row["subject"]], frame.names[row["signal"]]): float(row["value"]) for row in frame.rows}


def said(found: list[Frame | Event]) -> list[tuple[str, str]]:
    return [(one.kind, one.subject.id) for one in found if isinstance(one, Event)]


def series(name: str, value: object, *, uuid: str = UUID, gpu: int = 0, host: str = "n17", more: str = "") -> str:
    """A line as the exporter's template writes it."""
    labels = f'gpu="{gpu}",UUID="{uuid}",pci_bus_id="00000000:1B:00.0",device="nvidia{gpu}",modelName="NVIDIA H100"'
    return f'{name}{{{labels},Hostname="{host}"{more},DCGM_FI_DRIVER_VERSION="570.86.15"}} {value}\n'


TEMPERATURE = series("DCGM_FI_DEV_GPU_TEMP", 43)


# the table of fields


def test_every_reading_that_dcgm_is_said_to_tell_has_a_field_and_no_field_tells_another() -> None:
    assert {one.reading for one in FIELDS.values()} == {row.name for row in READINGS.values() if "dcgm" in row.sources}


@pytest.mark.parametrize("file", ["default-counters", "dcp-metrics-included"])
def test_every_counter_of_the_exporters_own_lists_is_read_or_left_out_for_a_reason(shared: Path, file: str) -> None:
    with (shared / "data" / "telemetry" / f"dcgm_exporter_{file}.csv").open() as lines:
        names = {row[0].lstrip("# ").strip() for row in csv.reader(lines) if len(row) >= 3 and "DCGM_" in row[0]}
    assert len(names) > 50
    known = FIELDS.keys() | LEFT_OUT.keys() | {"DCGM_EXP_XID_ERRORS_COUNT"}
    assert names <= known
    assert not FIELDS.keys() & LEFT_OUT.keys()


def test_an_id_means_one_reading_and_one_lane() -> None:
    assert len({one.id for one in FIELDS.values()}) == len({(one.id, one.reading, one.lane) for one in FIELDS.values()})


@pytest.mark.parametrize(
    ("name", "written", "reading", "value"),
    [
        ("DCGM_FI_DEV_SM_CLOCK", "1980", "gpu_sm_clock_hertz", 1.98e9),
        ("DCGM_FI_DEV_SM_CLOCK_HERTZ", "1980000000", "gpu_sm_clock_hertz", 1.98e9),
        ("DCGM_FI_DEV_FB_USED", "81559", "gpu_memory_used_bytes", 81559 * 1024 * 1024),
        ("DCGM_FI_DEV_FB_USED_BYTES", "1024", "gpu_memory_used_bytes", 1024),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "684573", "gpu_energy_joules", 684.573),
        ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", "684", "gpu_energy_joules", 684),
        ("DCGM_FI_DEV_POWER_VIOLATION", "2500000000", "gpu_power_violation_seconds", 2.5),
        ("DCGM_FI_DEV_MEM_COPY_UTIL", "57", "gpu_memory_utilization_ratio", 0.57),
        ("DCGM_FI_DEV_GPU_UTIL", "100", "gpu_utilization_ratio", 1.0),
        pytest.param("DCGM_FI_DEV_GPU_UTIL_RATIO", "87", "gpu_utilization_ratio", 0.87, id="percent of DCGM 4.6"),
        pytest.param("DCGM_FI_DEV_GPU_UTIL_RATIO", "1", "gpu_utilization_ratio", 0.01, id="1 percent of DCGM 4.6"),
        pytest.param("DCGM_FI_DEV_GPU_UTIL_RATIO", "0.870000", "gpu_utilization_ratio", 0.87, id="ratio of DCGM 4.7"),
        pytest.param("DCGM_FI_DEV_GPU_UTIL_RATIO", "1.000000", "gpu_utilization_ratio", 1.0, id="all of DCGM 4.7"),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "0.412300", "gpu_tensor_active_ratio", 0.4123),
        ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", "0.412300", "gpu_tensor_active_ratio", 0.4123),
        ("DCGM_FI_DEV_GPU_TEMP_LIMIT", "-3", "gpu_temperature_margin_celsius", -3),
        ("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "54731746511", "gpu_ecc_corrected_aggregate", 54731746511),
        ("DCGM_FI_DEV_XID_ERROR", "31", "gpu_last_xid", 31),
        ("dcgm_gpu_temp", "66", "gpu_temperature_celsius", 66),
    ],
)
def test_units_become_base_units(name: str, written: str, reading: str, value: float) -> None:
    one = FIELDS[name]
    (sample,) = parse(f"{name} {written}".encode()).samples
    assert one.reading == reading
    assert value_of(one, sample) == pytest.approx(value, rel=1e-12)


BASES = st.sampled_from([0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 140737488355328])
FORMS: list[Callable[[int], str]] = [str, "{:.6f}".format, "{:e}".format, "{:.17g}".format]


@settings(max_examples=200)
@given(BASES, st.integers(0, 15), st.sampled_from(FORMS[:2] + FORMS[3:]), st.sampled_from(sorted(FIELDS)))
def test_a_blank_never_becomes_a_number(base: int, off: int, form: Callable[[int], str], name: str) -> None:
    (sample,) = parse(f"{name} {form(base + off)}".encode()).samples
    assert value_of(FIELDS[name], sample) is None


@pytest.mark.parametrize("written", ["NaN", "+Inf", "-Inf", "-1", "-9223372036854775808"])
@pytest.mark.parametrize("name", ["DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_NVLINK_GET_STATE"])
def test_what_cannot_be_is_no_data(name: str, written: str) -> None:
    (sample,) = parse(f"{name} {written}".encode()).samples
    assert value_of(FIELDS[name], sample) is None


def test_numbers_of_a_real_fleet_are_none_of_them_taken_for_blanks(shared: Path) -> None:
    curves = json.loads((shared / "data" / "telemetry" / "acme_dcgm_cdfs.json").read_text())
    power = [float(x) for key, curve in curves.items() if "power" in key for x in curve[0]]
    assert len(power) > 1000
    one = FIELDS["DCGM_FI_DEV_POWER_USAGE"]
    assert [value_of(one, Sample("", {}, x, False)) for x in power] == power
    assert not any(is_blank(float(x)) for x in (0, 2**31 - 17, 2**31, 2**47 - 1, 2**47 + 16, 2**62))


# the source


def test_what_a_gpu_says_is_told_in_one_frame(web: Web, node: Node) -> None:
    web.body = (TEMPERATURE + series("DCGM_FI_DEV_POWER_USAGE", "684.573000", uuid=OTHER, gpu=1)).encode()
    (frame,) = node.scrape()
    assert isinstance(frame, Frame)
    assert (frame.source, frame.schema, frame.job, frame.epoch) == ("dcgm@n17", "reading", None, None)
    assert frame.rows["t_ns"].tolist() == [NOW_NS, NOW_NS]
    assert rows_of(frame) == {
        (f"device:{UUID}", "gpu_temperature_celsius"): 43.0,
        (f"device:{OTHER}", "gpu_power_watts"): 684.573,
    }
    assert web.asked[0].path == "/metrics"
    assert node.scrape()[0].seq == frame.seq + 1


def test_an_imitated_exporter_that_prometheus_client_serves_is_read() -> None:
    registry = CollectorRegistry()
    labels = ["gpu", "UUID", "hostname"]
    for number, name in enumerate(("DCGM_FI_DEV_GPU_TEMP_CELSIUS", "DCGM_FI_DEV_BOARD_POWER_WATTS", "DCGM_FI_DEV_NEW")):
        for gpu in range(8):
            Gauge(f"{name}", "a field", labels, registry=registry) if gpu == 0 else None
        gauge = registry._names_to_collectors[name]
        assert isinstance(gauge, Gauge)
        for gpu in range(8):
            gauge.labels(str(gpu), f"GPU-{gpu}", "n17").set(100 * number + gpu)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    node = Node(f"http://127.0.0.1:{server.server_port}/metrics")
    try:
        rows = node.rows()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert len(rows) == 16
    assert rows["device:GPU-7", "gpu_power_watts"] == 107.0
    assert node.source.counted == {"unknown": 8, "bad_line": 0, "left_out": 0}


@pytest.mark.parametrize(
    ("labels", "subject"),
    [
        pytest.param(f'gpu="0",UUID="{UUID}"', f"device:{UUID}", id="new name space"),
        pytest.param(f'gpu="0",uuid="{UUID}",hostname="n17"', f"device:{UUID}", id="old name space, new host label"),
        pytest.param('gpu="3",Hostname="n17.cluster.local"', "device:n17:3", id="no UUID, host with domain"),
        pytest.param(f'gpu="0",UUID="{UUID}",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"', f"device:{UUID}/gi-7", id="MIG"),
        pytest.param('gpu_id="2",gpu_uuid=""', "device:n17:2", id="Moneo"),
    ],
)
def test_who_a_series_is_about(web: Web, node: Node, labels: str, subject: str) -> None:
    web.body = f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} 43\n".encode()
    assert node.rows() == {(subject, "gpu_temperature_celsius"): 43.0}


@pytest.mark.parametrize(
    "labels", ["", 'UUID="a b"', 'gpu="../0"', f'UUID="{UUID}",GPU_I_ID="x"', 'nvswitch="1",nvlink="3"']
)
def test_a_series_about_nobody_is_counted(web: Web, node: Node, labels: str) -> None:
    web.body = f"{TEMPERATURE}DCGM_FI_DEV_NVLINK_GET_STATE{{{labels}}} 1\n".encode()
    assert list(node.rows()) == [(f"device:{UUID}", "gpu_temperature_celsius")]
    assert node.source.counted["no_device"] == 1


def test_links_are_told_apart_from_all_links_together(web: Web, node: Node) -> None:
    link = f'nvlink="3",gpu="0",gpu_uuid="{UUID}",hostname="n17"'
    web.body = (
        f"DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_PER_LINK_TOTAL{{{link}}} 5\nDCGM_FI_DEV_NVLINK_GET_STATE{{{link}}} 2\n"
        + series("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L17", 6)
        + series("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 9)
    ).encode()
    assert node.rows() == {
        (f"link:{UUID}/nvlink-3", "nvlink_crc_flit_errors"): 5.0,
        (f"link:{UUID}/nvlink-3", "nvlink_up"): 1.0,
        (f"link:{UUID}/nvlink-17", "nvlink_replay_errors"): 6.0,
        (f"link:{UUID}/nvlink-all", "nvlink_crc_flit_errors"): 9.0,
    }


def test_one_number_under_two_names_or_for_two_pods_is_told_once(web: Web, node: Node) -> None:
    pods = "".join(series("DCGM_FI_DEV_GPU_TEMP", 43, more=f',pod="p{number}"') for number in range(3))
    web.body = (pods + series("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 43)).encode()
    (frame,) = node.scrape()
    assert isinstance(frame, Frame)
    assert len(frame.rows) == 1


def test_series_of_other_hosts_are_refused_and_counted(web: Web, node: Node) -> None:
    web.body = (TEMPERATURE + 3 * series("DCGM_FI_DEV_GPU_TEMP", 99, uuid=OTHER, host="n18")).encode()
    assert node.rows() == {(f"device:{UUID}", "gpu_temperature_celsius"): 43.0}
    assert node.source.counted["other_host"] == 3


def test_an_exporter_of_other_hosts_only_says_how_to_name_them(web: Web) -> None:
    web.body = series("DCGM_FI_DEV_GPU_TEMP", 43, host="dcgm-exporter-x7k2p").encode()
    stranger, friend = Node(web.url), Node(web.url, hosts=("dcgm-exporter-x7k2p",))
    (blind,) = stranger.scrape()
    assert isinstance(blind, Event)
    why = "all series are of other hosts, such as 'dcgm-exporter-x7k2p': see collectors.dcgm.hosts"
    assert (blind.kind, blind.data["why"]) == ("source.blind", f"{web.url}: {why}")
    assert friend.rows()


def test_a_real_answer_about_two_hosts_tells_of_ours(shared: Path, web: Web, node: Node) -> None:
    found = json.loads((shared / "data" / "telemetry" / "moneo_goodDCGMResponseTwoVM.json").read_text())
    lines = []
    for one in found["data"]["result"]:
        metric = one["metric"]
        host = "n17" if metric["instance"].endswith("06") else metric["instance"]
        text = ",".join(f'{key}="{metric[key]}"' for key in ("gpu_id", "gpu_uuid"))
        lines.append(f'{metric["__name__"]}{{{text},Hostname="{host}"}} {one["value"][1]}\n')
    web.body = "".join(lines).encode()
    assert sorted(node.rows().values()) == [61.0, 63.0, 63.0, 63.0, 63.0, 64.0, 64.0, 66.0]
    assert node.source.counted["other_host"] == 8


def test_a_fleet_behind_one_address_is_not_taken_for_a_node(web: Web, node: Node) -> None:
    body = "".join(f'DCGM_FI_DEV_GPU_TEMP{{UUID="GPU-{number}"}} 43\n' for number in range(GPUS_MAX + 44))
    web.body = body.encode()
    assert len(node.rows()) == GPUS_MAX
    assert node.source.counted["too_many"] == 44


def test_a_bad_line_does_not_lose_the_others(web: Web, node: Node) -> None:
    web.body = f"{TEMPERATURE}DCGM_FI_DEV_GPU_TEMP{{gpu=\n{series('DCGM_FI_DEV_POWER_USAGE', 'abc')}".encode()
    assert len(node.rows()) == 1
    assert node.source.counted["bad_line"] == 2


def test_a_blank_beside_numbers_is_absent_and_counted(web: Web, node: Node) -> None:
    blank = series("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 9223372036854775794)
    web.body = (TEMPERATURE + blank).encode()
    assert list(node.rows()) == [(f"device:{UUID}", "gpu_temperature_celsius")]
    assert node.source.counted["blank"] == 1


def test_a_gpu_that_vanishes_is_blind_by_name_and_up_when_it_is_back(web: Web, node: Node) -> None:
    both = (TEMPERATURE + series("DCGM_FI_DEV_GPU_TEMP", 40, uuid=OTHER, gpu=1)).encode()
    web.body = both
    assert len(node.rows()) == 2
    web.body = (TEMPERATURE + series("DCGM_FI_DEV_GPU_TEMP", 0x7FFFFFF1, uuid=OTHER, gpu=1)).encode()
    blind, frame = node.scrape()
    assert said([blind]) == [("source.blind", f"dcgm@n17/{OTHER}")]
    assert isinstance(blind, Event)
    assert blind.data["why"] == f"{web.url}: no series of this GPU any more"
    assert list(rows_of(frame)) == [(f"device:{UUID}", "gpu_temperature_celsius")], "no data, not zero"
    assert said(node.scrape()) == [], "told once"
    web.body = both
    up, frame = node.scrape()
    assert said([up]) == [("source.up", f"dcgm@n17/{OTHER}")]
    assert len(rows_of(frame)) == 2


def test_a_counter_is_handed_on_as_it_is_whatever_it_starts_with(web: Web, node: Node) -> None:
    for value in (17, 17, 3):
        web.body = series("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", value).encode()
        assert node.rows() == {(f"device:{UUID}", "gpu_remapped_rows_uncorrectable"): float(value)}


def test_the_last_xid_is_a_reading_and_never_an_event(web: Web, node: Node) -> None:
    for code in (0, 31, 31, 79):
        web.body = series("DCGM_FI_DEV_XID_ERRORS", code, more=f',err_code="{code}",err_msg="x"').encode()
        assert node.rows() == {(f"device:{UUID}", "gpu_last_xid"): float(code)}


def test_a_code_whose_count_grew_is_a_hint_though_the_gauge_shows_another(web: Web, node: Node) -> None:
    def answer(**counts: int) -> list[float]:
        window = 'window_size_in_ms="300000"'
        lines = [
            series("DCGM_EXP_XID_ERRORS_COUNT", count, more=f',{window},xid="{code[1:]}"')
            for code, count in counts.items()
        ]
        none = series("DCGM_EXP_XID_ERRORS_COUNT", 0, more=f",{window}")
        web.body = "".join([series("DCGM_FI_DEV_XID_ERRORS", 45), *(lines or [none])]).encode()
        (frame,) = node.scrape()
        assert isinstance(frame, Frame)
        assert {frame.names[row["signal"]] for row in frame.rows} == {"gpu_last_xid"}
        return [float(value) for value in frame.rows["value"]]

    assert answer(_31=4) == [45.0], "what there was at first sight has no time"
    assert answer(_31=4, _62=1) == [62.0, 45.0]
    assert answer(_31=5, _62=1) == [31.0, 45.0]
    assert answer() == [45.0], "the window is over"
    assert answer(_31=1) == [31.0, 45.0]


def test_an_exporter_that_is_down_is_blind_once_and_up_when_it_is_back(web: Web) -> None:
    web.body = TEMPERATURE.encode()
    node = Node(web.url.replace("http://", "http://user:word@") + "/metrics?token=hidden")
    web.status = 503
    (blind,) = node.scrape()
    assert said([blind]) == [("source.blind", "dcgm@n17")]
    assert isinstance(blind, Event)
    assert blind.data["why"] == f"{web.url}: answered 503"
    node.source.poll(NOW_NS)
    web.status = 200
    up, frame = node.scrape()
    assert said([up]) == [("source.up", "dcgm@n17")]
    assert rows_of(frame)
    web.status = 503
    assert said(node.scrape()) == [("source.blind", "dcgm@n17")], "a second outage is told again"


def test_nobody_at_the_port_is_said_with_the_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        node = Node(url)
        (blind,) = node.scrape()
    assert isinstance(blind, Event)
    assert str(blind.data["why"]).startswith(f"{url}: ")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "<html>\n<b>log in</b>\n",
            "no number of a GPU in 0 series; 2 lines are no Prometheus text, the first '<html>'",
        ),
        ("", "no number of a GPU in 0 series"),
        ("go_goroutines 7\n", "no number of a GPU in 1 series"),
        (series("DCGM_FI_DEV_GPU_TEMP", 0x7FFFFFF0), "no number of a GPU in 1 series"),
    ],
)
def test_an_answer_without_a_gpu_is_blind(web: Web, node: Node, body: str, why: str) -> None:
    web.body = body.encode()
    (blind,) = node.scrape()
    assert isinstance(blind, Event)
    assert blind.data["why"] == f"{web.url}: {why}"


def test_an_exporter_that_answers_the_same_for_minutes_is_frozen(web: Web, node: Node) -> None:
    web.body = TEMPERATURE.encode()
    assert node.rows()
    node.now_ns += 300 * S
    assert node.rows(), "ten of its own periods: not yet"
    node.now_ns += 10 * S
    (blind,) = node.scrape()
    assert isinstance(blind, Event)
    assert blind.data["why"] == f"{web.url}: the same answer, byte for byte, for 310 s: it is frozen"
    web.body = series("DCGM_FI_DEV_GPU_TEMP", 44).encode()
    up, frame = node.scrape()
    assert said([up]) == [("source.up", "dcgm@n17")]
    assert rows_of(frame)


def test_an_exporter_that_hangs_is_waited_for_until_the_deadline(web: Web) -> None:
    go_on = threading.Event()
    web.before = lambda: [go_on.wait(DEADLINE_S)].clear()
    source = Dcgm(DcgmConfig(url=web.url, deadline=timedelta(seconds=0.3)), "n17", start_ns=NOW_NS)
    try:
        (blind,) = source.poll(NOW_NS)
    finally:
        go_on.set()
    assert isinstance(blind, Event)
    assert blind.data["why"] == f"{web.url}: no answer within 0.3 s"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DcgmConfig(url="localhost:9400"),
            "collectors.dcgm.url: need https://..., http://..., env:NAME or file:",
        ),
        (lambda: DcgmConfig(period=timedelta(0)), "collectors.dcgm.period: need 1s to 10m, got 0s"),
        (
            lambda: DcgmConfig(deadline=timedelta(seconds=10)),
            "collectors.dcgm.deadline: need 100ms or more, and less than",
        ),
        (lambda: DcgmConfig(stale_after=timedelta(seconds=29)), "collectors.dcgm.stale_after: need at least 3 periods"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], DcgmConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_secret_in_the_url_is_not_shown() -> None:
    assert "word" not in repr(DcgmConfig(url="http://user:word@n17:9400/metrics"))


LINES = st.builds(
    series,
    st.sampled_from([*sorted(FIELDS)[::20], "DCGM_EXP_XID_ERRORS_COUNT", "DCGM_FI_DEV_NEW"]),
    st.one_of(st.floats(), st.integers(0, 2**64), st.text(max_size=3)),
    uuid=st.sampled_from([UUID, OTHER, "", "a b"]),
    host=st.sampled_from(["n17", "n18", ""]),
    more=st.sampled_from(["", ',xid="31"', ',GPU_I_ID="1"', ',nvlink="2"']),
)
ANSWERS = st.lists(
    st.one_of(st.lists(LINES, max_size=6).map("".join).map(str.encode), st.binary(max_size=80)), max_size=3
)


@settings(max_examples=200)
@given(ANSWERS)
def test_whatever_an_exporter_answers_is_told_as_finite_numbers_or_as_blind(bodies: list[bytes]) -> None:
    source = Dcgm(DcgmConfig(), "n17", start_ns=NOW_NS)
    for number, body in enumerate(bodies):
        answer = Answer(place="http://n17:9400", t_ns=NOW_NS + number, parsed=parse(body), digest=hash(body))
        found = source.hear(answer, NOW_NS + number)
        for one in found:
            assert isinstance(one, Event) or all(map(math.isfinite, rows_of(one).values()))
            assert isinstance(one, Frame) or one.kind in ("source.blind", "source.up")
        assert found or number, "the first answer is told, or why it is of no use"
