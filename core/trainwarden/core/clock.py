"""The only place that asks what time it is; tests hand in their own."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]
"""Unix nanoseconds."""

unix_ns: Clock = time.time_ns


def boot_offset_ns() -> int:
    """Unix time minus CLOCK_MONOTONIC, so that a rank's monotonic stamps of this host can be told as Unix time."""
    before = time.monotonic_ns()
    unix = time.time_ns()
    return unix - (before + time.monotonic_ns()) // 2
