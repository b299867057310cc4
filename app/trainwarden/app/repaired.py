"""What a rehearsed run was repaired by, read from what it left behind: attempt folders and the journal."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwarden.app.folders import JobFolder
from trainwarden.app.store import Store
from trainwarden.core.codec import loads
from trainwarden.core.model import Event, Finding, Json, Outcome
from trainwarden.core.records import attempt_of
from trainwarden.rehearsal.judging import Repaired

_CHECKPOINT = re.compile(r"step-(\d+)-\d+")
_DONE = ("reached", "already")


def read_repaired(
    folder: JobFolder, struck_ns: int | None, progress: Sequence[tuple[int, int]], final_loss: str | None
) -> Repaired:
    """What was done. struck_ns: when the fault did; progress: (Unix ns, step) whenever a new step was seen to begin.

    Recovered is when the journal has that the last attempt's rung `running` is reached: all ranks began a step.
    Lost are the steps between the checkpoint and the newest one that had begun before the last attempt.
    """
    newest = folder.newest_attempt()
    told: Mapping[str, Any] = {} if newest is None else newest.told()
    attempts = 0 if newest is None else newest.number
    facts = _read_journal(folder.path / "journal.sqlite", attempts)
    step = _step_of(Path(told["checkpoint"]).name) if told.get("checkpoint") else None
    recovered_ns = facts.recovered_ns
    return Repaired(
        attempts=attempts,
        checkpoint=step,
        refused=tuple(sorted(_steps(facts.found.get("refused")))),
        without=tuple(int(slot.rpartition(":")[2]) for slot in told.get("without", ())),
        skip=tuple(batch for first, last in told.get("skip", ()) for batch in range(first, last + 1)),
        recovered_after_s=None if recovered_ns is None or struck_ns is None else (recovered_ns - struck_ns) / 1e9,
        steps_lost=_steps_lost(step or 0, facts.started_ns, progress) if attempts > 1 else None,
        relapses=tuple(sorted(facts.relapses)),
        final_loss=final_loss,
    )


def read_loss(out: Path) -> tuple[float, str] | None:
    """The final loss and how float.hex() writes it; None: the training did not come to its end."""
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
        return float(found["loss"]), str(found["hex"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(slots=True)
class _Facts:
    """What the journal says of the last attempt."""

    started_ns: int | None = None
    recovered_ns: int | None = None
    found: Mapping[str, Json] = field(default_factory=dict)
    """By the rung that started it."""
    relapses: set[str] = field(default_factory=set)


def _read_journal(path: Path, attempt: int) -> _Facts:
    facts = _Facts()
    for seen_ns, entry in _entries(path):
        if isinstance(entry, Event) and entry.kind == "attempt.started" and entry.data["attempt"] == attempt:
            facts.started_ns = entry.t_ns
        elif isinstance(entry, Outcome) and entry.found.get("attempt") == attempt and entry.result in _DONE:
            facts.recovered_ns, facts.found = seen_ns, entry.found
        elif isinstance(entry, Finding) and entry.status == "final" and entry.epoch is not None:
            facts.relapses |= {entry.kind} if attempt_of(entry.epoch) > 1 else set()
    return facts


def _entries(path: Path) -> Iterator[tuple[int, object]]:
    store = Store(path)
    try:
        for row in store.tail():
            yield row.seen_ns, loads(row.text)
    finally:
        store.close()


def _steps_lost(step: int, started_ns: int | None, progress: Sequence[tuple[int, int]]) -> int | None:
    begun = [newest for t_ns, newest in progress if started_ns is not None and t_ns <= started_ns]
    return max(begun) - step if begun else None


def _steps(names: Json) -> list[int]:
    """Of checkpoints, by name."""
    if not isinstance(names, Mapping):
        return []
    return [step for name in names if (step := _step_of(name)) is not None]


def _step_of(name: str) -> int | None:
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None
