"""Shows the launcher's output while it grows, from files: nothing of ours stands between the training and its log."""

from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 1 << 20
"""Shown at most per look; a training that writes faster is shown late, never slowed."""


class Follower:
    """Copies what is appended to a file to a stream."""

    def __init__(self, file: Path, stream: BinaryIO, *, from_end: bool = False) -> None:
        self._file, self._stream = file, stream
        self._read_bytes = file.stat().st_size if from_end and file.exists() else 0

    def look(self) -> None:
        """Copy what is new; a stream that is closed at the other end is no reason to stop watching."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read(MAX_BYTES)
        except OSError:
            return
        self._read_bytes += len(text)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return
