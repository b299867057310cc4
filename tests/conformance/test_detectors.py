"""The detector port: what every detector keeps to, ours and those to come. A new one is a line in DETECTORS.

Pure (inputs unchanged, same inputs same findings), streaming (bounded memory), quiet on a clean run, and able to be
written down at any moment as arrays and JSON and taken up again.
"""

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import numpy as np
import pytest
from tests.detectors.world import World, feed, step_matrix, topology

from trainwarden.app.line import topic
from trainwarden.core.codec import dumps, loads
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Finding, Frame, Input, Json, State, StepMatrix
from trainwarden.core.ports import Detector, Stateful
from trainwarden.core.records import LOCAL_NONFINITE, LOSS_NONFINITE
from trainwarden.core.schemas import DTYPES
from trainwarden.detectors.death import Death
from trainwarden.detectors.hang import Hang
from trainwarden.detectors.loss import NonFinite
from trainwarden.detectors.straggler import Straggler


class Whole(Detector, Stateful, Protocol):
    """What a detector of ours is: both ports."""


DETECTORS: tuple[Callable[[], Whole], ...] = (Death, Hang, NonFinite, Straggler)
ITEMS = 10_000
GROWTH_BYTES = 16_384
"""What may come and go: an open finding, a dozen stacks, quantiles that are cached. A leak of one object an item would
be a hundred times that."""

every = pytest.mark.parametrize("make", DETECTORS, ids=lambda make: make.__name__)


def closed(world: World, steps: int, *, slow: int | None = None, bad: int | None = None) -> None:
    """Closed steps of the world's attempt, up to where it stands."""
    where = topology(world.ranks, epoch=world.epoch)
    own_R = np.full(world.ranks, 0.1)
    own_R[slow if slow is not None else 0] *= 1.0 if slow is None else 1.8
    flags_R = [0] * world.ranks
    if bad is not None:
        flags_R[bad] = LOSS_NONFINITE | LOCAL_NONFINITE
    values = {"forward_s": own_R, "runq_s": np.zeros(world.ranks), "cpu_s": own_R, "loss": np.full(world.ranks, 2.0)}
    last, at = world.step(), world.now_ns
    world.items += [step_matrix(where, step, values, flags_R=flags_R, seen_ns=at) for step in range(last - steps, last)]


def clean_run() -> list[Input]:
    """A job that trains, saves, evaluates and ends."""
    world = World().begin().run_steps(30)
    closed(world, 30)
    for rank in range(4):
        world.event("mark.phase", rank, phase="checkpoint", expect_s=60.0)
    world.hold("checkpoint").run(30).let().run_steps(4).hold("eval").run(30).let().run_steps(4)
    closed(world, 8)
    world.state = ["detached"] * 4
    world.run(0.3)
    for rank in range(4):
        world.exit(rank, code=0, after_s=0.01 * rank)
    world.exit(None, code=0, by="keeper").run(1)
    return world.event("attempt.ended", None, attempt=0, term=1, by="keeper", code=0).items


def eventful_run() -> list[Input]:
    """Everything that any detector has an opinion on."""
    world = World().begin().run_steps(25)
    closed(world, 25, slow=1)
    world.stop(2).run(12).stack(2, "T", ["/job/train.py:3 load"]).run(1).let().run_steps(4)
    world.flags[0] = LOSS_NONFINITE | LOCAL_NONFINITE
    world.run(1)
    closed(world, 1, bad=0)
    world.exit(3, signal=9).run(0.2).exit(0, signal=15).exit(1, signal=15).exit(2, signal=15).run(0.5)
    world.event("oom.kill", None, pid=103, line="Killed process 103 (python)")
    world.exit(None, code=1, by="keeper").run(1)
    world.silent.clear()
    world.new_attempt().begin().run_steps(12)
    closed(world, 12)
    return world.run(1).items


def long_run() -> Iterator[Input]:
    """Attempts that are short, fail in turn and never end."""
    world = World(2)
    attempts = 0
    while True:
        world.begin().run_steps(40)
        closed(world, 40, slow=attempts % 2, bad=1 if attempts % 3 == 0 else None)
        world.stop(0).run(14).stack(0, "T", [f"/job/train.py:{attempts} f"]).run(1)
        world.event("oom.kill", None, pid=attempts, line=f"Killed process {attempts}")
        world.exit(1, signal=9).exit(None, code=1, by="keeper").run(2)
        yield from world.items
        world.items.clear()
        world.silent.clear()
        world.new_attempt()
        attempts += 1


