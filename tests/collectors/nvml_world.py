"""A node whose GPUs are lines of a file: the real nvidia-ml-py on a library made from tests/fakes/nvml.c."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainwarden.collectors.nvml import Nvml, NvmlConfig
from trainwarden.core.model import Event, Frame

SOURCE = Path(__file__).resolve().parent.parent / "fakes" / "nvml.c"
NAME = "libnvidia-ml.so.1"
LIMIT_S = 20.0
"""Real time that a reader may take for what takes it milliseconds: on a loaded machine it may wait for a core."""
FIELDS = {
    **{3: 10, 4: 11, 5: 12, 6: 13, 29: 14, 30: 15, 31: 1, 82: 71, 83: 5_000_000, 94: 16},
    **{142: 17, 143: 18, 144: 1, 145: 0, 230: 0, 220: 0x3 << 8 | 15, 222: 0x6 << 8 | 12},
    **{74: 10**9, 75: 2 * 10**9, 76: 3 * 10**9, 77: 4 * 10**9, 79: 5 * 10**9},
}
"""NVML_FI_DEV_* -> value: every field that the reader asks for."""


def compiled(folder: Path) -> Path:
    """The folder of the library; skips loudly where there is no C compiler."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("LOUD: no gcc on this machine: NVML is not tested at all (apt-get install gcc libc6-dev)")
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{NAME}"]
    command = [gcc, *options, "-o", str(folder / NAME), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    return folder


@dataclass(slots=True)
class Seen:
    """What polls gave."""

    events: list[Event] = field(default_factory=list)
    domains: list[Event] = field(default_factory=list)
    """What the node shares with others: a matter of its own."""
    readings: dict[str, dict[str, float]] = field(default_factory=dict)
    """Subject -> signal -> value, the last one."""
    times_ns: set[int] = field(default_factory=set)

    def add(self, items: Iterable[Frame | Event]) -> None:
        for item in items:
            if isinstance(item, Event):
                (self.domains if item.kind == "node.domains" else self.events).append(item)
                continue
            for subject, signal, _, t_ns, value in item.rows.tolist():
                self.readings.setdefault(item.names[subject], {})[item.names[signal]] = value
                self.times_ns.add(t_ns)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def subjects(self) -> list[str]:
        return [f"{event.kind} {event.subject.id}" for event in self.events]

    def whys(self) -> list[str]:
        return [f"{event.kind} {event.subject.id}: {event.data['why']}" for event in self.events]

    def gpus(self) -> list[str]:
        return sorted(self.readings)


class NvmlWorld:
    """One agent's source on such a node. Time goes only when told (`round`), however slow the machine is."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.now_ns = time.time_ns()
        self._ns = 0
        self._lines: dict[str, int] = {}
        self.set(count=2)
        self.source = Nvml(NvmlConfig(), node="n1", start_ns=self.now_ns, clock=lambda: self._ns)

    def set(self, lines: dict[str, int] | None = None, **more: int) -> None:
        """Change the node; what a key names: tests/fakes/nvml.c."""
        self._lines |= (lines or {}) | more
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self._lines.items()))
        new.rename(self.file)

    def go(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self._ns += int(seconds * 1e9)

    def round(self, seconds: float = 1.0) -> Seen:
        """Time goes on; what is seen until no answer is waited for."""
        self.go(seconds)
        return self.until(lambda: not self.source.busy)

    def until_it_hangs(self) -> Seen:
        """The next pass, up to the call that hangs; what was said before it was heard."""
        self.go(1.0)
        mark = self.file.with_name(f"{self.file.name}.hangs")
        seen = self.until(mark.exists)
        mark.unlink()
        seen.add(self.source.poll(self.now_ns))
        return seen

    def until(self, enough: Callable[[], bool]) -> Seen:
        seen, end_s = Seen(), time.monotonic() + LIMIT_S
        while True:
            seen.add(self.source.poll(self.now_ns))
            if enough():
                return seen
            assert time.monotonic() < end_s, f"the reader says nothing; seen so far: {seen.whys()}"
            time.sleep(0.002)
