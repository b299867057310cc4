"""A small job in numbers: what an agent would send about ranks that move in step, poll after poll.

Deterministic and without a clock. A rank's place is a number of steps; within a step it goes through data, forward,
backward, wait and optimizer, and nobody leaves `wait` before all have come to it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trainwarden.app.line import topic
from trainwarden.core.kinds import missing_data
from trainwarden.core.model import (
    Epoch,
    Event,
    Finding,
    Frame,
    Input,
    JobId,
    Json,
    StepMatrix,
    Subject,
    Tick,
    Topology,
)
from trainwarden.core.ports import Detector
from trainwarden.core.records import FEATURES, PHASES, STATES, epoch_of
from trainwarden.core.schemas import LIVE

JOB = JobId("job")
START_NS = 1_800_000_000_000_000_000
POLL_S, POLLS_A_TICK = 0.1, 2
SCHEDULE = ((0.1, "data"), (0.4, "forward"), (0.7, "backward"), (0.8, "wait"), (1.0, "optimizer"))
WAIT_AT, WAIT_END = 0.7, 0.8


class World:
    """Makes items; what was made lies in `items`."""

    def __init__(self, ranks: int = 4, *, attempt: int = 0, step_s: float = 0.5, start_ns: int = START_NS) -> None:
        self.ranks, self.attempt, self.restart, self.step_s = ranks, attempt, 0, step_s
        self.now_ns = start_ns
        self.items: list[Input] = []
        self.place = [-1.0] * ranks  # before the first step
        self.phase = ["init"] * ranks
        self.since_ns = [start_ns] * ranks
        self.flags = [0] * ranks
        self.state = ["attached"] * ranks
        self.skew_ns = [0] * ranks
        self.stopped: set[int] = set()
        self.held: dict[int, str] = {}
        self.silent: set[int] = set()
        self._seq = self._polls = 0

    @property
    def epoch(self) -> Epoch:
        return Epoch(epoch_of(self.attempt, self.restart, 0))

    def step(self, rank: int = 0) -> int:
        return int(self.place[rank])

    # what the job does

    def begin(self) -> "World":
        """Everybody says hello and begins the first step."""
        self.hello()
        self.items.append(topology(self.ranks, epoch=self.epoch))
        self.run(0.5)
        self.place = [0.0] * self.ranks
        return self

    def run(self, seconds: float) -> "World":
        """Let time pass; ranks that are neither stopped nor held move on."""
        for _ in range(round(seconds / POLL_S)):
            self.now_ns += round(POLL_S * 1e9)
            self._move()
            self.poll()
        return self

    def run_steps(self, steps: int) -> "World":
        return self.run(steps * self.step_s)

    def stop(self, rank: int) -> "World":
        """SIGSTOP."""
        self.stopped.add(rank)
        return self

    def hold(self, phase: str, ranks: Iterable[int] | None = None) -> "World":
        """Ranks enter a phase and stay in it until let()."""
        self.held |= dict.fromkeys(range(self.ranks) if ranks is None else ranks, phase)
        return self

    def let(self) -> "World":
        """Nobody is stopped or held any more."""
        self.stopped.clear()
        self.held.clear()
        return self

    def new_attempt(self) -> "World":
        """The next incarnation, ranks not started yet; it goes on making items."""
        self.attempt += 1
        self.place, self.phase = [-1.0] * self.ranks, ["init"] * self.ranks
        self.since_ns, self.flags = [self.now_ns] * self.ranks, [0] * self.ranks
        self.let()
        self.event("attempt.started", None, attempt=self.attempt, term=1, by="run")
        return self

    # what is said of it

    def hello(self, ranks: Collection[int] | None = None, **data: Json) -> "World":
        for rank in range(self.ranks) if ranks is None else ranks:
            said = hello(rank, self.ranks) | {"attempt": self.attempt, "restart": self.restart} | data
            self.event("hello", rank, **said)
        return self

    def exit(
        self,
        rank: int | None,
        *,
        code: int | None = None,
        signal: int | None = None,
        after_s: float = 0.0,
        oom: bool | None = None,
        by: str = "zombie",
    ) -> "World":
        """A process ends; its frames stop."""
        if rank is not None:
            self.silent.add(rank)
        t_ns = self.now_ns + round(after_s * 1e9)
        pid = 999 if rank is None else 100 + rank
        return self.event("process.exit", rank, rank=rank, pid=pid, code=code, signal=signal, oom=oom, by=by, t_ns=t_ns)

    def stack(self, rank: int, state: str = "S", frames: Sequence[str] = (), denied: str = "") -> "World":
        said: dict[str, Json] = {"rank": rank, "frames": list(frames), "state": state, "wchan": "", "denied": denied}
        return self.event("stack", rank, **said)

    def event(self, kind: str, about: int | None, /, **data: Json) -> "World":
        subject = Subject(kind="job", id=JOB) if about is None else Subject(kind="rank", id=str(about))
        assert missing_data(kind, data) == ()
        self._seq += 1
        epoch = None if kind in ("stack", "launcher.failure", "oom.kill") else self.epoch
        if kind == "oom.kill":
            subject = Subject(kind="node", id="n1")
        stamps = {"t_ns": self.now_ns, "seen_ns": self.now_ns}
        self.items.append(
            Event(kind=kind, subject=subject, source="w", seq=self._seq, **stamps, job=JOB, epoch=epoch, data=data)
        )
        return self

    def poll(self) -> None:
        """One live frame a node (two ranks each), and a tick now and then."""
        for first in range(0, self.ranks, 2):
            shown = [rank for rank in range(first, min(first + 2, self.ranks)) if rank not in self.silent]
            if shown:
                self.items.append(self._frame(shown, f"rings@n{first // 2}"))
        self._polls += 1
        if self._polls % POLLS_A_TICK == 0:
            self.items.append(Tick(seen_ns=self.now_ns))

    def _move(self) -> None:
        last = min(self.place)
        barrier = int(last) + (1 if last % 1 >= WAIT_AT else 0) + WAIT_END
        for rank in range(self.ranks):
            if rank in self.stopped:
                continue
            if rank in self.held:
                self._enter(rank, self.held[rank])
            elif self.place[rank] >= 0 and self.phase[rank] != "checkpoint":
                self._advance(rank, barrier)
            elif self.place[rank] >= 0:
                self._enter(rank, _phase_at(self.place[rank]))

    def _advance(self, rank: int, barrier: float) -> None:
        before = self.place[rank]
        self.place[rank] = max(before, min(before + POLL_S / self.step_s, barrier - 1e-6))
        if int(self.place[rank]) > int(before) or _phase_at(self.place[rank]) != self.phase[rank]:
            self._enter(rank, _phase_at(self.place[rank]), again=True)

    def _enter(self, rank: int, phase: str, *, again: bool = False) -> None:
        if phase != self.phase[rank] or again:
            self.phase[rank], self.since_ns[rank] = phase, self.now_ns

    def _frame(self, ranks: Sequence[int], source: str) -> Frame:
        rows = np.zeros(len(ranks), LIVE)
        for row, rank in zip(rows, ranks, strict=True):
            step = self.step(rank) if self.place[rank] >= 0 else 0
            row["rank"], row["step"], row["batch"] = rank, step, step
            row["phase"], row["flags"] = PHASES.index(self.phase[rank]), self.flags[rank]
            row["state"], row["since_ns"] = STATES.index(self.state[rank]), self.since_ns[rank] + self.skew_ns[rank]
        self._seq += 1
        return live_frame(rows, source=source, epoch=self.epoch, seq=self._seq, seen_ns=self.now_ns)


def live_frame(rows: NDArray[np.void], *, source: str, epoch: Epoch, seq: int, seen_ns: int) -> Frame:
    return Frame(
        schema="live",
        source=source,
        job=JOB,
        epoch=epoch,
        seq=seq,
        sent_ns=seen_ns,
        seen_ns=seen_ns,
        names=PHASES,
        rows=rows,
    )


def hello(rank: int, world_size: int) -> dict[str, Json]:
    said: dict[str, Json] = {"rank": rank, "world_size": world_size, "coords": {}, "slot": f"n1:{rank}"}
    said |= {"device": f"n1:{rank}", "node": "n1", "pid": 100 + rank, "start_time": 5, "uid": 0, "ring": "r"}
    return said | {"clock": "cpu", "blind": [], "attempt": 0, "restart": 0, "lap": 0, "versions": {}}


def topology(ranks: int, *, epoch: int = 0, devices: Sequence[str] | None = None, stages: int = 1) -> Topology:
    coords_RP = np.full((ranks, 5), -1, np.int16)
    coords_RP[:, 0] = np.arange(ranks) * stages // ranks
    return Topology(
        job=JOB,
        epoch=Epoch(epoch),
        device_R=tuple(devices or [f"n1:{rank}" for rank in range(ranks)]),
        node_R=np.zeros(ranks, np.int32),
        coords_RP=coords_RP,
        domains={"n1": {}},
    )


def step_matrix(
    where: Topology,
    step: int,
    values: Mapping[str, Sequence[float] | NDArray[np.float64]],
    *,
    flags_R: Sequence[int] | None = None,
    seen_R: Sequence[bool] | None = None,
    seen_ns: int | None = None,
) -> StepMatrix:
    """A closed step; what is not given is NaN, and steps close eight a second."""
    ranks = len(where.device_R)
    values_FR = np.full((len(FEATURES), ranks), np.nan, np.float32)
    for name, value_R in values.items():
        values_FR[FEATURES.index(name)] = value_R
    seen = np.ones(ranks, np.bool_) if seen_R is None else np.asarray(seen_R, np.bool_)
    return StepMatrix(
        topology=where,
        step=step,
        batch=step,
        seen_ns=START_NS + step * 125_000_000 if seen_ns is None else seen_ns,
        partial=not bool(seen.all()),
        values_FR=np.where(seen, values_FR, np.nan).astype(np.float32),
        seen_R=seen,
        flags_R=np.zeros(ranks, np.uint32) if flags_R is None else np.asarray(flags_R, np.uint32),
    )


def feed(detector: Detector, items: Iterable[Input]) -> list[Finding]:
    """All findings of these items; only what the detector wants is handed to it."""
    return [f for item in items if topic(item) in detector.wants for f in detector.update(item)]


def said(findings: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """(status, kind, subject) of each: what most tests compare."""
    return [(f.status, f.kind, str(f.subject)) for f in findings]


def evidence(finding: Finding) -> dict[str, Json]:
    return {row.what: row.value for row in finding.evidence}


def _phase_at(place: float) -> str:
    return next(name for end, name in SCHEDULE if place % 1 < end)