def stored(state: State) -> State:
    """Through npz and JSON, as a snapshot is kept."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in state.items() if name not in arrays}
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes its flag for one of the arrays
    text = json.dumps(rest, allow_nan=False)
    with np.load(io.BytesIO(file.getvalue()), allow_pickle=False) as loaded:
        return {**json.loads(text), **{name: loaded[name] for name in loaded.files}}


def frozen(item: Input) -> Input:
    """Arrays that cannot be written to: a frame from the wire has no others."""
    for array in _arrays(item):
        array.flags.writeable = False
    return item


def _arrays(item: Input) -> list[np.ndarray[Any, Any]]:
    if isinstance(item, Frame):
        return [item.rows]
    return [item.values_FR, item.seen_R, item.flags_R] if isinstance(item, StepMatrix) else []


@every
def test_it_fits_the_port(make: Callable[[], Whole]) -> None:
    detector = make()
    topics = {"topology", "steps", "tick", *DTYPES, *(name for name, kind in KINDS.items() if kind.of == "event")}
    assert detector.wants <= topics
    assert detector.name


def test_names_are_unique() -> None:
    assert len({make().name for make in DETECTORS}) == len(DETECTORS)


@every
def test_it_is_quiet_on_a_clean_run(make: Callable[[], Whole]) -> None:
    assert feed(make(), clean_run()) == []


@every
def test_it_says_something_in_a_run_full_of_faults(make: Callable[[], Whole]) -> None:
    """Else the tests below would test nothing."""
    assert feed(make(), eventful_run())


@every
def test_the_same_inputs_give_the_same_findings_and_stay_as_they_were(make: Callable[[], Whole]) -> None:
    items = [frozen(item) for item in eventful_run()]
    before = [array.tobytes() for item in items for array in _arrays(item)]
    assert feed(make(), items) == feed(make(), items)
    assert [array.tobytes() for item in items for array in _arrays(item)] == before


@every
def test_findings_are_well_formed(make: Callable[[], Whole]) -> None:
    newest: dict[str, Finding] = {}
    for finding in feed(make(), eventful_run()):
        before = newest.get(finding.id)
        assert finding.revision == (0 if before is None else before.revision + 1)
        assert before is None or before.status not in ("cleared", "withdrawn"), "said again after its end"
        assert finding.id.startswith(f"{make().name}/job/")
        assert KINDS[finding.kind].of == "finding"
        assert 0 <= finding.confidence <= 1
        assert all(0 <= share <= 1 for _, share in finding.suspects)
        assert finding.onset_ns <= finding.seen_ns
        assert loads(dumps(finding)) == finding, "not plain JSON, or not finite"
        newest[finding.id] = finding


@every
def test_a_snapshot_at_any_moment_changes_nothing(make: Callable[[], Whole]) -> None:
    items = eventful_run()
    unbroken = feed(make(), items)
    detector, found = make(), []
    for number, item in enumerate(items):
        if number % 23 == 0:
            state = stored(detector.snapshot())
            detector = make()
            detector.restore(state)
        found += feed(detector, [item])
    assert found == unbroken


@every
def test_a_snapshot_is_not_the_living_state(make: Callable[[], Whole]) -> None:
    detector, items = make(), eventful_run()
    feed(detector, items[:300])
    state = detector.snapshot()
    before = _content(stored(state))
    feed(detector, items[300:])
    assert _content(stored(state)) == before


@every
def test_its_memory_is_bounded(make: Callable[[], Whole]) -> None:
    detector, sizes = make(), list[int]()
    for number, item in enumerate(long_run(), start=1):
        if topic(item) in detector.wants:
            detector.update(item)
        if number in (ITEMS // 2, ITEMS):
            sizes.append(size_bytes(detector))
        if number == ITEMS:
            break
    assert sizes[1] - sizes[0] < GROWTH_BYTES, sizes


def _content(state: State) -> Mapping[str, Json | bytes]:
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in state.items()}


def size_bytes(root: object) -> int:
    """Of everything that hangs on an object; shared constants count once."""
    seen: set[int] = set()
    todo, total = [root], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type) or callable(one):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        todo += _parts(one)
    return total


def _parts(one: Any) -> list[Any]:
    if isinstance(one, np.ndarray):
        return [one.base] if one.base is not None else []
    if isinstance(one, Mapping):
        return [*one.keys(), *one.values()]
    if isinstance(one, list | tuple | set | frozenset):
        return list(one)
    if is_dataclass(one):
        return [getattr(one, field.name) for field in fields(one)]
    return list(vars(one).values()) if hasattr(one, "__dict__") else []
