"""The recorder that is switched off, closed, or does not know who it is; what it needs and what it offers."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.collectors.world import World, compute, poll, rows

import trainwarden.collectors.rank as tw
from trainwarden.collectors.rank import BACKWARD, FORWARD, LEARNING_RATE, LOSS, WAIT


def use_everything(w: tw.Rank) -> None:
    for step in (1, 1, 2):
        w.begin(step, batch=3)
        w.mark(FORWARD, tokens=3, contains_comm=True)
        with w.span(BACKWARD, mb=2):
            w.mark(WAIT)
        w.phase(tw.EVAL, expect_s=3)
        w.value(LOSS, 1.0)
        w.value("named", 1.0)
        w.value(LEARNING_RATE, math.nan)
        w.note("noted")
        w.end()
    w.side().value("x", 1)
    w.side().note("x")
    w.close()
    w.close()


def test_switched_off_it_leaves_no_trace(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINWARDEN", "0")
    w = world.attach(rank=99, world_size=1)
    use_everything(w)
    assert (w.why_off, w.attempt) == ("closed", None)
    assert [*world.root.iterdir()] == []
    assert capfd.readouterr().err == ""


def test_after_close_nothing_is_written(world: World) -> None:
    w = world.attach()
    w.begin(1)
    w.end()
    w.close()
    (path,) = world.rings.iterdir()
    before = path.read_bytes()
    use_everything(w)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        pytest.param({"RANK": "abc"}, "RANK: expected a whole number", id="a rank that is no number"),
        pytest.param({"RANK": "4", "WORLD_SIZE": "4"}, "RANK: expected", id="a rank beyond the world"),
        pytest.param({"TRAINWARDEN_ATTEMPT_FILE": "/no/such"}, "cannot be read", id="no attempt file"),
    ],
)
def test_who_does_not_know_itself_trains_without_us(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    environment: dict[str, str],
    said: str,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    for _ in range(2):
        w = tw.attach()
        assert said in w.why_off
        use_everything(w)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("trainwarden: no recording of this rank: ")
    assert said in line


def test_the_public_names() -> None:
    phases = {"BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "CHECKPOINT", "COMPILE", "DATA", "EVAL", "FORWARD"}
    phases |= {"OPTIMIZER", "OTHER", "WAIT"}
    values = {"LOSS", "GRAD_NORM", "LEARNING_RATE"}
    types = {"Agree", "Feature", "Phase", "Rank", "Request", "Scope", "Side"}
    assert set(tw.__all__) == phases | values | types | {"attach", "watch", "watch_gradients"}
    assert all(hasattr(tw, name) for name in tw.__all__)
    public = {name for name in dir(tw.Rank) if not name.startswith("_")}
    calls = {"begin", "mark", "value", "end", "span", "phase", "note", "side", "close", "let_go", "committed"}
    assert public == calls | {"attempt", "why_off"}


def test_a_bare_interpreter_will_do() -> None:
    """Neither site-packages nor the environment: only our two folders and the standard library."""
    root = Path(__file__).resolve().parents[2]
    program = f"""
import sys
sys.path += [{str(root / "core")!r}, {str(root / "collectors")!r}]
import trainwarden.core.records, trainwarden.core.identity
import trainwarden.collectors.rank, trainwarden.collectors.rank.hooks.torch
print(sorted(name for name in sys.modules if name.split(".")[0] in ("numpy", "torch", "pydantic", "yaml")))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_of_its_own_incarnations_a_rank_leaves_the_last_one_and_its_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ring takes 600 kB of memory for as long as it lies there."""
    other = world.attach(1, 2)
    for attempt in range(4):
        (tmp_path / "attempt.json").write_text(f'{{"attempt": {attempt}, "slots": {{}}}}')
        monkeypatch.setenv("TRAINWARDEN_ATTEMPT_FILE", str(tmp_path / "attempt.json"))
        w = world.attach(0, 2)
        use_everything(w)
    assert other.why_off == ""
    left = sorted(path.name for path in world.rings.iterdir())
    assert left == [
        *("rank-0-2-0.ring", "rank-0-2-0.side.ring", "rank-0-3-0.ring", "rank-0-3-0.side.ring", "rank-1-0-0.ring")
    ]
    hellos = {path.name.rsplit("-", 1)[0] for path in (world.root / "job" / "hello").glob("rank-*")}
    assert hellos == {"rank-0-2-0", "rank-0-3-0", "rank-1-0-0"}


def test_who_closes_our_files_leaves_steps_without_phases(world: World) -> None:
    """Daemons and sandboxes close all descriptors: then there is no CPU clock any more, and nothing worse."""
    w, source = world.attach(clock="cpu"), world.source()
    (fd,) = (int(name) for name in os.listdir("/proc/self/fd") if "schedstat" in _target(name))
    for step in range(4):
        if step == 1:
            os.close(fd)
        w.begin(step)
        w.mark(FORWARD)
        compute(0.0 if step else 0.03)  # what waits for a CPU longer than it took counts as nothing
        w.value(LOSS, 2.5)
        w.end()
    values = {int(row["step"]): row["values"][[0, 2, 7, 11]] for row in rows(poll(source), "step")}
    assert all(not math.isnan(value) for value in values[0].tolist())
    for step in (2, 3):
        step_s, forward_s, cpu_s, loss = values[step].tolist()
        assert step_s > 0
        assert loss == 2.5
        assert math.isnan(forward_s)
        assert math.isnan(cpu_s)


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""
