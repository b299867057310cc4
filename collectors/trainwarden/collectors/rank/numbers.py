"""What counts as a number. Everything here must be unable to wait for a device.

float() of a tensor on a device waits until the device has computed it, and of a distributed tensor it may start a
collective: both are refused without being touched (tensors on a device get their own way later).
"""

from typing import Any


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


def _item(value: Any) -> float:
    """The number in a CPU tensor or NumPy scalar (item(), since float() warns of tensors that require gradients)."""
    device = getattr(value, "device", "cpu")
    kind = device if isinstance(device, str) else getattr(device, "type", None)
    if kind != "cpu" or hasattr(value, "placements"):
        why = f"a tensor on {device} is not taken yet: give .item(), or nothing"
        raise RefusedValue("device_tensors_refused", why)
    if not hasattr(value, "item"):
        raise RefusedValue("values_refused", f"a value of type {type(value).__name__} is no number")
    return float(value.item())
