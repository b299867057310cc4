"""One owner of a job at a time, and every ownership has a larger number than all before it."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.app.store import LEASE_NS, Store
from trainwarden.core.errors import FencedError, OwnedError
from trainwarden.core.model import JobId
from trainwarden.core.process import ProcessId, identify

JOB = JobId("train-3")
SECOND = 1_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = Store(tmp_path / "journal.sqlite")
    yield one
    one.close()


def process(pid: int) -> ProcessId:
    found = identify(pid)
    assert found is not None
    return found


ME = process(os.getpid())
GHOST = ProcessId(pid=ME.pid, start_time=ME.start_time - 1)
"""A process that had our pid before us."""


def claim(store: Store, holder: ProcessId, now_ns: int) -> int:
    return store.claim(JOB, holder.pid, holder.start_time, now_ns)


def test_a_living_owner_that_renews_keeps_the_job(store: Store) -> None:
    term = claim(store, ME, 0)
    for now_ns in range(0, 20 * SECOND, SECOND):
        store.renew(JOB, term, now_ns)
        store.check(JOB, term)
        with pytest.raises(OwnedError, match=f"owned by process {ME.pid} .*which is alive"):
            claim(store, ME, now_ns + SECOND)


def test_a_frozen_owner_is_replaced_when_its_lease_is_over(store: Store) -> None:
    old = claim(store, ME, 0)
    with pytest.raises(OwnedError):
        claim(store, ME, LEASE_NS - 1)
    new = claim(store, ME, LEASE_NS)
    assert new > old
    with pytest.raises(FencedError, match=f"our term {old} is over"):
        store.renew(JOB, old, LEASE_NS)
    with pytest.raises(FencedError, match=f"our term {old} is over"):
        store.check(JOB, old)
    store.check(JOB, new)


def test_an_owner_that_woke_up_in_time_goes_on(store: Store) -> None:
    term = claim(store, ME, 0)
    store.renew(JOB, term, 2 * LEASE_NS)
    with pytest.raises(OwnedError):
        claim(store, ME, 2 * LEASE_NS + 1)


def test_an_owner_that_is_gone_is_replaced_at_once(store: Store) -> None:
    old = claim(store, GHOST, 0)
    assert claim(store, ME, 1) == old + 1


def test_a_zombie_owns_nothing(store: Store) -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    claim(store, process(child), 0)
    with pytest.raises(OwnedError, match=f"process {child}"):
        claim(store, ME, 1)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # dead, and nobody has fetched its status
    assert claim(store, ME, 2) == 2
    os.waitpid(child, 0)


def test_terms_grow_over_releases(store: Store) -> None:
    terms = []
    for now_ns in range(3):
        terms.append(claim(store, ME, now_ns))
        store.release(JOB, terms[-1])
        with pytest.raises(FencedError):
            store.renew(JOB, terms[-1], now_ns)
        with pytest.raises(FencedError):
            store.check(JOB, terms[-1])
    assert terms == [1, 2, 3]


def test_who_was_fenced_cannot_release_the_new_owner(store: Store) -> None:
    old = claim(store, GHOST, 0)
    new = claim(store, ME, 1)
    store.release(JOB, old)
    store.check(JOB, new)


def test_a_job_nobody_ever_owned_is_nobodys(store: Store) -> None:
    with pytest.raises(FencedError):
        store.check(JOB, 1)
    with pytest.raises(FencedError):
        store.renew(JOB, 1, 0)
    store.release(JOB, 1)


def test_jobs_have_owners_of_their_own(store: Store) -> None:
    claim(store, ME, 0)
    assert store.claim(JobId("other"), ME.pid, ME.start_time, 0) == 1


moves = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.sampled_from((ME, GHOST))),
        st.tuples(st.just("renew"), st.integers(1, 6)),
        st.tuples(st.just("release"), st.integers(1, 6)),
        st.tuples(st.just("wait"), st.sampled_from((SECOND, 4 * SECOND, LEASE_NS))),
    ),
    max_size=25,
)


class Model:
    """What ownership means, without a database."""

    def __init__(self) -> None:
        self.term, self.holder, self.expires_ns, self.now_ns = 0, ProcessId(pid=0, start_time=0), 0, 0

    def step(self, what: str, arg: object) -> object:
        if what == "wait":
            assert isinstance(arg, int)
            self.now_ns += arg
            return None
        ours = self.holder.pid != 0 and arg == self.term
        if what == "claim":
            if self.holder == ME and self.now_ns < self.expires_ns:
                return OwnedError
            assert isinstance(arg, ProcessId)
            self.term, self.holder, self.expires_ns = self.term + 1, arg, self.now_ns + LEASE_NS
            return self.term
        if what == "renew" and ours:
            self.expires_ns = self.now_ns + LEASE_NS
        if what == "release" and ours:
            self.holder = ProcessId(pid=0, start_time=0)
        return FencedError if what == "renew" and not ours else None


def done(store: Store, job: JobId, what: str, arg: object, now_ns: int) -> object:
    try:
        if isinstance(arg, ProcessId):
            return store.claim(job, arg.pid, arg.start_time, now_ns)
        assert isinstance(arg, int)
        if what == "renew":
            store.renew(job, arg, now_ns)
        elif what == "release":
            store.release(job, arg)
    except (OwnedError, FencedError) as error:
        return type(error)
    return None


numbers = itertools.count()
"""Each story is of a job of its own."""


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    one = Store(tmp_path_factory.mktemp("owner") / "journal.sqlite")
    yield one
    one.close()


@settings(max_examples=60, deadline=None)
@given(moves)
def test_any_order_of_moves_is_what_ownership_means(shared_store: Store, story: list[tuple[str, object]]) -> None:
    model, job = Model(), JobId(f"j{next(numbers)}")
    for what, arg in story:
        assert done(shared_store, job, what, arg, model.now_ns) == model.step(what, arg)
        valid = [term for term in range(1, model.term + 2) if passes(shared_store, job, term)]
        assert valid == ([model.term] if model.holder.pid else []), "one term at most is anybody's"


def passes(store: Store, job: JobId, term: int) -> bool:
    with contextlib.suppress(FencedError):
        store.check(job, term)
        return True
    return False


# real processes


def race(path: Path, count: int) -> list[str]:
    """What each of so many processes got that claim at the same moment; all live until all have claimed."""
    go, end, said = os.pipe(), os.pipe(), os.pipe()
    children = [child for _ in range(count) if (child := _fork_claimer(path, go, end, said))]
    os.close(said[1])
    os.close(go[1])  # all read its end at once
    heard = b""
    while heard.count(b"\n") < count:
        part = os.read(said[0], 4096)
        assert part, f"a process said nothing; the others: {heard!r}"
        heard += part
    os.close(end[1])
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count
    for descriptor in (go[0], end[0], said[0]):
        os.close(descriptor)
    return heard.decode().splitlines()


def _fork_claimer(path: Path, go: tuple[int, int], end: tuple[int, int], said: tuple[int, int]) -> int:
    child = os.fork()
    if child == 0:
        try:
            os.close(go[1])
            os.close(end[1])
            os.read(go[0], 1)
            os.write(said[1], f"{_claim(path)}\n".encode())
            os.read(end[0], 1)  # until all have claimed: an owner that is gone would be replaced, rightly
        finally:
            os._exit(0)
    return child


def _claim(path: Path) -> str:
    try:
        me = process(os.getpid())
        return f"term {Store(path).claim(JOB, me.pid, me.start_time, 10 * SECOND)}"
    except OwnedError as error:
        return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def test_of_8_processes_that_claim_at_once_one_wins_and_the_rest_name_it(tmp_path: Path) -> None:
    """Also opens a database that is not there yet 8 times at once. In each round the last winner is gone."""
    for round_ in range(1, 4):
        said = race(tmp_path / "journal.sqlite", 8)
        winners = [line for line in said if line.startswith("term")]
        assert winners == [f"term {round_}"], said
        assert sum("is owned by process" in line for line in said) == 7, said
