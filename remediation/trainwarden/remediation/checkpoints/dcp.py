"""Published checkpoints of torch.distributed.checkpoint: catalogue, verification, marks, pruning.

The table of contents, `.metadata`, is a pickle and is never unpickled: names of shards have a form of their own, so
they are found in its bytes. What a verification finds is not believed at the next selection: that reads back again.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from trainwarden.core.errors import ConfigError, DataError
from trainwarden.core.manifest import MANIFEST, Manifest, read_manifest
from trainwarden.core.model import Checkpoint, JobId
from trainwarden.core.records import attempt_of
from trainwarden.core.sealed import measure, read_sealed, write_sealed
from trainwarden.remediation.checkpoints.folder import (
    CheckpointFolder,
    accepted_names,
    name_of,
    names_in,
    numbers_in,
    order_of,
    regular_files,
)
from trainwarden.remediation.checkpoints.select import Entry

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30

READERS = 4
"""Files read at once: one core hashes slower than a disk reads, and a job waits for this."""

_SHARD = re.compile(rb"__\d+_\d+\.distcp")
_TRUST = ("unverified", "good", "distrusted")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    trust: str = "unverified"
    reason: str = ""
    pinned: bool = False


class DcpStore:
    """core.ports.CheckpointStore of one job. Methods that take a name raise ConfigError where there is no such one."""

    def __init__(self, root: Path, job: JobId) -> None:
        self._folder, self._job = CheckpointFolder(root), job

    def catalogue(self, job: JobId) -> Sequence[Checkpoint]:
        """What has a readable manifest, newest first."""
        found = [entry.checkpoint for entry in self.entries()] if job == self._job else []
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def entries(self) -> Sequence[Entry]:
        """Everything in the folder of published checkpoints, newest first, broken ones with the reason."""
        names = sorted(names_in(self._folder.published), key=lambda name: (order_of(name), name), reverse=True)
        return [self._entry(name) for name in names]

    def accepted(self) -> Mapping[int, frozenset[str]]:
        """attempt -> what it had published when it was over; nothing from one whose record is damaged."""
        return {attempt: self._accepted(attempt) for attempt in numbers_in(self._folder.root / "accepted")}

    def path(self, name: str) -> Path:
        """Where a checkpoint lies."""
        if name not in names_in(self._folder.published):
            raise ConfigError(f"no checkpoint {name!r} in {self._folder.published}")
        return self._folder.published / name

    def verify(self, name: str) -> Checkpoint:
        """Read all of it back. Raises DataError that names what is wrong, OSError for what may pass."""
        path = self.path(name)
        checkpoint, _ = self._read(name)
        there = regular_files(path) - {MANIFEST}
        for file in sorted(there ^ checkpoint.files.keys()):
            raise DataError(f"{path / file}: {'missing' if file in checkpoint.files else 'not in the manifest'}")
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda told: _compare(path, *told), sorted(checkpoint.files.items())))
        for shard in sorted(_shards(path) - checkpoint.files.keys()):
            raise DataError(f"{path / shard}: missing, but {METADATA} names it")
        return checkpoint if checkpoint.trust == "distrusted" else replace(checkpoint, trust="good")

    def judge(self, name: str) -> Entry:
        """Verify and mark what was found, good or distrusted; a distrust that stands is never lifted."""
        try:
            trust = self.verify(name).trust
        except DataError as error:
            self.mark(name, "distrusted", str(error))
        except OSError as error:  # may pass, so nothing is marked
            return Entry(name=name, checkpoint=None, reason=str(error), pinned=self._may_be_pinned(name))
        else:
            if trust == "good":
                self.mark(name, trust, "read back")
        return self._entry(name)

    def mark(self, name: str, trust: str, reason: str) -> None:
        """Say what is thought of it: unverified, good or distrusted."""
        if trust not in _TRUST:
            raise ConfigError(f"trust: expected one of {', '.join(_TRUST)}, got {trust!r}")
        self._change(name, lambda mark: replace(mark, trust=trust, reason=reason))

    def distrust_since(self, onset_ns: int, reason: str) -> Sequence[str]:
        """Distrust what is not older than an anomaly's onset, so that no later selection without a bound takes it."""
        found = self.catalogue(self._job)
        young = [one.name for one in found if one.t_ns >= onset_ns and one.trust != "distrusted"]
        for name in young:
            self.mark(name, "distrusted", reason)
        return young

    def pin(self, name: str) -> None:
        """Keep it for good."""
        self._change(name, lambda mark: replace(mark, pinned=True))

    def unpin(self, name: str) -> None:
        """It may be pruned again."""
        self._change(name, lambda mark: replace(mark, pinned=False))

    def prune(self, keep_last: int, selected: Collection[str], check: Callable[[], None]) -> Sequence[str]:
        """Remove what is older than the newest `keep_last` trusted ones, unless pinned or selected; the names.

        Also what attempts that are over have left in staging. check: raises FencedError unless the job is ours.
        """
        assert keep_last > 0
        self._folder.make()
        with self._folder.locked():
            doomed = _doomed(self.entries(), keep_last, selected)
            check()
            for name in doomed:
                (self._folder.published / name).rename(self._trash(name))
                self._mark_file(name).unlink(missing_ok=True)
        for epoch in numbers_in(self._folder.root / "staging"):
            if self._folder.accepted(attempt_of(epoch)).exists():
                self._folder.staging(epoch).rename(self._trash(str(epoch)))
        for name in names_in(self._folder.trash):
            shutil.rmtree(self._folder.trash / name, ignore_errors=True)
        return doomed

    def _entry(self, name: str) -> Entry:
        try:
            checkpoint, reason = self._read(name)
        except (DataError, OSError) as error:
            return Entry(name=name, checkpoint=None, reason=str(error), pinned=self._may_be_pinned(name))
        return Entry(name=name, checkpoint=checkpoint, reason=reason, pinned=checkpoint.pinned)

    def _may_be_pinned(self, name: str) -> bool:
        try:
            return self._mark(name).pinned
        except (DataError, OSError):
            return True

    def _read(self, name: str) -> tuple[Checkpoint, str]:
        """The checkpoint and what was said with its mark."""
        path = self._folder.published / name
        if path.is_symlink() or not path.is_dir():
            raise DataError(f"{path}: not a folder")
        manifest = read_manifest(path)
        _check_facts(path, manifest, self._job)
        mark = self._mark(name)
        told = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
        told |= {"trust": mark.trust, "pinned": mark.pinned}
        return Checkpoint(**told), mark.reason

    def _accepted(self, attempt: int) -> frozenset[str]:
        try:
            return accepted_names(self._folder, attempt) or frozenset()
        except (DataError, OSError):
            return frozenset()

    def _trash(self, name: str) -> Path:
        """A place that is free."""
        return Path(tempfile.mkdtemp(dir=self._folder.trash)) / name

    def _mark_file(self, name: str) -> Path:
        return self._folder.marks / f"{name}.json"

    def _mark(self, name: str) -> _Mark:
        path = self._mark_file(name)
        if not path.exists():
            return _Mark()
        found = read_sealed(path)
        trust = found.text("trust")
        if trust not in _TRUST:
            found.refuse("trust", f"one of {', '.join(_TRUST)}", trust)
        return _Mark(trust=trust, reason=found.text("reason"), pinned=found.truth("pinned"))

    def _change(self, name: str, change: Callable[[_Mark], _Mark]) -> None:
        self.path(name)
        with self._folder.locked():
            write_sealed(self._mark_file(name), asdict(change(self._mark(name))))


