"""The child process that calls NVML: whatever the vendor's library does (hang, crash, corrupt) happens here.

    python -P -m trainwarden.collectors.nvml_reader PATIENCE_S

Reads one JSON line a pass, `{"slow": bool, "skip": [index, ...]}`, and answers with JSON lines: `{"ready": count}`
once; then for each GPU `{"at": index}` before its first call, so that the GPU on which a call hangs can be named, and
`{"i": index, "t_ns", "v", "absent"}` after its last; `{"done": true}` at the end of the pass; `{"blind": words}` when
NVML cannot be used at all. A slow pass adds `links` and `pids`, a GPU's first answer `device` (who it is), a lost GPU's
is `lost` (NVML's words). Calls on one GPU that take longer than PATIENCE_S end the process by SIGALRM, in case that
nobody is left to kill it. `fabric`, in slow passes, is the NVLink domain that spans nodes, "" where there is none.

Numbers are in base units. What NVML does not tell is in `absent` (name -> its words), never 0. Standard library and
nvidia-ml-py only (15 MB resident). Rates of counters, and what a value means, are decided elsewhere.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pynvml as nv

MHZ, MILLI, NANO, PERCENT, KIB = 1e6, 1e-3, 1e-9, 1e-2, 1024.0
"""NVML's units in ours. PCIe throughput is documented as "KB/s": taken as KiB, as nvidia-smi's MB are 1024 of them."""

BLANKS: Final = frozenset((2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, *range(0x7FFFFFF0, 0x7FFFFFF4)))
"""No numbers but words: NVML_VALUE_NOT_AVAILABLE (all ones) and, where it comes through, DCGM's blanks."""

Ask = tuple[tuple[str, ...], float, Callable[[Any], Sequence[float]]]
"""Names, what NVML's unit is in base units, and the call that gives a number for each name."""
Field = tuple[str, str, float]
"""A name, its NVML_FI_DEV_* without that prefix, and the unit: read together, by nvmlDeviceGetFieldValues."""


REOPEN = (nv.NVMLError_Uninitialized, nv.NVMLError_DriverNotLoaded, nv.NVMLError_LibRmVersionMismatch)
"""Of no GPU but of the whole library (a driver that was replaced below us): only another process helps."""


class LostError(Exception):
    """NVML says that this GPU is gone."""


def _one(*names: str, of: int | None = None) -> Callable[[Any], Sequence[float]]:
    """A call that gives one number, of a sensor, clock or counter if it wants to know which. Of several names the first
    that library and bindings both have: old drivers lack the new ones, new bindings may drop the old ones (CUDA 14
    removes what pynvml.py calls deprecated)."""

    def call(gpu: Any) -> Sequence[float]:
        args = (gpu,) if of is None else (gpu, of)
        for name in names[:-1]:
            with contextlib.suppress(AttributeError, nv.NVMLError_FunctionNotFound):
                return [getattr(nv, name)(*args)]
        return [getattr(nv, names[-1])(*args)]

    return call


def _utilization(gpu: Any) -> Sequence[float]:
    rates = nv.nvmlDeviceGetUtilizationRates(gpu)
    return rates.gpu, rates.memory


def _memory(gpu: Any) -> Sequence[float]:
    memory = nv.nvmlDeviceGetMemoryInfo(gpu, version=nv.nvmlMemory_v2)
    return memory.used, memory.free, memory.reserved


def _banks(gpu: Any) -> Sequence[float]:
    banks = nv.nvmlDeviceGetRowRemapperHistogram(gpu)
    return banks.max, banks.high, banks.partial, banks.low, banks.none


def _processes(gpu: Any, pids: list[int]) -> Sequence[float]:
    pids += [process.pid for process in nv.nvmlDeviceGetComputeRunningProcesses(gpu)]
    return [len(pids)]


def _link(function: str, *args: Any) -> Sequence[float]:
    return [getattr(nv, function)(*args)]


