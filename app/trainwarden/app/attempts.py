"""Issues the attempts of one job on this host: folder, keeper, and what the ranks are told."""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwarden.app.folders import AttemptFolder, JobFolder, Keeper
from trainwarden.core.child import spawn
from trainwarden.core.errors import ConfigError
from trainwarden.core.identity import choose_root
from trainwarden.core.model import Json
from trainwarden.core.records import epoch_of
from trainwarden.remediation.checkpoints.folder import CheckpointFolder

KEEPER_START_S = 10.0
"""A Python that starts with a cold disk cache takes a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a new attempt starts from."""

    term: int
    checkpoint: str | None = None
    """Path of a published checkpoint; None: from the beginning."""
    skip: tuple[tuple[int, int], ...] = ()
    """Ranges of batches that are left out, inclusive."""
    without: tuple[str, ...] = ()
    """Slots that are left out."""


class Attempts:
    """The attempts of one job; only its owner may issue one."""

    def __init__(
        self,
        folder: JobFolder,
        *,
        command: Sequence[str],
        env: Mapping[str, str],
        node: str,
        slots: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._command, self._env, self._node, self._say = folder, tuple(command), env, node, say
        self._slots = tuple(f"{node}:{index}" for index in range(slots or 0))
        self._issued: set[int] = set()
        """Attempts whose keeper this process starts."""

    def launch(self, told: Told) -> AttemptFolder:
        """Make the next attempt and start its keeper. Raises ChildError."""
        root = self._ring_root()
        env = {**self._env, "TRAINWARDEN_JOB": self._folder.job, "TRAINWARDEN_NODE": self._node}
        if root is not None:
            env["TRAINWARDEN_DIR"] = str(root)
            self._clear(root)
        spec: dict[str, Json] = {"command": list(self._command), "cwd": os.getcwd(), "env": env}
        number = self._folder.next_number
        self._issued.add(number)
        attempt = self._folder.new_attempt(spec, self._in_json(told, number))
        self._keep(attempt)
        return attempt

    def keeper(self, attempt: AttemptFolder) -> Keeper | None:
        """Its keeper, waited for; None: the launcher could not be started. Raises ConfigError if there is no keeper.

        Whoever issued the attempt may have been killed before it started the keeper; of several only one keeps it.
        """
        if attempt.number not in self._issued and attempt.keeper() is None:
            self._keep(attempt)
        end_s = time.monotonic() + KEEPER_START_S
        while time.monotonic() < end_s:
            keeper = attempt.keeper()
            if keeper is not None or (attempt.path / "exits.jsonl").exists():
                return keeper
            time.sleep(0.01)
        log = (attempt.path / "keeper.log").read_text(errors="replace")[-2000:]
        raise ConfigError(f"the keeper of attempt {attempt.number} did not start; its log says:\n{log}")

    def forget_rings(self, attempt: AttemptFolder) -> None:
        """Give back the memory of an attempt's rings; the recording has what was in them."""
        root = attempt.ring_root
        if root is not None:
            self._clear(root)

    @property
    def slots(self) -> tuple[str, ...]:
        """All places on this host, as far as settings name them."""
        return self._slots

    def _keep(self, attempt: AttemptFolder) -> None:
        if attempt.ring_root is not None:
            self._folder.link_rings(attempt.ring_root / self._folder.job)
        with (attempt.path / "keeper.log").open("ab") as log:
            spawn([sys.executable, "-E", "-P", "-m", "trainwarden.app.keeper", str(attempt.path)], out=log, err=log)

    def _in_json(self, told: Told, number: int) -> Mapping[str, Json]:
        left = [slot for slot in self._slots if slot not in told.without]
        return {
            "term": told.term,
            "checkpoint": told.checkpoint,
            "skip": [list(batches) for batches in told.skip],
            "without": list(told.without),
            "slots": {str(rank): slot for rank, slot in enumerate(left)},
            "staging": str(CheckpointFolder(self._folder.path / "checkpoints").staging(epoch_of(number, 0, 0))),
        }

    def _ring_root(self) -> Path | None:
        """The tmpfs folder of this STATE: a job of the same name below another STATE is another job."""
        root, why_not = choose_root()
        if root is None:
            self._say(f"warning: there is no tmpfs for the ranks' rings, so only exits are watched: {why_not}")
            return None
        return root / f"state-{hashlib.sha256(bytes(self._folder.path.parent)).hexdigest()[:12]}"

    def _clear(self, root: Path) -> None:
        # rings of attempts that are over hold memory, and would be taken for those of the next attempt
        shutil.rmtree(root / self._folder.job, ignore_errors=True)
