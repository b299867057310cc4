"""Lost time: every instant of an outage belongs to one phase."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.remediation.losttime import Instants, lost_s

NAMES = [field.name for field in fields(Instants)][1:]
S = 1_000_000_000


def instants(*seconds: float | None) -> Instants:
    """Onset at 0, then the others in their order."""
    later = [None if at is None else int(at * S) for at in seconds]
    return Instants(onset_ns=0, **dict(zip(NAMES, later, strict=False)))


@pytest.mark.parametrize(
    ("what", "lost"),
    [
        pytest.param(
            instants(1, 1.5, 5, 6, 10, 12, 15),
            {"detect": 1.0, "decide": 0.5, "stop": 3.5, "start": 5.0, "load": 2.0, "warm_up": 3.0},
            id="a whole recovery",
        ),
        pytest.param(instants(), {}, id="nothing noticed yet"),
        pytest.param(instants(1, 1.5), {"detect": 1.0, "decide": 0.5}, id="a plan that has just begun"),
        pytest.param(
            instants(1, 1.5, None, 6, 10, 12, 15),
            {"detect": 1.0, "decide": 0.5, "start": 8.5, "load": 2.0, "warm_up": 3.0},
            id="stopped by itself: the time counts to what follows",
        ),
        pytest.param(
            instants(1, 1.5, 5, 6, 10), {"detect": 1, "decide": 0.5, "stop": 3.5, "start": 5}, id="hangs in load"
        ),
        pytest.param(instants(-2, 3), {"detect": 0.0, "decide": 3.0}, id="an onset that was revised to a later one"),
        pytest.param(instants(4, 3, 5), {"detect": 4.0, "decide": 0.0, "stop": 1.0}, id="clocks that differ"),
    ],
)
def test_lost_time(what: Instants, lost: dict[str, float]) -> None:
    assert lost_s(what) == lost


@given(st.lists(st.none() | st.integers(-100, 100), max_size=len(NAMES)))
def test_the_phases_add_up_to_the_outage(seconds: list[int | None]) -> None:
    lost = lost_s(instants(*seconds))
    assert min(lost.values(), default=0.0) >= 0.0
    assert sum(lost.values()) == max([0, *(at for at in seconds if at is not None)])
