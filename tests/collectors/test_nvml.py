"""NVML through the real nvidia-ml-py, on a library whose GPUs fail when told to (tests/fakes/nvml.c)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.collectors.nvml_world import FIELDS, NvmlWorld, Seen, compiled

from trainwarden.collectors.nvml import Nvml, NvmlConfig
from trainwarden.core.errors import ConfigError
from trainwarden.core.readings import READINGS

ALL_FIELDS = {f"field.{id_}": value for id_, value in FIELDS.items()}
GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN, NEWER = 15, 3, 999, 77
HANGS, CRASHES, CORRUPTS = -1, -2, -3
RSS_MAX_KIB = 40 * 1024
"""Of the reader: 15 MiB with the fake library; the agent and it stay below 150 MB together."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def node(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlWorld]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("TRAINWARDEN_FAKE_NVML", str(tmp_path / "gpus"))
    world = NvmlWorld(tmp_path / "gpus")
    yield world
    world.source.close()


def test_every_reading_that_nvml_can_tell_is_told(node: NvmlWorld) -> None:
    node.set(ALL_FIELDS, links=1)
    seen = node.round()
    told = seen.readings["device:GPU-0"].keys() | seen.readings["link:GPU-0/nvlink-0"].keys()
    can_tell = {name for name, row in READINGS.items() if "nvml" in row.sources}
    assert can_tell - told == {"gpu_temperature_margin_celsius"}, "this driver is too old for that one"
    assert told <= can_tell


def test_numbers_are_in_base_units(node: NvmlWorld) -> None:
    node.set(ALL_FIELDS, links=1, link0_error0=4, link0_error1=5, link0_error2=6, link0_error3=7, link0_error4=8)
    node.set(reasons=0x40, utilization=50)
    seen = node.round()
    expected = {
        "gpu_temperature_celsius": 40,
        "gpu_memory_temperature_celsius": 71,
        "gpu_power_watts": 70.5,
        "gpu_power_limit_watts": 700,
        "gpu_energy_joules": 5000,
        "gpu_sm_clock_hertz": 1.41e9,
        "gpu_sm_clock_max_hertz": 1.98e9,
        "gpu_memory_clock_hertz": 1.41e9,
        "gpu_utilization_ratio": 0.5,
        "gpu_memory_utilization_ratio": 0.4,
        "gpu_memory_used_bytes": 5 << 30,
        "gpu_memory_free_bytes": (75 << 30) - (1 << 29),
        "gpu_memory_reserved_bytes": 1 << 29,
        "gpu_clock_event_reasons": 0x40,
        "gpu_power_violation_seconds": 1,
        "gpu_thermal_violation_seconds": 2,
        "gpu_sync_boost_violation_seconds": 3,
        "gpu_board_limit_violation_seconds": 4,
        "gpu_reliability_violation_seconds": 5,
        "gpu_ecc_corrected_volatile": 10,
        "gpu_ecc_uncorrected_volatile": 11,
        "gpu_ecc_corrected_aggregate": 12,
        "gpu_ecc_uncorrected_aggregate": 13,
        "gpu_retired_pages_single_bit": 14,
        "gpu_retired_pages_double_bit": 15,
        "gpu_retired_pages_pending": 1,
        "gpu_remapped_rows_correctable": 17,
        "gpu_remapped_rows_uncorrectable": 18,
        "gpu_row_remap_pending": 1,
        "gpu_row_remap_failed": 0,
        "gpu_remap_banks_max": 640,
        "gpu_remap_banks_high": 0,
        "gpu_remap_banks_partial": 1,
        "gpu_remap_banks_low": 2,
        "gpu_remap_banks_none": 3,
        "gpu_recovery_action": 0,
        "gpu_pcie_replays": 16,
        "gpu_pcie_generation": 5,
        "gpu_pcie_width_lanes": 16,
        "gpu_pcie_generation_max": 5,
        "gpu_pcie_width_max_lanes": 16,
        "gpu_pcie_transmitted_bytes_per_second": 3072,
        "gpu_pcie_received_bytes_per_second": 3072,
        "gpu_processes": 1,
    }
    assert seen.readings["device:GPU-0"] == pytest.approx(expected)
    assert seen.readings["link:GPU-0/nvlink-0"] == pytest.approx(
        {
            "nvlink_up": 1,
            "nvlink_replay_errors": 4,
            "nvlink_recovery_errors": 5,
            "nvlink_crc_flit_errors": 6,
            "nvlink_crc_data_errors": 7,
            "nvlink_ecc_data_errors": 8,
            "nvlink_symbol_ber_ratio": 6e-12,
            "nvlink_effective_ber_ratio": 3e-15,
        }
    )


def test_eight_gpus_are_found_with_where_they_sit(node: NvmlWorld) -> None:
    node.set({"count": 8, "mig.2": 3})
    seen = node.round()
    assert seen.kinds() == ["device.found"] * 8
    assert dict(seen.events[2].data) | {"absent": {}} == {
        "uuid": "GPU-2",
        "pci": "0000:12:1c",
        "index": 2,
        "name": "NVIDIA Fake 80GB",
        "driver": "450.80.02",
        "mig": ["MIG-2-0", "MIG-2-1", "MIG-2-2"],
        "absent": {},
    }
    assert node.source.devices() == {f"0000:{0x10 + index:02x}:1c": f"GPU-{index}" for index in range(8)}
    assert node.source.pids()["GPU-2"] == (3000,)
    assert all(t_ns <= node.now_ns for t_ns in seen.times_ns)


FABRIC = {"fabric_state": 3, "fabric_cluster": 0xAB, "fabric_clique": 7}
NVLINK = "abababab-abab-abab-abab-abababababab.7"
SHARED = {"driver": "450.80.02", "gpu": "NVIDIA Fake 80GB"}


def test_a_gpu_without_a_domain_of_several_nodes_has_none(node: NvmlWorld) -> None:
    node.set(FABRIC | {"count": 6, "fabric_clique.5": 8})
    node.set({"fabric_cluster.1": 0, "fabric_state.2": 2, "fabric_status.3": UNKNOWN})
    node.set({"nvmlDeviceGetGpuFabricInfoV.4": 13})  # FUNCTION_NOT_FOUND: an older driver
    (event,) = node.round().domains
    assert (str(event.subject), event.source) == ("node:n1", "nvml@n1")
    each = {"nvlink.0": NVLINK, "nvlink.5": NVLINK.replace(".7", ".8")}
    assert event.data == {"from": "nvml", "domains": SHARED | each}, "and where GPUs differ each has its own"


def test_a_fabric_that_is_up_later_is_told_then_and_stays_through_a_failure(node: NvmlWorld) -> None:
    node.set({**FABRIC, "fabric_state": 1, "links": 1})
    assert [event.data["domains"] for event in node.round().domains] == [SHARED]
    node.set(fabric_state=3)
    assert node.round().domains == [], "asked again in a slow pass"
    assert [event.data["domains"] for event in node.round(15.0).domains] == [SHARED | {"nvlink": NVLINK}]
    node.set({"nvmlDeviceGetGpuFabricInfoV.1": UNKNOWN})
    assert node.round(15.0).domains == []
    node.set({"nvmlDeviceGetGpuFabricInfoV.1": GPU_IS_LOST})
    seen = node.round(15.0)
    assert "device.lost GPU-1" in seen.subjects()
    assert seen.domains == []


def test_fast_signals_come_each_second_and_slow_ones_rarely(node: NvmlWorld) -> None:
    node.round()
    node.set({"temperature0.1": 83, "power_limit.1": 500_000})
    (second, *_, last) = [node.round() for _ in range(15)]
    assert second.readings["device:GPU-1"]["gpu_temperature_celsius"] == 83
    assert "gpu_power_limit_watts" not in second.readings["device:GPU-1"]
    assert last.readings["device:GPU-1"]["gpu_power_limit_watts"] == 500


