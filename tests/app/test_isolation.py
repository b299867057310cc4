"""Sources that hang, raise and flood, beside sources that are well."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import numpy as np
import pytest

from trainwarden.app.isolation import EVENT_BYTES, ITEMS_MAX, Isolation, IsolationConfig, SourceState, weight
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, Subject
from trainwarden.core.ports import Source
from trainwarden.core.schemas import READING

CONFIG = IsolationConfig(
    deadline=timedelta(milliseconds=100), retry_max=timedelta(milliseconds=50), queue_bytes=1 << 16
)
DEADLINE_S = 20.0


Do = Callable[[], Iterable[Frame | Event]]


class Fake:
    """A source that does what a test says."""

    def __init__(
        self, name: str, do: Callable[[], Iterable[Frame | Event]] | None = None, period_s: float = 0.01
    ) -> None:
        self.name, self.period_s = f"{name}@n1", period_s
        self._do = do or (lambda: [self.event()])
        self._emit = Emitter(self.name, job=None, start_ns=0)
        self.polls = 0
        self.closed = False

    def event(self, kind: str = "source.started", why: str = "") -> Event:
        return self._emit(kind, Subject(kind="source", id=self.name), now_ns=0, data={"why": why})

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        self.polls += 1
        return self._do()

    def close(self) -> None:
        self.closed = True


@contextmanager
def isolated(*sources: Source, config: IsolationConfig = CONFIG) -> Iterator[Isolation]:
    isolation = Isolation(config, "n1")
    try:
        for source in sources:
            isolation.add(source)
        yield isolation
    finally:
        isolation.close(5.0)


def hang(release: threading.Event) -> Do:
    """What gives nothing, and not before it is released."""

    def do() -> list[Event]:
        release.wait(DEADLINE_S)
        return []

    return do


@contextmanager
def released() -> Iterator[threading.Event]:
    """What a hanging source waits for; set in the end, so that its thread ends with the test."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


def drain_until(isolation: Isolation, met: Callable[[list[Frame | Event]], object]) -> list[Frame | Event]:
    """Everything drained until what was wanted has come."""
    found: list[Frame | Event] = []
    end_s = time.monotonic() + DEADLINE_S
    while not met(found):
        assert time.monotonic() < end_s, f"never came; {isolation.states()}"
        found += isolation.drain()
        time.sleep(0.002)
    return found


def told(found: list[Frame | Event], kind: str, source: str) -> list[Event]:
    return [one for one in found if isinstance(one, Event) and one.kind == kind and one.subject.id == f"{source}@n1"]


def state(isolation: Isolation, source: str) -> SourceState:
    return next(one for one in isolation.states() if one.name == f"{source}@n1")


def test_a_source_that_hangs_holds_up_nobody() -> None:
    well = Fake("well")
    with released() as release:
        stuck = Fake("stuck", hang(release))
        with isolated(stuck, well) as isolation:
            found = drain_until(isolation, lambda found: told(found, "source.blind", "stuck"))
            (blind,) = told(found, "source.blind", "stuck")
            assert blind.data["why"] == "no answer for 0.1 s"
            assert blind.source == "agent@n1"
            assert state(isolation, "stuck").word == "blind"
            before = well.polls
            drain_until(isolation, lambda _: well.polls > before + 3)
            assert stuck.polls == 1, "a second call into what hangs would hang too"
            assert state(isolation, "well").word == "up"
            release.set()
            found = drain_until(isolation, lambda found: told(found, "source.up", "stuck"))
            assert "no answer for 0.1 s" in str(told(found, "source.up", "stuck")[0].data["why"])
            assert state(isolation, "stuck").word == "up"


def test_an_end_does_not_wait_for_a_source_that_hangs() -> None:
    with released() as release:
        stuck, well = Fake("stuck", hang(release)), Fake("well")
        isolation = Isolation(CONFIG, "n1")
        isolation.add(stuck)
        isolation.add(well)
        drain_until(isolation, lambda _: stuck.polls and well.polls)
        began_s = time.monotonic()
        assert isolation.close(0.2) == ["stuck@n1"]
        assert time.monotonic() - began_s < 2.0
        assert well.closed
        assert not stuck.closed, "what hangs is not touched from outside"


