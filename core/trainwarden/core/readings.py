"""Every number that is read about a node, a device or a link: the second half of the table of signals.

Names are what recordings and dashboards know, so they never change. They are Prometheus' (base unit last); a counter
only grows, apart from resets, and may begin with any value: what counts is its growth. A source emits a row's name as
the `signal` of a `reading` frame (core/schemas.py) with subject `device:<uuid>`, `link:<node>/<port>`,
`link:<uuid>/nvlink-<n>` or `node:<name>`; what cannot be read is not emitted. `sources` names what can tell it, the
best first: nvml, dcgm (dcgm-exporter), sysfs, proc.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ReadingKind = Literal["gauge", "counter"]
Subjects = Literal["device", "link", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One row."""

    name: str
    unit: str
    kind: ReadingKind
    of: Subjects
    meaning: str
    sources: tuple[str, ...]

    @property
    def metric(self) -> str:
        """Its Prometheus name.

        >>> READINGS["gpu_temperature_celsius"].metric, READINGS["gpu_pcie_replays"].metric
        ('trainwarden_gpu_temperature_celsius', 'trainwarden_gpu_pcie_replays_total')
        """
        return f"trainwarden_{self.name}{'_total' if self.kind == 'counter' else ''}"


_BOTH = ("nvml", "dcgm")
_Row = tuple[str, str, ReadingKind, str, tuple[str, ...]]

