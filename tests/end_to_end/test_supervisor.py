"""The whole line on a real torchrun job: real kills, real stops, a supervisor that dies itself."""

import os
import signal
import time
from collections.abc import Callable

import pytest
from tests.end_to_end.running import TORCHRUN, TRAIN, Running

from trainwarden.app.store import Store
from trainwarden.app.wiring import build_line, load_settings
from trainwarden.core.codec import loads
from trainwarden.core.model import Finding, JobId
from trainwarden.core.process import alive
from trainwarden.core.recording import read

PLAIN = ("--checkpoint-every", "9999", "--eval-every", "9999")  # no legal pause that a stop could fall into
FLOOR = "detectors:\n  hang:\n    floor: 4s\n"


@pytest.mark.torchrun
@pytest.mark.timeout(180)
def test_a_killed_rank_is_named_by_a_supervisor_that_was_killed_itself(start: Callable[..., Running]) -> None:
    running = start("killed", *TORCHRUN, TRAIN, "--steps", "400", *PLAIN)
    running.until("step 10", lambda: running.step() >= 10)
    running.supervisor.kill()
    running.supervisor.wait()
    before = running.step()
    running.until("further steps without a supervisor", lambda: running.step() >= before + 10)
    running.supervisor = running.start()
    running.until("words of re-attaching", lambda: "watching again" in running.err.read_text())
    second = running.start()
    assert second.wait(30) == 3
    assert f"process {running.supervisor.pid}" in running.err.read_text()
    victim = running.rank(2)
    killed_s = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    (notice,) = running.until("notice", lambda: running.notices("process.killed", "opened"))
    incident = notice["incident"]
    assert incident["culprit"] == "rank:2"
    assert incident["tier"] == "ERROR"
    assert incident["onset_ns"] / 1e9 == pytest.approx(killed_s, abs=1.0)
    assert running.wait() == 1  # torchrun's own exit status
    assert [n["incident"]["id"] for n in running.notices(change="opened")] == [incident["id"]], running.story()


@pytest.mark.torchrun
@pytest.mark.timeout(180)
def test_a_stopped_rank_then_a_killed_launcher(start: Callable[..., Running]) -> None:
    running = start("stopped", *TORCHRUN, TRAIN, "--steps", "4000", *PLAIN, config=FLOOR)
    running.until("20 known steps", lambda: running.step() >= 40)
    stopped = running.rank(1)
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped_s = time.time()
    (notice,) = running.until("notice", lambda: running.notices("rank.hung", "opened"))
    assert time.time() - stopped_s < 4 + 2 + 2  # budget, the goal's 2 s, and what a loaded machine adds to both
    # at first its neighbour may be as suspect: gloo's ring can leave it without the stopped rank's last chunk
    assert "rank:1" in {suspect for suspect, _ in notice["incident"]["findings"][0]["suspects"]}
    certain = running.until(
        "the stopped state in words",
        lambda: [n for n in running.notices("rank.hung") if "stopped" in n["incident"]["reason"]],
    )
    assert certain[0]["incident"]["culprit"] == "rank:1"
    os.kill(stopped.pid, signal.SIGCONT)
    running.until("resolution", lambda: running.notices("rank.hung", "resolved"))
    launcher = running.launcher()
    os.kill(launcher.pid, signal.SIGKILL)
    (killed,) = running.until("notice", lambda: running.notices("process.killed", "opened"))
    assert killed["incident"]["culprit"] == "job:stopped"
    assert "launcher" in killed["incident"]["reason"]
    for rank in range(4):
        process = running.rank(rank)
        if alive(process):
            os.kill(process.pid, signal.SIGKILL)
    assert running.wait() == 128 + signal.SIGKILL
    assert replayed(running) == journalled(running)


def replayed(running: Running) -> list[Finding]:
    """The findings of a fresh line fed with the recording."""
    line = build_line(load_settings(running.folder / "config.yaml"), JobId(running.job))
    findings = [finding for item in read(running.path / "frames") for finding in line.feed(item)]
    return findings + line.finish()


def journalled(running: Running) -> list[Finding]:
    """The findings that were acted on while it happened."""
    store = Store(running.path / "journal.sqlite")
    things = [loads(row.text) for row in store.tail()]
    store.close()
    return [thing for thing in things if isinstance(thing, Finding)]
