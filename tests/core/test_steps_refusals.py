"""What the assembler refuses: hellos, frames and settings that cannot be."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, StepMatrix, Subject, Tick, Topology
from trainwarden.core.records import epoch_of
from trainwarden.core.schemas import STEP
from trainwarden.core.steps import StepAssembler, StepsConfig

JOB = JobId("nano")
SECOND_NS = 1_000_000_000


def hello(data: dict[str, Json], epoch: Epoch | None = None, kind: str = "hello") -> Event:
    subject = Subject(kind="rank", id="0")
    return Event(
        kind=kind, subject=subject, source="test", seq=0, t_ns=0, seen_ns=SECOND_NS, job=JOB, epoch=epoch, data=data
    )


def step(at_s: float, epoch: Epoch | None) -> Frame:
    at_ns = int(at_s * SECOND_NS)
    rows = np.zeros(1, STEP)
    return Frame(
        schema="step", source="rings@n0", job=JOB, epoch=epoch, seq=0, sent_ns=0, seen_ns=at_ns, names=(), rows=rows
    )


def outputs(*items: Frame | Event | Tick) -> tuple[StepAssembler, list[Topology | StepMatrix]]:
    assembler = StepAssembler(JOB, StepsConfig())
    end = [Tick(seen_ns=100 * SECOND_NS), Tick(seen_ns=101 * SECOND_NS)]
    return assembler, [out for item in [*items, *end] for out in assembler.feed(item)]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"rank": 0},
        {"rank": 4, "world_size": 4},
        {"rank": -1, "world_size": 4},
        {"rank": "0", "world_size": 4},
        {"rank": 0, "world_size": 10**9},
        {"rank": True, "world_size": 4},
    ],
    ids=str,
)
def test_a_hello_that_cannot_be_is_refused(data: dict[str, Json]) -> None:
    assembler, out = outputs(hello(data, Epoch(0)))
    assert out == []
    assert assembler.counters.bad_events == 1


def test_a_hello_tells_its_epoch_in_its_data() -> None:
    _, (topology,) = outputs(hello({"rank": 0, "world_size": 1, "attempt": 2, "restart": 0, "lap": 1}))
    assert isinstance(topology, Topology)
    assert topology.epoch == epoch_of(2, 0, 1)


def test_a_hello_without_an_epoch_is_refused() -> None:
    assembler, out = outputs(hello({"rank": 0, "world_size": 1, "attempt": 2}))
    assert out == []
    assert assembler.counters.bad_events == 1


@pytest.mark.parametrize("ranks", [[], "01", [9], [True], None], ids=str)
def test_a_membership_of_nobody_we_know_is_refused(ranks: Json) -> None:
    world, members = hello({"rank": 0, "world_size": 1}), hello({"ranks": ranks}, kind="membership")
    first = Epoch(0)
    assembler, out = outputs(replace(world, epoch=first), replace(members, epoch=first), step(2, first))
    assert [type(one) for one in out] == [Topology, StepMatrix]
    assert assembler.counters.bad_events == 1


def test_a_frame_without_epoch_is_garbage() -> None:
    assembler, out = outputs(hello({"rank": 0, "world_size": 1}, Epoch(0)), step(2, None))
    assert len(out) == 1
    assert assembler.counters.garbage == 1


def test_of_world_sizes_that_differ_most_votes_count() -> None:
    votes: list[tuple[int, int]] = [(0, 2), (1, 2), (2, 64)]
    _, (topology,) = outputs(*(hello({"rank": rank, "world_size": size}, Epoch(0)) for rank, size in votes))
    assert isinstance(topology, Topology)
    assert len(topology.device_R) == 2


def test_a_clock_that_falls_back_does_not_stop_the_steps() -> None:
    _, out = outputs(hello({"rank": 0, "world_size": 1}, Epoch(0)), step(5, Epoch(0)), step(3, Epoch(0)))
    assert [type(one) for one in out] == [Topology, StepMatrix]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window_steps": 0}, "window_steps: need at least 1, got 0"),
        ({"grace_factor": 0.0}, "grace_factor: need more than 0, got 0"),
        (
            {"grace_floor": timedelta(seconds=11)},
            "grace_floor: need 0 s to grace_ceiling (10 s), got 11 s",
        ),
    ],
    ids=["window", "factor", "floor above ceiling"],
)
def test_contradictory_config_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StepsConfig(**wrong)
    assert str(refused.value) == message