def test_what_nvml_does_not_tell_is_absent_and_never_zero(node: NvmlWorld) -> None:
    node.set(
        {"power": 2**32 - 1, "field.83": 2**64 // 2 - 1, "field.94": 5, "code.94": NEWER, "field.3": 1, "type.3": 9}
    )
    seen = node.round()
    told, absent = seen.readings["device:GPU-0"], node.source.absent()["GPU-0"]
    assert {name: absent[name] for name in absent if "ecc" not in name and "remap" not in name} == {
        "gpu_temperature_margin_celsius": "Function Not Found",
        "gpu_power_watts": "blank",
        "gpu_energy_joules": "blank",
        "gpu_memory_temperature_celsius": "Not Supported",
        **{f"gpu_{name}_violation_seconds": "Not Supported" for name in ("power", "thermal", "sync_boost")},
        **{f"gpu_{name}_violation_seconds": "Not Supported" for name in ("board_limit", "reliability")},
        "gpu_recovery_action": "Not Supported",
        **{f"gpu_retired_pages_{name}": "Not Supported" for name in ("single_bit", "double_bit", "pending")},
        "gpu_pcie_replays": "words of a newer error",
        "nvlink_up": "Invalid Argument",
    }
    assert absent["gpu_ecc_corrected_volatile"] == "of unknown type 9"
    assert told.keys().isdisjoint(absent)
    assert seen.events[0].data["absent"] == absent
    assert seen.kinds() == ["device.found"] * 2


def test_a_signal_that_vanishes_is_told_once_and_its_return_too(node: NvmlWorld) -> None:
    node.round()
    node.set({"nvmlDeviceGetPowerUsage.1": NOT_SUPPORTED})
    seen = [node.round(5.0) for _ in range(10)]
    assert "gpu_power_watts" not in seen[0].readings["device:GPU-1"]
    assert [why for one in seen for why in one.whys()] == [
        "source.blind nvml@n1/gpu-1/signals: GPU 1 (GPU-1) does not tell any more: gpu_power_watts (Not Supported)"
    ]
    assert "gpu_power_watts" in seen[-1].readings["device:GPU-0"]
    node.set({"nvmlDeviceGetPowerUsage.1": 0})
    assert [what for _ in range(4) for what in node.round(5.0).subjects()] == ["source.up nvml@n1/gpu-1/signals"]


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        pytest.param({"nvmlDeviceGetPowerUsage.3": GPU_IS_LOST}, "NVML: GPU is lost", id="one call says so"),
        pytest.param(
            {
                f"nvmlDeviceGet{name}.3": UNKNOWN
                for name in (
                    *("Temperature", "PowerUsage", "ClockInfo", "UtilizationRates", "MemoryInfo_v2", "FieldValues"),
                    "CurrentClocksThrottleReasons",
                )
            },
            "NVML: Unknown Error, whatever is asked",
            id="no call works and NVML does not know why",
        ),
    ],
)
def test_a_lost_gpu_is_told_once_and_the_others_go_on(node: NvmlWorld, faults: dict[str, int], why: str) -> None:
    node.set(count=8)
    node.round()
    node.set(faults)
    seen = [node.round() for _ in range(3)]
    assert [(event.kind, str(event.subject), event.data["why"]) for one in seen for event in one.events] == [
        ("device.lost", "device:GPU-3", why)
    ]
    assert seen[-1].gpus() == [f"device:GPU-{index}" for index in range(8) if index != 3]
    node.set(dict.fromkeys(faults, 0))
    assert node.round().kinds() == ["device.found"]


def test_a_gpu_that_fell_off_is_looked_for_and_found_again(node: NvmlWorld) -> None:
    node.round()
    node.set({"nvmlDeviceGetPowerUsage.1": GPU_IS_LOST, "nvmlDeviceGetHandleByIndex_v2.1": GPU_IS_LOST})
    assert node.round().kinds() == ["device.lost"]
    first = node.source.reader_pid
    node.round(300.0)
    assert node.round().whys() == ["source.blind nvml@n1/gpu-1: GPU 1 cannot be opened: GPU is lost"]
    assert node.source.reader_pid != first, "NVML is opened anew: old handles do not come back"
    node.set({"nvmlDeviceGetPowerUsage.1": 0, "nvmlDeviceGetHandleByIndex_v2.1": 0})
    node.round(300.0)
    assert node.round().kinds() == ["source.up", "device.found"]
    assert node.source.restarts == 0


def test_a_gpu_that_is_not_listed_any_more_is_lost(node: NvmlWorld) -> None:
    node.round()
    node.set({"nvmlDeviceGetTemperature.0": CRASHES}, count=1)
    node.round()
    node.set({"nvmlDeviceGetTemperature.0": 0})
    assert node.round().whys() == ["device.lost GPU-1: NVML: it is not listed any more"]


def test_one_call_that_fails_without_a_reason_loses_no_gpu(node: NvmlWorld) -> None:
    node.set({"nvmlDeviceGetPowerUsage.1": UNKNOWN})
    assert node.round().kinds() == ["device.found"] * 2
    assert node.source.absent()["GPU-1"]["gpu_power_watts"] == "Unknown Error"


