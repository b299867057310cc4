"""Which checkpoint to go back to: the newest that is good, older than the anomaly, and of an accepted attempt.

`select` is pure: what was read back comes in as data. `select_verified` reads back as few as it must, newest first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from trainwarden.core.errors import TrainwardenError
from trainwarden.core.model import Checkpoint
from trainwarden.core.records import attempt_of
from trainwarden.remediation.checkpoints.folder import order_of

GOOD = ""
"""What a verification that found nothing says."""

Choice: TypeAlias = tuple[Checkpoint | None, Mapping[str, str]]
"""The checkpoint, and why each newer one was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the folder of published checkpoints, whatever it is."""

    name: str
    checkpoint: Checkpoint | None
    """As its manifest tells; None: broken."""
    reason: str
    """Broken: why. Else what was said with its mark."""
    pinned: bool = False


class Shelf(Protocol):
    """What is read to select."""

    def entries(self) -> Sequence[Entry]: ...
    def accepted(self) -> Mapping[int, frozenset[str]]: ...
    def verify(self, name: str) -> Checkpoint: ...


def select(
    entries: Sequence[Entry],
    *,
    before_ns: int | None,
    accepted: Mapping[int, frozenset[str]],
    verified: Mapping[str, str],
) -> Choice:
    """The newest one that may be used, and why each newer one may not.

    before_ns: onset of the anomaly; None: no bound. accepted: attempt -> names that it had published when it was over.
    verified: name -> GOOD or what is wrong with it; absent: not read back.
    """
    refused: dict[str, str] = {}
    for entry in _newest_first(entries):
        why = _objection(entry, before_ns, accepted) or verified.get(entry.name, "was not read back")
        if why == GOOD and entry.checkpoint is not None:
            return replace(entry.checkpoint, trust="good"), refused
        refused[entry.name] = why
    return None, refused


def select_verified(shelf: Shelf, before_ns: int | None) -> Choice:
    """Read back, newest first, what could be selected, until one is good."""
    entries, accepted = shelf.entries(), shelf.accepted()
    verified: dict[str, str] = {}
    for entry in _newest_first(entries):
        if not _objection(entry, before_ns, accepted):
            verified[entry.name] = _read_back(shelf, entry.name)
            if verified[entry.name] == GOOD:
                break
    return select(entries, before_ns=before_ns, accepted=accepted, verified=verified)


def _newest_first(entries: Sequence[Entry]) -> Sequence[Entry]:
    return sorted(entries, key=lambda entry: (order_of(entry.name), entry.name), reverse=True)


def _objection(entry: Entry, before_ns: int | None, accepted: Mapping[int, frozenset[str]]) -> str:
    """Why it may not be used, from what is known without reading it back."""
    checkpoint = entry.checkpoint
    if checkpoint is None:
        return entry.reason or "broken"
    if checkpoint.trust == "distrusted":
        return f"distrusted: {entry.reason or 'no reason given'}"
    attempt = attempt_of(checkpoint.epoch)
    if attempt not in accepted:
        return f"attempt {attempt} is not over, so nothing of it is accepted yet"
    if checkpoint.name not in accepted[attempt]:
        return f"published after attempt {attempt} was over"
    if before_ns is not None and checkpoint.t_ns >= before_ns:
        return f"not older than the anomaly: taken {(checkpoint.t_ns - before_ns) / 1e9:.3f} s after its onset"
    return ""


def _read_back(shelf: Shelf, name: str) -> str:
    try:
        shelf.verify(name)
    except (TrainwardenError, OSError) as error:
        return str(error) or type(error).__name__
    return GOOD
