"""Deaths: the first cause, its victims, and what is said while nobody knows how it ended."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.detectors.world import World, evidence, feed, said, topology

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Finding, Json
from trainwarden.detectors.death import Death, DeathConfig

TERM, KILL, SEGV = 15, 9, 11
STOCK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def running(ranks: int = 4) -> World:
    return World(ranks).begin().run_steps(3)


def findings(world: World) -> list[Finding]:
    return feed(Death(), world.items)


def last(world: World) -> Finding:
    return findings(world)[-1]


def failure(rank: int, exitcode: int | None, *, time: str = "2026-01-02_03:04:05", message: str = STOCK) -> Json:
    return {"rank": rank, "pid": 100 + rank, "exitcode": exitcode, "error_file": None, "message": message, "time": time}


def table(world: World, *failures: Json, root: int | None, file: str | None = None) -> World:
    return world.event("launcher.failure", None, failures=list(failures), root=root, file=file)


def torchrun_ends(world: World, first: int, code: int | None = None, signal: int | None = None) -> World:
    """One rank dies, torchrun ends the others and then itself."""
    world.exit(first, code=code, signal=signal).run(0.1)
    for rank in {*range(world.ranks)} - {first}:
        world.exit(rank, signal=TERM, after_s=0.05)
    world.run(0.5)
    told = -signal if signal is not None else code
    return table(world, failure(first, told), root=first).exit(None, code=1, by="keeper").run(2)


def test_one_death_makes_one_finding_and_victims() -> None:
    found = findings(torchrun_ends(running(), 2, signal=KILL))
    assert {(f.kind, str(f.subject), f.status) for f in found} == {("process.killed", "rank:2", "final")}
    assert {f.id for f in found} == {"death/job/0/rank:2/0"}
    assert found[-1].reason == ("rank 2 (pid 102) was killed by SIGKILL at step 2; ranks 0-1, 3 ended after it")
    assert evidence(found[-1])["victims"] == [0, 1, 3]


def test_it_is_said_at_the_next_tick() -> None:
    world = running()
    died_ns = world.now_ns
    found = findings(world.exit(1, signal=KILL).run(1))
    assert 1e-9 * (found[0].seen_ns - died_ns) <= 0.3
    assert (found[0].onset_ns, found[0].onset_step) == (died_ns, 2)


@pytest.mark.parametrize(
    ("ended", "kind", "words"),
    [
        pytest.param({"signal": KILL}, "process.killed", "was killed by SIGKILL", id="kill -9"),
        pytest.param({"signal": TERM}, "process.killed", "was killed by SIGTERM", id="preemption"),
        pytest.param({"code": -9}, "process.killed", "was killed by SIGKILL", id="torchrun's negative code"),
        pytest.param({"code": 1}, "process.failed", "ended itself with exit code 1", id="an exception"),
        pytest.param({"signal": SEGV}, "process.failed", "crashed with SIGSEGV", id="its own crash"),
        pytest.param({"signal": KILL, "oom": True}, "process.oom", "the kernel's OOM killer", id="out of memory"),
        pytest.param({}, "process.unknown", "nobody saw its exit status", id="nobody saw it: never 0"),
    ],
)
def test_kinds(ended: dict[str, int], kind: str, words: str) -> None:
    found = last(running().exit(3, **ended).run(1))  # type: ignore[arg-type]  # a table of keyword arguments
    assert (found.kind, str(found.subject)) == (kind, "rank:3")
    assert words in found.reason


@pytest.mark.parametrize(
    ("ending", "found"),
    [
        pytest.param(lambda w: w.run(1), [], id="nothing happens"),
        pytest.param(lambda w: all_end(w, code=0), [], id="all exit with 0"),
        pytest.param(lambda w: all_end(in_order(w)), [], id="nobody saw the codes of a job that ended in order"),
        pytest.param(lambda w: all_end(w.event("attempt.stopping", None, attempt=0, by="SIGINT"), signal=TERM), [],
                     id="stopped on purpose"),
        pytest.param(lambda w: w.exit(3, code=0).run(3), [], id="one rank leaves early"),
        pytest.param(
            lambda w: all_end(w),
            [("provisional", "process.unknown", "rank:0"), ("withdrawn", "process.unknown", "rank:0")],
            id="codes unseen, no word of the collector, but the launcher ended with 0",
        ),
        pytest.param(
            lambda w: table(in_order(w).exit(1).run(1), failure(1, 1), root=1).run(1),
            [("final", "process.failed", "rank:1")],
            id="the table names a rank whose collector had closed in order",
        ),
        pytest.param(
            lambda w: in_order(w).exit(1).run(0.1).exit(0, signal=TERM).run(1),
            [("provisional", "process.unknown", "rank:1")],
            id="a rank closes in order, and then the others are ended: it had failed",
        ),
        pytest.param(
            lambda w: in_order(w).exit(2).run(1).exit(None, code=1, by="keeper").run(3),
            [("provisional", "process.unknown", "rank:2")],
            id="a rank that closed in order, a launcher that failed, no table",
        ),
        pytest.param(
            lambda w: w.exit(2).run(45),
            [("provisional", "process.unknown", "rank:2"), ("final", "process.unknown", "rank:2")],
            id="an unknown status stays unknown after 40 s",
        ),
        pytest.param(
            lambda w: table(w.exit(2).run(1), failure(2, -9), root=2).run(1),
            [("provisional", "process.unknown", "rank:2"), ("final", "process.killed", "rank:2")],
            id="torchrun's table tells the signal",
        ),
        pytest.param(
            lambda w: table(w.exit(2).run(1), failure(2, 1, message="Traceback:\nValueError: x"), root=2).run(1),
            [("provisional", "process.unknown", "rank:2"), ("final", "process.failed", "rank:2")],
            id="an error file tells the exception",
        ),
        pytest.param(
            lambda w: w.exit(2).run(1).event("oom.kill", None, pid=102, line="Killed process 102 (python)").run(1),
            [("provisional", "process.unknown", "rank:2"), ("final", "process.oom", "rank:2")],
            id="the kernel log tells of the OOM killer",
        ),
        pytest.param(
            lambda w: w.event("oom.kill", None, pid=102, line="Killed process 102").run(1).exit(2, signal=KILL).run(1),
            [("final", "process.oom", "rank:2")],
            id="the kernel log was faster",
        ),
        pytest.param(
            lambda w: w.exit(2, signal=KILL).event("oom.kill", None, pid=None, line="oom_kill 0 -> 1").run(1),
            [("final", "process.oom", "rank:2")],
            id="a cgroup counts an OOM kill without a pid",
        ),
        pytest.param(
            lambda w: w.exit(2, signal=KILL).event("oom.kill", None, pid=777, line="Killed process 777").run(1),
            [("final", "process.killed", "rank:2")],
            id="the OOM killer ended somebody else",
        ),
        pytest.param(
            lambda w: w.exit(2).run(1).exit(2, signal=KILL, by="keeper").run(1),
            [("provisional", "process.unknown", "rank:2"), ("final", "process.killed", "rank:2")],
            id="the keeper saw the status",
        ),
        pytest.param(
            lambda w: w.exit(None, signal=KILL, by="keeper").run(1),
            [("final", "process.killed", "job:job")],
            id="kill -9 of torchrun itself",
        ),
        pytest.param(
            lambda w: w.exit(1, code=1).run(0.3).exit(None, code=1, by="keeper").run(2),
            [("final", "process.failed", "rank:1")] * 2,
            id="a launcher that fails because of a rank",
        ),
        pytest.param(
            lambda w: w.exit(0, signal=TERM).exit(1, signal=TERM, after_s=0.2).run(1),
            [("final", "process.killed", "rank:0")],
            id="scancel: the first SIGTERM, the others are victims",
        ),
        pytest.param(
            lambda w: w.exit(3, signal=TERM, after_s=0.3).exit(1, code=1, after_s=-0.3).run(1),
            [("final", "process.failed", "rank:1")],
            id="told in the wrong order",
        ),
    ],
)  # fmt: skip
def test_what_is_said(ending: Callable[[World], World], found: list[tuple[str, str, str]]) -> None:
    told = said(findings(ending(running())))
    assert list(dict.fromkeys(told)) == list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("ends", "failures", "root", "first"),
    [
        pytest.param([(2, {"signal": KILL}, 0.03), (0, {"code": 1}, 0)], [], None, 2,
                     id="a signal cannot be the consequence of an exception that fast"),
        pytest.param([(2, {"signal": KILL}, 0.03), (0, {"code": 1}, 0)], [0, 2], 0, 2,
                     id="nor does torchrun know better: its root is the lowest rank of that second"),
        pytest.param([(2, {"code": 1}, 0), (0, {"code": 1}, 0.04)], [0, 2], 0, 2,
                     id="of two exceptions the earlier, whatever torchrun takes for the root"),
        pytest.param([(2, {"code": 1}, 0.04), (0, {"signal": TERM}, 0)], [2], 2, 2,
                     id="the only one that torchrun found dead"),
        pytest.param([(0, {"signal": TERM}, 0), (1, {"code": 1}, 0.05), (2, {"code": 1}, 0.04)], [1, 2], 1, 2,
                     id="the earlier of the two that torchrun found dead"),
        pytest.param([(2, {}, 0.02), (0, {"signal": TERM}, 0)], [], None, 2,
                     id="a status that nobody saw, beside a SIGTERM"),
        pytest.param([(2, {"signal": KILL}, 0.5), (0, {"code": 1}, 0)], [], None, 0,
                     id="half a second later is later"),
        pytest.param([(0, {"signal": TERM}, 0), (1, {"signal": TERM}, 0.01)], [2], 2, 2,
                     id="a rank that died before it said hello: only torchrun saw it"),
        pytest.param([(0, {}, 0), (1, {}, 0.01)], [2], 2, 2,
                     id="the same, and nobody saw how the others ended"),
    ],
)  # fmt: skip
def test_first_causes(
    ends: list[tuple[int, dict[str, int], float]], failures: list[int], root: int | None, first: int
) -> None:
    world = running()
    for rank, status, after_s in ends:
        world.exit(rank, after_s=after_s, **status)  # type: ignore[arg-type]  # a table of keyword arguments
    if failures:
        table(world, *(failure(rank, 1) for rank in failures), root=root)
    found = findings(world.run(1))
    assert [str(f.subject) for f in found] == [f"rank:{first}"]


def test_torchruns_root_counts_where_its_clock_could_tell() -> None:
    world = running().exit(1, code=1).exit(2, code=1, after_s=0.02)
    table(world, failure(1, 1, time="2026-01-02_03:04:06"), failure(2, 1, time="2026-01-02_03:04:05"), root=2)
    assert str(last(world.run(1)).subject) == "rank:2"


def test_a_message_is_the_exception_itself() -> None:
    world = table(running().exit(2, code=1), failure(2, 1, message="Traceback:\n  File\nValueError: no batch"), root=2)
    assert last(world.run(1)).reason == "rank 2 (pid 102) ended itself with exit code 1 at step 2: ValueError: no batch"
    assert evidence(last(world))["message"] == "ValueError: no batch"


@pytest.mark.parametrize(
    ("world", "words"),
    [
        pytest.param(lambda: World(), "the launcher (pid 999) ended itself with exit code 2; no rank ever attached the collector", id="never attached"),  # noqa: E501
        pytest.param(running, "the launcher (pid 999) ended itself with exit code 2; no rank had died before it", id="attached"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_launcher_that_fails_alone(world: Callable[[], World], words: str) -> None:
    found = findings(world().exit(None, code=2, by="keeper").run(3))
    assert said(found) == [("final", "process.failed", "job:job")]
    assert found[0].reason == words


def test_the_end_of_the_attempt_needs_no_further_tick() -> None:
    world = World().exit(None, code=2, by="keeper")
    world.event("attempt.ended", None, attempt=0, term=1, by="keeper", code=2)
    assert said(findings(world)) == [("final", "process.failed", "job:job")]


def test_a_rank_that_left_early_is_evidence() -> None:
    world = running().exit(3, code=0).run(2).exit(1, code=1).run(1)
    assert (str(last(world).subject), evidence(last(world))["left_in_order"]) == ("rank:1", [3])


def test_the_command_may_be_the_rank_itself() -> None:
    """No torchrun: the keeper's child is rank 0, and the keeper saw its status."""
    world = World(1).begin().run(1).exit(0, by="nobody")
    exit_ = world.items[-1]
    assert isinstance(exit_, Event)
    world.event("process.exit", None, **dict(exit_.data) | {"rank": None, "code": 3, "by": "keeper"})
    assert said(findings(world.run(1))) == [("final", "process.failed", "rank:0")]


