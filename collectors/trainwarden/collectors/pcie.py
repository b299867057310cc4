"""Errors that PCIe devices reported (AER), all devices of a node summed, from /sys/bus/pci/devices/*/aer_dev_*.

The sum is our own: what stood there at first sight, plus the growth of each device since. The plain sum would fall when
a device goes, and who takes differences would take that for a reset and count all that is left as new errors. A device
that comes later adds nothing but its growth; a smaller value than before is that device's reset. Which device it was is
told by the kernel log (event pcie.aer): a number a device would be 150 series a node that nearly all stay 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from trainwarden.collectors.blind import Parts
from trainwarden.collectors.kernelfiles import keyed, names, read_or_nothing
from trainwarden.collectors.readingframes import ReadingFrames
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Subject

_SEVERITIES: Final = (
    ("node_pcie_corrected_errors", "aer_dev_correctable", b"TOTAL_ERR_COR"),
    ("node_pcie_nonfatal_errors", "aer_dev_nonfatal", b"TOTAL_ERR_NONFATAL"),
    ("node_pcie_fatal_errors", "aer_dev_fatal", b"TOTAL_ERR_FATAL"),
)
"""Signal, file, line (Documentation/ABI/testing/sysfs-bus-pci-devices-aer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieConfig:
    """How often PCIe errors are read."""

    period: timedelta = timedelta(seconds=10)
    """How often each device's counter of one severity is read, in turn (150 files on a GPU server, 1.3 ms)."""

    def __post_init__(self) -> None:
        if self.period < timedelta(seconds=1):
            raise ConfigError(f"collectors.pcie.period: need at least 1s, got {self.period.total_seconds():g}s")


@dataclass(slots=True)
class _Total:
    """One severity: the sum told, and each device's last value."""

    told: int = 0
    seen: bool = False
    """Whether any device answered at the last turn."""
    last: dict[str, int] = field(default_factory=dict)

    def take(self, found: dict[str, int]) -> None:
        """The values of one poll; devices that did not answer keep their last."""
        first = not self.last
        self.told += sum(number if first else _grown(self.last.get(device), number) for device, number in found.items())
        self.last |= found
        self.seen = bool(found)


class PcieErrors:
    """Source of node_pcie_* readings of one node."""

    def __init__(self, config: PcieConfig, *, node: str, start_ns: int, sys: Path = Path("/sys")) -> None:
        self.name = f"pcie@{node}"
        self.period_s = config.period.total_seconds()
        self._folder = f"{sys}/bus/pci/devices"
        self._node = str(Subject(kind="node", id=node))
        self._parts = Parts(Emitter(self.name, job=None, start_ns=start_ns))
        self._frames = ReadingFrames(self.name, start_ns=start_ns)
        self._totals = {signal: _Total() for signal, _, _ in _SEVERITIES}
        self._polls = 0

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """The sums, each where any device told it when its severity had its turn."""
        signal, file, key = _SEVERITIES[self._polls % len(_SEVERITIES)]
        self._polls += 1
        self._totals[signal].take(dict(self._read(file, key)))
        sums = {signal: total.told for signal, total in self._totals.items() if total.seen}
        rows = [(self._node, signal, float(told)) for signal, told in sums.items()]
        why = (
            "" if rows else f"{self._folder}: no device counts AER errors (a kernel without AER, or a virtual machine)"
        )
        return [*self._frames(rows, now_ns), *self._parts("", why, now_ns)]

    def _read(self, file: str, key: bytes) -> Iterator[tuple[str, int]]:
        for device in names(self._folder):
            text = read_or_nothing(f"{self._folder}/{device}/{file}")
            for number in keyed(text, (key,)).values():
                yield device, number


def _grown(last: int | None, number: int) -> int:
    if last is None:
        return 0
    return number - last if number >= last else number
