"""The keeper: a small process that starts the launcher and records how it ended. Standard library only.

It stands between supervisor and launcher so that the supervisor can die and come back while the training goes on: the
launcher's output goes to files (a pipe would kill the training by EPIPE when its reader dies), and its exit status is
waited for by a process that outlives the supervisor. As a child subreaper it also inherits, and so sees the exit status
of, ranks whose launcher died before them. Run as `python -m trainwarden.app.keeper ATTEMPT_FOLDER`.

    spec.json      in:  {command, cwd, env}           env: variables added to the keeper's own environment
    keeper.json    out: {pid, start_time, launcher_pid, launcher_start_time, started_ns}
    keeper.lock    held by the one keeper
    exits.jsonl    out: {pid, launcher, code, signal, t_ns} for each process waited for; a line is whole or absent
"""

import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

from trainwarden.core.child import spawn
from trainwarden.core.errors import ChildError
from trainwarden.core.process import read_stat, say_status

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)."""

CANNOT_START = 127
"""What a shell says of a command it cannot start."""


def keep(folder: Path) -> int:
    """Start the launcher described in the folder and wait for it and all it leaves behind; once an attempt."""
    if not _is_only_one(folder):
        return 0
    spec = json.loads((folder / "spec.json").read_text())
    _become_subreaper()
    env = {**os.environ, **spec["env"]}
    with (folder / "out.log").open("ab") as out, (folder / "err.log").open("ab") as err:
        try:
            launcher = spawn(spec["command"], out=out, err=err, env=env, cwd=Path(spec["cwd"]))
        except ChildError as error:
            err.write(f"trainwarden: {error}\n".encode())
            _record(folder, pid=0, launcher=True, code=CANNOT_START, number=None)
            return CANNOT_START
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # after the start: an ignored signal is inherited
        signal.signal(number, signal.SIG_IGN)
    _say_started(folder, launcher.pid)
    return _wait_for_all(folder, launcher.pid)


def _is_only_one(folder: Path) -> bool:
    """A supervisor that died while it started a keeper leaves its successor in doubt whether there is one."""
    lock = os.open(folder / "keeper.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # held until we end
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return not any((folder / name).exists() for name in ("keeper.json", "exits.jsonl"))


def _wait_for_all(folder: Path, launcher: int) -> int:
    result = 0
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return result
        code, number = say_status(status)
        _record(folder, pid=pid, launcher=pid == launcher, code=code, number=number)
        if pid == launcher:
            result = code if code is not None else 128 + (number or 0)


def _become_subreaper() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _say_started(folder: Path, launcher: int) -> None:
    own, its = read_stat(os.getpid()), read_stat(launcher)
    record = {
        "pid": os.getpid(),
        "start_time": own.start_time if own else 0,
        "launcher_pid": launcher,
        "launcher_start_time": its.start_time if its else 0,
        "started_ns": time.time_ns(),
    }
    draft = folder / "keeper.json.new"
    draft.write_text(json.dumps(record))
    draft.rename(folder / "keeper.json")


def _record(folder: Path, *, pid: int, launcher: bool, code: int | None, number: int | None) -> None:
    line = json.dumps({"pid": pid, "launcher": launcher, "code": code, "signal": number, "t_ns": time.time_ns()})
    with (folder / "exits.jsonl").open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1])))
