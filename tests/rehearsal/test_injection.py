import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from trainwarden.core.errors import ConfigError
from trainwarden.rehearsal.faults import Argument, Fault, read_strikes, to_json
from trainwarden.rehearsal.injection import Faults, compute

RANK_1 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TRAINWARDEN_NODE": "n1"}


def environment(*faults: Fault, **more: object) -> dict[str, str]:
    return {**RANK_1, "TRAINWARDEN_FAULTS": to_json(faults), **{key: str(value) for key, value in more.items()}}


def on_rank_1(*faults: Fault, **more: object) -> Faults:
    return Faults.from_environment(environment(*faults, **more))


def slow(factor: float, at_step: int = 1, **more: Argument) -> Fault:
    return Fault(kind="slow_rank", rank=1, at_step=at_step, args={"factor": factor, **more})


def forked(action: Callable[[], object], options: int = 0) -> tuple[int, int]:
    """Pid and wait status of a child that does this and ends with 99."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(99)
    return os.waitpid(pid, options)


def test_without_the_variable_nothing_happens() -> None:
    faults = Faults.from_environment(RANK_1)
    faults.before_step(1)
    with faults.slowed("forward"):
        faults.in_phase("checkpoint")
    assert faults.batch(35, 1.0) == 1.0


def test_faults_of_others_do_not_happen_here() -> None:
    faults = on_rank_1(
        Fault(kind="raise", rank=0),
        Fault(kind="process.stop", rank=1),
        Fault(kind="poison_batch", rank=2, args={"batch": 3}),
        Fault(kind="slow_slot", slot=2, args={"factor": 1000}),
    )
    faults.before_step(1)
    with faults.slowed("forward"):
        assert faults.batch(3, 1.0) == 1.0


def test_a_poisoned_batch_is_nan_whenever_it_is_used() -> None:
    faults = on_rank_1(Fault(kind="poison_batch", args={"batch": 35}))
    assert [math.isnan(faults.batch(batch, 1.0)) for batch in (34, 35, 36, 35)] == [False, True, False, True]


def test_a_slow_slot_stays_slow_whoever_sits_there(tmp_path: Path) -> None:
    attempt = tmp_path / "attempt.json"
    attempt.write_text(json.dumps({"slots": {"1": "n1:4"}}))
    fault = Fault(kind="slow_slot", slot=4, args={"factor": 3})
    moved = on_rank_1(fault, TRAINWARDEN_ATTEMPT_FILE=attempt)
    assert cpu_s_of_two(moved, "forward") > 0.035
    assert cpu_s_of_two(on_rank_1(fault), "forward") < 0.03


def cpu_s_of_two(faults: Faults, phase: str) -> float:
    """CPU time of two phases of 10 ms each, in step 1."""
    faults.before_step(1)
    start_s = time.thread_time()
    for _ in range(2):
        with faults.slowed("forward" if phase == "forward" else "backward"):
            compute(0.01)
    return time.thread_time() - start_s


@pytest.mark.parametrize(
    ("fault", "cpu_s"),
    [
        pytest.param(slow(3), 0.04, id="computes the second one three times"),
        pytest.param(slow(3, where="forward"), 0.04, id="slow in this phase"),
        pytest.param(slow(3, where="backward"), 0.02, id="slow in the other"),
        pytest.param(slow(3, how="sleep"), 0.02, id="sleeping costs no CPU"),
        pytest.param(slow(3, at_step=2), 0.02, id="not yet"),
        pytest.param(slow(1), 0.02, id="a factor of one"),
    ],
)
def test_a_slow_rank_does_so_much_more_work(fault: Fault, cpu_s: float) -> None:
    assert cpu_s <= cpu_s_of_two(on_rank_1(fault), "forward") < cpu_s + 0.01


def test_a_sleeping_rank_takes_longer_all_the_same() -> None:
    faults = on_rank_1(slow(6, how="sleep"))
    start_s = time.monotonic()
    cpu_s_of_two(faults, "forward")
    assert time.monotonic() - start_s >= 0.07


def test_slowness_does_not_feed_on_itself() -> None:
    faults = on_rank_1(slow(2))
    faults.before_step(1)
    start_s = time.thread_time()
    for _ in range(8):
        with faults.slowed("forward"):
            compute(0.005)
    assert time.thread_time() - start_s < 0.1


@pytest.mark.parametrize("phase", ["checkpoint", "eval"])
def test_the_first_phase_after_the_fault_is_long(phase: str, tmp_path: Path) -> None:
    fault = Fault(kind=f"slow_{phase}", at_step=2, args={"seconds": 0.1})
    faults = on_rank_1(fault, TRAINWARDEN_FAULTS_LOG=tmp_path / "strikes")
    start_s = time.monotonic()
    for step in (1, 3, 5):
        faults.before_step(step)
        faults.in_phase("checkpoint" if phase == "checkpoint" else "eval")
    assert time.monotonic() - start_s >= 0.1
    assert [strike.step for strike in read_strikes(tmp_path / "strikes")] == [3]


def test_a_rank_raises_at_its_step() -> None:
    faults = on_rank_1(Fault(kind="raise", at_step=2))
    faults.before_step(1)
    with pytest.raises(RuntimeError, match="rehearsed failure at step 2"):
        faults.before_step(2)


def test_a_rank_ends_with_a_code() -> None:
    _, status = forked(lambda: on_rank_1(Fault(kind="exit_code", args={"code": 7})).before_step(1))
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_rank_kills_itself() -> None:
    _, status = forked(lambda: on_rank_1(Fault(kind="kill_self")).before_step(1))
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_rank_stops_itself() -> None:
    pid, status = forked(lambda: on_rank_1(Fault(kind="stop_self")).before_step(1), os.WUNTRACED)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status)


def test_a_stalled_rank_shows_where_it_stalls() -> None:
    def look(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name == "load_from_a_dead_disk":
                os._exit(3)
            frame = frame.f_back

    def stall() -> None:
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        on_rank_1(Fault(kind="stall_python")).before_step(1)

    _, status = forked(stall)
    assert os.waitstatus_to_exitcode(status) == 3


def test_a_strike_is_logged_once_with_its_step(tmp_path: Path) -> None:
    log = tmp_path / "strikes"
    faults = on_rank_1(Fault(kind="raise", rank=0), slow(1.5, at_step=2), TRAINWARDEN_FAULTS_LOG=log)
    for step in (1, 2, 3):
        faults.before_step(step)
        with faults.slowed("forward"), faults.slowed("backward"):
            pass
    assert [(strike.fault, strike.step, strike.rank) for strike in read_strikes(log)] == [(1, 2, 1)]


@pytest.mark.parametrize(
    ("fault", "again"),
    [
        pytest.param(Fault(kind="raise"), False, id="what ends a job strikes one incarnation"),
        pytest.param(Fault(kind="poison_batch", args={"batch": 1}), True, id="a batch stays poisoned"),
    ],
)
def test_a_restarted_training(fault: Fault, again: bool, tmp_path: Path) -> None:
    def strikes() -> bool:
        faults = on_rank_1(fault, TRAINWARDEN_FAULTS_LOG=tmp_path / "strikes")
        try:
            faults.before_step(1)
        except RuntimeError:
            return True
        return math.isnan(faults.batch(1, 1.0))

    assert [strikes(), strikes()] == [True, again]


def test_a_wrong_variable_is_refused_aloud() -> None:
    with pytest.raises(ConfigError, match="TRAINWARDEN_FAULTS: not JSON"):
        Faults.from_environment({**RANK_1, "TRAINWARDEN_FAULTS": "[{"})
