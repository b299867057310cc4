"""What goes wrong while a job is repaired, or instead of it; on a training without torch that starts in 0.2 s."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.end_to_end import light
from tests.end_to_end.running import CLI, TORCHRUN, TRAIN, Running
from tests.fakes.freeze import freeze, stopped

from trainwarden.core.model import Event
from trainwarden.core.process import alive
from trainwarden.core.records import attempt_of
from trainwarden.remediation.checkpoints.folder import order_of

pytestmark = pytest.mark.timeout(120)

LIGHT = [sys.executable, light.__file__]
HANG = "detectors:\n  hang:\n    floor: 1500ms\n"
POLICY = """
rules:
  process:
    killed: &restart
      mode: {mode}
      approval: {approval}
      budget: {{plans: {plans}, window: 10min}}
      cool_down: 200ms
      rungs: {{evidence_collected: 5s, checkpoint_taken: 5s, quiesced: 10s, stopped: 15s, running: 10s, verified: 15s}}
    oom: *restart
    failed: *restart
    unknown: *restart
  rank:
    hung: *restart
  loss:
    nonfinite: *restart
limits:
  budget: {{plans: 10, window: 10min}}
  breaker: {{failed: {failed}}}
  patience: 2s
"""


def policy(mode: str = "act", *, plans: int = 3, failed: int = 2, approval: str = "30s") -> str:
    return POLICY.format(mode=mode, plans=plans, failed=failed, approval=approval)


def kill_rank(running: Running, rank: int = 1, attempt: int = 1) -> None:
    os.kill(running.rank(rank, attempt).pid, signal.SIGKILL)


def last_words(running: Running, attempt: int) -> str:
    """The last line of rank 0."""
    return (running.path / f"attempt/{attempt}/out.log").read_text().splitlines()[-1]


def ended_as_undisturbed(running: Running, attempt: int, steps: int) -> bool:
    return last_words(running, attempt) == f"final {light.final(steps).hex()}"


def until_published(running: Running, epochs_of: int = 1) -> None:
    running.until(
        "a published checkpoint", lambda: any(attempt_of(order_of(n)[0]) == epochs_of for n in running.published())
    )


# what an old attempt left


@pytest.mark.slow
def test_a_rank_stopped_inside_its_save_is_ended_and_its_checkpoint_is_never_taken(
    start: Callable[..., Running],
) -> None:
    steps = 70
    running = start(
        "stopped", *LIGHT, "--steps", str(steps), "--fault-step", "40", "--stop-in-save", config=HANG, policy=policy()
    )
    running.until("step 39", lambda: running.step() == 39)
    stopped = running.rank(1)
    running.until("a second attempt", lambda: running.attempts() == [1, 2], 30)
    assert not alive(stopped)
    assert running.wait(30) == 0, running.story()
    assert ended_as_undisturbed(running, 2, steps)
    assert f"step-40-{1 << 32}" not in running.published()
    assert str(running.told(2)["checkpoint"]).endswith(f"step-30-{1 << 32}")
    assert [one.result for one in running.outcomes(-1)] == ["reached"]


@pytest.mark.slow
def test_a_process_of_an_old_attempt_that_wakes_up_changes_nothing(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    told, steps = tmp_path / "lingers", 150
    running = start(
        "lingers", *LIGHT, "--steps", str(steps), "--fault-step", "20", "--linger", str(told), policy=policy()
    )
    running.until("the save that is left open", told.exists)
    until_published(running)
    never = f"step-20-{1 << 32}"
    kill_rank(running)
    until_published(running, 2)
    if wake(int(told.read_text())):
        running.until("the last thing it does", told.with_suffix(".done").exists, 10)
    assert running.wait(60) == 0, running.story()
    assert ended_as_undisturbed(running, 2, steps)
    taken = Path(str(running.told(2)["checkpoint"])).name
    assert order_of(taken)[0] == 1 << 32
    assert taken != never
    assert never not in running.published()


def wake(pid: int) -> bool:
    """Let a process go on; False: it was ended with its attempt, which is better still."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


# two supervisors


