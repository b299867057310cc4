"""What counts as a number. Everything here must be unable to wait for a device, or for another rank.

float() of a tensor on a device waits until the device has computed it: value() has a way of its own for these
(pending.py), elsewhere they are refused. float() of a distributed tensor may start a collective: its local part is
taken, and refused where that is no number yet.
"""

import sys
from typing import Any, Final

LOW: Final = -3.4028234e38
HIGH: Final = 3.4028234e38
"""What a float32 holds: a row has no larger numbers, and a loss out of here is as good as infinite."""


class RefusedValue(Exception):
    """Not taken as a number; `counter` is one of records.COUNTERS."""

    def __init__(self, counter: str, why: str) -> None:
        super().__init__(why)
        self.counter = counter


def number(value: object) -> float:
    """The value as a float. Raises RefusedValue.

    >>> number(3)
    3.0
    >>> number("3")
    Traceback (most recent call last):
    trainwarden.collectors.rank.numbers.RefusedValue: a value of type str is no number
    """
    try:
        return float(value if isinstance(value, int | float) else _item(value))
    except RefusedValue:
        raise
    except Exception as error:
        raise RefusedValue("values_refused", f"a value of type {type(value).__name__} is no number") from error


def device_kind(value: object) -> str | None:
    """Torch's name of the kind of device that a tensor is on; None for what is no tensor."""
    kind = None if isinstance(value, int | float) else getattr(getattr(value, "device", None), "type", None)
    return kind if isinstance(kind, str) else None


def local_part(value: Any) -> Any:
    """This rank's part of a distributed tensor; any other value as it is. Raises RefusedValue where that is one of the
    terms of the number, or the result of a collective that may still be under way."""
    placements = getattr(value, "placements", None)
    if placements is not None:
        if any(placement.is_partial() for placement in placements):
            raise RefusedValue("device_tensors_refused", "a distributed tensor that is not reduced yet is no number")
        with sys.modules["torch"].no_grad():  # else a node of the graph is made
            value = value.to_local()
    if not hasattr(value, "trigger_wait"):
        return value
    if not value.completed:
        raise RefusedValue(
            "device_tensors_refused", "the result of a collective that nobody has waited for is no number"
        )
    return value.elem


def _item(value: Any) -> float:
    """The number in a CPU tensor or NumPy scalar (item(), since float() warns of tensors that require gradients)."""
    device = getattr(value, "device", "cpu")
    kind = device if isinstance(device, str) else getattr(device, "type", None)
    if kind != "cpu":
        raise RefusedValue(
            "device_tensors_refused", f"a tensor on {device} is not taken here: give .item(), or nothing"
        )
    if not hasattr(value, "item"):
        raise RefusedValue("values_refused", f"a value of type {type(value).__name__} is no number")
    return float(local_part(value).item())
