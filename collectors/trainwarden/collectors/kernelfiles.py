"""Small text files of the kernel (sysfs, proc): what stands in them, or nothing.

Files are opened anew at each poll. A descriptor kept open reads four times faster, but a source would hold hundreds of
them, and behind the same path a reloaded driver makes a new file that the old descriptor never sees.
"""

import os
from collections.abc import Iterable
from typing import Final

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Not blocking: what stands in a file's place (a FIFO) must not hold the agent."""
PAGE: Final = 4096
"""The most that a sysfs file can hold."""
ALL_ONES: Final = 2**64 - 1
"""What a counter of hardware that fell off the bus reads as."""


def read(path: str, limit: int = PAGE) -> bytes:
    """The beginning of a file. Raises OSError."""
    descriptor = os.open(path, _FLAGS)
    try:
        text = part = os.read(descriptor, limit)
        while part and PAGE <= len(text) < limit:  # tables of proc come a page at a read
            part = os.read(descriptor, limit - len(text))
            text += part
        return text
    finally:
        os.close(descriptor)


def names(path: str) -> list[str]:
    """What a folder holds, sorted; nothing where it cannot be listed. Names that are no plain ASCII are left out: they
    go on the wire."""
    try:
        return sorted(name for name in os.listdir(path) if name.isascii() and name.isprintable())
    except OSError:
        return []


def count(text: bytes) -> int | None:
    """The one decimal number that is all of a text; None for anything else, and for all ones.

    >>> count(b"12\\n"), count(b"1_000"), count(b"-1"), count(b""), count(b"18446744073709551615")
    (12, None, None, None, None)
    """
    digits = text.strip()
    if not digits.isdigit() or len(digits) > 20:  # bytes.isdigit: ASCII only
        return None
    number = int(digits)
    return number if number < ALL_ONES else None


def read_or_nothing(path: str) -> bytes:
    """The beginning of a file; empty where it cannot be read."""
    try:
        return read(path)
    except OSError:
        return b""


def read_count(path: str) -> int | None:
    """The number that a file holds; None: it cannot be read or holds no number."""
    return count(read_or_nothing(path))


def keyed(text: bytes, keys: Iterable[bytes]) -> dict[bytes, int]:
    """The numbers of `key number ...` lines (a colon after the key is no part of it) of these keys.

    >>> keyed(b"MemFree: 7 kB\\nprocs_blocked 3\\nMemTotal: x", [b"MemFree", b"procs_blocked", b"MemTotal"])
    {b'MemFree': 7, b'procs_blocked': 3}
    """
    wanted, found = set(keys), {}
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) > 1 and (key := words[0].rstrip(b":")) in wanted and (number := count(words[1])) is not None:
            found[key] = number
    return found


def said(error: OSError, path: str) -> str:
    """Why a path cannot be read, without what a file's content may say."""
    return f"{path}: {error.strerror or type(error).__name__}"