@pytest.mark.slow
def test_a_frozen_supervisor_that_wakes_up_after_the_take_over_does_nothing_more(start: Callable[..., Running]) -> None:
    running = start("taken-over", *LIGHT, "--steps", "500", policy=policy())
    until_published(running)
    first = running.supervisor
    kill_rank(running)
    freeze(first.pid, running.path / "journal.sqlite")  # what it has begun is the second one's to finish
    time.sleep(5.2)  # its lease
    second = running.supervisor = running.start()
    running.until("steps of the second attempt", lambda: running.attempts() == [1, 2] and running.step(2) > 0, 30)
    rows = running.journal()
    first.send_signal(signal.SIGCONT)
    assert first.wait(20) == 4, running.story()
    assert second.poll() is None
    own = {one.source: one.seq for one in rows if isinstance(one, Event) and one.source.startswith("run@")}
    late = [one for one in running.journal()[len(rows) :] if isinstance(one, Event) and one.seq < min(own.values())]
    assert late == []
    assert running.attempts() == [1, 2]
    kill_rank(running, attempt=2)
    running.until("steps of a third attempt", lambda: running.attempts() == [1, 2, 3] and running.step(3) > 0, 30)
    assert running.told(3)["term"] == 2
    assert {one.result for one in running.outcomes(-1)} <= {"reached", "failed"}


# more than one fault


@pytest.mark.slow
def test_a_fault_that_comes_again_in_every_attempt_ends_at_the_budget(start: Callable[..., Running]) -> None:
    running = start("again", *LIGHT, "--steps", "400", "--die-from", "2", "--die-after", "4", policy=policy(failed=9))
    until_published(running)
    kill_rank(running)
    assert running.wait(60) == 1, running.story()
    assert running.attempts() == [1, 2, 3, 4]
    assert len([one for one in running.outcomes(-1) if one.result == "failed"]) == 3
    assert {notice["incident"]["tier"] for notice in running.notices()} <= {"ERROR", "CRITICAL"}
    newest = {notice["incident"]["id"]: notice["change"] for notice in running.notices()}
    assert set(newest.values()) != {"resolved"}, running.story()
    assert [one.result for one in running.outcomes(-1)][-1] == "refused"


@pytest.mark.slow
def test_the_breaker_opens_after_plans_that_failed(start: Callable[..., Running]) -> None:
    running = start("breaks", *LIGHT, "--steps", "400", "--die-from", "2", "--die-after", "4", policy=policy(plans=9))
    until_published(running)
    kill_rank(running)
    assert running.wait(60) == 1, running.story()
    assert running.attempts() == [1, 2, 3]
    *failed, refused = running.outcomes(-1)
    assert [one.result for one in failed] == ["failed", "failed"]
    assert "breaker" in refused.reason


def test_without_a_checkpoint_that_verifies_the_job_starts_from_the_beginning(start: Callable[..., Running]) -> None:
    steps = 90
    running = start("corrupted", *LIGHT, "--steps", str(steps), "--every", "10", policy=policy())
    running.until("two checkpoints", lambda: len(running.published()) >= 2)
    running.supervisor.send_signal(signal.SIGSTOP)
    running.until("a stopped supervisor", lambda: stopped(running.supervisor.pid))
    kill_rank(running)
    broken = running.published()
    for shard in (running.path / "checkpoints").rglob("__1_0.distcp"):  # what is staged would be published yet
        shard.write_text(shard.read_text().replace("0x1", "0x2"))
    running.supervisor.send_signal(signal.SIGCONT)
    assert running.wait(60) == 0, running.story()
    assert running.told(2)["checkpoint"] is None
    (begun,) = [one for one in running.outcomes() if "refused" in one.found]
    told = begun.found["refused"]
    assert isinstance(told, dict)
    assert set(broken) <= set(told)
    assert all("other bytes" in told[name] for name in broken), told
    assert ended_as_undisturbed(running, 2, steps)
    assert "from the beginning" in running.err.read_text()


