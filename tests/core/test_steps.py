"""Each rule of docs/architecture.md, From frames to steps, is a test here; the replay property is test_steps_replay."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from trainwarden.core.model import Epoch, Event, Frame, JobId, Json, Schema, StepMatrix, Subject, Tick, Topology
from trainwarden.core.records import CONTAINS_COMM, FEATURES, LOSS_NONFINITE, epoch_of
from trainwarden.core.schemas import DTYPES
from trainwarden.core.steps import StepAssembler, StepsConfig

JOB = JobId("nano")
FIRST = Epoch(epoch_of(0, 0, 0))
SECOND = Epoch(epoch_of(1, 0, 0))
SECOND_NS = 1_000_000_000
LOSS = FEATURES.index("loss")

Item = Frame | Event | Tick
Output = Topology | StepMatrix


def ns(seconds: float) -> int:
    return 1_700_000_000 * SECOND_NS + round(seconds * SECOND_NS)


def event(kind: str, at_s: float, data: dict[str, Json], epoch: Epoch | None = FIRST) -> Event:
    subject = Subject(kind="job", id=JOB)
    return Event(
        kind=kind, subject=subject, source="test", seq=0, t_ns=0, seen_ns=ns(at_s), job=JOB, epoch=epoch, data=data
    )


def hellos(world_size: int = 4, at_s: float = 0.0, epoch: Epoch = FIRST) -> list[Event]:
    return [
        event("hello", at_s, {"rank": rank, "world_size": world_size, "node": "n0", "device": f"n0:{rank}"}, epoch)
        for rank in range(world_size)
    ]


def frame(schema: Schema, at_s: float, rows: int, epoch: Epoch | None = FIRST, names: tuple[str, ...] = ()) -> Frame:
    table = np.zeros(rows, DTYPES[schema])
    return Frame(
        schema=schema,
        source="rings@n0",
        job=JOB,
        epoch=epoch,
        seq=0,
        sent_ns=0,
        seen_ns=ns(at_s),
        names=names,
        rows=table,
    )


def step(number: int, ranks: Sequence[int], at_s: float, *, loss: float = 0.0, epoch: Epoch | None = FIRST) -> Frame:
    made = frame("step", at_s, len(ranks), epoch)
    made.rows["rank"], made.rows["step"], made.rows["batch"] = ranks, number, number
    made.rows["values"][:, LOSS] = loss
    return made


def span(
    number: int,
    rank: int,
    mb: int,
    at_s: float,
    wall_s: float,
    *,
    kind: str = "forward",
    flags: int = 0,
    start: int = 0,
) -> Frame:
    made = frame("span", at_s, 1, names=("data", kind))
    made.rows["rank"], made.rows["step"], made.rows["mb"], made.rows["kind"] = rank, number, mb, 1
    made.rows["flags"], made.rows["start_ns"] = flags, start
    made.rows["values"] = [wall_s, np.nan, np.nan, np.nan]
    return made


def feed(assembler: StepAssembler, *items: Item) -> list[Output]:
    return [out for item in items for out in assembler.feed(item)]


def wait(assembler: StepAssembler, at_s: float) -> list[Output]:
    """Time passes; all that was seen up to `at_s` is acted on."""
    return feed(assembler, Tick(seen_ns=ns(at_s)), Tick(seen_ns=ns(at_s + 0.001)))


def standing(world_size: int = 4, config: StepsConfig | None = None) -> StepAssembler:
    """An assembler whose topology stands since second 0."""
    assembler = StepAssembler(JOB, config or StepsConfig())
    (topology,) = feed(assembler, *hellos(world_size), Tick(seen_ns=ns(0.001)))
    assert isinstance(topology, Topology)
    return assembler


def numbers(out: Sequence[Output]) -> list[int]:
    """Step numbers; a partial one is negative."""
    return [-one.step if one.partial else one.step for one in out if isinstance(one, StepMatrix)]


def only(out: Sequence[Output]) -> StepMatrix:
    (matrix,) = out
    assert isinstance(matrix, StepMatrix)
    return matrix


ALL = range(4)


def test_rule_1_rank_clocks_close_nothing() -> None:
    skewed = step(1, [0, 1], 1)
    skewed.rows["end_ns"] = ns(10_000)
    assembler = standing()
    assert feed(assembler, skewed, step(1, [2], 1.1), Tick(seen_ns=ns(2))) == []
    assert numbers(feed(assembler, step(1, [3], 2.1), Tick(seen_ns=ns(2.2)))) == [1]


def test_rule_1_a_step_carries_the_time_it_closed() -> None:
    assembler = standing()
    matrix = only(feed(assembler, step(1, [0, 1], 1), step(1, [2, 3], 1.5), Tick(seen_ns=ns(2))))
    assert matrix.seen_ns == ns(1.5)


def test_rule_2_the_first_row_of_a_rank_wins_and_copies_are_counted() -> None:
    assembler = standing()
    rows: list[Item] = [step(1, ALL, 1, loss=1), step(1, [2], 1, loss=9), step(1, [0, 1], 1.1), Tick(seen_ns=ns(2))]
    matrix = only(feed(assembler, *rows))
    assert matrix.values_FR[LOSS].tolist() == [1, 1, 1, 1]
    feed(assembler, Tick(seen_ns=ns(3)))
    assert assembler.counters.copies == 3


def test_rule_2_rows_are_scattered_to_their_ranks() -> None:
    rows = step(7, [3, 1, 0, 2], 1)
    rows.rows["values"] = np.arange(4 * len(FEATURES)).reshape(4, -1)
    rows.rows["flags"] = [0, LOSS_NONFINITE, 0, 0]
    rows.rows["batch"] = 70
    matrix = only(feed(standing(), rows, Tick(seen_ns=ns(2))))
    assert matrix.values_FR[0].tolist() == [32, 16, 48, 0]
    assert matrix.flags_R.tolist() == [0, LOSS_NONFINITE, 0, 0]
    assert (matrix.step, matrix.batch, matrix.micro_MKR) == (7, 70, None)


def test_rule_2_a_missing_rank_is_nan_and_not_seen() -> None:
    assembler = standing()
    matrix = only([*feed(assembler, step(1, [0, 1, 3], 1)), *assembler.finish()])
    assert matrix.partial
    assert matrix.seen_R.tolist() == [True, True, False, True]
    assert np.isnan(matrix.values_FR[:, 2]).all()


def test_rule_2_span_rows_come_before_their_step_and_make_micro_batches() -> None:
    spans = [
        span(1, 0, 0, 1, 0.5),
        span(1, 0, 1, 1, 0.25),
        span(1, 0, 1, 1, 0.5, start=1),  # another stage of the same micro-batch
        span(1, 0, 1, 1, 0.25),  # sent twice
        span(1, 1, 0, 1, 1, kind="backward_input"),
        span(1, 1, 0, 1, 2, kind="backward_weight", start=1),
        span(1, 1, 1, 1, 9, flags=CONTAINS_COMM),
        span(1, 2, -1, 1, 9),  # of the whole step
    ]
    matrix = only(feed(standing(), *spans, step(1, ALL, 1), Tick(seen_ns=ns(2))))
    nan = np.nan
    wanted_MKR = [
        [[0.5, nan, nan, nan], [nan, 3, nan, nan], [nan] * 4],
        [[0.75, nan, nan, nan], [nan] * 4, [nan] * 4],
    ]
    assert matrix.micro_MKR is not None
    assert_array_equal(matrix.micro_MKR, np.array(wanted_MKR, np.float32))


def test_rule_3_an_epoch_below_is_dropped_and_counted() -> None:
    assembler = StepAssembler(JOB, StepsConfig())
    feed(assembler, *hellos(epoch=SECOND), Tick(seen_ns=ns(0.1)))
    assert feed(assembler, *hellos(at_s=1), step(1, ALL, 1), Tick(seen_ns=ns(2)), Tick(seen_ns=ns(3))) == []
    assert assembler.counters.old_epoch == 4


def test_rule_3_an_epoch_above_closes_open_steps_as_partial_and_starts_anew() -> None:
    assembler = standing()
    feed(assembler, step(5, [0], 1), step(6, ALL, 1))
    out = feed(assembler, *hellos(at_s=2, epoch=SECOND), step(1, ALL, 2, epoch=SECOND), Tick(seen_ns=ns(3)))
    assert numbers(out[:2]) == [-5, 6]
    assert isinstance(out[2], Topology)
    assert out[2].epoch == SECOND
    assert numbers(out[3:]) == [1]


def test_rule_3_an_epoch_is_told_by_any_frame() -> None:
    assembler = standing()
    feed(assembler, step(5, [0], 1))
    assert numbers(feed(assembler, frame("live", 2, 1, SECOND), Tick(seen_ns=ns(3)))) == [-5]


def test_rule_3_the_topology_stands_when_all_said_hello() -> None:
    assembler = StepAssembler(JOB, StepsConfig())
    assert feed(assembler, domains("r3", 0), *hellos()[:3], Tick(seen_ns=ns(59))) == []
    (topology,) = feed(assembler, *hellos(at_s=59.1)[3:], Tick(seen_ns=ns(59.2)))
    assert isinstance(topology, Topology)
    assert topology.device_R == ("n0:0", "n0:1", "n0:2", "n0:3")
    assert topology.domains == {"n0": {"rack": "r3"}}


def domains(rack: str, at_s: float, source: str = "site@n0") -> Event:
    told = event("node.domains", at_s, {"from": "site", "domains": {"rack": rack}})
    return replace(told, subject=Subject(kind="node", id="n0"), source=source)


def test_rule_3_a_topology_keeps_the_fault_domains_that_it_began_with() -> None:
    assembler = StepAssembler(JOB, StepsConfig())
    (first,) = feed(assembler, *hellos(), domains("r1", 0), Tick(seen_ns=ns(1)))
    assert feed(assembler, domains("r2", 2), domains("r3", 2, "site@n9"), domains("r2", 3), Tick(seen_ns=ns(4))) == []
    (matrix,) = [*feed(assembler, step(1, ALL, 5)), *wait(assembler, 6)]
    (second,) = [*feed(assembler, *hellos(at_s=7, epoch=SECOND)), *wait(assembler, 8)]
    assert isinstance(first, Topology)
    assert isinstance(matrix, StepMatrix)
    assert isinstance(second, Topology)
    assert [one.domains["n0"]["rack"] for one in (first, matrix.topology, second)] == ["r1", "r1", "r2"]
    assert (assembler.counters.late_domains, assembler.counters.bad_events) == (1, 1)


def test_rule_3_the_topology_stands_after_60_s_without_the_silent() -> None:
    assembler = StepAssembler(JOB, StepsConfig())
    assert feed(assembler, *hellos()[:3], step(1, ALL, 1), Tick(seen_ns=ns(59.9))) == []
    topology, matrix = feed(assembler, Tick(seen_ns=ns(60)), Tick(seen_ns=ns(60.25)))
    assert isinstance(topology, Topology)
    assert topology.device_R[3] == ""
    assert numbers([matrix]) == [1]
    assert feed(assembler, *hellos(at_s=61), Tick(seen_ns=ns(62)), Tick(seen_ns=ns(63))) == []
    assert assembler.counters.late_hellos == 1


def test_rule_3_without_any_hello_the_rows_tell_the_world_size() -> None:
    assembler = StepAssembler(JOB, StepsConfig())
    topology, matrix = feed(assembler, step(1, [0, 2, 1], 1), Tick(seen_ns=ns(61)), Tick(seen_ns=ns(62)))
    assert isinstance(topology, Topology)
    assert topology.device_R == ("", "", "")
    assert numbers([matrix]) == [1]


def test_rule_3_rows_that_waited_for_a_topology_are_not_lost_with_their_epoch() -> None:
    assembler = StepAssembler(JOB, StepsConfig())
    out = feed(assembler, hellos()[0], step(1, [0, 1, 2], 1), *hellos(at_s=2, epoch=SECOND), Tick(seen_ns=ns(3)))
    assert [type(one) for one in out] == [Topology, StepMatrix, Topology]
    assert numbers(out) == [-1]


def test_rule_3_too_many_rows_make_the_topology_stand() -> None:
    assembler = StepAssembler(JOB, StepsConfig(waiting_rows=8))
    out = feed(assembler, hellos()[0], step(1, ALL, 1), step(2, ALL, 2), step(3, ALL, 3))
    assert numbers(out) == [1, 2]


def test_rule_4_the_first_step_is_the_smallest_that_waited() -> None:
    assembler = StepAssembler(JOB, StepsConfig())
    feed(assembler, step(12, ALL, 1), step(11, ALL, 1), step(13, ALL, 2), *hellos(at_s=3))
    assert numbers(feed(assembler, Tick(seen_ns=ns(4)))) == [11, 12, 13]
    assert numbers(feed(assembler, step(10, ALL, 5), Tick(seen_ns=ns(6)), Tick(seen_ns=ns(7)))) == []
    assert assembler.counters.late == 4


def test_rule_5a_a_step_closes_when_all_members_are_in() -> None:
    assembler = standing()
    assert feed(assembler, step(1, [0, 1, 2], 1), Tick(seen_ns=ns(1.1))) == []
    assert numbers(feed(assembler, step(1, [3], 1.2), Tick(seen_ns=ns(1.3)))) == [1]


@pytest.mark.parametrize(
    ("late_s", "grace_s"),
    [
        pytest.param([], 10, id="nothing learnt: the ceiling"),
        pytest.param([0.01] * 5, 0.5, id="never below the floor"),
        pytest.param([1, 1, 1, 0.1, 5], 4, id="four times the median of last minus half"),
        pytest.param([4] * 5, 10, id="never above the ceiling"),
    ],
)
def test_rule_5b_half_of_the_members_wait_for_the_rest(late_s: list[float], grace_s: float) -> None:
    assembler = standing()
    for number, wait_s in enumerate(late_s):
        feed(assembler, step(number, [0, 1], 20 * number + 1), step(number, [2, 3], 20 * number + 1 + wait_s))
    feed(assembler, step(99, [0], 900), step(99, [1], 1000), step(99, [2], 1000.1))
    before, after = Tick(seen_ns=ns(1000 + grace_s - 0.01)), Tick(seen_ns=ns(1000 + grace_s))
    assert numbers(feed(assembler, before, after)) == []
    assert numbers(feed(assembler, Tick(seen_ns=ns(1100)))) == [-99]


def test_rule_5b_rows_seen_in_the_last_instant_of_the_grace_are_in() -> None:
    assembler = standing()
    out = feed(assembler, step(1, [0, 1], 1), Tick(seen_ns=ns(11)), step(1, [2, 3], 11), Tick(seen_ns=ns(12)))
    assert numbers(out) == [1]


def test_rule_5b_without_ticks_the_next_item_tells_the_time() -> None:
    assembler = standing()
    assert numbers(feed(assembler, step(1, [0, 1], 1), step(2, [0], 11), step(2, [1], 11.1))) == [-1]


def test_rule_5b_late_rows_teach_patience() -> None:
    assembler = standing()
    for number in range(64):  # all in by 0.1 s: the grace falls to its floor
        feed(assembler, step(number, [0, 1], number), step(number, [2, 3], number + 0.1))
    for number in range(64, 100):  # then the rest is 0.9 s behind, until the median knows
        feed(
            assembler, step(number, [0, 1], number), Tick(seen_ns=ns(number + 0.5)), step(number, [2, 3], number + 0.9)
        )
    wait(assembler, 100)
    assert (assembler.counters.partial, assembler.counters.late) == (33, 66)


def test_rule_5c_below_half_only_an_end_closes() -> None:
    assembler = standing()
    assert feed(assembler, step(1, [0], 1), Tick(seen_ns=ns(3000)), Tick(seen_ns=ns(3001))) == []
    ended = event("attempt.ended", 3002, {"attempt": 0, "term": 1, "by": "us", "code": 1})
    other = replace(ended, data={**ended.data, "attempt": 1})
    assert feed(assembler, other, replace(ended, seen_ns=ns(3003))) == []
    assert numbers(feed(assembler, step(1, [1], 3003), Tick(seen_ns=ns(3004)))) == [-1]


def test_rule_5c_the_end_of_the_job_closes_all() -> None:
    assembler = standing()
    feed(assembler, step(1, [0], 1), step(2, ALL, 1), step(3, [0, 1, 2], 1))
    assert numbers(assembler.finish()) == [-1, 2, -3]
    assert assembler.finish() == []


def test_rule_6_steps_leave_in_order_and_once() -> None:
    assembler = standing()
    feed(assembler, step(1, [0, 1, 2], 1))
    assert [*feed(assembler, step(3, ALL, 1.1), step(2, ALL, 1.2)), *wait(assembler, 1.3)] == []
    assert numbers([*feed(assembler, step(1, [3], 1.4), step(2, ALL, 2)), *wait(assembler, 3)]) == [1, 2, 3]


def test_rule_6_a_number_nobody_used_is_skipped() -> None:
    assembler = standing()
    assert numbers(feed(assembler, step(1, ALL, 1), step(4, ALL, 2), Tick(seen_ns=ns(3)))) == [1, 4]
    assert assembler.counters.skipped == 2


def test_rule_6_late_rows_are_counted_and_change_no_step() -> None:
    assembler = standing()
    matrix = only(feed(assembler, step(1, [0, 1, 2], 1), Tick(seen_ns=ns(11)), Tick(seen_ns=ns(12))))
    assert feed(assembler, step(1, ALL, 13), Tick(seen_ns=ns(14)), Tick(seen_ns=ns(15))) == []
    assert (assembler.counters.late, assembler.counters.copies) == (1, 3)
    assert matrix.seen_R.tolist() == [True, True, True, False]


def test_rule_7_a_row_beyond_the_window_closes_the_oldest() -> None:
    assembler = standing(config=StepsConfig(window_steps=4))
    out = feed(assembler, *(step(number, [0], number) for number in range(1, 8)))
    assert numbers([*out, *wait(assembler, 9)]) == [-1, -2, -3]
    assert numbers(feed(assembler, step(4, [1, 2, 3], 10), Tick(seen_ns=ns(11)))) == [4]


def test_rule_7_beyond_ten_windows_a_row_is_garbage() -> None:
    assembler = standing()
    wild = [step(number, [3], 2) for number in (641, 2**31 - 1, -5)]
    assert feed(assembler, step(1, [0, 1], 1), *wild, Tick(seen_ns=ns(2.5))) == []
    assert numbers(feed(assembler, step(1, [2, 3], 3), Tick(seen_ns=ns(4)))) == [1]
    assert assembler.counters.garbage == 3


def test_rule_7_a_rank_outside_the_world_is_garbage() -> None:
    assembler = standing()
    assert numbers(feed(assembler, step(1, [4, -1, *ALL], 1), span(1, 9, 0, 1, 1), Tick(seen_ns=ns(2)))) == [1]
    assert assembler.counters.garbage == 3


def test_rule_7_garbage_in_the_first_batch_does_not_deafen() -> None:
    assembler = standing()
    out = feed(assembler, step(1, [2], 1), *(step(5000 + k, ALL, 1 + k) for k in range(4)))
    assert numbers([*out, *wait(assembler, 9)]) == [-1, 5001, 5002, 5003]
    assert assembler.counters.garbage == 4


def test_rule_7_one_rank_counting_out_there_moves_nobody() -> None:
    assembler = standing()
    for number in range(1, 6):
        feed(assembler, step(number, [0, 1, 2], number), step(number + 5000, [3], number))
    assert numbers(assembler.finish()) == [-1, -2, -3, -4, -5]
    assert assembler.counters.garbage == 5


def test_rule_8_members_change_by_event() -> None:
    assembler = standing()
    feed(assembler, step(1, [0, 1, 2], 1), Tick(seen_ns=ns(1.1)))
    out = feed(assembler, event("membership", 2, {"ranks": [0, 1, 2]}), step(2, [0, 1, 2], 3), Tick(seen_ns=ns(4)))
    assert numbers(out) == [1, 2]


def test_rule_8_members_that_make_half_start_the_grace() -> None:
    assembler = standing()
    assert feed(assembler, step(1, [0], 1), event("membership", 5, {"ranks": [0, 1]})) == []
    assert wait(assembler, 14.9) == []
    assert numbers(wait(assembler, 15)) == [-1]


def test_rule_8_members_known_before_the_topology_count_from_the_first_step() -> None:
    assembler = StepAssembler(JOB, StepsConfig(window_steps=2))
    early = [step(number, [0, 1], number) for number in range(1, 6)]
    out = feed(assembler, event("membership", 0, {"ranks": [0, 1]}), *early, *hellos(at_s=6))
    assert numbers([*out, *wait(assembler, 7)]) == [1, 2, 3, 4, 5]


def test_rule_9_live_frames_and_other_jobs_do_not_touch_steps() -> None:
    assembler = standing()
    others: list[Item] = [replace(step(1, ALL, 1), job=JobId("other")), frame("live", 1, 4), frame("reading", 1, 1)]
    assert feed(assembler, *others, Tick(seen_ns=ns(2)), Tick(seen_ns=ns(3))) == []
    assert assembler.finish() == []
