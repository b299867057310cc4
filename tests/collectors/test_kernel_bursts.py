"""Many lines, few events, and no line uncounted."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.collectors.kernel_bursts import MAX_TOTALS, Bursts, BurstsConfig, Told
from trainwarden.collectors.kernel_grammar import Fact, parse
from trainwarden.core.errors import ConfigError

S = 1_000_000_000
XID = "NVRM: Xid (PCI:0000:9b:00): "


def fact(line: str) -> Fact:
    found = parse(line)
    assert found is not None
    return found


def told(lines: list[tuple[float, str]], *, over_s: float | None = None) -> list[tuple[int, float]]:
    """(count, first second) of what is told of lines at these seconds; over_s: when time ends."""
    bursts = Bursts(BurstsConfig())
    said = [one for at_s, line in lines for one in bursts.add(fact(line), int(at_s * S))]
    said += bursts.over(int(over_s * S)) if over_s is not None else bursts.close()
    return [(one.count, one.first_ns / S) for one in said]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([(1, "13, a")], [(1, 1)], id="one line is told at once, and no more"),
        pytest.param([(1, "13, a"), (2, "13, b"), (3, "13, c")], [(1, 1), (3, 1)], id="a burst ends with its count"),
        pytest.param([(1, "13, a"), (12, "13, b")], [(1, 1), (1, 12)], id="after more than 10 s of quiet: a new event"),
        pytest.param([(1, "13, a"), (11, "13, b")], [(1, 1), (2, 1)], id="after 10 s it is the same"),
        pytest.param([(1, "13, a"), (2, "31, b")], [(1, 1), (1, 2)], id="another code is another event"),
        pytest.param([(9, "13, a"), (2, "13, b")], [(1, 9), (2, 9)], id="a line out of order joins"),
        pytest.param([(90, "13, a"), (2, "13, b")], [(1, 90), (1, 2)], id="a clock that jumped back begins anew"),
        pytest.param(
            [(at_s, f"74, NVLink: fatal error detected on link {at_s}(0x0)") for at_s in (1, 2)],
            [(1, 1), (1, 2)],
            id="another link is another event",
        ),
        pytest.param(
            [
                (1, "154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"),
                (2, "154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)"),
            ],
            [(1, 1), (1, 2)],
            id="a new recovery action is never folded away",
        ),
    ],
)
def test_what_is_told_of_a_gpu(lines: list[tuple[float, str]], expected: list[tuple[int, float]]) -> None:
    assert told([(at_s, XID + tail) for at_s, tail in lines]) == expected


def test_the_three_lines_of_one_switch_error_are_one_event() -> None:
    head = "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, "
    tails = ("Fatal, Link 30 LTSSM Fault Up", "Severity 1 Engine instance 60 Sub-engine instance 00", "Data {0x1}")
    assert told([(1, head + tail) for tail in tails]) == [(1, 1), (3, 1)]


def test_every_turn_of_a_port_is_told_and_no_repetition() -> None:
    port = "mlx5_core 0000:0c:00.0 mlx5_5: Port: 1 Link "
    states = ("DOWN", "DOWN", "ACTIVE", "DOWN", "ACTIVE", "ACTIVE")
    assert told([(at_s, port + state) for at_s, state in enumerate(states)]) == [(1, 0), (1, 2), (1, 3), (1, 4)]


def test_the_two_lines_of_one_kill_are_one_event() -> None:
    lines = ["oom-kill:constraint=A,task=x,pid=77,uid=0", "Memory cgroup out of memory: Killed process 77 (x), UID 0"]
    other = "Out of memory: Killed process 78 (y)"
    assert told([(1, lines[0]), (1, other), (1, lines[1])]) == [(1, 1), (1, 1)]


def test_a_burst_that_goes_on_is_told_more_and_more_rarely() -> None:
    bursts = Bursts(BurstsConfig())
    line = fact(XID + "95, Uncontained: FBHUB. RST: Yes, D-RST: No")
    said = [one for at_s in range(86_400) for one in bursts.add(line, at_s * S)]
    assert len(said) <= 15
    assert [one.last_ns // S for one in said[:5]] == [0, 10, 20, 40, 80]
    assert [one.count for one in bursts.over(10**15)] == [86_400]
    assert bursts.totals == {("xid", "0000:9b:00", 95): (1, 86_400)}


def test_nothing_is_over_before_its_quiet_is() -> None:
    lines = [(1.0, XID + "13, a"), (2.0, XID + "13, a")]
    assert told(lines, over_s=12) == [(1, 1)]
    assert told(lines, over_s=12.1) == [(1, 1), (2, 1)]


def test_a_flood_of_different_errors_is_bounded_and_counted() -> None:
    bursts = Bursts(BurstsConfig(max_open=8))
    said: list[Told] = []
    for pid in range(10_000):
        said += bursts.add(fact(f"Out of memory: Killed process {pid} (x)"), S)
    assert len(said) == 9
    assert [one.count for one in bursts.close()] == [10_000 - 8]
    assert len(bursts.totals) == MAX_TOTALS + 1
    assert sum(lines for _, lines in bursts.totals.values()) == 10_000


@pytest.mark.parametrize("wrong", [{"quiet_s": 0}, {"quiet_s": float("nan")}, {"max_open": 0}])
def test_a_bad_setting_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"bursts.{next(iter(wrong))}: need"):
        BurstsConfig(**wrong)  # type: ignore[arg-type]


STEPS = st.lists(st.tuples(st.floats(0, 30), st.sampled_from((13, 31, 79)), st.sampled_from(("01", "02"))), max_size=60)


@settings(max_examples=200)
@given(STEPS)
def test_folding_keeps_the_count(steps: list[tuple[float, int, str]]) -> None:
    bursts, at_s = Bursts(BurstsConfig()), 0.0
    newest: dict[tuple[object, object, int], int] = {}
    lines: Counter[tuple[object, object]] = Counter()
    last: dict[tuple[object, object], float] = {}
    begun: Counter[tuple[object, object]] = Counter()
    said: list[Told] = []
    for wait_s, code, bus in steps:
        at_s += wait_s
        one = fact(f"NVRM: Xid (PCI:0000:{bus}:00): {code}, x")
        place = (one.where, code)
        lines[place] += 1
        begun[place] += int(at_s * S) > int(last.get(place, -99) * S) + 10 * S
        last[place] = at_s
        said += bursts.add(one, int(at_s * S))
    said += bursts.close()
    for heard in said:
        newest[heard.fact.where, heard.fact.data["code"], heard.first_ns] = heard.count
    summed: Counter[tuple[object, object]] = Counter()
    for (where, number, _), count in newest.items():
        summed[where, number] += count
    assert summed == lines
    assert {(where, number): both for (_, where, number), both in bursts.totals.items()} == {
        place: (begun[place], count) for place, count in lines.items()
    }
    assert all(one.last_ns <= two.last_ns for one, two in pairwise(said) if one.fact is two.fact)
