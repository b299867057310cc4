"""A number of a step that does not go the short way: whatever is no plain float, has a scope, is not finite or has a
name of the script's own. Parts of Rank, like Span; whatever is raised here is counted there.
"""

import time
from math import nan
from typing import TYPE_CHECKING, Final, TypeAlias

from trainwarden.collectors.rank.device import DEVICES
from trainwarden.collectors.rank.numbers import HIGH, LOW, device_kind, number
from trainwarden.collectors.rank.pending import LIVE_FLAGS, pending_of
from trainwarden.collectors.rank.sums import VALUES
from trainwarden.collectors.rank.words import FEATURE_NAMES, GRAD_NORM, LEARNING_RATE, LOSS, Feature, Scope
from trainwarden.core.records import CONTAINS_COMM, GRAD_NONFINITE, LOCAL_NONFINITE, LOSS_NONFINITE

if TYPE_CHECKING:
    from trainwarden.collectors.rank.rank import Rank

_TOKENS: Final = VALUES.index("tokens")
_LR: Final = VALUES.index("learning_rate")

_Place: TypeAlias = tuple[str, int, int]
"""Column of FEATURES; flag if not finite; where it is kept in sums (or, from LOSS on, in the plain row)."""

_GLOBAL: Final[dict[int | str, _Place]] = {
    LOSS: ("loss", LOSS_NONFINITE, LOSS),
    GRAD_NORM: ("grad_norm", GRAD_NONFINITE, GRAD_NORM),
    LEARNING_RATE: ("learning_rate", 0, _LR),
}
_LOCAL: Final[dict[int | str, _Place]] = {
    LOSS: ("local_loss", LOCAL_NONFINITE, VALUES.index("local_loss")),
    GRAD_NORM: ("local_grad_norm", LOCAL_NONFINITE, VALUES.index("local_grad_norm")),
    LEARNING_RATE: ("learning_rate", LOCAL_NONFINITE, _LR),
}
_PLACES: Final[dict[bool, dict[int | str, _Place]]] = {
    local: {**places, **{FEATURE_NAMES[feature]: place for feature, place in places.items()}}
    for local, places in ((False, _GLOBAL), (True, _LOCAL))
}


def give(w: "Rank", name: Feature | str, value: object, scope: Scope | None, flagged: bool = True) -> None:
    """Rank.value(), the long way. flagged: whether what is not finite is flagged; else it is not told at all.

    Raises RefusedValue.
    """
    place = _PLACES[scope == "local"].get(name)
    kind = None
    if isinstance(value, float):
        amount = value
    elif (kind := device_kind(value)) in DEVICES:
        amount = nan  # not known yet
    else:
        amount, kind = number(value), None
    if place is None:
        if kind is None:
            w._detail("value", str(name), time.perf_counter(), amount)
        else:
            pending_of(w, kind).value(str(name), None, 0, value)
        return
    column, flag, at = place
    if not flagged:
        flag = 0
    if kind is None and not LOW < amount < HIGH:
        if not flagged:
            return
        _raise_flag(w, flag)
    if w._open is not w._plain:
        w._wrong(f"value({FEATURE_NAMES[name]}) between end() and begin() belongs to no step")
    elif kind is not None and not pending_of(w, kind).value(column, column, flag, value):
        return
    elif at < LOSS:
        w._go_long()
        w._sums.values[at] = amount
    else:
        w._plain[at] = amount


def _raise_flag(w: "Rank", flag: int) -> None:
    """Seen by the agent at its next poll, whether or not the step ever ends."""
    w._go_long()
    w._flags |= flag
    w._words[LIVE_FLAGS] |= flag


def tell(w: "Rank", tokens: object, contains_comm: bool) -> None:
    """What a mark says besides its phase. Raises RefusedValue."""
    w._go_long()
    if contains_comm:
        w._flags |= CONTAINS_COMM
    if tokens is not None:
        before = w._sums.values[_TOKENS]
        w._sums.values[_TOKENS] = number(tokens) + (before if before == before else 0.0)
