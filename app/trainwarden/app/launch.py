"""What can be said about a launch command before it runs, in words for the person who typed it."""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shutil import which

from trainwarden.core.errors import ConfigError

TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def check_command(command: Sequence[str]) -> None:
    """Raise ConfigError if the command cannot be started at all."""
    if not command:
        raise ConfigError("no command: trainwarden run [--job ID] [--config FILE] -- torchrun ... train.py ...")
    program = command[0]
    if which(program) is None:
        where = "is not an executable file" if "/" in program else "is not on PATH"
        raise ConfigError(f"command: {program!r} {where}; give the launcher as you would on the shell")


def is_torchrun(command: Sequence[str]) -> bool:
    """Whether the command is torchrun, by its name or as a module of Python.

    >>> is_torchrun(["python", "-m", "torch.distributed.run", "train.py"]), is_torchrun(["python", "train.py"])
    (True, False)
    """
    if Path(command[0]).name == "torchrun":
        return True
    return any(flag == "-m" and name in TORCHRUN_MODULES for flag, name in pairwise(command))


def warnings(command: Sequence[str], environment: Mapping[str, str] = os.environ, pid: int | None = None) -> list[str]:
    """What a person should know before the training starts; empty is the normal case."""
    found = []
    if (os.getpid() if pid is None else pid) == 1:
        found.append(
            "trainwarden is PID 1 of its container: when it ends, the kernel ends the training too; "
            "start it beside the launcher or under an init (docker run --init)"
        )
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        found.append(
            f"trainwarden runs as a Slurm task (SLURM_PROCID={environment['SLURM_PROCID']}): Slurm ends the whole step "
            "when it ends; start `trainwarden run` once a node in the batch script, not by srun"
        )
    if not is_torchrun(command):
        found.append(
            f"{Path(command[0]).name} is not torchrun: there is no failure table to read, so causes come from exit "
            "statuses alone; ranks are seen if the script calls trainwarden.collectors.rank.attach()"
        )
    return found


def check_restarts(command: Sequence[str]) -> None:
    """Raise ConfigError if the launcher restarts ranks by itself: exactly one may do it, and the policy says we act.

    >>> check_restarts(["torchrun", "--max-restarts=3", "train.py"])
    Traceback (most recent call last):
    trainwarden.core.errors.ConfigError: torchrun --max-restarts 3: two would restart the job; give --max-restarts 0
    """
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--max") else [word])]
    for flag, value in pairwise(words):
        if flag in ("--max-restarts", "--max_restarts") and value != "0":
            raise ConfigError(f"torchrun --max-restarts {value}: two would restart the job; give --max-restarts 0")
