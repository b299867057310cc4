import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.core.errors import ConfigError
from trainwarden.rehearsal.faults import (
    FAULT_KINDS,
    Fault,
    Strike,
    from_json,
    log_strike,
    read_strikes,
    to_json,
)

FACTOR = {"factor": 1.6}


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    row = FAULT_KINDS[draw(st.sampled_from(sorted(FAULT_KINDS)))]
    places = st.integers(0, 7)
    args: dict[str, Any] = {key: draw(st.integers(0, 100)) for key in row.needs}
    args |= {key: draw(st.sampled_from(words)) for key, words in row.choices.items() if draw(st.booleans())}
    return Fault(
        kind=row.name,
        rank=draw(places if row.target == "rank" else st.none() | places),
        slot=draw(places if row.target == "slot" else st.none() | places),
        at_step=draw(st.integers(1, 1000)),
        args=args,
    )


@given(st.lists(faults()))
def test_what_is_put_into_the_environment_comes_out_of_it(some: list[Fault]) -> None:
    assert from_json(to_json(some)) == tuple(some)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"kind": "gremlin"}, "kind: no fault 'gremlin'; there are poison_batch", id="no such kind"),
        pytest.param({"kind": "slow_rank", "args": FACTOR}, "slow_rank: needs a rank", id="whom?"),
        pytest.param({"kind": "slow_slot", "rank": 1, "args": FACTOR}, "slow_slot: needs a slot", id="where?"),
        pytest.param({"kind": "poison_batch"}, "poison_batch: args.batch is missing", id="a needed argument"),
        pytest.param(
            {"kind": "poison_batch", "args": {"batch": "7"}},
            "poison_batch: args.batch: need a number, got '7'",
            id="an argument of the wrong type",
        ),
        pytest.param(
            {"kind": "slow_rank", "rank": 0, "args": {**FACTOR, "how": "softly"}},
            "slow_rank: args.how: need one of compute, sleep, got 'softly'",
            id="a word that is none of the allowed",
        ),
        pytest.param(
            {"kind": "slow_checkpoint", "args": {"seconds": 1, "minutes": 2}},
            "slow_checkpoint: args.minutes: unknown key; allowed: seconds",
            id="an argument that means nothing",
        ),
        pytest.param({"kind": "raise", "at": 3}, "unexpected keyword argument 'at'", id="a key that means nothing"),
        pytest.param(7, "need an object, got 7", id="no object"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_by_its_place(row: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^TRAINWARDEN_FAULTS\[1\]: .*{re.escape(message)}"):
        from_json(json.dumps([{"kind": "raise"}, row]))


@pytest.mark.parametrize("text", ["{", "{}", "null", "3"])
def test_what_is_no_list_of_faults_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^TRAINWARDEN_FAULTS: "):
        from_json(text)


def test_what_others_do_to_ranks_and_files_is_not_the_ranks_to_make() -> None:
    outside = {name for name, row in FAULT_KINDS.items() if row.where == "outside"}
    assert outside == {"process.kill", "process.stop", "checkpoint.corrupt"}


def test_a_fault_without_rank_or_slot_is_everybodys() -> None:
    assert Fault(kind="slow_checkpoint", args={"seconds": 1}).names(rank=3, slot=5)


def test_a_fault_of_a_slot_is_that_of_whoever_sits_there() -> None:
    fault = Fault(kind="slow_slot", slot=2, args={"factor": 1.6})
    assert [fault.names(rank, slot) for rank, slot in ((2, 2), (2, 4), (0, 2))] == [True, False, True]


def test_strikes_are_read_as_they_were_written(tmp_path: Path) -> None:
    strikes = (Strike(fault=0, step=30, t_ns=5, rank=2), Strike(fault=1, step=31, t_ns=6))
    for strike in strikes:
        log_strike(tmp_path / "strikes", strike)
    assert read_strikes(tmp_path / "strikes") == strikes


def test_no_log_means_no_strikes(tmp_path: Path) -> None:
    assert read_strikes(tmp_path / "strikes") == ()
