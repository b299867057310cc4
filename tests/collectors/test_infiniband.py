"""Ports from a miniature sysfs, from real trees of GPU servers, and from the fabric simulator where it is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.sysfs import Miniature, as_nobody, events, fleeting, numbers, public_folder

from trainwarden.collectors.infiniband import Infiniband, InfinibandConfig
from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Event, Frame

PORT = {
    "ports/1/state": "4: ACTIVE\n",
    "ports/1/phys_state": "5: LinkUp\n",
    "ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "ports/1/link_layer": "InfiniBand\n",
    "ports/1/counters/port_xmit_data": "250\n",
    "ports/1/counters/symbol_error": "3\n",
    "ports/1/hw_counters/out_of_sequence": "5\n",
}
LINK = "link:n1/mlx5_0/1"
OTHER = "link:n1/mlx5_1/1"
LIMIT_MS = 2.0


@pytest.fixture
def mini(tmp_path: Path) -> Miniature:
    return Miniature(tmp_path)


def source(mini: Miniature, config: InfinibandConfig | None = None) -> Infiniband:
    return Infiniband(config or InfinibandConfig(), node="n1", start_ns=1_000, sys=mini.sys)


def poll(ports: Infiniband) -> list[Frame | Event]:
    return list(ports.poll(7))


def two_devices(mini: Miniature) -> Path:
    """mlx5_0 and mlx5_1; gives mlx5_0's port."""
    mini.rdma("mlx5_1", PORT, pci="0000:02:00.0")
    return mini.rdma("mlx5_0", PORT, pci="0000:01:00.0") / "ports/1"


def test_a_port_tells_state_speed_and_counters_in_base_units(mini: Miniature) -> None:
    mini.rdma("mlx5_0", PORT, pci="0000:01:00.0", interfaces=["ib0"])
    found = poll(source(mini))
    assert events(found) == []
    assert numbers(found)[LINK] == {
        "port_up": 1,
        "port_physically_up": 1,
        "port_rate_bytes_per_second": 50e9,
        "port_transmitted_bytes": 1000,
        "port_symbol_errors": 3,
        "port_out_of_sequence": 5,
    }
    assert numbers(found)["link:n1/ib0"] == {
        "port_up": 1,
        "port_rate_bytes_per_second": 25e9,
        "port_transmitted_bytes": 7,
        "port_received_bytes": 7,
        "port_transmitted_packets": 7,
        "port_received_packets": 7,
        "port_receive_errors": 7,
        "port_transmit_discards": 7,
        "port_link_downs": 1,
    }


def test_a_healthy_server_with_counters_that_stopped_long_ago_raises_nothing(mini: Miniature, shared: Path) -> None:
    """The real tree of an H100 node: link_downed stands at 255 on one port, buffer overruns at 15 on all."""
    sample = json.loads((shared / "data/telemetry/gpud_sys_class_infiniband_h100.json").read_text())
    mini.nested(sample)
    ports = source(mini)
    first, second = poll(ports), poll(ports)
    assert events(first) == events(second) == []
    found = numbers(first)
    assert found == numbers(second)
    assert len(found) == 9
    assert {subject for subject, port in found.items() if port["port_link_downs"]} == {"link:n1/mlx5_1/1"}
    assert found["link:n1/mlx5_1/1"]["port_link_downs"] == 255
    for name, device in sample.items():
        told, counters = found[f"link:n1/{name}/1"], device["ports"]["1"]["counters"]
        assert told["port_up"] == told["port_physically_up"] == 1
        assert told["port_received_bytes"] == 4 * int(counters["port_rcv_data"])
        assert told["port_buffer_overruns"] == 15
        assert told["port_transmit_wait_ticks"] == 2489603687
        assert told["port_retransmits"] == 3
    assert found["link:n1/mlx5_bond_0/1"]["port_rate_bytes_per_second"] == 25e9


