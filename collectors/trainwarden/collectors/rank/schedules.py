"""Pipeline schedules of torch.distributed.pipelining: a span for each micro-batch's forward and backward.

A schedule calls methods of its stages, in plain Python, around whatever is compiled; between these calls it sends,
receives and waits. So the time of a schedule's step() is `wait`, but for the spans of those methods and of the loss.
The methods are wrapped on the stage objects at hand, not on their classes.
"""

from collections.abc import Callable
from typing import Any, Final

from trainwarden.collectors.rank.rank import IN_SUMS, Rank
from trainwarden.collectors.rank.words import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, OTHER, WAIT, Phase

_OF_A_STAGE: Final = {
    "forward_one_chunk": FORWARD,
    "backward_one_chunk": BACKWARD,
    "backward_weight_one_chunk": BACKWARD_WEIGHT,
}


def watch_schedule(w: Rank, schedule: Any) -> list[Any]:
    """Wrap it; the modules of its stages here, or nothing where `schedule` is none. Raises AttributeError for a
    schedule of another make: then nothing is wrapped."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages == [None] or not callable(getattr(schedule, "step", None)):
        return []
    methods = [(stage, name, kind) for stage in stages for name, kind in _OF_A_STAGE.items()]
    methods.append((schedule, "_compute_loss", FORWARD))
    timed = [(owner, name, _timed(w, getattr(owner, name), kind)) for owner, name, kind in methods]
    for owner, name, method in timed:
        setattr(owner, name, method)
    schedule.step = _stepping(w, schedule, schedule.step)
    return [stage.submod for stage in stages]


def _timed(w: Rank, method: Callable[..., Any], kind: Phase) -> Callable[..., Any]:
    """The method, as a span of the micro-batch that its first argument names (-1: it names none)."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        if w._phase != IN_SUMS or w._sums.phase != WAIT:
            return method(*args, **kwargs)
        first = next(iter((*args, *kwargs.values())), -1)
        half = kind == BACKWARD and not kwargs.get("full_backward", True)
        with w.span(BACKWARD_INPUT if half else kind, first if isinstance(first, int) else -1):
            return method(*args, **kwargs)

    return timed


def _stepping(w: Rank, schedule: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    def stepping(*args: Any, **kwargs: Any) -> Any:
        if w._phase < IN_SUMS or not getattr(schedule, "_has_backward", True):  # between steps, or only evaluated
            return step(*args, **kwargs)
        w._go_long()
        w.mark(WAIT)
        try:
            return step(*args, **kwargs)
        finally:
            w.mark(OTHER)

    return stepping
