"""What people tell a running supervisor: files in STATE/<job>/commands/, each taken up once and kept as taken.

Who may write there is who may write the job's folder: its user. The stop-all switch is a file that stands for itself
(app/repair.py): it works even while nobody reads commands.
"""

import json
import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainwarden.core.emit import Emitter
from trainwarden.core.model import Event, Frame, JobId, Json, Subject

VERBS = ("approve", "deny", "stop_all")
KEYS = ("plan", "who", "why", "expires_ns")
MAX_BYTES = 64 * 1024
WHY_MAX = 300
"""Characters of a refusal: garbage may be long."""


def write_command(folder: Path, verb: str, data: Mapping[str, Json]) -> Path:
    """Leave a command for the supervisor of the job. Raises OSError."""
    commands = folder / "commands"
    commands.mkdir(mode=0o700, exist_ok=True)
    file = commands / f"{time.time_ns()}-{os.getpid()}.json"
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps({"verb": verb, **data}))
    draft.rename(file)
    return file


class Commands:
    """Source of command.* events."""

    period_s = 0.2

    def __init__(self, folder: Path, job: JobId, *, start_ns: int) -> None:
        self.name = "commands"
        self._folder, self._job = folder / "commands", job
        self._emit = Emitter(self.name, job=job, start_ns=start_ns)
        self._taken: set[str] = set()
        """Names of files that could not be marked as taken."""

    def poll(self, now_ns: int) -> Iterable[Frame | Event]:
        """New commands, oldest first; what cannot be understood is told as blind."""
        try:
            found = sorted(path for path in self._folder.iterdir() if path.suffix == ".json")
        except OSError:
            return []
        files = [file for file in found if file.name not in self._taken]
        events = [self._read(file, now_ns) for file in files]
        for file in files:
            try:
                file.rename(file.with_suffix(".taken"))
            except OSError:
                self._taken.add(file.name)
        return events

    def _read(self, file: Path, now_ns: int) -> Event:
        job = Subject(kind="job", id=self._job)
        try:
            said = json.loads(_bytes_of(file))
            verb = said["verb"]
            data = {key: said[key] for key in KEYS}
            if verb not in VERBS:
                raise ValueError(f"verb {verb!r}")
            if not all(isinstance(data[key], str) for key in KEYS[:-1]) or not _is_time(data["expires_ns"]):
                raise ValueError(f"{', '.join(KEYS)}: expected three texts and a time, got {data!r}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"command {file.name} is not understood: {type(error).__name__} {error}"[:WHY_MAX]
            return self._emit("source.blind", Subject(kind="source", id=self.name), now_ns=now_ns, data={"why": why})
        return self._emit(f"command.{verb}", job, now_ns=now_ns, data=data)


def _bytes_of(file: Path) -> bytes:
    """What a regular file of a sane size holds. Raises OSError, ValueError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hold us up
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        content = os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return content


def _is_time(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