@pytest.mark.parametrize(
    ("sample", "down"),
    [
        pytest.param("good", set[str](), id="a healthy node"),
        pytest.param("ib_intf_operstate_down", {"ib4"}, id="an interface down on a port that is active"),
        pytest.param("stuck_ib_intf", {"mlx5_6/1", "mlx5_8/1", "ib4", "ib6"}, id="ports stuck in INIT with light"),
    ],
)
def test_real_nodes_show_which_ports_are_down(mini: Miniature, shared: Path, sample: str, down: set[str]) -> None:
    mini.flat(json.loads((shared / f"data/telemetry/gcm_node_learn_{sample}.json").read_text()))
    ports = source(mini)
    found = numbers(poll(ports))
    assert {subject.removeprefix("link:n1/") for subject, port in found.items() if port["port_up"] == 0} == down
    assert len(found) == 16
    assert all(port["port_physically_up"] == 1 for subject, port in found.items() if "mlx5" in subject)
    assert events(poll(ports)) == []
    if sample == "ib_intf_operstate_down":
        assert "port_rate_bytes_per_second" not in found["link:n1/ib4"], "its speed is empty: no data"


def test_a_change_of_state_is_told_once_when_it_happens(mini: Miniature) -> None:
    port = two_devices(mini)
    ports = source(mini)
    poll(ports)
    mini.put(port / "state", "1: DOWN\n")
    mini.put(port / "phys_state", "2: Polling\n")
    down = poll(ports)
    assert events(down) == [("link.state", LINK)]
    (event,) = (item for item in down if isinstance(item, Event))
    assert event.data == {"port": "mlx5_0/1", "state": "DOWN", "line": "mlx5_0/1: ACTIVE -> DOWN"}
    assert KINDS[event.kind].hard
    assert (numbers(down)[LINK]["port_up"], numbers(down)[LINK]["port_physically_up"]) == (0, 0)
    assert numbers(down)[OTHER]["port_up"] == 1
    assert events(poll(ports)) == []
    mini.put(port / "state", "4: ACTIVE\n")
    assert events(poll(ports)) == [("link.state", LINK)]


def test_a_port_that_is_down_at_first_sight_is_no_event(mini: Miniature) -> None:
    mini.rdma("mlx5_0", PORT | {"ports/1/state": "1: DOWN\n"}, pci="0000:01:00.0")
    found = poll(source(mini))
    assert events(found) == []
    assert numbers(found)[LINK]["port_up"] == 0


def test_a_port_that_vanishes_is_blind_and_not_zero(mini: Miniature) -> None:
    two_devices(mini)
    ports = source(mini)
    poll(ports)
    link = mini.sys / "class/infiniband/mlx5_0"
    target = link.readlink()
    link.unlink()
    gone = poll(ports)
    assert events(gone) == [("source.blind", "source:infiniband@n1/mlx5_0/1")]
    assert numbers(gone).keys() == {OTHER}
    assert events(poll(ports)) == []
    link.symlink_to(target)
    back = poll(ports)
    assert events(back) == [("source.up", "source:infiniband@n1/mlx5_0/1")]
    assert numbers(back).keys() == {LINK, OTHER}


def test_a_port_that_comes_back_in_another_state_tells_the_change(mini: Miniature) -> None:
    port = two_devices(mini)
    ports = source(mini)
    poll(ports)
    mini.put(port / "state", "garbage")
    assert events(poll(ports)) == [("source.blind", "source:infiniband@n1/mlx5_0/1")]
    mini.put(port / "state", "2: INIT\n")
    assert events(poll(ports)) == [("source.up", "source:infiniband@n1/mlx5_0/1"), ("link.state", LINK)]


def test_without_rdma_devices_the_source_is_blind_until_the_driver_is_loaded(mini: Miniature) -> None:
    ports = source(mini)
    assert events(poll(ports)) == [("source.blind", "source:infiniband@n1")]
    assert poll(ports) == []
    two_devices(mini)
    assert events(poll(ports)) == [("source.up", "source:infiniband@n1")]


def test_counters_are_told_as_they_are_and_resets_raise_nothing(mini: Miniature) -> None:
    port = two_devices(mini)
    ports = source(mini)
    for value in ("4294967295", "12", "0", "18446744073709551614"):
        mini.put(port / "counters/symbol_error", value)
        found = poll(ports)
        assert events(found) == []
        assert numbers(found)[LINK]["port_symbol_errors"] == float(value)