@pytest.mark.parametrize("error", [ValueError("bad row"), SystemExit(3), MemoryError("none left"), KeyError("x")])
def test_a_source_that_raises_is_blind_with_its_words_and_asked_again(error: BaseException) -> None:
    broken = threading.Event()
    broken.set()

    def do() -> list[Event]:
        if broken.is_set():
            raise error
        return []

    source = Fake("raising", do)
    with isolated(source) as isolation:
        found = drain_until(isolation, lambda _: source.polls > 3)
        blind = told(found, "source.blind", "raising")
        assert [one.data["why"] for one in blind] == [f"{type(error).__name__}: {error}"], "said once"
        fares = state(isolation, "raising")
        assert (fares.word, fares.raised > 2) == ("blind", True)
        broken.clear()
        drain_until(isolation, lambda found: told(found, "source.up", "raising"))
        assert state(isolation, "raising").word == "up"


def test_what_raises_is_asked_less_and_less_often() -> None:
    def do() -> list[Event]:
        raise OSError("down")

    patient = IsolationConfig(retry_max=timedelta(seconds=60))
    source = Fake("down", do)
    with isolated(source, config=patient) as isolation:
        drain_until(isolation, lambda _: source.polls > 3)  # after 0.02, 0.04, 0.08 s
        began = source.polls
        time.sleep(0.1)
        assert source.polls - began <= 1, "a source with this period would be polled ten times when it is well"


def test_items_given_before_an_error_are_kept() -> None:
    def do() -> Iterator[Event]:
        yield half.event("source.up", why="the first")
        raise ValueError("half way")

    half = Fake("half", do)
    with isolated(half) as isolation:
        found = drain_until(isolation, lambda found: told(found, "source.blind", "half"))
        assert told(found, "source.up", "half")[0].data["why"] == "the first"


def test_a_flood_is_bounded_and_counted() -> None:
    """The source gives without end; nobody drains. What is kept is the newest, within the bound."""
    source = Fake("flood", lambda: (source.event() for _ in count()), period_s=60)
    with isolated(source) as isolation:
        deadline_s = time.monotonic() + DEADLINE_S
        while state(isolation, "flood").dropped < ITEMS_MAX - CONFIG.queue_bytes // EVENT_BYTES:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        found = drain_until(isolation, lambda found: told(found, "telemetry.lost", "flood"))
        kept = [one for one in told(found, "source.started", "flood")]
        assert sum(map(weight, kept)) <= CONFIG.queue_bytes
        assert [one.seq for one in kept] == list(range(ITEMS_MAX - len(kept) + 1, ITEMS_MAX + 1))
        drain_until(isolation, lambda _: state(isolation, "flood").dropped == ITEMS_MAX - len(kept) + 1)
        lost = told(found + isolation.drain(), "telemetry.lost", "flood")
        ranges = [(int(str(one.data["from_seq"])), int(str(one.data["to_seq"]))) for one in lost]
        assert ranges[0][0] == 1
        assert sum(last - first + 1 for first, last in ranges) == state(isolation, "flood").dropped


def test_large_frames_count_by_their_size() -> None:
    rows = np.zeros(1000, READING)
    frame = Frame(
        schema="reading", source="big@n1", job=None, epoch=None, seq=0, sent_ns=0, seen_ns=0, names=("a",), rows=rows
    )
    source = Fake("big", lambda: [frame] * 10, period_s=60)
    with isolated(source) as isolation:
        drain_until(isolation, lambda _: source.polls and state(isolation, "big").dropped == 8)


