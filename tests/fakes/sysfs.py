"""A miniature /sys and /proc: the files that sources read, in a folder of the test's own, to be broken at will."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwarden.core.model import Event, Frame
from trainwarden.core.readings import READINGS

NOBODY = 65534
PROCESS = "{pid} ({name}) {state} 1 1 1 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 5 1000 100 18446744073709551615\n"
PRESSURE = "some avg10=0.00 avg60=0.08 avg300=8.42 total={us}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"
HOST = {
    "pressure/cpu": PRESSURE.format(us=4500000),
    "pressure/io": PRESSURE.format(us=250000),
    "pressure/memory": PRESSURE.format(us=0),
    "stat": "cpu  1000 20 300 99999 50 6 7 80 0 0\ncpu0 1000 20 300 99999 50 6 7 80 0 0\nintr 1 2 3\nctxt 5\n"
    "procs_running 2\nprocs_blocked 3\n",
    "loadavg": "0.66 1.29 2.34 1/95 23839\n",
    "meminfo": "MemTotal:       2000 kB\nMemFree:         500 kB\nMemAvailable:   1500 kB\n",
}
"""Files of /proc of a healthy host, with small numbers."""


class Miniature:
    """`sys` and `proc` below a folder."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.sys.mkdir()
        self.proc.mkdir()

    def put(self, path: Path, content: str | bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def host(self) -> None:
        for name, text in HOST.items():
            self.put(self.proc / name, text)
        self.process(1, "systemd", "S")
        self.put(self.sys / "class/thermal/thermal_zone0/temp", "27800\n")

    def process(self, pid: int, name: str, state: str) -> None:
        self.put(self.proc / str(pid) / "stat", PROCESS.format(pid=pid, name=name, state=state))

    def rdma(self, name: str, files: Mapping[str, str], *, pci: str, interfaces: Iterable[str] = ()) -> Path:
        """An RDMA device with its files (`ports/1/state`), at its place below the PCI device; gives its folder."""
        device = self.sys / "bus/pci/devices" / pci / "infiniband" / name
        for path, text in files.items():
            self.put(device / path, text)
        self._link(name, device)
        for interface in interfaces:
            self.interface(interface, device.parent.parent / "net" / interface)
        return device

    def interface(self, name: str, folder: Path | None = None) -> Path:
        folder = folder or self.sys / "class/net" / name
        for file in ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_dropped"):
            self.put(folder / "statistics" / file, "7\n")
        for file, text in {"operstate": "up\n", "speed": "200000\n", "carrier_down_count": "1\n"}.items():
            self.put(folder / file, text)
        return folder

    def nested(self, sample: Mapping[str, Any]) -> None:
        """/sys/class/infiniband as one nested object: folders are objects, files strings without the line's end."""
        for number, (name, tree) in enumerate(sample.items()):
            files = {path: f"{text}\n" for path, text in _leaves(tree)}
            self.rdma(name, files, pci=f"0000:{number:02x}:00.0")

    def flat(self, sample: Mapping[str, str]) -> None:
        """A manifest of files by their absolute path below /sys."""
        for path, text in sample.items():
            self.put(self.sys.parent / path.lstrip("/"), text)
        for device in self.sys.glob("bus/pci/devices/*/infiniband/*"):
            self._link(device.name, device)

    def _link(self, name: str, device: Path) -> None:
        link = self.sys / "class/infiniband" / name
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(device)
            (device / "device").symlink_to("../..")


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}/")
        else:
            yield above + name, str(value)


def numbers(items: Iterable[Frame | Event]) -> dict[str, dict[str, float]]:
    """Readings that were told: subject -> signal -> value. Every one is a row of READINGS about the right thing."""
    found: dict[str, dict[str, float]] = {}
    for frame in items:
        if isinstance(frame, Frame):
            assert frame.schema == "reading"
            assert (frame.job, frame.epoch) == (None, None)
            for row in frame.rows:
                subject, signal = frame.names[row["subject"]], frame.names[row["signal"]]
                assert subject.startswith(READINGS[signal].of)
                assert signal not in found.setdefault(subject, {}), "told twice"
                found[subject][signal] = float(row["value"])
    return found


def events(items: Iterable[Frame | Event]) -> list[tuple[str, str]]:
    """(kind, subject) of what was told beside numbers."""
    return [(item.kind, str(item.subject)) for item in items if isinstance(item, Event)]


@contextlib.contextmanager
def fleeting() -> Iterator[Miniature]:
    """A miniature for one of very many examples: in memory, and gone at once."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        yield Miniature(Path(root))


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that every user can read: pytest's own are their owner's."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, which may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