# no durable record, no action


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB for the job's folder. What the training itself writes to its output is elsewhere: to a full
    disk no program can print."""
    where = tmp_path / "state" / "full"
    where.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs here, so a full disk is not tried: {mounted.stderr.strip()}")
    (tmp_path / "attempt").mkdir()
    (where / "attempt").symlink_to(tmp_path / "attempt")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_stops_all_actions_and_leaves_the_training_alone(
    small_disk: Path, start: Callable[..., Running]
) -> None:
    running = start("full", *LIGHT, "--steps", "4000", "--every", "100000", config=HANG, policy=policy())
    running.until("100 known steps", lambda: running.step() >= 100)
    before = running.step()
    fill(small_disk / "ballast")
    stopped = running.rank(1)
    os.kill(stopped.pid, signal.SIGSTOP)
    running.until("a CRITICAL word", lambda: "[CRITICAL]" in running.err.read_text(), 30)
    running.until("words of the hang", lambda: "rank 1" in running.err.read_text(), 30)
    time.sleep(1)
    assert running.supervisor.poll() is None
    assert running.attempts() == [1]
    assert alive(stopped)
    os.kill(stopped.pid, signal.SIGCONT)
    (small_disk / "ballast").unlink()
    running.until("further steps", lambda: running.step() > before + 10, 20)
    assert alive(running.launcher())


def fill(file: Path) -> None:
    """Take all the room there is."""
    with file.open("wb", buffering=0) as out:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    out.write(b"\0" * size)
            except OSError:
                continue


# what people say


@pytest.mark.slow
def test_stop_all_before_a_fault_leaves_it_alone_until_actions_are_allowed_again(start: Callable[..., Running]) -> None:
    running = start("switched-off", *LIGHT, "--steps", "3000", config=HANG, policy=policy())
    until_published(running)
    running.until("100 known steps", lambda: running.step() >= 100)
    running.tell("stop-all", "--why", "we look at it ourselves")
    stopped = running.rank(1)
    os.kill(stopped.pid, signal.SIGSTOP)
    running.until("an end of the plan", lambda: running.outcomes(-1), 30)
    assert "switched off" in running.outcomes(-1)[0].reason
    assert alive(stopped)
    assert running.attempts() == [1]
    running.tell("stop-all", "--undo")
    running.until("a second attempt", lambda: running.attempts() == [1, 2], 30)
    assert not alive(stopped)


def test_stop_all_during_a_plan_ends_it_within_a_second(start: Callable[..., Running]) -> None:
    running = start("switched-off", *LIGHT, "--steps", "3000", policy=policy())
    until_published(running)
    kill_rank(running)
    running.until("a second attempt", lambda: running.attempts() == [1, 2], 30)
    (running.path / "stop-all").touch()
    said_s = time.monotonic()
    (end,) = running.until("an end of the plan", lambda: running.outcomes(-1), 10)
    assert time.monotonic() - said_s < 1.5  # 1 s, and our own looking
    assert end.result == "refused"
    assert "switched off" in end.reason
    running.until("steps of the second attempt", lambda: running.step(2) > 0)
    assert running.attempts() == [1, 2]


def waiting_plan(running: Running) -> str:
    """The plan that waits for a person: the first of its incident."""
    running.until("a plan that is written down", lambda: list(running.path.glob("durable-*.sqlite")), 10)
    return f"{running.notices()[0]['incident']['id']}/plan-1"


def test_a_plan_waits_for_approval_and_begins_with_it(start: Callable[..., Running]) -> None:
    steps = 60
    running = start("asks", *LIGHT, "--steps", str(steps), policy=policy("approve"))
    until_published(running)
    kill_rank(running)
    plan = waiting_plan(running)
    running.tell("approve", plan, "--minutes", "0", "--why", "too late")
    time.sleep(1.0)
    assert running.outcomes() == []
    assert running.attempts() == [1]
    running.tell("approve", plan, "--why", "go on")
    assert running.wait(30) == 0, running.story()
    assert running.attempts() == [1, 2]
    assert ended_as_undisturbed(running, 2, steps)
    assert [one.result for one in running.outcomes(-1)] == ["reached"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("approval", "denied", "result"),
    [pytest.param("30s", True, "refused", id="denied"), pytest.param("2s", False, "expired", id="nobody answers")],
)
def test_a_plan_that_is_not_approved_ends_without_having_done_anything(
    start: Callable[..., Running], approval: str, denied: bool, result: str
) -> None:
    running = start("asks", *LIGHT, "--steps", "3000", policy=policy("approve", approval=approval))
    running.until("steps", lambda: running.step() > 5)
    kill_rank(running)
    plan = waiting_plan(running)
    if denied:
        running.tell("deny", plan, "--why", "not now")
    assert running.wait(20) == 1, running.story()
    (end,) = running.outcomes()
    assert (end.plan, end.index, end.result) == (plan, -1, result)
    assert running.attempts() == [1]


def test_torchrun_that_restarts_by_itself_is_refused_where_we_would_too(tmp_path: Path) -> None:
    command = ["run", "--policy", "demo", "--state", str(tmp_path), "--", *TORCHRUN[:-1], "3", TRAIN]
    ran = subprocess.run([CLI, *command], capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == 2
    words = "trainwarden: torchrun --max-restarts 3: two would restart the job; give --max-restarts 0\n"
    assert ran.stderr == words
    assert list(tmp_path.iterdir()) == []