BROKEN = [
    pytest.param(b"", id="empty"),
    pytest.param(b"\xff\xfe\x00", id="not UTF-8"),
    pytest.param(b"12 34\n", id="two numbers"),
    pytest.param(b"-1\n", id="negative"),
    pytest.param(b"1_000\n", id="Python's spelling"),
    pytest.param("\u0663".encode(), id="an Arabic digit"),
    pytest.param(b"0x1f\n", id="hexadecimal"),
    pytest.param(b"nan\n", id="nan"),
    pytest.param(b"1e9\n", id="exponent"),
    pytest.param(b"18446744073709551615\n", id="all ones: fell off the bus"),
    pytest.param(b"9" * (1 << 20), id="huge"),
]


@pytest.mark.parametrize("content", BROKEN)
def test_what_is_no_counter_is_no_number(mini: Miniature, content: bytes) -> None:
    port = two_devices(mini)
    ports = source(mini)
    mini.put(port / "counters/symbol_error", content)
    found = poll(ports)
    assert "port_symbol_errors" not in numbers(found)[LINK]
    assert numbers(found)[OTHER]["port_symbol_errors"] == 3
    assert events(found) == []


@pytest.mark.parametrize("content", [pytest.param(b"4", id="no name"), pytest.param(b"9: NEW", id="unknown"), *BROKEN])
def test_what_is_no_state_makes_the_port_blind(mini: Miniature, content: bytes) -> None:
    mini.put(two_devices(mini) / "state", content)
    found = poll(source(mini))
    assert events(found) == [("source.blind", "source:infiniband@n1/mlx5_0/1")]
    assert numbers(found).keys() == {OTHER}


@pytest.mark.parametrize("file", ["rate", "phys_state"])
@pytest.mark.parametrize("content", BROKEN)
def test_what_is_no_speed_is_absent(mini: Miniature, file: str, content: bytes) -> None:
    mini.put(two_devices(mini) / file, content)
    found = poll(source(mini))
    assert ("port_rate_bytes_per_second" in numbers(found)[LINK]) == (file != "rate")
    assert ("port_physically_up" in numbers(found)[LINK]) == (file != "phys_state")
    assert events(found) == []


def test_speeds_that_are_missing_are_absent_each_on_its_own(mini: Miniature) -> None:
    (two_devices(mini) / "phys_state").unlink()
    device = mini.rdma("mlx5_2", PORT, pci="0000:03:00.0", interfaces=["ib2"])
    (device.parent.parent / "net/ib2/speed").unlink()
    found = numbers(poll(source(mini)))
    assert "port_physically_up" not in found[LINK]
    assert found[LINK]["port_rate_bytes_per_second"] == 50e9
    assert "port_rate_bytes_per_second" not in found["link:n1/ib2"]


def test_a_fifo_or_a_folder_in_a_files_place_does_not_hold_the_agent(mini: Miniature) -> None:
    port = two_devices(mini)
    ports = source(mini)
    (port / "counters/symbol_error").unlink()
    os.mkfifo(port / "counters/symbol_error")
    (port / "hw_counters/out_of_sequence").unlink()
    (port / "hw_counters/out_of_sequence").mkdir()
    assert numbers(poll(ports))[LINK].keys().isdisjoint({"port_symbol_errors", "port_out_of_sequence"})
    (port / "state").unlink()
    os.mkfifo(port / "state")
    assert events(poll(ports)) == [("source.blind", "source:infiniband@n1/mlx5_0/1")]


def test_counters_that_may_not_be_read_make_them_blind_and_leave_the_state() -> None:
    with public_folder() as root:
        mini = Miniature(root)
        port = two_devices(mini)
        for counter in (*port.glob("counters/*"), *port.glob("hw_counters/*")):
            counter.chmod(0)
        with as_nobody():
            found = poll(source(mini))
        assert events(found) == [("source.blind", "source:infiniband@n1/mlx5_0/1/counters")]
        assert numbers(found)[LINK] == {"port_up": 1, "port_physically_up": 1, "port_rate_bytes_per_second": 50e9}
        (port / "state").chmod(0)
        with as_nobody():
            found = poll(source(mini))
        (blind,) = (item for item in found if isinstance(item, Event))
        assert str(blind.data["why"]).endswith("ports/1/state: Permission denied")


