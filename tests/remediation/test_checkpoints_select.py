"""Selection: against an oracle that tries every rule on every checkpoint, and as lazy as it says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.model import Checkpoint, Epoch, JobId
from trainwarden.core.records import attempt_of, epoch_of
from trainwarden.remediation.checkpoints.folder import name_of, order_of
from trainwarden.remediation.checkpoints.select import GOOD, Entry, select, select_verified


def entry(step: int, attempt: int = 1, *, t_ns: int = 0, trust: str = "unverified", broken: bool = False) -> Entry:
    epoch = Epoch(epoch_of(attempt, 0, 0))
    found = Checkpoint(
        name=name_of(step, epoch),
        job=JobId("train-3"),
        epoch=epoch,
        step=step,
        t_ns=t_ns,
        loss=2.5,
        grad_norm=None,
        data_position=None,
        topology=None,
        rank_steps={0: step},
        trust="distrusted" if trust == "distrusted" else "good" if trust == "good" else "unverified",
        pinned=False,
        files={},
    )
    return Entry(name=found.name, checkpoint=None if broken else found, reason="cut off" if broken else "")


@dataclass
class Shelf:
    """What is there, and what reading back gives; counts what was read."""

    all: Sequence[Entry]
    accepts: Mapping[int, frozenset[str]]
    bad: Mapping[str, Exception] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    def entries(self) -> Sequence[Entry]:
        return self.all

    def accepted(self) -> Mapping[int, frozenset[str]]:
        return self.accepts

    def verify(self, name: str) -> Checkpoint:
        self.read.append(name)
        if name in self.bad:
            raise self.bad[name]
        (found,) = (one.checkpoint for one in self.all if one.name == name and one.checkpoint is not None)
        return found


def accepting(*entries: Entry) -> dict[int, frozenset[str]]:
    attempts = {order_of(one.name)[0] >> 32 for one in entries}
    return {a: frozenset(one.name for one in entries if order_of(one.name)[0] >> 32 == a) for a in attempts}


A, B, C = entry(20, t_ns=20), entry(40, t_ns=40), entry(60, t_ns=60)


def test_only_as_many_are_read_back_as_it_takes() -> None:
    shelf = Shelf([A, B, C], accepting(A, B, C), bad={C.name: DataError("short")})
    chosen, refused = select_verified(shelf, None)
    assert chosen == replace(B.checkpoint, trust="good") if B.checkpoint else False
    assert refused == {C.name: "short"}
    assert shelf.read == [C.name, B.name]


def test_what_may_not_be_used_anyway_is_not_read_back() -> None:
    distrusted, foreign, broken = entry(80, trust="distrusted"), entry(10, attempt=2), entry(90, broken=True)
    shelf = Shelf([A, B, C, distrusted, foreign, broken], accepting(A, C, distrusted))
    chosen, refused = select_verified(shelf, 60)
    assert chosen is not None
    assert chosen.name == A.name
    assert shelf.read == [A.name]
    assert refused == {
        foreign.name: "attempt 2 is not over, so nothing of it is accepted yet",
        broken.name: "cut off",
        distrusted.name: "distrusted: no reason given",
        C.name: "not older than the anomaly: taken 0.000 s after its onset",
        B.name: "published after attempt 1 was over",
    }


@pytest.mark.parametrize(
    "error", [DataError("torn"), PermissionError(13, "Permission denied"), ConfigError("removed meanwhile")], ids=repr
)
def test_whatever_keeps_it_from_being_read_is_a_reason(error: Exception) -> None:
    chosen, refused = select_verified(Shelf([A], accepting(A), bad={A.name: error}), None)
    assert chosen is None
    assert refused == {A.name: str(error)}


def test_nothing_is_good_that_was_not_read_back() -> None:
    marked = entry(20, trust="good")
    assert select([marked], before_ns=None, accepted=accepting(marked), verified={}) == (
        None,
        {marked.name: "was not read back"},
    )


ENTRIES = st.builds(
    entry,
    st.integers(0, 6),
    st.integers(0, 3),
    t_ns=st.integers(0, 9),
    trust=st.sampled_from(["unverified", "unverified", "good", "distrusted"]),
    broken=st.sampled_from([False, False, False, True]),
)


@given(st.data())
def test_selection_equals_trying_every_rule_on_everything(data: st.DataObject) -> None:
    entries = data.draw(st.lists(ENTRIES, max_size=12, unique_by=lambda one: one.name))
    before_ns = data.draw(st.none() | st.integers(0, 10))
    names = [one.name for one in entries]
    some = st.frozensets(st.sampled_from(names)) if names else st.just(frozenset())
    accepted = data.draw(st.dictionaries(st.integers(0, 3), some))
    bad = data.draw(some)

    able = {
        one.name
        for one in entries
        if one.checkpoint is not None
        and one.checkpoint.trust != "distrusted"
        and one.name in accepted.get(attempt_of(one.checkpoint.epoch), ())
        and (before_ns is None or one.checkpoint.t_ns < before_ns)
        and one.name not in bad
    }
    best = max(able, key=order_of, default=None)
    newer = {name for name in names if best is None or order_of(name) > order_of(best)}

    verified = {name: "bad" if name in bad else GOOD for name in names}
    shelf = Shelf(entries, accepted, bad={name: DataError("bad") for name in bad})
    chosen, refused = select(entries, before_ns=before_ns, accepted=accepted, verified=verified)
    assert (chosen and chosen.name, set(refused)) == (best, newer)
    assert all(refused.values())
    assert select_verified(shelf, before_ns) == (chosen, refused)