def test_a_gpu_with_a_garbled_name_is_blind_and_the_others_are_not(node: NvmlWorld) -> None:
    node.set({"garbled.0": 1})
    seen = node.round()
    assert seen.kinds() == ["source.blind", "device.found"]
    assert str(seen.events[0].data["why"]).startswith("GPU 0 cannot be opened: 'utf-8' codec")


def test_a_call_that_hangs_is_named_its_reader_killed_and_the_others_go_on(node: NvmlWorld) -> None:
    node.set(count=4)
    node.round()
    node.set({"nvmlDeviceGetPowerUsage.2": HANGS})
    hanging = node.source.reader_pid
    seen = node.until_it_hangs()
    assert seen.kinds() == []
    began_s = time.monotonic()
    node.go(5.1)
    seen.add(node.source.poll(node.now_ns))
    assert time.monotonic() - began_s < 1, "a poll waits for nothing"
    assert seen.whys() == ["source.blind nvml@n1/gpu-2: NVML did not answer for 5 s on GPU 2 (GPU-2)"]
    after = node.round()
    assert after.gpus() == ["device:GPU-0", "device:GPU-1", "device:GPU-3"]
    assert after.kinds() == []
    assert node.source.reader_pid != hanging
    assert (node.source.restarts, node.source.abandoned) == (1, 0)


def test_a_gpu_that_hung_is_tried_again_later_and_later(node: NvmlWorld) -> None:
    node.round()
    node.set({"nvmlDeviceGetPowerUsage.1": HANGS})
    node.until_it_hangs()
    node.round(5.1)
    node.round(59.0)
    assert not node.round(0.5).events
    node.until_it_hangs()
    assert node.round(5.1).whys() == [], "told already"
    node.set({"nvmlDeviceGetPowerUsage.1": 0})
    assert node.round(100.0).gpus() == ["device:GPU-0"]
    seen = node.round(21.0)
    assert seen.subjects() == ["source.up nvml@n1/gpu-1"]
    assert seen.gpus() == ["device:GPU-0", "device:GPU-1"]


def test_a_library_that_crashes_takes_its_reader_only(node: NvmlWorld) -> None:
    node.round()
    node.set({"nvmlDeviceGetPowerUsage.1": CRASHES})
    seen = node.round()
    assert seen.whys() == [
        "source.blind nvml@n1/gpu-1: the reader of NVML ended by itself (signal 11) on GPU 1 (GPU-1)"
    ]
    assert seen.gpus() == ["device:GPU-0"], "what was answered before the crash counts"
    assert node.round().gpus() == ["device:GPU-0"]


def test_a_library_that_writes_where_it_should_not_is_not_believed(node: NvmlWorld) -> None:
    node.round()
    node.set({"nvmlDeviceGetPowerUsage.1": CORRUPTS})
    assert node.round().whys() == [
        "source.blind nvml@n1/gpu-1: no answer of the NVML reader: b'garbage' on GPU 1 (GPU-1)"
    ]


def test_an_nvml_that_cannot_be_opened_is_blind_with_its_words_and_tried_again(node: NvmlWorld) -> None:
    node.set(nvmlInitWithFlags=9)
    assert node.round().whys() == ["source.blind nvml@n1: NVML: Driver Not Loaded"]
    pids = set()
    for _ in range(8):
        assert node.round(0.5).events == []
        pids.add(node.source.reader_pid)
    assert len(pids) < 8, "a reader is not started at each poll"
    node.set(nvmlInitWithFlags=0)
    seen = node.round(300.0)
    assert seen.kinds() == ["source.up", "device.found", "device.found"]


def test_a_driver_that_is_replaced_below_us_is_opened_anew(node: NvmlWorld) -> None:
    node.round()
    node.set(nvmlDeviceGetPowerUsage=18)
    assert node.round().whys() == ["source.blind nvml@n1: NVML: RM has detected an NVML/RM version mismatch."]
    node.set(nvmlDeviceGetPowerUsage=0)
    assert node.round(2.0).kinds() == ["source.up"]


