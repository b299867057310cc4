"""A repair on a real torchrun job that goes on through three deaths of its supervisor."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.end_to_end.running import TORCHRUN, TRAIN, Running

from trainwarden.core.model import Event

STEPS = "60"


def killed_and_started_again(running: Running) -> None:
    """The supervisor dies where it stands; another takes up its work."""
    running.supervisor.kill()
    running.supervisor.wait()
    running.supervisor = running.start()


def result(file: Path) -> dict[str, object]:
    """What the training wrote when it was through."""
    found: dict[str, object] = json.loads(file.read_text())
    return found


@pytest.mark.torchrun(launches=3)
@pytest.mark.timeout(240)
def test_a_plan_goes_on_through_three_deaths_of_its_supervisor(start: Callable[..., Running], tmp_path: Path) -> None:
    training = [*TORCHRUN, TRAIN, "--steps", STEPS, "--checkpoint-every", "20", "--out"]
    undisturbed = start("undisturbed", *training, str(tmp_path / "undisturbed.json"))
    assert undisturbed.wait(90) == 0, undisturbed.story()

    running = start("killed", *training, str(tmp_path / "killed.json"), policy="demo")
    running.until("a published checkpoint", running.published)
    running.until("step 30", lambda: running.step() >= 30)
    os.kill(running.rank(3).pid, signal.SIGSTOP)  # torchrun waits 30 s for this one, so `stopped` is left to the plan
    os.kill(running.rank(2).pid, signal.SIGKILL)
    running.until("a stop by a plan", lambda: stopping(running), 60)
    killed_and_started_again(running)
    running.until("a second attempt", lambda: running.attempts() == [1, 2], 40)
    killed_and_started_again(running)
    running.until("steps of the second attempt", lambda: running.step(2) > 0, 40)
    assert running.outcomes(-1) == []
    killed_and_started_again(running)

    assert running.wait(90) == 0, running.story()
    assert running.attempts() == [1, 2]
    (end,) = running.outcomes(-1)
    assert end.result == "reached", end
    assert str(running.told(2)["checkpoint"]).split("/")[-1].startswith("step-20-"), running.told(2)
    assert result(tmp_path / "killed.json") == result(tmp_path / "undisturbed.json")
    assert running.err.read_text().count("watching again") == 3


def stopping(running: Running) -> bool:
    """Whether a plan has said that it stops the attempt."""
    events = [one for one in running.journal() if isinstance(one, Event) and one.kind == "attempt.stopping"]
    return any(str(one.data["by"]).startswith("plan") for one in events)
