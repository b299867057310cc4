"""A folder of flight-recorder dumps, one a rank, as a source: analysing it is replaying it through the line."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainwarden.collectors.blind import Blind
from trainwarden.collectors.nccl.dumps import NotRead, Teller, read_dumps
from trainwarden.collectors.nccl.reader import DumpLimits
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, Event, Frame, JobId
from trainwarden.core.records import epoch_of

_JOB: Final = JobId("dumps")
_QUORUM: Final = re.compile(r"(?:.*_)?quorum_(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFolderConfig:
    """Flight-recorder dumps that lie in a folder."""

    folder: Path
    """Files whose names hold no rank are left alone; of torchft's `..._quorum_ID` folders in it each is a restart."""

    job: JobId = _JOB
    """What the job is called."""

    pattern: str = r"(?:.*\D)?(\d{1,7})(?:\.(?:pickle|pkl|json|trace|bin))?"
    """Regular expression that fits the whole name of a dump; its one group is the rank: `nccl_trace_rank_3`, `_dump_3`,
    `rank_3.pickle`, `3`. Of a rank's files the first that can be read is taken, JSON last: it tells no less of
    collectives, but it is not what the recorder writes by itself."""

    limits: DumpLimits = field(default_factory=DumpLimits)

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"dumps.pattern: need a regular expression, got {self.pattern!r}: {error}") from None
        if groups != 1:
            raise ConfigError(f"dumps.pattern: need one group, the rank, got {groups} in {self.pattern!r}")


class DumpFolder:
    """Source of what a folder holds, told once, at the first poll."""

    period_s = 1.0

    def __init__(self, config: DumpFolderConfig, *, start_ns: int) -> None:
        self.name = f"dumps@{config.folder.name}"
        self._config, self._name = config, re.compile(config.pattern)
        emit = Emitter(self.name, job=config.job, start_ns=start_ns)
        self._tell, self._blind = Teller(emit, config.job, start_ns=start_ns), Blind(emit)
        self._told = False

    def poll(self, now_ns: int) -> Iterator[Frame | Event]:
        """Rank by rank; nothing is kept."""
        if self._told:
            return
        self._told = True
        try:
            generations = [files for files in self._generations() if files]
        except OSError as error:
            yield from self._blind(f"{self._config.folder}: {error.strerror}", now_ns)
            return
        if not generations:
            yield from self._blind(f"{self._config.folder}: no name in it has a rank ({self._config.pattern})", now_ns)
        for restart, files in enumerate(generations):
            yield from self._tell_all(files, Epoch(epoch_of(0, restart, 0)), now_ns)

    def _generations(self) -> Iterator[dict[int, list[str]]]:
        """Files of each rank: those in the folder itself, then those of each quorum, in their order."""
        folder = self._config.folder
        quorums = [(int(found[1]), name) for name in os.listdir(folder) if (found := _QUORUM.fullmatch(name))]
        for place in (folder, *(folder / name for _, name in sorted(quorums) if (folder / name).is_dir())):
            files: dict[int, list[str]] = {}
            for name in sorted(os.listdir(place), key=lambda name: (name.endswith(".json"), name)):
                found = self._name.fullmatch(name)
                if found and found[1].isdecimal() and not (place / name).is_dir():
                    files.setdefault(int(found[1]), []).append(str(place / name))
            yield dict(sorted(files.items()))

    def _tell_all(self, files: dict[int, list[str]], epoch: Epoch, now_ns: int) -> Iterator[Frame | Event]:
        while files:
            first = {paths.pop(0): rank for rank, paths in files.items()}
            for found in read_dumps(first, owner_uid=-1, limits=self._config.limits):
                if isinstance(found, NotRead):
                    yield from self._tell.refuse(found.path, found.why, now_ns)
                else:
                    del files[found.rank]
                    yield from self._tell.say(found, found.rows_N, epoch, now_ns)
            files = {rank: paths for rank, paths in files.items() if paths}