def test_opening_nvml_has_a_deadline_of_its_own(node: NvmlWorld) -> None:
    node.set(nvmlInitWithFlags=HANGS)
    node.until_it_hangs()
    node.go(59.0)
    assert list(node.source.poll(node.now_ns)) == []
    assert node.round(2.0).whys() == ["source.blind nvml@n1: NVML did not answer for 60 s"]


def test_a_node_without_gpus_is_blind(node: NvmlWorld) -> None:
    node.set(count=0)
    assert node.round().whys() == ["source.blind nvml@n1: NVML finds no GPU"]


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A v1 freezer cgroup: who is frozen there does not die of SIGKILL, as in state D."""
    path = Path("/sys/fs/cgroup/freezer") / f"trainwarden-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"LOUD: no v1 freezer cgroup can be made here ({error}): readers that cannot be killed not tested")
    yield path
    (path / "freezer.state").write_text("THAWED")
    end_s = time.monotonic() + 5
    while (path / "cgroup.procs").read_text() and time.monotonic() < end_s:
        time.sleep(0.01)
    path.rmdir()


def test_readers_that_cannot_be_killed_are_left_behind_and_counted(node: NvmlWorld, freezer: Path) -> None:
    node.set(count=3)
    node.round()
    (freezer / "freezer.state").write_text("FROZEN")
    for index in (0, 1):
        node.set({f"nvmlDeviceGetPowerUsage.{index}": HANGS})
        node.until_it_hangs()
        (freezer / "cgroup.procs").write_text(str(node.source.reader_pid))
        assert node.round(5.1).kinds() == ["source.blind"]
        assert node.source.abandoned == index + 1
    assert node.round().whys() == [
        "source.blind nvml@n1: 2 readers hang in the driver and cannot be killed: no other is started until one is gone"
    ]
    assert node.round().events == []
    (freezer / "freezer.state").write_text("THAWED")
    node.until(lambda: node.source.abandoned == 0)
    node.round()
    assert node.round().gpus() == ["device:GPU-2"]
    assert node.source.restarts == 2


def test_a_reader_ends_with_its_agent(node: NvmlWorld) -> None:
    node.round()
    (pid,) = {node.source.reader_pid}
    assert pid is not None
    node.source.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_reader_that_hangs_and_has_no_agent_any_more_ends_itself(node: NvmlWorld, tmp_path: Path) -> None:
    node.set({"nvmlDeviceGetTemperature.0": HANGS})
    command = [sys.executable, "-P", "-m", "trainwarden.collectors.nvml_reader", "1"]
    ask = json.dumps({"slow": False, "skip": []}) + "\n"
    done = subprocess.run(command, input=ask, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == -signal.SIGALRM
    assert done.stdout.splitlines() == ['{"ready": 2}', '{"at": 0}']


def test_the_reader_is_small(node: NvmlWorld) -> None:
    node.set(ALL_FIELDS, count=8, links=18)
    node.round()
    status = Path(f"/proc/{node.source.reader_pid}/status").read_text()
    (kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    assert kib < RSS_MAX_KIB


def test_without_a_driver_it_is_blind_in_nvmls_words(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False, timeout=30).returncode == 0:
        pytest.skip("this machine has a driver")
    source, seen = Nvml(NvmlConfig(), node="n1", start_ns=0), Seen()
    end_s = time.monotonic() + 20
    while not seen.events and time.monotonic() < end_s:
        seen.add(source.poll(time.time_ns()))
        time.sleep(0.005)
    source.close()
    assert seen.whys() == ["source.blind nvml@n1: NVML: NVML Shared Library Not Found"]


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        pytest.param(True, "the reader of NVML ended by itself (status 1)", id="broken"),
        pytest.param(False, "nvidia-ml-py is not installed here: pip install 'trainwarden[agent]'", id="missing"),
    ],
)
def test_without_usable_bindings_it_is_blind(
    node: NvmlWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, why: str
) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    assert node.round().whys() == [f"source.blind nvml@n1: {why}"]


def test_the_agent_never_loads_the_vendors_bindings() -> None:
    probe = "import sys, trainwarden.collectors.nvml; sys.exit('pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=30).returncode == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param({"fast": timedelta(0)}, "collectors.nvml.fast: need at least 0.1s, got 0s", id="no pause"),
        pytest.param(
            {"deadline": timedelta(milliseconds=1)},
            "collectors.nvml.deadline: need at least 1s, got 0.001s",
            id="no patience",
        ),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, timedelta], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NvmlConfig(**wrong)
