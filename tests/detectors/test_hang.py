"""Hangs: what is one, what is none, who is named, how it ends."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.detectors.world import START_NS, World, evidence, feed, said

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Finding, Frame, Tick
from trainwarden.detectors.hang import Hang, HangConfig

FLOOR_S = 4.0
DEMO = HangConfig(floor=timedelta(seconds=FLOOR_S))
KNOWN = 24  # steps: more than the 20 that make budgets learnt
SHORT = HangConfig(
    floor=timedelta(seconds=2),
    init=timedelta(seconds=20),
    first_step=timedelta(seconds=15),
    step=timedelta(seconds=8),
    long_phase=timedelta(seconds=25),
)
IN_ALLREDUCE = "/v/site-packages/torch/distributed/distributed_c10d.py:2810 all_reduce"
LOADING = "/job/train.py:120 share"


def known(ranks: int = 4) -> World:
    """A job whose budgets are learnt."""
    return World(ranks).begin().run_steps(KNOWN)


def findings(world: World, config: HangConfig = DEMO) -> list[Finding]:
    return feed(Hang(config), world.items)


def test_a_stopped_rank_is_named_with_its_state_and_frame() -> None:
    world = known().stop(2).run(FLOOR_S + 1)
    world.stack(2, "T", ["/v/site-packages/torch/x.py:1 f", LOADING]).run(1)
    first, last = findings(world)[0], findings(world)[-1]
    assert (first.status, first.kind, str(first.subject)) == ("provisional", "rank.hung", "rank:2")
    assert last.status == "final"
    assert last.reason.endswith(f"ranks 0-1, 3 wait for it; it is stopped (state T); it stands at {LOADING}")
    assert evidence(last) | {"quiet": 0, "standing": 0} == {
        "quiet": 0,
        "phase": "optimizer",
        "step": KNOWN - 1,
        "standing": 0,
        "frame": LOADING,
        "process_state": "T",
        "victims": [0, 1, 3],
    }
    assert last.suspects[0][1] == last.confidence > 0.9


def test_it_is_suspected_at_the_budget_and_final_a_second_later() -> None:
    world = known()
    moved_ns = world.now_ns
    found = findings(world.stop(1).run(FLOOR_S + 3))
    assert said(found) == [("provisional", "rank.hung", "rank:1"), ("final", "rank.hung", "rank:1")]
    # the others come to `wait` within a step; a tick is a quarter of a second at most
    assert 0 <= 1e-9 * (found[0].seen_ns - moved_ns) - FLOOR_S <= world.step_s + 0.5
    assert 1e-9 * (found[1].seen_ns - found[0].seen_ns) <= 1.3
    assert [f.id for f in found] == ["hang/job/0/rank:1/0"] * 2


def test_it_clears_when_the_culprit_goes_on_and_a_second_hang_is_a_second_finding() -> None:
    world = known().stop(3).run(FLOOR_S + 3).let().run(5).stop(0).run(FLOOR_S + 3)
    found = findings(world)
    assert [f.status for f in found] == ["provisional", "final", "cleared", "provisional", "final"]
    assert [str(f.subject) for f in found] == ["rank:3"] * 3 + ["rank:0"] * 2
    assert len({f.id for f in found}) == 2
    assert [f.revision for f in found] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("world", "config"),
    [
        pytest.param(lambda: known().run_steps(100), DEMO, id="a healthy run"),
        pytest.param(lambda: World(step_s=20.0).begin().run_steps(8), SHORT, id="steps that are slower than the floor"),
        pytest.param(lambda: World().begin().run(0.1).stop(1).run(14), SHORT, id="a first step that compiles"),
        pytest.param(lambda: World().hello().run(19), SHORT, id="an initialisation that takes long"),
        pytest.param(lambda: known().hold("checkpoint").run(24), SHORT, id="a checkpoint that nobody declared"),
        pytest.param(lambda: known().hold("eval").run(24), SHORT, id="an evaluation that nobody declared"),
        pytest.param(lambda: declared(known(), 600).run(300), SHORT, id="a long checkpoint that was declared"),
        pytest.param(lambda: declared(known(), 600, [1]).run(300), SHORT, id="one rank saves, the others wait for it"),
        pytest.param(lambda: silent(known(), range(4)).run(60), SHORT, id="a silent agent is blind, not hung"),
        pytest.param(lambda: paused(known(), 60).run(1).let().run(1), DEMO, id="a machine that was paused"),
        pytest.param(lambda: known().exit(2, signal=9).run(60), SHORT, id="the others of a dead rank"),
        pytest.param(lambda: stopping(known()).stop(0).run(60), SHORT, id="a job that is being stopped"),
        pytest.param(lambda: known().exit(None, code=0).stop(0).run(60), SHORT, id="a launcher that has ended"),
        pytest.param(lambda: detached(known()).run(60), SHORT, id="ranks that closed their collector"),
        pytest.param(lambda: known().exit(2, code=0).stop(1).run(20), SHORT, id="the end: a rank left in order"),
        pytest.param(lambda: garbage(known()).run(5), SHORT, id="garbage in the live words"),
    ],
)
def test_no_alarm(world: Callable[[], World], config: HangConfig) -> None:
    assert said(findings(world(), config)) == []


@pytest.mark.parametrize(
    ("world", "budget_s", "subject"),
    [
        pytest.param(lambda: World().hello(), 20, "job:job", id="init"),
        pytest.param(lambda: World().begin().run(0.1).stop(2), 15, "rank:2", id="first step"),
        pytest.param(lambda: World().begin().run_steps(10).stop(2), 8, "rank:2", id="few steps are known"),
        pytest.param(lambda: known().stop(2), 2, "rank:2", id="learnt, the floor"),
        pytest.param(lambda: World(step_s=3).begin().run_steps(KNOWN).stop(2), 9, "rank:2", id="3 x p99.9 of a step"),
        pytest.param(lambda: known().hold("checkpoint", [1]), 25, "rank:1", id="a checkpoint nobody declared"),
        pytest.param(lambda: declared(known(), 40, [1]), 40, "rank:1", id="a declared one that outlasts its budget"),
        pytest.param(
            lambda: saved_often(known()).hold("checkpoint", [1]), 3, "rank:1", id="a checkpoint that is learnt"
        ),
    ],
)
def test_budgets(world: Callable[[], World], budget_s: float, subject: str) -> None:
    made = world()
    begun_ns = made.now_ns
    made.run(budget_s + 8)
    found = findings(made, SHORT)
    assert str(found[0].subject) == subject
    # a step that was under way ends first (step 3 s: at most 2.4 s until the others wait)
    assert budget_s - 0.3 <= 1e-9 * (found[0].seen_ns - begun_ns) <= budget_s + 3.0


def test_budgets_outlive_an_attempt_and_a_hang_teaches_nothing() -> None:
    world = known().stop(2).run(30).new_attempt().begin().run_steps(3)
    stopped_ns = world.now_ns
    found = findings(world.stop(0).run(FLOOR_S + 3))
    assert said(found)[2:] == [
        ("cleared", "rank.hung", "rank:2"),
        ("provisional", "rank.hung", "rank:0"),
        ("final", "rank.hung", "rank:0"),
    ]
    assert 1e-9 * (found[3].seen_ns - stopped_ns) <= FLOOR_S + world.step_s + 0.5


def test_an_attempt_that_stands_still_from_its_start_is_another_hang() -> None:
    found = findings(known().stop(2).run(7).new_attempt().hello().run(25), SHORT)
    assert [(f.status, str(f.subject)) for f in found[2:]] == [
        ("cleared", "rank:2"),
        ("provisional", "job:job"),
        ("final", "job:job"),
    ]
    assert found[3].epoch == 1 << 32


def test_a_stay_that_resumed_teaches_nothing_either() -> None:
    world = known().stop(2).run(20).let().run_steps(10)
    stopped_ns = world.now_ns
    found = findings(world.stop(2).run(FLOOR_S + 3))
    assert 1e-9 * (found[3].seen_ns - stopped_ns) <= FLOOR_S + world.step_s + 0.5


def test_where_all_look_alike_that_is_said_until_the_stacks_tell() -> None:
    world = known().hold("backward").run(FLOOR_S + 1)
    for rank in range(4):
        world.stack(rank, "S", [LOADING if rank == 3 else IN_ALLREDUCE])
    found = findings(world.run(0.5))
    assert said(found) == [("provisional", "rank.hung", "job:job"), ("final", "rank.hung", "rank:3")]
    assert found[0].confidence < 0.5
    assert "nothing tells which one" in found[0].reason
    assert len(found[0].suspects) == 4
    assert found[0].id == found[1].id == "hang/job/0/job:job/0"


@pytest.mark.parametrize("letter", ["T", "t", "Z", "gone"])
def test_a_stopped_process_counts_more_than_where_it_stands(letter: str) -> None:
    """It was stopped inside `wait`, after it had arrived; another one merely looks late."""
    world = known().hold("wait", [0, 2, 3]).hold("forward", [1]).run(FLOOR_S + 1)
    found = findings(world.stack(2, letter).stack(1, "R", [LOADING]).run(0.5))
    assert said(found) == [("provisional", "rank.hung", "rank:1"), ("final", "rank.hung", "rank:2")]


def test_a_stack_that_was_denied_is_said() -> None:
    world = known().stop(1).run(FLOOR_S + 1).stack(1, "T", denied="py-spy: Permission Denied").run(0.5)
    assert evidence(findings(world)[-1])["stack_denied"] == "py-spy: Permission Denied"


def test_several_that_did_not_arrive_share_the_blame() -> None:
    last = findings(known().hold("data", [1, 2]).run(FLOOR_S + 3))[-1]
    assert {str(subject): round(share, 2) for subject, share in last.suspects} == {"rank:1": 0.45, "rank:2": 0.45}
    assert evidence(last)["victims"] == [0, 3]


def test_a_rank_that_never_attached_is_who_the_others_wait_for() -> None:
    world = World()
    world.silent.add(3)
    world.hello([0, 1, 2]).run(25)
    first = findings(world, SHORT)[0]
    assert (str(first.subject), first.onset_step) == ("rank:3", None)
    assert "never attached" in first.reason


def test_a_node_that_fell_silent_while_the_rest_waits_is_suspected() -> None:
    world = silent(known(), [2, 3]).hold("wait", [0, 1]).run(FLOOR_S + 3)
    first = findings(world)[0]
    assert str(first.subject) == "job:job"
    assert [str(subject) for subject, _ in first.suspects] == ["rank:2", "rank:3", "rank:0", "rank:1"]
    assert "ranks 2-3 cannot be seen" in first.reason


def test_a_death_that_came_first_takes_the_finding_back() -> None:
    world = known().stop(2).run(FLOOR_S + 0.8)
    died_s = 1e-9 * (world.now_ns - START_NS) - FLOOR_S - 0.8
    found = findings(world.exit(2, signal=9, after_s=-(FLOOR_S + 0.8)).run(2))
    assert died_s > 0
    assert [f.status for f in found] == ["provisional", "withdrawn"]


def test_a_death_long_after_the_hang_leaves_it_as_it_is() -> None:
    found = findings(known().stop(2).run(FLOOR_S + 3).exit(0, signal=6).run(5))
    assert [f.status for f in found] == ["provisional", "final"]


@pytest.mark.parametrize("skew_s", [-3600.0, -1.0, 1.0, 3600.0])
def test_a_skewed_clock_of_a_node_changes_nothing(skew_s: float) -> None:
    straight, skewed = World(), World()
    skewed.skew_ns = [0, 0, round(skew_s * 1e9), round(skew_s * 1e9)]
    for world in (straight, skewed):
        world.begin().run_steps(KNOWN).stop(2).run(FLOOR_S + 3)
    assert findings(straight) == findings(skewed)


def test_an_offset_read_afresh_at_each_poll_is_no_progress() -> None:
    world = known().stop(2)
    for poll in range(60):
        world.skew_ns = [400_000 * (poll % 2)] * 4
        world.run(0.1)
    assert said(findings(world))[0] == ("provisional", "rank.hung", "rank:2")


def test_one_rank_alone_is_its_own_culprit() -> None:
    assert str(findings(known(1).stop(0).run(FLOOR_S + 3))[0].subject) == "rank:0"


@settings(max_examples=5)
@given(st.integers(0, 3), st.integers(0, 9), st.randoms(use_true_random=False))
def test_the_order_of_frames_between_two_ticks_does_not_matter(culprit: int, polls: int, random: object) -> None:
    world = known().run(polls / 10).stop(culprit).run(FLOOR_S + 3).let().run(3)
    shuffled = World()
    batch: list[Frame] = []
    for item in world.items:
        if isinstance(item, Frame) and (not batch or batch[0].seen_ns == item.seen_ns):
            batch.append(item)
            continue
        random.shuffle(batch)  # type: ignore[attr-defined]  # hypothesis types it as random.Random
        shuffled.items += batch
        batch = [item] if isinstance(item, Frame) else []
        shuffled.items += [] if isinstance(item, Frame) else [item]
    assert feed(Hang(DEMO), [*shuffled.items, *batch]) == findings(world)


@settings(max_examples=5)
@given(st.permutations(range(4)), st.integers(0, 3))
def test_it_does_not_matter_which_number_a_rank_has(order: list[int], culprit: int) -> None:
    found = findings(known().stop(order[culprit]).run(FLOOR_S + 3))
    assert [str(f.subject) for f in found] == [f"rank:{order[culprit]}"] * 2
    assert evidence(found[0])["victims"] == sorted(set(range(4)) - {order[culprit]})


@settings(max_examples=10)
@given(st.floats(0, 1))
def test_a_snapshot_in_between_changes_nothing(where: float) -> None:
    world = known().stop(2).run(FLOOR_S + 3).stack(2, "T", [LOADING]).run(1).let().run(3)
    cut = int(where * len(world.items))
    first, second = Hang(DEMO), Hang(DEMO)
    found = feed(first, world.items[:cut])
    second.restore(first.snapshot())
    assert found + feed(second, world.items[cut:]) == findings(world)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"floor": timedelta(0)}, r"detectors\.hang\.floor: need more than 0", id="no floor"),
        pytest.param({"quantile": 1.5}, r"detectors\.hang\.quantile: need between 0 and 1", id="no quantile"),
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, timedelta | float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HangConfig(**wrong)  # type: ignore[arg-type]  # wrong on purpose


# worlds


def declared(world: World, expect_s: float, ranks: list[int] | None = None) -> World:
    for rank in range(world.ranks) if ranks is None else ranks:
        world.event("mark.phase", rank, phase="checkpoint", expect_s=expect_s)
    return world.hold("checkpoint", ranks)


def saved_often(world: World) -> World:
    for _ in range(25):
        world.hold("checkpoint").run(1).let().run(1)
    return world


def silent(world: World, ranks: range | list[int]) -> World:
    world.silent |= set(ranks)
    return world


def stopping(world: World) -> World:
    return world.event("attempt.stopping", None, attempt=0, by="SIGINT")


def detached(world: World) -> World:
    world.state = ["detached"] * world.ranks
    return world


def paused(world: World, seconds: float) -> World:
    """Everything stands, we too, and the ranks are a little slower than we are to come back."""
    world.now_ns += round(seconds * 1e9)
    world.stopped = {*range(world.ranks)}
    return world


def garbage(world: World) -> World:
    for item in [item for item in world.items if isinstance(item, Frame)][-3:]:
        rows = item.rows.copy()
        rows["rank"], rows["phase"] = [-5, 1 << 30], 60000
        world.items.append(Frame(**{name: getattr(item, name) for name in Frame.__slots__} | {"rows": rows}))
    assert isinstance(world.items[-1], Frame | Tick)
    return world
