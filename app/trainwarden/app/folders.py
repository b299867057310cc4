"""Where a job's things stand: STATE/<job>/ on this node's own disk, and the ranks' rings on a tmpfs.

attempt/<n>/      spec.json, attempt.json (read by the ranks), out.log, err.log, keeper.json, exits.jsonl, ended.json
rings, hello      links to the tmpfs
frames/           the recording
journal.sqlite    decisions, and who owns the job
notices.jsonl     what was said
story.jsonl       what was decided: revisions of incidents, plans, outcomes
metrics.json      counters, for the next supervisor
report.html       made by `trainwarden report`

Beside the jobs: STATE/_targets/<job>.json, where the metrics of each are.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwarden.core.errors import ConfigError
from trainwarden.core.model import JobId, Json
from trainwarden.core.process import ProcessId

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


def state_folder(given: Path | None) -> Path:
    """STATE: the argument, else $TRAINWARDEN_STATE, else trainwarden below $XDG_STATE_HOME or ~/.local/state."""
    if given is not None:
        return given.absolute()
    if named := os.environ.get("TRAINWARDEN_STATE"):
        return Path(named).absolute()
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "trainwarden"


def choose_job(given: str | None, command: list[str], state: Path) -> JobId:
    """--job, else the Slurm job id, else SCRIPT-n with n the next free number below STATE. Raises ConfigError."""
    if given is not None:
        if not _NAME.match(given):
            raise ConfigError(f"--job: expected letters, digits, '.', '_', '-' (at most 64), got {given!r}")
        return JobId(given)
    if slurm := os.environ.get("SLURM_JOB_ID"):
        return JobId(f"slurm-{slurm}")
    script = next((Path(word).stem for word in command if word.endswith(".py")), Path(command[0]).stem)
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script).lstrip("._-")[:48] or "job"
    number = 1
    while (state / f"{stem}-{number}").exists():
        number += 1
    return JobId(f"{stem}-{number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """What keeper.json says."""

    keeper: ProcessId
    launcher: ProcessId
    started_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFolder:
    """attempt/<n>/."""

    path: Path
    number: int

    @property
    def attempt_file(self) -> Path:
        """What the ranks of this attempt must know."""
        return self.path / "attempt.json"

    @property
    def ended(self) -> bool:
        """Whether a supervisor saw this attempt to its end."""
        return (self.path / "ended.json").exists()

    @property
    def ring_root(self) -> Path | None:
        """Where the ranks of this attempt were told to put their rings; None: there was no tmpfs."""
        named = json.loads((self.path / "spec.json").read_text())["env"].get("TRAINWARDEN_DIR")
        return None if named is None else Path(named)

    def told(self) -> Mapping[str, Any]:
        """What the ranks of this attempt were told; written by us."""
        told: Mapping[str, Any] = json.loads(self.attempt_file.read_text())
        return told

    def keeper(self) -> Keeper | None:
        """Who keeps it; None: the keeper has not started the launcher (yet)."""
        try:
            told = json.loads((self.path / "keeper.json").read_text())
        except (OSError, ValueError):
            return None
        return Keeper(
            keeper=ProcessId(pid=told["pid"], start_time=told["start_time"]),
            launcher=ProcessId(pid=told["launcher_pid"], start_time=told["launcher_start_time"]),
            started_ns=told["started_ns"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """STATE/<job>/."""

    path: Path
    job: JobId

    @classmethod
    def make(cls, state: Path, job: JobId) -> "JobFolder":
        """Create it, for this user only. Raises ConfigError where it cannot be written."""
        path = state / job
        try:
            for below in ("attempt", "frames", "evidence"):
                (path / below).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--state: cannot create {path}: {error.strerror}; name a folder on a local disk"
            ) from error
        return cls(path=path, job=job)

    def attempt(self, number: int) -> AttemptFolder:
        """One attempt's folder, whether it exists or not."""
        return AttemptFolder(path=self.path / "attempt" / str(number), number=number)

    def newest_attempt(self) -> AttemptFolder | None:
        """The attempt with the largest number, or None."""
        numbers = [int(entry.name) for entry in (self.path / "attempt").iterdir() if entry.name.isdigit()]
        return self.attempt(max(numbers)) if numbers else None

    @property
    def next_number(self) -> int:
        """The number that the next attempt will have."""
        newest = self.newest_attempt()
        return 1 if newest is None else newest.number + 1

    def new_attempt(self, spec: Mapping[str, Json], told: Mapping[str, Json]) -> AttemptFolder:
        """Make the next attempt's folder: `spec` for the keeper (env gets the attempt file), `told` for the ranks."""
        number = self.next_number
        attempt = self.attempt(number)
        draft = Path(tempfile.mkdtemp(dir=self.path / "attempt", prefix="new-"))
        (draft / "attempt.json").write_text(json.dumps({"attempt": number, **told}))
        env = {**_mapping(spec["env"]), "TRAINWARDEN_ATTEMPT_FILE": str(attempt.attempt_file)}
        env.setdefault("TORCHELASTIC_ERROR_FILE", str(attempt.path / "error.json"))
        (draft / "spec.json").write_text(json.dumps({**spec, "env": env}))
        draft.rename(attempt.path)
        return attempt

    def link_rings(self, tmpfs: Path) -> None:
        """Let `rings` and `hello` point to the job's folders on the tmpfs."""
        for name in ("rings", "hello"):
            link = self.path / name
            link.unlink(missing_ok=True)
            link.symlink_to(tmpfs / name)


def _mapping(value: Json) -> Mapping[str, Json]:
    assert isinstance(value, Mapping)
    return value
