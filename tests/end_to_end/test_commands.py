"""Commands that are not what we hope for: clear words, the command's own exit status, never a traceback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.end_to_end.running import CLI, Running

RECORDS = """
import sys
from trainwarden.collectors.rank import FORWARD, LOSS, attach
w = attach(clock="cpu")
assert not w.why_off, w.why_off
for step in range(40):
    w.begin(step); w.mark(FORWARD); w.value(LOSS, 1.0); w.end()
    import time; time.sleep(0.02)
print([p for p in sys.path if "site-packages" in p])
"""


def test_a_training_that_ends_at_once_is_told_as_such(start: Callable[..., Running]) -> None:
    running = start("quick", sys.executable, "-c", "pass")
    assert running.wait() == 0
    words = running.err.read_text()
    assert "is not torchrun" in words
    assert "no rank ever said hello" in words
    assert "exit status of the launcher: 0" in words
    assert running.notices() == []


def test_a_script_that_fails_without_the_collector_is_named_by_its_exit_status(start: Callable[..., Running]) -> None:
    running = start("failing", sys.executable, "-c", "import sys; print('last words'); sys.exit(7)")
    assert running.wait() == 7
    (opened,) = running.notices("process.failed", "opened")
    assert opened["incident"]["culprit"] == "job:failing"
    assert "exit" in opened["incident"]["reason"]
    assert "7" in opened["incident"]["reason"]
    assert "last words" in running.out.read_text()
    assert "Traceback" not in running.err.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        pytest.param(
            ["--", "no-such-launcher"], 2, "'no-such-launcher' is not on PATH", id="a command that is not there"
        ),
        pytest.param(
            ["--config", "absent.yaml", "--", "true"], 2, "absent.yaml", id="a settings file that is not there"
        ),
        pytest.param(["--job", "a/b", "--", "true"], 2, "--job: expected letters", id="a name that is no name"),
        pytest.param(
            ["--state", "/proc/x", "--", "true"], 2, "--state: cannot create", id="a folder that cannot be made"
        ),
    ],
)
def test_what_cannot_work_is_refused_in_words(tmp_path: Path, arguments: list[str], status: int, words: str) -> None:
    ran = subprocess.run(
        [CLI, "run", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=50, check=False
    )
    assert ran.returncode == status, ran.stderr
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_setting_that_is_wrong_names_key_value_and_what_is_allowed(start: Callable[..., Running]) -> None:
    running = start("wrong", "true", config="detectors:\n  hang:\n    floor: 4 parsecs\n")
    assert running.wait() == 2
    words = running.err.read_text()
    assert "detectors.hang.floor" in words
    assert "4 parsecs" in words
    assert not running.path.exists()


def test_ctrl_c_goes_to_the_training_and_is_no_incident(start: Callable[..., Running]) -> None:
    script = "import signal, sys, time\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(3))\nprint('up', flush=True)\n"
    running = start("stopped", sys.executable, "-c", script + "time.sleep(60)")
    running.until("the script", lambda: "up" in running.out.read_text())
    running.supervisor.send_signal(signal.SIGINT)
    assert running.wait() == 3
    assert running.notices() == []
    assert "SIGINT: passed on to the launcher" in running.err.read_text()


def test_collector_and_command_live_in_two_environments(
    start: Callable[..., Running], make_venv: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training's environment holds our wheel and nothing else; the command runs from ours. Nothing leaks over."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    training = make_venv() / "python"
    running = start("two-envs", str(training), "-c", RECORDS)
    assert running.wait() == 0, running.story()
    printed = running.out.read_text()
    assert str(training.parent.parent) in printed
    assert str(Path(sys.prefix)) not in printed
    assert "no rank ever said hello" not in running.err.read_text()


def test_the_launcher_s_environment_is_the_user_s(start: Callable[..., Running]) -> None:
    running = start("environment", sys.executable, "-c", "import os, json; print(json.dumps(dict(os.environ)))")
    assert running.wait() == 0
    theirs = json.loads(running.out.read_text().splitlines()[0])
    added = {name for name in theirs if os.environ.get(name) != theirs[name]}
    assert added <= {
        *("TRAINWARDEN_JOB", "TRAINWARDEN_NODE", "TRAINWARDEN_DIR", "TRAINWARDEN_ATTEMPT_FILE"),
        *("TORCHELASTIC_ERROR_FILE", "LC_CTYPE"),
    }
