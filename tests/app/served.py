"""A server for tests of the wire: tokens, a job in numbers as agents would send it, and what came of it."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tests.detectors.world import World, hello

from trainwarden.app.uplink import Uplink, UplinkConfig
from trainwarden.core.auth import hashed
from trainwarden.core.model import Epoch, Event, Frame, JobId, Subject
from trainwarden.core.records import FEATURES, epoch_of
from trainwarden.core.schemas import STEP
from trainwarden.core.wire import Asked

T = TypeVar("T")
EPOCH = Epoch(epoch_of(1, 0, 0))


def until(what: str, found: Callable[[], T], timeout_s: float = 20.0) -> T:
    """Poll until there is something."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if answer := found():
            return answer
        time.sleep(0.01)
    raise AssertionError(f"no {what} within {timeout_s} s")


def tokens_file(folder: Path, *, agents: Iterable[str] = ("n0", "n1"), jobs: Iterable[str] = ()) -> Path:
    """Each token is the name with `secret-` before it."""
    told = {
        "agents": {name: hashed(f"secret-{name}") for name in agents},
        "jobs": {name: hashed(f"secret-{name}") for name in jobs},
        "approve": {"ann": hashed("secret-ann")},
    }
    file = folder / "tokens.yaml"
    file.write_text(json.dumps({"tokens": told}))
    return file


def uplink(
    folder: Path, server: str, node: str = "n0", *, on_look: Callable[[Asked], None] | None = None, **more: Any
) -> Uplink:
    """One agent's sending side."""
    token = folder / f"token-{node}"
    if not token.exists():
        token.write_text(f"secret-{node}\n")
    settings: dict[str, Any] = {"tls": False, "backoff_max_s": 0.2, **more}
    return Uplink(UplinkConfig(server=server, token=f"file:{token}", **settings), node, on_look)


class Node:
    """What the agent of one node sees of one job; numbers as sources number."""

    def __init__(self, node: str, job: str, ranks: Sequence[int], world_size: int) -> None:
        self.node, self.job, self.ranks, self.world_size = node, JobId(job), ranks, world_size
        self.seq = time.time_ns() // 1000
        self.events = 0

    def hellos(self) -> list[Event]:
        return [self.event("hello", rank, {**hello(rank, self.world_size), "attempt": 1}) for rank in self.ranks]

    def event(self, kind: str, rank: int, data: Mapping[str, Any]) -> Event:
        self.events += 1
        stamp = time.time_ns()
        return Event(
            kind=kind,
            subject=Subject(kind="rank", id=str(rank)),
            source=f"rings@{self.node}",
            seq=self.seq + self.events,
            t_ns=stamp,
            seen_ns=stamp,
            job=self.job,
            epoch=EPOCH,
            data=data,
        )

    def steps(self, first: int, last: int) -> list[Frame]:
        return [self.step(number) for number in range(first, last + 1)]

    def step(self, number: int) -> Frame:
        """One frame: the number of the frame is that of the step."""
        return step_frame(number, self.ranks, source=f"rings@{self.node}", job=self.job, seq=self.seq + number)


def step_frame(step: int, ranks: Sequence[int], *, source: str, job: JobId | None, seq: int) -> Frame:
    rows = np.zeros(len(ranks), STEP)
    rows["rank"], rows["step"], rows["batch"] = ranks, step, step
    rows["values"][:, FEATURES.index("step_s")] = 0.5
    return Frame(
        schema="step",
        source=source,
        job=job,
        epoch=None if job is None else EPOCH,
        seq=seq,
        sent_ns=time.time_ns(),
        seen_ns=0,
        names=(),
        rows=rows,
    )


def as_sent(world: World, job: str, node: str = "n0") -> list[Frame | Event]:
    """What a world made, of this job, as the agent of one node would send it."""
    out: list[Frame | Event] = []
    numbers = {Frame: time.time_ns() // 1000, Event: time.time_ns() // 1000}
    for item in world.items:
        if isinstance(item, Frame | Event):
            numbers[type(item)] += 1
            out.append(replace(item, job=JobId(job), source=f"w@{node}", seq=numbers[type(item)]))
    return out


def notices(state: Path, job: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (state / job / "notices.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []
