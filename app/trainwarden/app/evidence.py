"""Reaches `evidence_collected`: what every rank does, written down before anything is ended."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from trainwarden.core.errors import ActionError
from trainwarden.core.model import Json, Look, Rung, Subject
from trainwarden.core.ports import Witness


class Evidence:
    """The actuator: EVIDENCE/<incident>/stacks.json, without environment, locals or batch text."""

    goals = frozenset({"evidence_collected"})

    def __init__(self, witness: Witness, folder: Path, world_size: Callable[[], int]) -> None:
        self._witness, self._folder, self._world_size = witness, folder, world_size

    def reached(self, rung: Rung) -> bool | None:
        """Whether the file is there."""
        return self._file(rung).exists()

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        """Look at every rank. Raises ActionError where it cannot be written."""
        subjects = tuple(Subject(kind="rank", id=str(rank)) for rank in range(self._world_size()))
        seen = [event.data for event in self._witness.look(Look(key="evidence", what="stack", subjects=subjects))]
        file = self._file(rung)
        draft = file.with_suffix(".new")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps([dict(data) for data in seen], indent=1))
            draft.rename(file)
        except OSError as error:
            raise ActionError(f"{file}: {error.strerror}", retryable=True) from error
        return {"ranks": len(seen), "file": str(file)}

    def _file(self, rung: Rung) -> Path:
        return self._folder / str(rung.args["incident"]).replace("/", "_") / "stacks.json"