_GPU: tuple[_Row, ...] = (
    ("gpu_temperature_celsius", "celsius", "gauge", "core temperature", _BOTH),
    ("gpu_memory_temperature_celsius", "celsius", "gauge", "HBM temperature", _BOTH),
    ("gpu_temperature_margin_celsius", "celsius", "gauge", "degrees left until the GPU slows down", _BOTH),
    ("gpu_power_watts", "watts", "gauge", "board power", _BOTH),
    ("gpu_power_limit_watts", "watts", "gauge", "enforced power limit", ("nvml",)),
    ("gpu_energy_joules", "joules", "counter", "energy since the driver was loaded", _BOTH),
    ("gpu_sm_clock_hertz", "hertz", "gauge", "SM clock", _BOTH),
    ("gpu_sm_clock_max_hertz", "hertz", "gauge", "highest SM clock", ("nvml",)),
    ("gpu_memory_clock_hertz", "hertz", "gauge", "memory clock", _BOTH),
    ("gpu_utilization_ratio", "ratio", "gauge", "share of the time in which any kernel ran", _BOTH),
    ("gpu_memory_utilization_ratio", "ratio", "gauge", "share of the time in which memory was read or written", _BOTH),
    ("gpu_memory_used_bytes", "bytes", "gauge", "device memory in use", _BOTH),
    ("gpu_memory_free_bytes", "bytes", "gauge", "device memory free", _BOTH),
    ("gpu_memory_reserved_bytes", "bytes", "gauge", "device memory held by the driver", _BOTH),
    ("gpu_clock_event_reasons", "1", "gauge", "bit mask: why clocks are lower (nvmlClocksEventReason*)", _BOTH),
    ("gpu_power_violation_seconds", "seconds", "counter", "time slowed down by power", _BOTH),
    ("gpu_thermal_violation_seconds", "seconds", "counter", "time slowed down by heat", _BOTH),
    ("gpu_reliability_violation_seconds", "seconds", "counter", "time slowed down by reliability limits", _BOTH),
    ("gpu_board_limit_violation_seconds", "seconds", "counter", "time slowed down by board limits", _BOTH),
    ("gpu_sync_boost_violation_seconds", "seconds", "counter", "time slowed down by a slower GPU of its group", _BOTH),
    ("gpu_ecc_corrected_volatile", "1", "counter", "corrected memory errors since the driver was loaded", _BOTH),
    ("gpu_ecc_uncorrected_volatile", "1", "counter", "uncorrected memory errors since the driver was loaded", _BOTH),
    ("gpu_ecc_corrected_aggregate", "1", "counter", "corrected memory errors in the GPU's life", _BOTH),
    ("gpu_ecc_uncorrected_aggregate", "1", "counter", "uncorrected memory errors in the GPU's life", _BOTH),
    ("gpu_retired_pages_single_bit", "1", "counter", "pages retired for single-bit errors (before Ampere)", _BOTH),
    ("gpu_retired_pages_double_bit", "1", "counter", "pages retired for double-bit errors (before Ampere)", _BOTH),
    ("gpu_retired_pages_pending", "1", "gauge", "pages that will be retired at the next reset", _BOTH),
    ("gpu_remapped_rows_correctable", "1", "counter", "memory rows replaced after correctable errors", _BOTH),
    ("gpu_remapped_rows_uncorrectable", "1", "counter", "memory rows replaced after uncorrectable errors", _BOTH),
    ("gpu_row_remap_pending", "1", "gauge", "1: a row will be replaced at the next reset", _BOTH),
    ("gpu_row_remap_failed", "1", "gauge", "1: a row could not be replaced", _BOTH),
    ("gpu_remap_banks_max", "1", "gauge", "memory banks with all spare rows left", _BOTH),
    ("gpu_remap_banks_high", "1", "gauge", "memory banks with most spare rows left", _BOTH),
    ("gpu_remap_banks_partial", "1", "gauge", "memory banks with some spare rows left", _BOTH),
    ("gpu_remap_banks_low", "1", "gauge", "memory banks with few spare rows left", _BOTH),
    ("gpu_remap_banks_none", "1", "gauge", "memory banks without a spare row", _BOTH),
    (
        "gpu_recovery_action",
        "1",
        "gauge",
        "0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset, 5 IMEX domain, 6 bus reset, 7 system reboot",
        _BOTH,
    ),
    ("gpu_pcie_replays", "1", "counter", "PCIe packets sent again", _BOTH),
    ("gpu_pcie_generation", "1", "gauge", "PCIe generation in use", _BOTH),
    ("gpu_pcie_width_lanes", "lanes", "gauge", "PCIe lanes in use", _BOTH),
    ("gpu_pcie_generation_max", "1", "gauge", "highest PCIe generation of GPU and slot", ("nvml",)),
    ("gpu_pcie_width_max_lanes", "lanes", "gauge", "PCIe lanes of GPU and slot", ("nvml",)),
    ("gpu_pcie_transmitted_bytes_per_second", "bytes/s", "gauge", "PCIe traffic to the host", ("dcgm", "nvml")),
    ("gpu_pcie_received_bytes_per_second", "bytes/s", "gauge", "PCIe traffic from the host", ("dcgm", "nvml")),
    ("gpu_nvlink_transmitted_bytes_per_second", "bytes/s", "gauge", "NVLink traffic sent, all links", ("dcgm",)),
    ("gpu_nvlink_received_bytes_per_second", "bytes/s", "gauge", "NVLink traffic received, all links", ("dcgm",)),
    (
        "gpu_engine_active_ratio",
        "ratio",
        "gauge",
        "share of the time in which a graphics or compute engine ran",
        ("dcgm",),
    ),
    ("gpu_sm_active_ratio", "ratio", "gauge", "share of SMs and time with at least one warp", ("dcgm",)),
    ("gpu_sm_occupancy_ratio", "ratio", "gauge", "resident warps over the most that fit", ("dcgm",)),
    ("gpu_tensor_active_ratio", "ratio", "gauge", "share of the time in which tensor cores ran", ("dcgm",)),
    ("gpu_dram_active_ratio", "ratio", "gauge", "share of the time in which device memory moved data", ("dcgm",)),
    ("gpu_fp64_active_ratio", "ratio", "gauge", "share of the time in which FP64 pipes ran", ("dcgm",)),
    ("gpu_fp32_active_ratio", "ratio", "gauge", "share of the time in which FP32 pipes ran", ("dcgm",)),
    ("gpu_fp16_active_ratio", "ratio", "gauge", "share of the time in which FP16 pipes ran", ("dcgm",)),
    ("gpu_last_xid", "1", "gauge", "last Xid: a hint only, it stays until another replaces it", ("dcgm",)),
    ("gpu_processes", "1", "gauge", "compute processes on the GPU", ("nvml",)),
)