FAST: tuple[Ask, ...] = (
    (
        ("gpu_temperature_celsius",),
        1,
        _one("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", of=nv.NVML_TEMPERATURE_GPU),
    ),
    (("gpu_temperature_margin_celsius",), 1, _one("nvmlDeviceGetMarginTemperature")),
    (("gpu_power_watts",), MILLI, _one("nvmlDeviceGetPowerUsage")),
    (("gpu_sm_clock_hertz",), MHZ, _one("nvmlDeviceGetClockInfo", of=nv.NVML_CLOCK_SM)),
    (("gpu_memory_clock_hertz",), MHZ, _one("nvmlDeviceGetClockInfo", of=nv.NVML_CLOCK_MEM)),
    (("gpu_utilization_ratio", "gpu_memory_utilization_ratio"), PERCENT, _utilization),
    (("gpu_memory_used_bytes", "gpu_memory_free_bytes", "gpu_memory_reserved_bytes"), 1, _memory),
    (
        ("gpu_clock_event_reasons",),
        1,
        _one("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
)
FAST_FIELDS: tuple[Field, ...] = (
    ("gpu_memory_temperature_celsius", "MEMORY_TEMP", 1),
    ("gpu_energy_joules", "TOTAL_ENERGY_CONSUMPTION", MILLI),
    ("gpu_power_violation_seconds", "PERF_POLICY_POWER", NANO),
    ("gpu_thermal_violation_seconds", "PERF_POLICY_THERMAL", NANO),
    ("gpu_sync_boost_violation_seconds", "PERF_POLICY_SYNC_BOOST", NANO),
    ("gpu_board_limit_violation_seconds", "PERF_POLICY_BOARD_LIMIT", NANO),
    ("gpu_reliability_violation_seconds", "PERF_POLICY_RELIABILITY", NANO),
    ("gpu_recovery_action", "GET_GPU_RECOVERY_ACTION", 1),
)
SLOW: tuple[Ask, ...] = (
    (("gpu_power_limit_watts",), MILLI, _one("nvmlDeviceGetEnforcedPowerLimit")),
    (("gpu_sm_clock_max_hertz",), MHZ, _one("nvmlDeviceGetMaxClockInfo", of=nv.NVML_CLOCK_SM)),
    (tuple(f"gpu_remap_banks_{left}" for left in ("max", "high", "partial", "low", "none")), 1, _banks),
    (("gpu_pcie_generation",), 1, _one("nvmlDeviceGetCurrPcieLinkGeneration")),
    (("gpu_pcie_width_lanes",), 1, _one("nvmlDeviceGetCurrPcieLinkWidth")),
    (("gpu_pcie_generation_max",), 1, _one("nvmlDeviceGetMaxPcieLinkGeneration")),
    (("gpu_pcie_width_max_lanes",), 1, _one("nvmlDeviceGetMaxPcieLinkWidth")),
    (
        ("gpu_pcie_transmitted_bytes_per_second",),
        KIB,
        _one("nvmlDeviceGetPcieThroughput", of=nv.NVML_PCIE_UTIL_TX_BYTES),
    ),
    (("gpu_pcie_received_bytes_per_second",), KIB, _one("nvmlDeviceGetPcieThroughput", of=nv.NVML_PCIE_UTIL_RX_BYTES)),
)
SLOW_FIELDS: tuple[Field, ...] = (
    ("gpu_ecc_corrected_volatile", "ECC_SBE_VOL_TOTAL", 1),
    ("gpu_ecc_uncorrected_volatile", "ECC_DBE_VOL_TOTAL", 1),
    ("gpu_ecc_corrected_aggregate", "ECC_SBE_AGG_TOTAL", 1),
    ("gpu_ecc_uncorrected_aggregate", "ECC_DBE_AGG_TOTAL", 1),
    ("gpu_retired_pages_single_bit", "RETIRED_SBE", 1),
    ("gpu_retired_pages_double_bit", "RETIRED_DBE", 1),
    ("gpu_retired_pages_pending", "RETIRED_PENDING", 1),
    ("gpu_remapped_rows_correctable", "REMAPPED_COR", 1),
    ("gpu_remapped_rows_uncorrectable", "REMAPPED_UNC", 1),
    ("gpu_row_remap_pending", "REMAPPED_PENDING", 1),
    ("gpu_row_remap_failed", "REMAPPED_FAILURE", 1),
    ("gpu_pcie_replays", "PCIE_REPLAY_COUNTER", 1),
)
LINK_ERRORS: Mapping[str, int] = {
    "nvlink_replay_errors": nv.NVML_NVLINK_ERROR_DL_REPLAY,
    "nvlink_recovery_errors": nv.NVML_NVLINK_ERROR_DL_RECOVERY,
    "nvlink_crc_flit_errors": nv.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    "nvlink_crc_data_errors": nv.NVML_NVLINK_ERROR_DL_CRC_DATA,
    "nvlink_ecc_data_errors": nv.NVML_NVLINK_ERROR_DL_ECC_DATA,
}
LINK_FIELDS: tuple[Field, ...] = (
    ("nvlink_recovery_errors", "NVLINK_COUNT_LINK_RECOVERY_EVENTS", 1),
    ("nvlink_symbol_ber_ratio", "NVLINK_COUNT_SYMBOL_BER", 1),
    ("nvlink_effective_ber_ratio", "NVLINK_COUNT_EFFECTIVE_BER", 1),
)
"""What NVLink 5 has instead of CRC counters; the link is the field's scope."""


class Pass:
    """What one GPU told in one pass. Raises LostError from whatever call first says that the GPU is gone."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.values: dict[str, float] = {}
        self.absent: dict[str, str] = {}

    def read(self, asks: Sequence[Ask], fields: Sequence[Field]) -> None:
        for names, unit, call in asks:
            self.call(names, unit, call, self.gpu)
        self.fields(fields)

    def call(self, names: Sequence[str], unit: float, call: Callable[..., Sequence[float]], *args: Any) -> None:
        try:
            told = call(*args)
        except Exception as error:  # whatever bindings or library of another version do is "no data" of these names
            self.absent |= dict.fromkeys(names, _words(error))
            return
        for name, value in zip(names, told, strict=True):
            self.keep(name, value, unit)

    def fields(self, fields: Sequence[Field], scope: int = 0) -> None:
        ids = {name: getattr(nv, f"NVML_FI_DEV_{field}", None) for name, field, _ in fields}
        known = [field for field in fields if ids[field[0]] is not None]
        self.absent |= dict.fromkeys((name for name, of in ids.items() if of is None), "not in this nvidia-ml-py")
        try:
            told = nv.nvmlDeviceGetFieldValues(self.gpu, [(ids[name], scope) for name, _, _ in known])
        except Exception as error:
            self.absent |= dict.fromkeys((name for name, _, _ in known), _words(error))
            return
        for (name, _, unit), field in zip(known, told, strict=True):
            if field.nvmlReturn != nv.NVML_SUCCESS:
                self.absent[name] = _words(nv.NVMLError(field.nvmlReturn))
            elif (value := _number(field)) is None:
                self.absent[name] = f"of unknown type {field.valueType}"
            else:
                self.keep(name, _bit_error_rate(value) if name.endswith("_ber_ratio") else value, unit)

    def keep(self, name: str, value: float, unit: float) -> None:
        if value in BLANKS:
            self.absent[name] = "blank"
        else:
            self.values[name] = value * unit
            self.absent.pop(name, None)


def _number(field: Any) -> float | None:
    """By nvmlValueType_t, in the order of pynvml's NVML_VALUE_TYPE_*; None: a newer type."""
    kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return getattr(field.value, kinds[field.valueType]) if field.valueType < len(kinds) else None


def _bit_error_rate(raw: float) -> float:
    """Mantissa in bits 8-11, negative decimal exponent in bits 0-7 (layout: NVIDIA's open kernel modules,
    ctrl2080nvlink.h, BER_MANTISSA 11:8 and BER_EXPONENT 7:0)."""
    return float((int(raw) >> 8 & 0xF) * 10.0 ** -(int(raw) & 0xFF))


def _words(error: Exception) -> str:
    """NVML's own words. Raises LostError if they are that the GPU is gone, and what ends this process as it is."""
    if isinstance(error, nv.NVMLError_GpuIsLost):
        raise LostError(str(error))
    if isinstance(error, REOPEN):
        raise error
    return str(error) if isinstance(error, nv.NVMLError) else f"not in this nvidia-ml-py ({type(error).__name__})"


def read_gpu(gpu: Any, *, slow: bool) -> dict[str, Any]:
    """One GPU's numbers. Raises LostError, also when nothing at all can be read and NVML does not know why."""
    told = Pass(gpu)
    told.read(FAST, FAST_FIELDS)
    if not told.values and str(nv.NVMLError(nv.NVML_ERROR_UNKNOWN)) in told.absent.values():
        raise LostError("Unknown Error, whatever is asked")
    if not slow:
        return {"v": told.values, "absent": told.absent}
    told.read(SLOW, SLOW_FIELDS)
    pids: list[int] = []
    told.call(("gpu_processes",), 1, _processes, gpu, pids)
    links = dict(_links(gpu, told.absent))
    return {"v": told.values, "absent": told.absent, "links": links, "pids": pids, "fabric": fabric(gpu)}


def _links(gpu: Any, absent: dict[str, str]) -> Iterator[tuple[int, Mapping[str, float]]]:
    """(link, numbers) of each link that has a state; what no link tells goes to absent."""
    untold: dict[str, str] = {}
    names = set[str]()
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        told = Pass(gpu)
        told.call(("nvlink_up",), 1, _link, "nvmlDeviceGetNvLinkState", gpu, link)
        if told.values:
            told.fields(LINK_FIELDS, scope=link)
            for name, counter in LINK_ERRORS.items():
                told.call((name,), 1, _link, "nvmlDeviceGetNvLinkErrorCounter", gpu, link, counter)
            yield link, told.values
        names |= told.values.keys()
        untold = told.absent | untold
    absent |= {name: words for name, words in untold.items() if name not in names}


def fabric(gpu: Any) -> str:
    """<ClusterUUID>.<cliqueId>, as the label nvidia.com/gpu.clique has it; "" for a GPU that is in no such domain (one
    of a single server has a UUID of zeros), is not registered yet, or has a driver that cannot tell."""
    try:
        info = nv.c_nvmlGpuFabricInfoV_t()
        nv.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    except Exception as error:
        _words(error)
        return ""
    there = info.state == nv.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == nv.NVML_SUCCESS
    cluster = bytes(info.clusterUuid)
    return f"{uuid.UUID(bytes=cluster)}.{info.cliqueId}" if there and any(cluster) else ""


def who(gpu: Any, index: int) -> dict[str, Any]:
    """What names a GPU: no serial number. MIG instances by UUID."""
    pci = nv.nvmlDeviceGetPciInfo(gpu)
    place = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
    told = {"uuid": nv.nvmlDeviceGetUUID(gpu), "pci": place, "index": index, "name": nv.nvmlDeviceGetName(gpu)}
    return told | {"driver": nv.nvmlSystemGetDriverVersion(), "mig": list(_instances(gpu))}


def _instances(gpu: Any) -> Iterator[str]:
    """UUIDs of the MIG instances; gaps in their numbers are legal."""
    try:
        count = nv.nvmlDeviceGetMaxMigDeviceCount(gpu) if nv.nvmlDeviceGetMigMode(gpu)[0] else 0
    except nv.NVMLError:  # a GPU or driver without MIG
        return
    for number in range(count):
        with contextlib.suppress(nv.NVMLError_NotFound, nv.NVMLError_InvalidArgument):
            yield nv.nvmlDeviceGetUUID(nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))


class Reader:
    """The passes over all GPUs, told through `say`."""

    def __init__(self, say: Callable[[dict[str, Any]], None], patience_s: int) -> None:
        self._say, self._patience_s = say, patience_s
        self._gpus: dict[int, Any] = {}
        nv.nvmlInit()
        self._count = int(nv.nvmlDeviceGetCount())
        say({"ready": self._count})

    def read_all(self, *, slow: bool, skip: Sequence[int]) -> None:
        for index in range(self._count):
            if index not in skip:
                self._say({"at": index})
                signal.alarm(self._patience_s)
                told = self._told(index, slow=slow)
                signal.alarm(0)  # to say it may take as long as the agent likes
                self._say({"i": index, "t_ns": time.time_ns()} | told)
        self._say({"done": True})

    def _told(self, index: int, *, slow: bool) -> dict[str, Any]:
        device: dict[str, Any] = {}
        try:
            if index not in self._gpus:
                gpu = nv.nvmlDeviceGetHandleByIndex(index)
                device = {"device": who(gpu, index)}
                self._gpus[index] = gpu
            return device | read_gpu(self._gpus[index], slow=slow)
        except REOPEN:
            raise
        except Exception as error:  # also what bindings make of garbage: a name that is no UTF-8
            return device | {"lost": str(error)}


def main() -> int:
    """Until standard input ends: nobody is left to tell."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever the library prints is no answer
    patience_s = int(sys.argv[1])

    def say(told: dict[str, Any]) -> None:
        out.write(json.dumps(told) + "\n")

    try:
        signal.alarm(patience_s * 10)  # nvmlInit wakes up every GPU where persistence mode is off
        reader = Reader(say, patience_s)
        signal.alarm(0)
        for line in sys.stdin:
            reader.read_all(**json.loads(line))
    except nv.NVMLError as error:
        say({"blind": str(error)})
    except BrokenPipeError:
        os._exit(0)  # no flush at exit into a pipe that is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
