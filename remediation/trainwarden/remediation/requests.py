"""Reaches the cooperative goals by asking the ranks: `checkpoint_taken` and `quiesced`.

A request is void when a rank had begun the next step before it was written everywhere; that is normal now and then, and
it is asked again. A rank that is hung or stopped never decides: then this fails by its deadline, and the plan goes on
to signals.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil

from trainwarden.core.control import CHECKPOINT, LEAD_S, LEAD_STEPS, QUIESCE, Block, Request, acks, close_blocks, post
from trainwarden.core.errors import ActionError
from trainwarden.core.model import Json, Rung

QUIET_S = 120
"""A quiesced job goes on by itself after this long: whoever asked may have died. The rungs after it take a third."""

TRIES = 10
"""Times that a void request is repeated; one is void in a few of a hundred (measured with stopped ranks: a third)."""

_LOOK_S = 0.02


class Requests:
    """The actuator; one job on one host."""

    goals = frozenset({"checkpoint_taken", "quiesced"})

    def __init__(
        self,
        blocks: Callable[[], Sequence[Block]],
        published: Callable[[], int],
        step_s: Callable[[], float],
        check: Callable[[], None],
    ) -> None:
        """blocks: of the running attempt's ranks, to be closed by us. published: newest step of this attempt that a
        published checkpoint holds, -1 for none. step_s: how long a step takes. check: raises FencedError."""
        self._blocks, self._published, self._step_s, self._check = blocks, published, step_s, check
        self._asked: dict[str, Request] = {}

    def reached(self, rung: Rung) -> bool | None:
        """checkpoint_taken: one is published at or after the step that was asked for. quiesced: all ranks stand."""
        request = self._asked.get(rung.goal)
        if request is None:
            return False
        if rung.goal == "checkpoint_taken":
            return self._published() >= request.at_step
        blocks = self._blocks()
        try:
            obeyed = set(acks(blocks, request).values()) == {"obeyed"}
            return obeyed and all(block.begun_step == request.at_step for block in blocks)
        finally:
            close_blocks(blocks)

    def pursue(self, rung: Rung, fence: int) -> Mapping[str, Json]:
        """Ask until all obey. Raises ActionError, FencedError."""
        self._check()
        code = CHECKPOINT if rung.goal == "checkpoint_taken" else QUIESCE
        blocks = self._blocks()
        try:
            if not blocks:
                raise ActionError("no rank has a ring: nobody can be asked", retryable=False)
            end_s = time.monotonic() + rung.deadline_s
            for _ in range(TRIES):
                request = post(blocks, code=code, lead_steps=self._lead(), arg=QUIET_S)
                if self._decided(blocks, request, end_s):
                    self._asked[rung.goal] = request
                    return {"step": request.at_step}
        finally:
            close_blocks(blocks)
        raise ActionError(f"{rung.goal}: {TRIES} requests were void", retryable=True)

    def _lead(self) -> int:
        step_s = self._step_s()
        return max(LEAD_STEPS, ceil(LEAD_S / step_s)) if step_s > 0 else LEAD_STEPS

    def _decided(self, blocks: Sequence[Block], request: Request, end_s: float) -> bool:
        """Whether all obeyed. Raises ActionError when a rank does not decide in time."""
        while any(block.undecided for block in blocks):
            if time.monotonic() > end_s:
                late = [block.rank for block in blocks if block.undecided]
                raise ActionError(f"{request.name}: ranks {late} did not decide in time", retryable=True)
            time.sleep(_LOOK_S)
        return set(acks(blocks, request).values()) == {"obeyed"}