def test_it_is_over_when_the_ranks_of_a_new_attempt_are_there() -> None:
    world = torchrun_ends(running(), 2, signal=KILL)
    world.new_attempt().hello().run(1)
    before = findings(world)
    world.items.append(topology(4, epoch=world.epoch))
    found = findings(world.run(1))
    assert found[:-1] == before
    assert (found[-1].status, str(found[-1].subject)) == ("cleared", "rank:2")


def test_a_restart_by_torchrun_is_a_new_incarnation_and_late_news_of_the_old_one_is_none() -> None:
    world = running().exit(2, signal=KILL).run(1)
    old = world.exit(1, signal=TERM).items.pop()
    world.restart += 1
    world.hello()
    world.items.append(old)
    world.silent.clear()
    world.items.append(topology(4, epoch=world.epoch))
    found = findings(world.run(2).exit(0, code=1).run(1))
    assert said(found) == [
        ("final", "process.killed", "rank:2"),
        ("cleared", "process.killed", "rank:2"),
        ("final", "process.failed", "rank:0"),
    ]
    assert evidence(found[-1])["victims"] == []


@settings(max_examples=15)
@given(st.permutations(range(4)), st.sampled_from([KILL, SEGV, None]))
def test_it_does_not_matter_which_number_a_rank_has(order: list[int], signal: int | None) -> None:
    found = last(torchrun_ends(running(), order[0], signal=signal, code=None if signal else 1))
    assert str(found.subject) == f"rank:{order[0]}"
    assert evidence(found)["victims"] == sorted(order[1:])


@settings(max_examples=15)
@given(st.floats(0, 1))
def test_a_snapshot_in_between_changes_nothing(where: float) -> None:
    world = torchrun_ends(running(), 2, signal=KILL).new_attempt().begin().exit(1).run(42)
    cut = int(where * len(world.items))
    first, second = Death(), Death()
    found = feed(first, world.items[:cut])
    second.restore(first.snapshot())
    assert found + feed(second, world.items[cut:]) == findings(world)


def test_a_wrong_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"detectors\.death\.unknown_after: need 0 or more"):
        DeathConfig(unknown_after=timedelta(seconds=-1))


def all_end(world: World, code: int | None = None, signal: int | None = None) -> World:
    for rank in range(world.ranks):
        world.exit(rank, code=code, signal=signal, after_s=0.01 * rank)
    return world.run(1).exit(None, code=0, by="keeper").run(2)


def in_order(world: World) -> World:
    """The collectors of all ranks say that the script ended in order."""
    world.state = ["detached"] * world.ranks
    return world.run(0.1)
