"""Rule 10 of docs/architecture.md, From frames to steps: what comes out does not depend on how it was cut.

A recording is drawn as instants (items with one seen_ns). Then the frames of each instant are split, joined and turned
about in any way that a source or receiver could, and the assembler is stopped and taken up again in the middle.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, Schema, State, StepMatrix, Subject, Tick, Topology
from trainwarden.core.records import epoch_of
from trainwarden.core.schemas import DTYPES
from trainwarden.core.steps import StepAssembler, StepCounters, StepsConfig

JOB = JobId("nano")
EPOCHS = [Epoch(epoch_of(*parts)) for parts in ((0, 0, 0), (0, 0, 1), (1, 0, 0))]
CONFIG = StepsConfig(window_steps=4, grace_ceiling=timedelta(seconds=2), topology_wait=timedelta(seconds=5), ranks=64)
NAMES = ("data", "forward", "backward", "backward_input")
WORLD = 4

Item = Frame | Event | Tick
Instant = list[Item]


def frame_of(schema: Schema, source: str, epoch: Epoch, rows: NDArray[np.void]) -> Frame:
    return Frame(
        schema=schema, source=source, job=JOB, epoch=epoch, seq=0, sent_ns=0, seen_ns=0, names=NAMES, rows=rows
    )


def event_of(kind: str, epoch: Epoch, data: dict[str, Json]) -> Event:
    subject = Subject(kind="job", id=JOB)
    return Event(kind=kind, subject=subject, source="test", seq=0, t_ns=0, seen_ns=0, job=JOB, epoch=epoch, data=data)


def hello_of(rank: int, epoch: Epoch) -> Event:
    data: dict[str, Json] = {"rank": rank, "world_size": WORLD, "device": f"d{rank}", "node": "n0", "coords": {"pp": 0}}
    return event_of("hello", epoch, data)


def domains_of(node: str, by: str, **told: Json) -> Event:
    event = event_of("node.domains", EPOCHS[0], {"from": by, "domains": told})
    return replace(event, subject=Subject(kind="node", id=node), source=f"{by}@{node}")


HELLOS: Instant = [hello_of(rank, EPOCHS[0]) for rank in range(WORLD)]
STEP_NUMBERS = st.sampled_from([1, 1, 2, 2, 3, 3, 4, 5, 6, 9, 30, 45, 46, 47, 48, 5000, -1])
RANKS = st.sampled_from([0, 0, 1, 1, 2, 2, 3, 3, WORLD, -1])


@st.composite
def step_frames(draw: st.DrawFn) -> Frame:
    """Rows of one source, also such as cannot be; a source has ranks of its own, as a node has."""
    source = draw(st.sampled_from(["a", "b"]))
    rows = np.zeros(draw(st.integers(0, 6)), DTYPES["step"])
    for row in rows:
        row["rank"] = draw(RANKS)
        row["step"] = draw(STEP_NUMBERS)
        row["values"] = draw(st.integers(0, 3))
    return frame_of("step", source, draw(st.sampled_from(EPOCHS)), rows)


@st.composite
def span_frames(draw: st.DrawFn) -> Frame:
    rows = np.zeros(draw(st.integers(1, 4)), DTYPES["span"])
    for row in rows:
        row["rank"], row["step"] = draw(RANKS), draw(STEP_NUMBERS)
        row["mb"], row["kind"] = draw(st.integers(-1, 2)), draw(st.integers(0, len(NAMES) - 1))
        row["start_ns"], row["values"] = draw(st.integers(0, 1)), draw(st.floats(0, 10, width=32))
    return frame_of("span", draw(st.sampled_from("ab")), draw(st.sampled_from(EPOCHS)), rows)


@st.composite
def calm_frames(draw: st.DrawFn) -> Frame:
    """A step as it should be, perhaps without its last ranks."""
    rows = np.zeros(draw(st.sampled_from([WORLD, WORLD, 3, 2, 1])), DTYPES["step"])
    rows["rank"], rows["step"] = np.arange(len(rows)), draw(STEP_NUMBERS)
    return frame_of("step", "a", draw(st.sampled_from(EPOCHS)), rows)


EVENTS = st.one_of(
    st.builds(hello_of, st.integers(0, WORLD - 1), st.sampled_from(EPOCHS)),
    st.sampled_from([event_of("membership", EPOCHS[0], {"ranks": ranks}) for ranks in ([0, 1], [0, 1, 2, 3], [9])]),
    st.sampled_from([event_of("attempt.ended", EPOCHS[0], {"attempt": attempt}) for attempt in (0, 1)]),
    st.builds(
        domains_of, st.sampled_from(["n0", "n1"]), st.sampled_from(["site", "slurm"]), rack=st.sampled_from("ab")
    ),
)
FRAMES = st.one_of(step_frames(), calm_frames(), calm_frames(), span_frames())
GAPS_NS = st.sampled_from([1, 1000, 10**8, 2 * 10**8, 10**9, 3 * 10**9])


@st.composite
def recordings(draw: st.DrawFn) -> list[Instant]:
    """All that happened, one list an instant; mostly the hellos come first."""
    greeted = draw(st.booleans())
    now_ns, instants = 1, [[*HELLOS] if greeted else []]
    for _ in range(draw(st.integers(2, 14))):
        now_ns += draw(GAPS_NS)
        items: Instant = [*draw(st.lists(FRAMES, max_size=3)), *draw(st.lists(EVENTS, max_size=1))]
        if draw(st.booleans()):
            items.append(Tick(seen_ns=now_ns))
        instants.append([replace(item, seen_ns=now_ns) for item in items])
    return instants


@st.composite
def recuts(draw: st.DrawFn, instant: Instant) -> Instant:
    """The same instant cut and ordered otherwise: rows of one (source, epoch, schema) keep their order, no more."""
    lanes: dict[tuple[str, ...], list[Item]] = {}
    for item in instant:
        if isinstance(item, Frame):
            lane = lanes.setdefault((item.schema, item.source, str(item.epoch)), [])
            if draw(st.booleans()) and lane:
                lane[-1] = joined(lane[-1], item)
            else:
                lane += draw(splits(item))
        else:
            lanes.setdefault((type(item).__name__,), []).append(item)
    order = draw(st.permutations([lane for lane, items in lanes.items() for _ in items]))
    return [lanes[lane].pop(0) for lane in order]


def joined(first: Item, second: Frame) -> Frame:
    assert isinstance(first, Frame)
    return replace(first, rows=np.concatenate([first.rows, second.rows]))


@st.composite
def splits(draw: st.DrawFn, frame: Frame) -> list[Frame]:
    cuts = sorted(draw(st.lists(st.integers(0, len(frame.rows)), max_size=3)))
    return [replace(frame, rows=rows) for rows in np.split(frame.rows, cuts)]


def played(instants: Sequence[Instant], *, stop_after: int | None = None) -> list[Any]:
    """Everything that came out, as values that compare; perhaps with a break in the middle."""
    assembler, out = StepAssembler(JOB, CONFIG), []
    for fed, item in enumerate(item for instant in instants for item in instant):
        if fed == stop_after:
            state = stored(assembler.snapshot())
            assembler = StepAssembler(JOB, CONFIG)
            assembler.restore(state)
        out += assembler.feed(item)
    out += assembler.finish()
    return [*map(plain, out), assembler.counters]


def stored(state: State) -> State:
    """As a snapshot comes back from disk: npz without pickle, and JSON."""
    arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    file.seek(0)
    rest = {key: value for key, value in state.items() if key not in arrays}
    return {**np.load(file, allow_pickle=False), **json.loads(json.dumps(rest))}


def plain(out: Topology | StepMatrix) -> tuple[object, ...]:
    if isinstance(out, Topology):
        return out.epoch, out.device_R, out.node_R.tobytes(), out.coords_RP.tobytes(), out.domains
    micro = None if out.micro_MKR is None else (out.micro_MKR.shape, out.micro_MKR.tobytes())
    arrays = (out.values_FR.tobytes(), out.seen_R.tobytes(), out.flags_R.tobytes(), micro)
    return out.topology.epoch, out.topology.domains, out.step, out.batch, out.seen_ns, out.partial, *arrays


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rule_10_the_cut_into_frames_does_not_matter(data: st.DataObject) -> None:
    instants = data.draw(recordings())
    other = [data.draw(recuts(instant)) for instant in instants]
    assert played(other) == played(instants)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rule_10_a_break_does_not_matter(data: st.DataObject) -> None:
    instants = data.draw(recordings())
    items = sum(map(len, instants))
    assert played(instants, stop_after=data.draw(st.integers(0, items))) == played(instants)


def eventful() -> list[Instant]:
    """A recording in which all that an assembler remembers matters later on."""
    instants: list[Instant] = [[domains_of("n0", "slurm", rack="a"), *HELLOS]]

    def at(now_ns: int, *items: Item) -> None:
        instants.append([replace(item, seen_ns=now_ns) for item in items])

    def steps(number: int, *ranks: int) -> Frame:
        rows = np.zeros(len(ranks), DTYPES["step"])
        rows["rank"], rows["step"] = ranks, number
        return frame_of("step", "a", EPOCHS[0], rows)

    second = 10**9
    for number in range(3):  # teaches a grace of 1.2 s
        at((10 * number + 1) * second, steps(number, 0, 1), domains_of("n0", "site", rack=f"{number}"))
        at((10 * number + 1) * second + 3 * 10**8, steps(number, 2, 3))
    micro = np.zeros(1, DTYPES["span"])
    micro["step"], micro["kind"] = 3, NAMES.index("forward")
    at(40 * second, frame_of("span", "a", EPOCHS[0], micro), steps(3, 0, 1, 2), Tick(seen_ns=0))
    at(41 * second + 5 * 10**8, steps(4, 0), Tick(seen_ns=0))  # 3 closes here
    at(41 * second + 6 * 10**8, steps(3, 3))
    at(50 * second, event_of("membership", EPOCHS[0], {"ranks": [0, 1, 2]}), steps(4, 1, 2))
    for number in range(3):  # two of three members jump, one rank after the other
        at((60 + number) * second, steps(900 + number, 0), Tick(seen_ns=0))
    for number in range(3):
        at((70 + number) * second, steps(900 + number, 1), Tick(seen_ns=0))
    at(90 * second, steps(904, 0, 1, 2), steps(4, 3), event_of("attempt.ended", EPOCHS[0], {"attempt": 0}))
    return instants


CLOSED = [0, 1, 2, 3, 4, 901, 902, 904]


@pytest.mark.parametrize("stop_after", range(37))
def test_rule_10_wherever_the_break_is(stop_after: int) -> None:
    assert played(eventful(), stop_after=stop_after) == played(eventful())


def test_the_eventful_recording_is_eventful() -> None:
    *out, counters = played(eventful())
    assert out[0][-1] == {"n0": {"rack": "a"}}
    assert [one[1:3] for one in out[1:]] == [({"n0": {"rack": "a"}}, number) for number in CLOSED]
    assert sum(map(len, eventful())) == 37
    assert counters == StepCounters(rows=23, late=2, garbage=4, closed=8, partial=3, skipped=1, late_domains=3)


@settings(max_examples=60, deadline=None)
@given(recordings())
def test_rule_6_each_step_leaves_once_and_in_order(instants: list[Instant]) -> None:
    assembler = StepAssembler(JOB, CONFIG)
    out = [one for instant in instants for item in instant for one in assembler.feed(item)]
    out += assembler.finish()
    told = [(one.topology.epoch, one.step) for one in out if isinstance(one, StepMatrix)]
    assert told == sorted(set(told))
    assert len({one.epoch for one in out if isinstance(one, Topology)}) == sum(isinstance(one, Topology) for one in out)