@pytest.mark.parametrize(
    ("config", "ports"),
    [
        pytest.param(InfinibandConfig(), {"mlx5_0/1", "ib0", "mlx5_bond_0/1"}, id="not the virtual function"),
        pytest.param(InfinibandConfig(skip=("*bond*",)), {"mlx5_0/1", "ib0"}, id="not the front end"),
        pytest.param(InfinibandConfig(devices=("mlx5_bond_0",)), {"mlx5_bond_0/1"}, id="one device"),
        pytest.param(
            InfinibandConfig(virtual_functions=True), {"mlx5_0/1", "ib0", "mlx5_bond_0/1", "mlx5_9/1"}, id="all"
        ),
        pytest.param(
            InfinibandConfig(devices=(), interfaces=("eth*",)), {"eth0"}, id="a management port that is asked for"
        ),
    ],
)
def test_which_ports_count(mini: Miniature, config: InfinibandConfig, ports: set[str]) -> None:
    mini.rdma("mlx5_0", PORT, pci="0000:01:00.0", interfaces=["ib0"])
    mini.rdma("mlx5_bond_0", PORT, pci="0000:02:00.0")
    virtual = mini.rdma("mlx5_9", PORT, pci="0000:01:00.1")
    (virtual.parent.parent / "physfn").symlink_to("../0000:01:00.0")
    mini.interface("eth0")
    mini.interface("eno1")
    mini.interface("eno2")
    found = numbers(poll(source(mini, config)))
    assert {subject.removeprefix("link:n1/") for subject in found} == ports - {"eno1", "eno2"}


def test_the_config_names_the_key_and_the_value() -> None:
    with pytest.raises(ConfigError, match=r"^collectors\.infiniband\.period: need at least 100ms, got 0\.01s$"):
        InfinibandConfig(period=timedelta(milliseconds=10))


FILES = [*PORT, "ports/1/counters/port_rcv_data", "ports/1/hw_counters/roce_adp_retrans"]
STATE = re.compile(rb"[1-5]:")
NUMBER = re.compile(rb"[0-9]{1,20}")
RATE = re.compile(rb"[0-9]{1,6}(\.[0-9])? Gb/sec")
fragments = st.sampled_from([b"4: ACTIVE\n", b"5: LinkUp", b"12", b"0", b"400 Gb/sec", b"-1", b":", b"\xff", b"9" * 21])
garbage = st.one_of(st.binary(max_size=40), fragments, st.lists(fragments, max_size=3).map(b"".join))


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(FILES), garbage))
def test_garbage_never_raises_and_never_becomes_a_number(broken: dict[str, bytes]) -> None:
    with fleeting() as mini:
        device = mini.rdma("mlx5_0", PORT, pci="0000:01:00.0")
        ports = source(mini)
        poll(ports)
        for file, content in broken.items():
            mini.put(device / file, content)
        told = numbers(poll(source(mini))).get(LINK, {})
        text = {file: (device / file).read_bytes() for file in FILES if (device / file).exists()}
        assert bool(told) == bool(STATE.match(text["ports/1/state"]))
        if not told:
            return
        counters = {
            "port_transmitted_bytes": ("counters/port_xmit_data", 4),
            "port_received_bytes": ("counters/port_rcv_data", 4),
            "port_symbol_errors": ("counters/symbol_error", 1),
            "port_out_of_sequence": ("hw_counters/out_of_sequence", 1),
            "port_retransmits": ("hw_counters/roce_adp_retrans", 1),
        }
        for signal, (file, unit) in counters.items():
            plain = NUMBER.fullmatch(text.get(f"ports/1/{file}", b"").strip())
            number = int(plain.group()) if plain else 2**64
            assert told.get(signal) == (float(number * unit) if number < 2**64 - 1 else None)
        assert ("port_rate_bytes_per_second" in told) == bool(RATE.match(text["ports/1/rate"]))


def test_a_poll_of_8_adapters_with_40_counters_takes_2_ms_of_cpu_at_most(mini: Miniature) -> None:
    """Measured on the miniature: 1.2 ms, with an interface on each 1.7 ms. Opens of real sysfs take twice as long, so
    at the default period all that is 0.07 % of a core."""
    known = [*PORT, *(f"ports/1/counters/c{number}" for number in range(40 - len(PORT)))]
    real = {f"ports/1/{file}": "123456789012\n" for files in _real_names() for file in files}
    for number in range(8):
        files = {file: "1\n" for file in known} | real | PORT
        mini.rdma(f"mlx5_{number}", files, pci=f"0000:{number:02x}:00.0")
    ports = source(mini)
    told = numbers(poll(ports))
    assert sum(len(port) for port in told.values()) == 8 * 22
    costs_ms = [_cpu_ms(ports) for _ in range(30)]
    assert min(costs_ms) <= (LIMIT_MS if sys.gettrace() is None else 4 * LIMIT_MS)


def _real_names() -> list[list[str]]:
    from trainwarden.collectors.infiniband import _PORT

    return [[candidates[0][0]] for candidates in _PORT.values()]


def _cpu_ms(ports: Infiniband) -> float:
    began = time.thread_time_ns()
    poll(ports)
    return (time.thread_time_ns() - began) / 1e6


NET = """Switch\t8 "leaf1"
[1]\t"n1"[1]
[2]\t"n2"[1]

Hca\t2 "n1"
[1]\t"leaf1"[1]

Hca\t2 "n2"
[1]\t"leaf1"[2]
"""
COPY = """
import os, shutil, sys
os.listdir("/sys/class/infiniband")  # the first look makes the library write its tree
shutil.copytree(f"sys-{os.getpid()}/sys", sys.argv[1])
"""


@contextmanager
def fabric(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """ibsim with two nodes on one switch."""
    (folder / "net").write_text(NET)
    with (folder / "log").open("wb") as log:
        command = ["ibsim", "-s", "net"]
        sim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder, env=_sim_env())
    try:
        yield sim
    finally:
        assert sim.stdin is not None
        sim.stdin.close()
        sim.kill()
        sim.wait()


def _sim_env() -> dict[str, str]:
    """The socket is named by us: another test process may simulate too."""
    return os.environ | {"SIM_HOST": "n1", "IBSIM_SOCKNAME": f"trainwarden-{os.getpid()}"}


def simulated(folder: Path, *command: str) -> str:
    """A command that sees the fabric as node n1; ibsim takes a moment to answer the first."""
    until_s = time.monotonic() + 10
    while True:
        run = ["ibsim-run", *command]
        done = subprocess.run(run, cwd=folder, env=_sim_env(), capture_output=True, text=True, timeout=20, check=False)
        if done.returncode == 0 or time.monotonic() > until_s:
            assert done.returncode == 0, done.stdout + done.stderr + (folder / "log").read_text()
            return done.stdout
        time.sleep(0.1)


@pytest.mark.skipif(
    shutil.which("ibsim-run") is None or shutil.which("ibstat") is None,
    reason="LOUD: no ibsim and ibstat here (Debian: ibsim-utils, infiniband-diags): no simulated fabric is read",
)
def test_the_ports_of_a_simulated_fabric_are_those_that_ibstat_shows(tmp_path: Path) -> None:
    """libumad2sim writes the sysfs tree that the real tools read; ours is a copy of it, before and after a pulled
    cable. It has no counters and, like old kernels, no link_layer."""
    tree = tmp_path / "seen"
    ports = Infiniband(InfinibandConfig(), node="n1", start_ns=1_000, sys=tree)
    with fabric(tmp_path) as sim:
        simulated(tmp_path, sys.executable, "-c", COPY, str(tree))
        shown = simulated(tmp_path, "ibstat")
        assert "State: Initializing" in shown
        assert "Rate: 10\n" in shown
        first = poll(ports)
        assert numbers(first) == {
            "link:n1/ibsim0/1": {"port_up": 0, "port_physically_up": 1, "port_rate_bytes_per_second": 1.25e9}
        }
        assert events(first) == []
        assert sim.stdin is not None
        sim.stdin.write(b'Unlink "n1"[1]\n')
        sim.stdin.flush()
        until_s = time.monotonic() + 10
        while "State: Down" not in simulated(tmp_path, "ibstat"):
            assert time.monotonic() < until_s
        shutil.rmtree(tree)
        simulated(tmp_path, sys.executable, "-c", COPY, str(tree))
    second = poll(ports)
    assert events(second) == [("link.state", "link:n1/ibsim0/1")]
    assert numbers(second)["link:n1/ibsim0/1"]["port_physically_up"] == 0