def _check_facts(path: Path, manifest: Manifest, job: JobId) -> None:
    """What the manifest says of itself, against where it lies. Raises DataError."""
    if manifest.name != path.name or name_of(manifest.step, manifest.epoch) != path.name:
        told = f"{manifest.name}, step {manifest.step} of epoch {manifest.epoch}"
        raise DataError(f"{path / MANIFEST}: is of another checkpoint: {told!a}")
    if manifest.job != job:
        raise DataError(f"{path / MANIFEST}: job: expected {job}, got {manifest.job!a}")
    if sorted(manifest.rank_steps) != list(range(len(manifest.rank_steps))) or not manifest.rank_steps:
        raise DataError(f"{path / MANIFEST}: rank_steps: expected all ranks from 0 on")
    mixed = [rank for rank, step in manifest.rank_steps.items() if step != manifest.step]
    if mixed:
        raise DataError(f"{path / MANIFEST}: mixed steps: rank {mixed[0]} wrote step {manifest.rank_steps[mixed[0]]}")


def _compare(path: Path, file: str, told: tuple[int, str]) -> None:
    """Read a file back. Raises DataError, OSError."""
    length, digest = measure(path, file)
    if (length, digest) != told:
        what = f"{length} bytes, not {told[0]}" if length != told[0] else "other bytes than were written"
        raise DataError(f"{path / file}: {what}")


def _shards(path: Path) -> set[str]:
    """The shards that the table of contents names. Raises DataError, OSError."""
    try:
        size = (path / METADATA).stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path / METADATA}: missing") from error
    if size > MAX_METADATA_BYTES:
        raise DataError(f"{path / METADATA}: {size} bytes, at most {MAX_METADATA_BYTES} are read")
    shards = {found.decode() for found in _SHARD.findall((path / METADATA).read_bytes())}
    if not shards:
        raise DataError(f"{path / METADATA}: names no shard")
    return shards


def _doomed(entries: Sequence[Entry], keep_last: int, selected: Collection[str]) -> list[str]:
    """From newest-first entries, the names of what may go. Young broken ones stay: somebody may want to know why."""
    doomed, kept = [], 0
    for entry in entries:
        checkpoint = entry.checkpoint
        if kept >= keep_last and entry.name not in selected and not entry.pinned:
            doomed.append(entry.name)
        kept += checkpoint is not None and checkpoint.trust != "distrusted"
    return doomed
