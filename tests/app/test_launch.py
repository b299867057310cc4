"""What is said about a command before it starts."""

import pytest

from trainwarden.app.launch import check_command, is_torchrun, warnings
from trainwarden.core.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param([], "no command: trainwarden run", id="nothing"),
        pytest.param(["no-such-launcher"], "'no-such-launcher' is not on PATH", id="not on PATH"),
        pytest.param(["/etc/passwd"], "is not an executable file", id="not executable"),
    ],
)
def test_a_command_that_cannot_start_is_refused(command: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_command(command)


@pytest.mark.parametrize(
    ("command", "torchrun"),
    [
        (["torchrun", "train.py"], True),
        (["/opt/env/bin/torchrun", "--nproc-per-node", "4", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["python", "train.py"], False),
        (["python", "-m", "pytest"], False),
    ],
)
def test_torchrun_is_known_by_name_or_module(command: list[str], torchrun: bool) -> None:
    assert is_torchrun(command) is torchrun


@pytest.mark.parametrize(
    ("environment", "pid", "words"),
    [
        pytest.param({}, 7, [], id="the normal case"),
        pytest.param({}, 1, ["PID 1"], id="first process of a container"),
        pytest.param({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, 7, ["SLURM_PROCID=3"], id="a Slurm task"),
        pytest.param({"SLURM_JOB_ID": "9"}, 7, [], id="a Slurm batch script is fine"),
    ],
)
def test_surroundings_that_bite_are_said(environment: dict[str, str], pid: int, words: list[str]) -> None:
    found = warnings(["torchrun", "t.py"], environment, pid)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
