"""What the kernel says of its own clock: adjtimex(2), asked without the right to set anything.

The answer is what the time daemon told the kernel (NTP, chrony, PTP by phc2sys), so it needs no daemon of ours. How far
the clock is off is known only while the kernel calls it synchronized; else its error is a guess that grows for ever.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import Final

_STA_UNSYNC: Final = 0x0040
_STA_NANO: Final = 0x2000
"""Bits of timex.status (uapi/linux/timex.h); with _STA_NANO the offset counts nanoseconds, else microseconds."""


class _Timex(ctypes.Structure):
    """struct timex up to status; the rest (152 bytes on 64-bit Linux) is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """Whether the clock is synchronized, and how far it may be off: the larger of offset and estimated error."""

    synchronized: bool
    offset_s: float | None


def kernel_clock() -> ClockState:
    """Ask the kernel. Raises OSError where it may not be asked (seccomp), or where the C library has no such call."""
    timex = _Timex(modes=0)
    call = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if call is None:
        raise OSError(0, "the C library has no adjtimex")
    if call(ctypes.byref(timex)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return clock_state(status=timex.status, offset=timex.offset, esterror=timex.esterror)


def clock_state(*, status: int, offset: int, esterror: int) -> ClockState:
    """From the fields of struct timex; esterror counts microseconds.

    >>> clock_state(status=0x2001, offset=-31_000, esterror=12)
    ClockState(synchronized=True, offset_s=3.1e-05)
    >>> clock_state(status=0x40, offset=0, esterror=16_000_000)
    ClockState(synchronized=False, offset_s=None)
    """
    if status & _STA_UNSYNC:
        return ClockState(synchronized=False, offset_s=None)
    offset_s = abs(offset) * (1e-9 if status & _STA_NANO else 1e-6)
    return ClockState(synchronized=True, offset_s=max(offset_s, esterror * 1e-6))
