"""A tmpfs of a test's own, with ranks that write to it and an agent's source that reads it."""

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trainwarden.collectors.rank import Rank, attach, say
from trainwarden.collectors.rings import Rings
from trainwarden.core.identity import filesystem_of
from trainwarden.core.model import Event, Frame, JobId

SHM = Path("/dev/shm")
DEADLINE_S = 20.0
_TELLS_A_RANK = re.compile(r"TRAINWARDEN|TORCHELASTIC|SLURM|(RANK|WORLD_SIZE|LOCAL_RANK)$")


class World:
    """One job on one host. Ranks made here are closed at the end, forked children ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job = JobId("job")
        self._ranks: list[Rank] = []
        self._sources: list[Rings] = []
        self._children: list[int] = []

    @property
    def rings(self) -> Path:
        return self.root / self.job / "rings"

    def attach(self, rank: int = 0, world_size: int = 1, **more: Any) -> Rank:
        self._ranks.append(attach(rank=rank, world_size=world_size, **more))
        return self._ranks[-1]

    def source(self, live_ns: int = 0) -> Rings:
        self._sources.append(Rings(self.root, "n1", self.job, start_ns=time.time_ns(), live_ns=live_ns))
        return self._sources[-1]

    def fork(self, run: Callable[[], object]) -> int:
        """A child that does this and ends, 0 if nothing was raised."""
        pid = os.fork()
        if pid:
            self._children.append(pid)
            return pid
        try:
            run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def wait(self, pid: int) -> int:
        """How a child ended: its exit status, or minus the signal. A child that does not end is killed."""
        self._children.remove(pid)
        end_s = time.monotonic() + DEADLINE_S
        while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > end_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(found[1])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def end(self) -> None:
        for pid in [*self._children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                self.kill(pid)
        for w in self._ranks:
            w.close()
        for source in self._sources:
            source.close()


def make_world(patch: pytest.MonkeyPatch, root: Path) -> World:
    """A world below this folder; the environment is that of a process nobody launched."""
    for name in [*os.environ]:
        if _TELLS_A_RANK.match(name) and name != "TRAINWARDEN_SUITE":
            patch.delenv(name)
    patch.setenv("TRAINWARDEN_DIR", str(root))
    patch.setenv("TRAINWARDEN_JOB", "job")
    patch.setenv("TRAINWARDEN_NODE", "n1")
    patch.setattr(say, "_said", set())
    return World(root)


@contextlib.contextmanager
def a_world() -> Iterator[World]:
    """A world of its own, ended whatever happens: for tests that need a new one for each example."""
    with tmpfs_folder() as folder, pytest.MonkeyPatch.context() as patch:
        made = make_world(patch, folder)
        try:
            yield made
        finally:
            made.end()


@contextlib.contextmanager
def tmpfs_folder() -> Iterator[Path]:
    """A private folder on the machine's own tmpfs."""
    if filesystem_of(SHM, Path("/proc/self/mountinfo").read_text()) != "tmpfs" or not os.access(SHM, os.W_OK):
        pytest.skip("no writable tmpfs at /dev/shm: rings cannot be made here")
    with tempfile.TemporaryDirectory(dir=SHM, prefix="trainwarden-test-") as folder:
        yield Path(folder)


def poll(source: Rings) -> list[Frame | Event]:
    return source.poll(time.time_ns())


def frames(out: list[Frame | Event], schema: str) -> list[Frame]:
    return [one for one in out if isinstance(one, Frame) and one.schema == schema]


def events(out: list[Frame | Event], kind: str) -> list[Event]:
    return [one for one in out if isinstance(one, Event) and one.kind == kind]


def rows(out: list[Frame | Event], schema: str) -> NDArray[np.void]:
    """The rows of all frames of a schema; there must be some."""
    found = frames(out, schema)
    assert found, f"no {schema} frame"
    return np.concatenate([frame.rows for frame in found])


def compute(cpu_s: float) -> None:
    """Several times what the scheduler's own account lags behind while a thread runs: a tick, 1 to 10 ms."""
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def until(met: Callable[[], bool], what: str) -> None:
    """Wait for something that is bound to come."""
    end_s = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < end_s, f"never came: {what}"
        time.sleep(0.005)