_LINK: tuple[_Row, ...] = (
    ("nvlink_up", "1", "gauge", "1: the link is active", _BOTH),
    ("nvlink_crc_flit_errors", "1", "counter", "flits with a wrong checksum", _BOTH),
    ("nvlink_crc_data_errors", "1", "counter", "data packets with a wrong checksum", _BOTH),
    ("nvlink_replay_errors", "1", "counter", "packets sent again", _BOTH),
    ("nvlink_recovery_errors", "1", "counter", "recoveries of the link", _BOTH),
    ("nvlink_ecc_data_errors", "1", "counter", "data packets with ECC errors", ("nvml",)),
    ("nvlink_symbol_ber_ratio", "ratio", "gauge", "symbol bit error rate (NVLink 5)", _BOTH),
    ("nvlink_effective_ber_ratio", "ratio", "gauge", "bit error rate after correction (NVLink 5)", _BOTH),
    ("port_up", "1", "gauge", "1: the port's logical state is active (InfiniBand) or up (Ethernet)", ("sysfs",)),
    ("port_physically_up", "1", "gauge", "1: the port's physical state is LinkUp", ("sysfs",)),
    ("port_rate_bytes_per_second", "bytes/s", "gauge", "speed of the port", ("sysfs",)),
    ("port_transmitted_bytes", "bytes", "counter", "sent", ("sysfs",)),
    ("port_received_bytes", "bytes", "counter", "received", ("sysfs",)),
    ("port_transmitted_packets", "1", "counter", "packets sent", ("sysfs",)),
    ("port_received_packets", "1", "counter", "packets received", ("sysfs",)),
    ("port_symbol_errors", "1", "counter", "symbol errors", ("sysfs",)),
    ("port_link_recoveries", "1", "counter", "link error recoveries (stops at 255)", ("sysfs",)),
    ("port_link_downs", "1", "counter", "times the link went down (InfiniBand: stops at 255)", ("sysfs",)),
    ("port_receive_errors", "1", "counter", "packets received with errors", ("sysfs",)),
    ("port_remote_physical_errors", "1", "counter", "packets marked bad by the sender", ("sysfs",)),
    ("port_transmit_discards", "1", "counter", "packets not sent", ("sysfs",)),
    ("port_transmit_wait_ticks", "ticks", "counter", "ticks with data to send and no credits", ("sysfs",)),
    ("port_local_integrity_errors", "1", "counter", "local link integrity errors (stops at 15)", ("sysfs",)),
    ("port_buffer_overruns", "1", "counter", "excessive buffer overruns (stops at 15)", ("sysfs",)),
    ("port_out_of_sequence", "1", "counter", "RoCE packets out of sequence", ("sysfs",)),
    ("port_retransmits", "1", "counter", "RoCE packets sent again (adaptive or timeout)", ("sysfs",)),
    ("port_ack_timeouts", "1", "counter", "RDMA sends whose acknowledgement did not come in time", ("sysfs",)),
    ("port_sequence_naks", "1", "counter", "RDMA packets that the other side refused as out of sequence", ("sysfs",)),
    ("port_ecn_marked", "1", "counter", "RoCE packets marked with congestion", ("sysfs",)),
    ("port_cnp_received", "1", "counter", "RoCE congestion notifications received", ("sysfs",)),
    (
        "port_pause_frames_received",
        "1",
        "counter",
        "Ethernet pause frames received (global or per priority)",
        ("sysfs",),
    ),
    ("port_pause_frames_sent", "1", "counter", "Ethernet pause frames sent", ("sysfs",)),
)

_NODE: tuple[_Row, ...] = (
    ("node_load_1m", "1", "gauge", "load average of a minute", ("proc",)),
    ("node_cpu_seconds", "seconds", "counter", "CPU time that was used, all CPUs", ("proc",)),
    ("node_cpu_steal_seconds", "seconds", "counter", "CPU time that the hypervisor gave to others", ("proc",)),
    ("node_memory_available_bytes", "bytes", "gauge", "memory that can be had without swapping", ("proc",)),
    ("node_pressure_cpu_seconds", "seconds", "counter", "time in which some task waited for a CPU (PSI)", ("proc",)),
    ("node_pressure_io_seconds", "seconds", "counter", "time in which some task waited for a disk (PSI)", ("proc",)),
    (
        "node_pressure_memory_seconds",
        "seconds",
        "counter",
        "time in which some task waited for memory (PSI)",
        ("proc",),
    ),
    ("node_blocked_tasks", "1", "gauge", "tasks that wait for a disk (procs_blocked)", ("proc",)),
    ("node_uninterruptible_processes", "1", "gauge", "processes in uninterruptible sleep (state D)", ("proc",)),
    ("node_temperature_celsius", "celsius", "gauge", "hottest thermal zone", ("sysfs",)),
    ("node_pcie_corrected_errors", "1", "counter", "PCIe AER: corrected, all devices", ("sysfs",)),
    ("node_pcie_nonfatal_errors", "1", "counter", "PCIe AER: uncorrected, not fatal, all devices", ("sysfs",)),
    ("node_pcie_fatal_errors", "1", "counter", "PCIe AER: fatal, all devices", ("sysfs",)),
    (
        "node_mount_latency_seconds",
        "seconds",
        "gauge",
        "time of one statfs of the slowest watched mount (so far, while it does not answer)",
        ("proc",),
    ),
    ("node_clock_offset_seconds", "seconds", "gauge", "estimated error of the clock (adjtimex)", ("proc",)),
    ("node_clock_synchronized", "1", "gauge", "1: the kernel says that the clock is synchronized", ("proc",)),
)


def _rows() -> Mapping[str, Reading]:
    sections: tuple[tuple[Subjects, tuple[_Row, ...]], ...] = (("device", _GPU), ("link", _LINK), ("node", _NODE))
    rows = [(of, row) for of, section in sections for row in section]
    return {
        name: Reading(name=name, unit=unit, kind=kind, of=of, meaning=meaning, sources=sources)
        for of, (name, unit, kind, meaning, sources) in rows
    }


READINGS: Mapping[str, Reading] = _rows()
"""By name."""