def test_what_a_source_says_of_itself_counts() -> None:
    words = iter(["source.blind", "source.up"])
    go_on = threading.Event()

    def do() -> list[Event]:
        if source.polls == 2 and not go_on.is_set():
            source.polls -= 1
            return []
        kind = next(words, None)
        return [] if kind is None else [source.event(kind, why="no driver")]

    source = Fake("honest", do)
    with isolated(source) as isolation:
        drain_until(isolation, lambda found: told(found, "source.blind", "honest"))
        assert (state(isolation, "honest").word, state(isolation, "honest").why) == ("blind", "no driver")
        go_on.set()
        drain_until(isolation, lambda found: told(found, "source.up", "honest"))
        assert state(isolation, "honest").word == "up"


def test_a_part_of_a_source_has_a_state_of_its_own() -> None:
    part = Subject(kind="source", id="ports@n1/mlx5_0")

    def do() -> list[Event]:
        return [Emitter("ports@n1", job=None, start_ns=0)("source.blind", part, now_ns=0, data={"why": "no counters"})]

    with isolated(Fake("ports", do)) as isolation:
        drain_until(isolation, lambda found: found)
        states = {one.name: one.word for one in isolation.states()}
        assert states == {"ports@n1": "up", "ports@n1/mlx5_0": "blind"}


def test_a_poll_that_takes_long_but_not_too_long_is_stale() -> None:
    with released() as release:
        slow = Fake("slow", hang(release))
        with isolated(slow, config=IsolationConfig(deadline=timedelta(seconds=60))) as isolation:
            drain_until(isolation, lambda _: state(isolation, "slow").word == "stale")
            fares = state(isolation, "slow")
            assert fares.age_s > 1
            assert "s old, it should come every 0.01 s" in fares.why
            release.set()


def test_a_source_that_is_removed_is_closed_by_its_own_thread() -> None:
    source = Fake("gone")
    with isolated(source) as isolation:
        drain_until(isolation, lambda found: found)
        drain_until(isolation, lambda _: source.polls > 2)
        left = isolation.remove("gone@n1")
        assert all(isinstance(one, Event) for one in left)
        drain_until(isolation, lambda _: source.closed)
        assert isolation.states() == []
        isolation.add(Fake("gone"))  # the name is free again


WAYS = ("well", "raises", "hangs", "floods", "blind")


@pytest.mark.parametrize("seed", range(10))
def test_whatever_others_do_a_source_that_is_well_is_heard_in_order(seed: int) -> None:
    draw = random.Random(seed)
    ways = draw.choices(WAYS, k=draw.randint(1, 6))
    with released() as release:

        def acts(way: str, name: str) -> Fake:
            def do() -> Iterable[Frame | Event]:
                match way:
                    case "raises":
                        raise RuntimeError("no")
                    case "hangs":
                        release.wait(DEADLINE_S)
                    case "floods":
                        return (made.event() for _ in range(500))
                    case "blind":
                        return [made.event("source.blind", why="nothing there")]
                return []

            made = Fake(name, do)
            return made

        others = [acts(way, f"{way}-{place}") for place, way in enumerate(ways)]
        well = Fake("well-known")
        with isolated(*others, well) as isolation:

            def heard(found: list[Frame | Event]) -> bool:
                return len(told(found, "source.started", "well-known")) >= 5

            found = drain_until(isolation, heard)
            numbers = [one.seq for one in told(found, "source.started", "well-known")]
            assert numbers == list(range(1, len(numbers) + 1)), "each once, in order, none lost"
            release.set()


@pytest.mark.parametrize(
    ("made", "key"),
    [
        pytest.param(lambda: IsolationConfig(deadline=timedelta(0)), "agent.isolation.deadline", id="no patience"),
        pytest.param(lambda: IsolationConfig(retry_max=timedelta(0)), "agent.isolation.retry_max", id="no pause"),
        pytest.param(lambda: IsolationConfig(queue_bytes=1), "agent.isolation.queue_bytes", id="no room"),
    ],
)
def test_settings_that_cannot_work_are_refused(made: Callable[[], IsolationConfig], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        made()
