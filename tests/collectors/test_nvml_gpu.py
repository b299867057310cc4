"""NVML with a real driver and a real GPU; everything else of it is tested on a fake library (test_nvml.py)."""

import time

import pytest
from tests.collectors.nvml_world import Seen

from trainwarden.collectors.nvml import Nvml, NvmlConfig


@pytest.mark.gpu
def test_a_real_gpu_tells_who_and_how_it_is() -> None:
    source, seen, end_s = Nvml(NvmlConfig(), node="n1", start_ns=time.time_ns()), Seen(), time.monotonic() + 50
    while not seen.events and time.monotonic() < end_s:
        seen.add(source.poll(time.time_ns()))
        time.sleep(0.01)
    source.close()
    if seen.kinds()[:1] == ["source.blind"]:
        pytest.skip(f"LOUD: no GPU here: {seen.whys()[0]}")
    found = seen.events[0]
    assert found.kind == "device.found"
    told = seen.readings[f"device:{found.data['uuid']}"]
    assert str(found.data["uuid"]).startswith("GPU-")
    assert 10 < told["gpu_temperature_celsius"] < 110
    assert 5 < told["gpu_power_watts"] < 2000
    assert 0 <= told["gpu_utilization_ratio"] <= 1
    assert told["gpu_memory_used_bytes"] + told["gpu_memory_free_bytes"] > 1 << 30
    assert 1e8 < told["gpu_sm_clock_hertz"] <= told["gpu_sm_clock_max_hertz"] < 1e10
