"""What dcgm-exporter says of the GPUs of this node: its fields under old and new names, in base units.

Fields are known by their DCGM id (dcgm_fields.h up to 4.7; 4.6 renamed most, and the exporter prints whatever name its
list of counters holds). What DCGM does not know it may write as a "blank" number (dcgm_structs.h): no data here, as is
what is negative or not finite. Counters are handed on as they are: what counts is their growth.

Xids are hints only, none is an event: the kernel log counts them. The gauge of the last Xid stays until another
replaces it, and shows once what happened twice. So a code whose count (DCGM_EXP_XID_ERRORS_*, off by default) grew
between two scrapes is told as `gpu_last_xid` too, before the gauge's own value: one that another overwrote is seen.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Final, NamedTuple

from trainwarden.collectors.blind import Parts
from trainwarden.collectors.prometheus_text import Answer, Sample, scrape
from trainwarden.collectors.readingframes import ReadingFrames, Row
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame

GPUS_MAX: Final = 256
"""Known of one node; the series of any beyond are refused and counted (a fleet behind one address, or an invention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One DCGM field that is read."""

    id: int
    reading: str
    """Row of core/readings.py."""
    scale: float
    """What its unit is in the reading's unit; below 1 the inverse of a whole number."""
    lane: str = ""
    """The NVLink that it speaks of, where its name says so."""


_MHZ, _MIB, _PERCENT, _MILLI, _NANO = 1e6, 2.0**20, 1e-2, 1e-3, 1e-9

_ROWS: Final[tuple[tuple[int, str, float, str], ...]] = (
    (100, "gpu_sm_clock_hertz", _MHZ, "DEV_SM_CLOCK dcgm_sm_clock"),
    (1603, "gpu_sm_clock_hertz", 1, "DEV_SM_CLOCK_HERTZ"),
    (101, "gpu_memory_clock_hertz", _MHZ, "DEV_MEM_CLOCK dcgm_memory_clock"),
    (1604, "gpu_memory_clock_hertz", 1, "DEV_MEMORY_CLOCK_HERTZ"),
    (112, "gpu_clock_event_reasons", 1, "DEV_CLOCK_THROTTLE_REASONS DEV_CLOCKS_EVENT_REASONS"),
    (140, "gpu_memory_temperature_celsius", 1, "DEV_MEMORY_TEMP DEV_MEMORY_TEMP_CELSIUS dcgm_memory_temp"),
    (150, "gpu_temperature_celsius", 1, "DEV_GPU_TEMP DEV_GPU_TEMP_CELSIUS dcgm_gpu_temp"),
    (153, "gpu_temperature_margin_celsius", 1, "DEV_GPU_TEMP_LIMIT DEV_GPU_TEMP_MARGIN_CELSIUS"),
    (155, "gpu_power_watts", 1, "DEV_POWER_USAGE DEV_BOARD_POWER_WATTS dcgm_power_usage"),
    (156, "gpu_energy_joules", _MILLI, "DEV_TOTAL_ENERGY_CONSUMPTION dcgm_total_energy_consumption"),
    (1611, "gpu_energy_joules", 1, "DEV_GPU_ENERGY_JOULES_TOTAL"),
    (202, "gpu_pcie_replays", 1, "DEV_PCIE_REPLAY_COUNTER DEV_PCIE_REPLAY_TOTAL dcgm_pcie_replay_counter"),
    (203, "gpu_utilization_ratio", _PERCENT, "DEV_GPU_UTIL dcgm_gpu_utilization"),
    (1613, "gpu_utilization_ratio", 1, "DEV_GPU_UTIL_RATIO"),
    (204, "gpu_memory_utilization_ratio", _PERCENT, "DEV_MEM_COPY_UTIL dcgm_mem_copy_utilization"),
    (1614, "gpu_memory_utilization_ratio", 1, "DEV_MEMORY_UTIL_RATIO"),
    (230, "gpu_last_xid", 1, "DEV_XID_ERRORS DEV_XID_ERROR dcgm_xid_errors"),
    (237, "gpu_pcie_generation", 1, "DEV_PCIE_LINK_GEN"),
    (238, "gpu_pcie_width_lanes", 1, "DEV_PCIE_LINK_WIDTH"),
    (240, "gpu_power_violation_seconds", _NANO, "DEV_POWER_VIOLATION"),
    (241, "gpu_thermal_violation_seconds", _NANO, "DEV_THERMAL_VIOLATION"),
    (242, "gpu_sync_boost_violation_seconds", _NANO, "DEV_SYNC_BOOST_VIOLATION"),
    (243, "gpu_board_limit_violation_seconds", _NANO, "DEV_BOARD_LIMIT_VIOLATION"),
    (245, "gpu_reliability_violation_seconds", _NANO, "DEV_RELIABILITY_VIOLATION"),
    (251, "gpu_memory_free_bytes", _MIB, "DEV_FB_FREE dcgm_fb_free"),
    (1626, "gpu_memory_free_bytes", 1, "DEV_FB_FREE_BYTES"),
    (252, "gpu_memory_used_bytes", _MIB, "DEV_FB_USED dcgm_fb_used"),
    (1627, "gpu_memory_used_bytes", 1, "DEV_FB_USED_BYTES"),
    (253, "gpu_memory_reserved_bytes", _MIB, "DEV_FB_RESERVED"),
    (1628, "gpu_memory_reserved_bytes", 1, "DEV_FB_RESERVED_BYTES"),
    (310, "gpu_ecc_corrected_volatile", 1, "DEV_ECC_SBE_VOL_TOTAL"),
    (311, "gpu_ecc_uncorrected_volatile", 1, "DEV_ECC_DBE_VOL_TOTAL"),
    (312, "gpu_ecc_corrected_aggregate", 1, "DEV_ECC_SBE_AGG_TOTAL"),
    (313, "gpu_ecc_uncorrected_aggregate", 1, "DEV_ECC_DBE_AGG_TOTAL"),
    (385, "gpu_remap_banks_max", 1, "DEV_BANKS_REMAP_ROWS_AVAIL_MAX DEV_BANK_REMAP_AVAIL_MAX"),
    (386, "gpu_remap_banks_high", 1, "DEV_BANKS_REMAP_ROWS_AVAIL_HIGH DEV_BANK_REMAP_AVAIL_HIGH"),
    (387, "gpu_remap_banks_partial", 1, "DEV_BANKS_REMAP_ROWS_AVAIL_PARTIAL DEV_BANK_REMAP_AVAIL_PARTIAL"),
    (388, "gpu_remap_banks_low", 1, "DEV_BANKS_REMAP_ROWS_AVAIL_LOW DEV_BANK_REMAP_AVAIL_LOW"),
    (389, "gpu_remap_banks_none", 1, "DEV_BANKS_REMAP_ROWS_AVAIL_NONE DEV_BANK_REMAP_AVAIL_NONE"),
    (390, "gpu_retired_pages_single_bit", 1, "DEV_RETIRED_SBE DEV_PAGE_RETIRED_SBE_TOTAL"),
    (391, "gpu_retired_pages_double_bit", 1, "DEV_RETIRED_DBE DEV_PAGE_RETIRED_DBE_TOTAL"),
    (392, "gpu_retired_pages_pending", 1, "DEV_RETIRED_PENDING DEV_PAGE_RETIRED_PENDING"),
    (393, "gpu_remapped_rows_uncorrectable", 1, "DEV_UNCORRECTABLE_REMAPPED_ROWS DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"),
    (394, "gpu_remapped_rows_correctable", 1, "DEV_CORRECTABLE_REMAPPED_ROWS DEV_ROW_REMAP_CORRECTABLE_TOTAL"),
    (395, "gpu_row_remap_failed", 1, "DEV_ROW_REMAP_FAILURE DEV_ROW_REMAP_FAILED"),
    (396, "gpu_row_remap_pending", 1, "DEV_ROW_REMAP_PENDING"),
    (409, "nvlink_crc_flit_errors", 1, "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL DEV_NVLINK_CRC_FLIT_ERROR_TOTAL"),
    (1525, "nvlink_crc_flit_errors", 1, "DEV_NVLINK_CRC_FLIT_ERROR_PER_LINK_TOTAL"),
    (419, "nvlink_crc_data_errors", 1, "DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL DEV_NVLINK_CRC_DATA_ERROR_TOTAL"),
    (1526, "nvlink_crc_data_errors", 1, "DEV_NVLINK_CRC_DATA_ERROR_PER_LINK_TOTAL"),
    (429, "nvlink_replay_errors", 1, "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL DEV_NVLINK_REPLAY_ERROR_TOTAL"),
    (1527, "nvlink_replay_errors", 1, "DEV_NVLINK_REPLAY_ERROR_PER_LINK_TOTAL"),
    (439, "nvlink_recovery_errors", 1, "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL DEV_NVLINK_RECOVERY_ERROR_TOTAL"),
    (1528, "nvlink_recovery_errors", 1, "DEV_NVLINK_RECOVERY_ERROR_PER_LINK_TOTAL"),
    (1216, "nvlink_symbol_ber_ratio", 1, "DEV_NVLINK_COUNT_SYMBOL_BER_FLOAT DEV_NVLINK_SYMBOL_BER_RATIO"),
    (1218, "nvlink_effective_ber_ratio", 1, "DEV_NVLINK_COUNT_EFFECTIVE_BER_FLOAT DEV_NVLINK_EFFECTIVE_BER_RATIO"),
    (1508, "nvlink_up", 1, "DEV_NVLINK_GET_STATE DEV_NVLINK_LINK_STATUS"),
    (1001, "gpu_engine_active_ratio", 1, "PROF_GR_ENGINE_ACTIVE PROF_GR_ENGINE_UTIL_RATIO"),
    (1002, "gpu_sm_active_ratio", 1, "PROF_SM_ACTIVE PROF_SM_UTIL_RATIO"),
    (1003, "gpu_sm_occupancy_ratio", 1, "PROF_SM_OCCUPANCY PROF_SM_OCCUPANCY_RATIO"),
    (1004, "gpu_tensor_active_ratio", 1, "PROF_PIPE_TENSOR_ACTIVE PROF_TENSOR_UTIL_RATIO"),
    (1005, "gpu_dram_active_ratio", 1, "PROF_DRAM_ACTIVE PROF_DRAM_UTIL_RATIO"),
    (1006, "gpu_fp64_active_ratio", 1, "PROF_PIPE_FP64_ACTIVE PROF_FP64_UTIL_RATIO"),
    (1007, "gpu_fp32_active_ratio", 1, "PROF_PIPE_FP32_ACTIVE PROF_FP32_UTIL_RATIO"),
    (1008, "gpu_fp16_active_ratio", 1, "PROF_PIPE_FP16_ACTIVE PROF_FP16_UTIL_RATIO"),
    (1009, "gpu_pcie_transmitted_bytes_per_second", 1, "PROF_PCIE_TX_BYTES"),
    (1010, "gpu_pcie_received_bytes_per_second", 1, "PROF_PCIE_RX_BYTES"),
    (1011, "gpu_nvlink_transmitted_bytes_per_second", 1, "PROF_NVLINK_TX_BYTES"),
    (1012, "gpu_nvlink_received_bytes_per_second", 1, "PROF_NVLINK_RX_BYTES"),
    (1523, "gpu_recovery_action", 1, "DEV_GET_GPU_RECOVERY_ACTION DEV_GPU_RECOVERY_ACTION"),
)
"""Id, reading, scale, names: without DCGM_FI_, the oldest first; small letters: the exporter's old name space (1.x).
What is sent and received over PCIe and NVLink is a rate, whatever type the list of counters gives it."""

_LANES: Final[Mapping[str, tuple[str, Iterable[int]]]] = {
    "CRC_FLIT": ("nvlink_crc_flit_errors", chain(range(400, 406), range(451, 457), range(406, 409), range(481, 484))),
    "CRC_DATA": ("nvlink_crc_data_errors", chain(range(410, 416), range(457, 463), range(416, 419), range(484, 487))),
    "REPLAY": ("nvlink_replay_errors", chain(range(420, 426), range(463, 469), range(426, 429), range(487, 490))),
    "RECOVERY": ("nvlink_recovery_errors", chain(range(430, 436), range(469, 475), range(436, 439), range(491, 494))),
}
"""Fields of single links, 0 to 17: their ids, in that order."""

_EITHER: Final = (1613, 1614)
"""A name that meant percent in 4.6 (there field 203, an integer) and means a ratio since (a double, which the exporter
writes with a point): told apart by how the number is written."""

_MAY_BE_NEGATIVE: Final = "gpu_temperature_margin_celsius"

_XID_COUNTS: Final = ("DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_XID_ERRORS_TOTAL")

_LABEL: Final = "text, put on other series as a label"
LEFT_OUT: Final[Mapping[str, str]] = {
    "DCGM_FI_DEV_ENC_UTIL": "video encoding is no part of training",
    "DCGM_FI_DEV_DEC_UTIL": "video decoding is the data loader's, seen in its own time",
    "DCGM_FI_DEV_LOW_UTIL_VIOLATION": "low clocks of an idle GPU are no fault",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "units differ between versions; DCGM_FI_PROF_NVLINK_*_BYTES are bytes/s",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_L0": "units differ between versions; DCGM_FI_PROF_NVLINK_*_BYTES are bytes/s",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": "no vGPU trains here",
    "DCGM_EXP_CLOCK_EVENTS_COUNT": "a window's count; gpu_clock_event_reasons and the violation counters tell more",
    "DCGM_EXP_GPU_HEALTH_STATUS": "a verdict, not a measurement, and healthy beside 17,700 ECC errors a second",
    "DCGM_EXP_P2P_STATUS": "of pairs of GPUs; nvlink_up tells links",
    "DCGM_FI_DRIVER_VERSION": _LABEL,
    "DCGM_FI_NVML_VERSION": _LABEL,
    "DCGM_FI_DEV_BRAND": _LABEL,
    "DCGM_FI_DEV_SERIAL": _LABEL,
    "DCGM_FI_DEV_OEM_INFOROM_VER": _LABEL,
    "DCGM_FI_DEV_ECC_INFOROM_VER": _LABEL,
    "DCGM_FI_DEV_POWER_INFOROM_VER": _LABEL,
    "DCGM_FI_DEV_INFOROM_IMAGE_VER": _LABEL,
    "DCGM_FI_DEV_VBIOS_VERSION": _LABEL,
}
"""Of the exporter's own list of counters, what is not read, and why."""


def _fields() -> Iterator[tuple[str, Field]]:
    for id, reading, scale, names in _ROWS:
        for name in names.split():
            prefix = "" if name.islower() else "DCGM_FI_"
            yield prefix + name, Field(id=id, reading=reading, scale=scale)
    for what, (reading, ids) in _LANES.items():
        for lane, id in enumerate(ids):
            one = Field(id=id, reading=reading, scale=1, lane=str(lane))
            yield f"DCGM_FI_DEV_NVLINK_{what}_ERROR_COUNT_L{lane}", one
            yield f"DCGM_FI_DEV_NVLINK_{what}_ERROR_L{lane}_TOTAL", one


FIELDS: Final[Mapping[str, Field]] = dict(_fields())
"""By every name that an exporter may print."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,96}")
_NUMBER = re.compile(r"[0-9]{1,4}")


def is_blank(value: float) -> bool:
    """Whether DCGM writes this number for "not found", "not supported", "not permitted" and the like (dcgm_structs.h:
    16 numbers from a base, one base a type; as a float64 all 16 of INT64 are 2**63).

    >>> is_blank(2147483634), is_blank(9223372036854775794), is_blank(140737488355328.0), is_blank(54731746511)
    (True, True, True, False)
    """
    return 0 <= value - 0x7FFFFFF0 < 16 or 0 <= value - 2.0**47 < 16 or value >= 2.0**63 - 1024


def value_of(one: Field, sample: Sample) -> float | None:
    """The reading in its base unit; None: no data.

    >>> value_of(FIELDS["DCGM_FI_DEV_GPU_UTIL"], Sample("", {}, 87.0, True))
    0.87
    """
    value = sample.value
    if is_blank(value) or not math.isfinite(value) or (value < 0 and one.reading != _MAY_BE_NEGATIVE):
        return None
    if one.reading == "nvlink_up":  # NVML: 0 inactive, 1 active, 2 asleep to save power
        return float(value > 0) if value in (0, 1, 2) else None
    scale = _PERCENT if one.id in _EITHER and (sample.whole or value > 1) else one.scale
    return value * scale if scale >= 1 else value / round(1 / scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmConfig:
    """The dcgm-exporter of this node."""

    url: str = field(default="http://127.0.0.1:9400/metrics", repr=False)
    """`http://HOST:PORT/metrics`, or `env:NAME` or `file:/PATH` to take it from there, as where it holds a password."""

    period: timedelta = timedelta(seconds=10)
    """Between two scrapes. The exporter itself samples every 30 s by default
    (`DCGM_EXPORTER_INTERVAL`, in milliseconds): asking more often than it samples shows nothing new."""

    deadline: timedelta = timedelta(seconds=5)
    """For one scrape, from name lookup to the last byte; shorter than the period."""

    stale_after: timedelta = timedelta(minutes=5)
    """An exporter that answers the same bytes for so long is frozen, or its host engine is: blind, whatever its health
    page says. Ten of the exporter's own periods; power and energy change from one to the next."""

    hosts: tuple[str, ...] = ()
    """Further names under which the exporter knows this node, beside its own (with or without domain). Series of other
    hosts are refused and counted."""

    def __post_init__(self) -> None:
        key = "collectors.dcgm"
        if not self.url.startswith(("env:", "file:", "https://", "http://")):
            raise ConfigError(f"{key}.url: need https://..., http://..., env:NAME or file:/PATH")
        if not timedelta(seconds=1) <= self.period <= timedelta(minutes=10):
            raise ConfigError(f"{key}.period: need 1s to 10m, got {self.period.total_seconds():g}s")
        if not timedelta(milliseconds=100) <= self.deadline < self.period:
            got = f"{self.deadline.total_seconds():g}s"
            raise ConfigError(f"{key}.deadline: need 100ms or more, and less than the period, got {got}")
        if self.stale_after < 3 * self.period:
            got = f"{self.stale_after.total_seconds():g}s"
            raise ConfigError(f"{key}.stale_after: need at least 3 periods, got {got}")


class _Place(NamedTuple):
    """What a series is about."""

    gpu: str
    device: str
    """The GPU, or one instance (MIG) of it."""
    link: str
    """Number of the NVLink, or `all`."""


@dataclass(slots=True)
class _Seen:
    """What one answer says of this node."""

    rows: dict[tuple[str, str], float] = field(default_factory=dict)
    """By subject and reading: of two series of one number (an old name beside a new one, a GPU shared by pods) the
    first."""
    xids: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """Counts by name, subject and code."""
    gpus: set[str] = field(default_factory=set)
    """Of which there is a number."""
    placed: set[str] = field(default_factory=set)
    other_host: str = ""


class Dcgm:
    """Source of the readings of dcgm-exporter: device, instance (`<uuid>/gi-<n>`) and link (`<uuid>/nvlink-<n>`, and
    `<uuid>/nvlink-all` for what is only told of all links together)."""

    def __init__(self, config: DcgmConfig, node: str, *, start_ns: int, clock: Clock = unix_ns) -> None:
        self.name, self.period_s = f"dcgm@{node}", config.period.total_seconds()
        self._config, self._node, self._clock = config, node, clock
        self._parts = Parts(Emitter(self.name, job=None, start_ns=start_ns))
        self._frames = ReadingFrames(self.name, start_ns=start_ns)
        self._names = (node, *config.hosts)
        self._gpus: set[str] = set()
        self._xids: dict[tuple[str, str, str], float] = {}
        self._digest, self._changed_ns = 0, 0
        self.counted: Counter[str] = Counter()
        """What was passed over, by why: bad_line, left_out, other_host, no_device, too_many, blank, unknown."""

    def poll(self, now_ns: int) -> list[Frame | Event]:
        """What a scrape brings; waits for it, at most its deadline."""
        said = scrape(self._config.url, self._config.deadline.total_seconds(), self._clock)
        return self.hear(said, now_ns) if isinstance(said, Answer) else [*self._parts("", said, now_ns)]

    def hear(self, answer: Answer, now_ns: int) -> list[Frame | Event]:
        """What one answer tells: readings, and what is blind or can be read again."""
        parsed = answer.parsed
        self.counted.update(bad_line=parsed.bad_lines, left_out=parsed.left_out)
        seen = _Seen()
        self._read(parsed.samples, seen)
        if why := self._useless(answer, seen):
            return [*self._parts("", f"{answer.place}: {why}", now_ns)]
        out: list[Frame | Event] = [*self._parts("", "", now_ns)]
        hints = [*self._risen(seen.xids)]
        self._gpus |= seen.gpus
        for gpu in sorted(self._gpus):
            why = "" if gpu in seen.gpus else f"{answer.place}: no series of this GPU any more"
            out += self._parts(gpu, why, now_ns)
        frames = self._frames([*hints, *((*key, value) for key, value in seen.rows.items())], now_ns)
        for frame in frames:
            frame.rows["t_ns"] = answer.t_ns
        return [*out, *frames]

    def _useless(self, answer: Answer, seen: _Seen) -> str:
        """Why an answer tells nothing of this node, or nothing new; "" where it does."""
        parsed = answer.parsed
        if not seen.gpus and seen.other_host:
            return f"all series are of other hosts, such as {seen.other_host[:60]!a}: see collectors.dcgm.hosts"
        if not seen.gpus:
            bad = f"; {parsed.bad_lines} lines are no Prometheus text, the first {parsed.first_bad}"
            return f"no number of a GPU in {len(parsed.samples)} series{bad if parsed.bad_lines else ''}"
        if answer.digest != self._digest:
            self._digest, self._changed_ns = answer.digest, answer.t_ns
        same_s = (answer.t_ns - self._changed_ns) / 1e9
        frozen = same_s > self._config.stale_after.total_seconds()
        return f"the same answer, byte for byte, for {same_s:.0f} s: it is frozen" if frozen else ""

    def _read(self, samples: Iterable[Sample], seen: _Seen) -> None:
        places: dict[int, _Place | str] = {}
        for sample in samples:
            one = FIELDS.get(sample.name)
            if one is None and sample.name not in _XID_COUNTS:
                self.counted["unknown"] += sample.name not in LEFT_OUT
                continue
            if (key := id(sample.labels)) not in places:  # samples of one answer share them
                places[key] = self._place(sample.labels, seen)
            place = places[key]
            if isinstance(place, str):
                self.counted[place] += 1
            elif one is None:
                self._count_xid(sample, place, seen)
            elif (value := value_of(one, sample)) is None:
                self.counted["blank"] += 1
            else:
                seen.gpus.add(place.gpu)
                link = one.reading.startswith("nvlink_")
                subject = f"link:{place.gpu}/nvlink-{one.lane or place.link}" if link else f"device:{place.device}"
                seen.rows.setdefault((subject, one.reading), value)

    def _count_xid(self, sample: Sample, place: _Place, seen: _Seen) -> None:
        code = sample.labels.get("xid", "")  # absent: a window without any
        if _NUMBER.fullmatch(code) and sample.value > 0 and not is_blank(sample.value):
            seen.xids[sample.name, f"device:{place.device}", code] = sample.value

    def _place(self, labels: Mapping[str, str], seen: _Seen) -> _Place | str:
        """What series with these labels are about, or why they are refused."""
        host = labels.get("hostname") or labels.get("Hostname") or ""
        if host and not any(_same_host(host, own) for own in self._names):
            seen.other_host = host
            return "other_host"
        uuid = labels.get("UUID") or labels.get("uuid") or labels.get("gpu_uuid") or ""
        slot = labels.get("gpu") or labels.get("gpu_id") or ""
        gpu = uuid or (f"{self._node}:{slot}" if slot else "")
        instance, link = labels.get("GPU_I_ID", ""), labels.get("nvlink", "")
        if not _ID.fullmatch(gpu) or not all(_NUMBER.fullmatch(number) for number in (instance, link) if number):
            return "no_device"
        if gpu not in self._gpus and len(self._gpus | seen.placed | {gpu}) > GPUS_MAX:
            return "too_many"
        seen.placed.add(gpu)
        return _Place(gpu, f"{gpu}/gi-{instance}" if instance else gpu, link or "all")

    def _risen(self, xids: dict[tuple[str, str, str], float]) -> Iterator[Row]:
        """A hint for each code whose count grew; what there is at first sight of a GPU has no time and is none."""
        before, self._xids = self._xids, xids
        for key, count in xids.items():
            _, subject, code = key
            gpu = subject.removeprefix("device:").partition("/")[0]
            if gpu in self._gpus and count > before.get(key, 0):
                yield subject, "gpu_last_xid", float(code)


def _same_host(one: str, other: str) -> bool:
    """Whether two names are of one host; a name without domain is the same as one with.

    >>> _same_host("n17", "N17.cluster.local"), _same_host("10.0.0.1", "10.0.0.2")
    (True, False)
    """
    one, other = one.lower(), other.lower()
    bare = "." not in one or "." not in other
    return one == other or (bare and one.partition(".")[0] == other.partition(".")[0])
