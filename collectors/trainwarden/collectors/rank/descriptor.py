"""An open file in somebody else's process: daemons close all descriptors, and the numbers come again."""

import contextlib
import os
from pathlib import Path


class Descriptor:
    """A file kept open for reading; it is closed only while its number still stands for it."""

    __slots__ = ("_file", "number")

    def __init__(self, path: str | Path) -> None:
        """Raises OSError."""
        self.number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._file = self._identity()

    def close(self) -> None:
        """Close it, once."""
        number, self.number = self.number, -1
        with contextlib.suppress(OSError):
            found = os.fstat(number)
            if (found.st_dev, found.st_ino) == self._file:
                os.close(number)

    def _identity(self) -> tuple[int, int]:
        found = os.fstat(self.number)
        return found.st_dev, found.st_ino
