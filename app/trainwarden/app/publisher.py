"""Publishes what the ranks staged, as the job's owner: about once a second, in a thread of its own.

A stage is published when every rank's part is there and its step's values have arrived and are finite. What was refused
is said once and not asked again; what is published is read back, and marked good, in the same thread.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from trainwarden.core.clock import unix_ns
from trainwarden.core.errors import DataError, FencedError
from trainwarden.core.model import Epoch, JobId, Json, StepMatrix
from trainwarden.core.records import attempt_of
from trainwarden.remediation.checkpoints.dcp import DcpStore
from trainwarden.remediation.checkpoints.publish import StepValues, publish, staged, step_values

EVERY_NS = 1_000_000_000
VALUES_KEPT = 64
"""Steps whose values are remembered: as many as may be open at once (StepsConfig.window)."""
KEEP_LAST = 3
"""Checkpoints kept beside the pinned one and the one in use: two may turn out bad."""
TIMES_KEPT = 9
"""Eight intervals tell how far apart checkpoints are; an outage does not move their median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """What became of checkpoints, as of the newest look; replaced as a whole, so that any thread may read it."""

    pending: int | None = None
    """Stages of the running attempt that are neither published nor refused; None: not looked yet."""
    published: int = 0
    refused: int = 0
    """Since we began."""
    last_step: int | None = None
    """Step of the newest published one; None: there is none, or not looked yet."""
    times_ns: tuple[int, ...] = ()
    """When the newest published ones were written, by their manifests, oldest first."""


class Publisher:
    """One attempt's stages after the other; look() at every turn."""

    def __init__(self, root: Path, job: JobId, check: Callable[[], None], say: Callable[[str], None]) -> None:
        """check: raises FencedError when the job is not ours any more; called in the thread."""
        self._root, self._job, self._check, self._say = root, job, check, say
        self._values: dict[tuple[int, int], StepValues | None] = {}
        self._done: set[tuple[Epoch, int]] = set()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainwarden-publish")
        self._work: Future[list[str]] | None = None
        self._next_ns = 0
        self.saves = Saves()
        self.in_use: str | None = None
        """Name of the checkpoint that the running attempt started from."""

    def note(self, matrix: StepMatrix) -> None:
        """Remember what a closed step's ranks said of it."""
        self._values[int(matrix.topology.epoch), matrix.step] = step_values(matrix)
        while len(self._values) > VALUES_KEPT:
            del self._values[next(iter(self._values))]

    def look(self, attempt: int, world_size: int, topology: Mapping[str, Json], now_ns: int) -> None:
        """Publish what can be, in the background; say what became of the last look."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            for words in work.result():
                self._say(words)
        if self._work is None and now_ns >= self._next_ns and world_size > 0:
            self._next_ns = now_ns + EVERY_NS
            values = dict(self._values)
            self._work = self._pool.submit(self._publish, attempt, world_size, topology, values)

    def settle(self) -> None:
        """Wait for the look that is under way."""
        if self._work is not None:
            self._work.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=True)

    def _publish(
        self,
        attempt: int,
        world_size: int,
        topology: Mapping[str, Json],
        values: Mapping[tuple[int, int], StepValues | None],
    ) -> list[str]:
        words: list[str] = []
        store = DcpStore(self._root, self._job)
        try:
            if self.saves.pending is None:
                past = sorted(store.catalogue(self._job), key=lambda one: one.t_ns)[-TIMES_KEPT:]
                times_ns = tuple(one.t_ns for one in past)
                self.saves = replace(self.saves, last_step=past[-1].step if past else None, times_ns=times_ns)
            stages = staged(self._root, attempt)
            for epoch, step in stages:
                if (epoch, step) not in self._done:
                    words += self._one(store, epoch, step, world_size, topology, values.get((int(epoch), step)))
            self.saves = replace(self.saves, pending=sum(stage not in self._done for stage in stages))
            if words:
                store.prune(KEEP_LAST, [self.in_use] if self.in_use else [], self._check)
        except (FencedError, OSError, DataError) as error:
            words.append(f"checkpoints: {error}")
        return words

    def _one(
        self,
        store: DcpStore,
        epoch: Epoch,
        step: int,
        world_size: int,
        topology: Mapping[str, Json],
        values: StepValues | None,
    ) -> list[str]:
        done = publish(
            self._root,
            job=self._job,
            attempt=attempt_of(epoch),
            epoch=epoch,
            step=step,
            world_size=world_size,
            values=values,
            topology=topology,
            check=self._check,
        )
        if done.result == "waiting":
            return []
        self._done.add((epoch, step))
        if done.result == "refused":
            self.saves = replace(self.saves, refused=self.saves.refused + 1)
            return [f"checkpoint {done.name} is not published: {done.reason}"]
        written = store.judge(done.name).checkpoint
        if done.result != "published":
            return []
        t_ns = unix_ns() if written is None else written.t_ns
        times_ns = (*self.saves.times_ns, t_ns)[-TIMES_KEPT:]
        self.saves = replace(self.saves, published=self.saves.published + 1, last_step=step, times_ns=times_ns)
        return [f"checkpoint {done.name} is published"]
