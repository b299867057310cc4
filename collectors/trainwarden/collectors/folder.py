"""One folder of a job on the tmpfs, listed cheaply ten times a second."""

import os
import re
import stat
from itertools import islice
from pathlib import Path
from typing import Final

MAX_FILES: Final = 4096
"""Entries that are looked at; a host has some ten ranks."""

SETTLED_NS: Final = 1_000_000_000
"""A folder whose time stamp is older than this when it is listed has changed since only if the stamp has: stamps tick
in some ms, so that a file that comes right after a listing may not move it."""


class Folder:
    """Files of a folder whose names have a certain form."""

    def __init__(self, path: Path, form: re.Pattern[str]) -> None:
        self.path = path
        self.owner_uid = -1
        """The user that the folder, and so its files, belong to."""
        self._text, self._form = str(path), form
        self._listed: frozenset[tuple[str, int]] = frozenset()
        self._stamp_ns = -1

    def files(self, now_ns: int) -> frozenset[tuple[str, int]]:
        """(name, inode) of each file; the same object as last time where nothing changed. None there: empty."""
        try:
            found = os.lstat(self._text)
            if found.st_mtime_ns != self._stamp_ns:
                self.owner_uid = found.st_uid
                listed = self._list() if stat.S_ISDIR(found.st_mode) else frozenset()
                self._listed = self._listed if listed == self._listed else listed
                self._stamp_ns = found.st_mtime_ns if now_ns - found.st_mtime_ns > SETTLED_NS else -1
        except OSError:
            self._listed, self._stamp_ns = frozenset(), -1
        return self._listed

    def _list(self) -> frozenset[tuple[str, int]]:
        with os.scandir(self.path) as listing:
            found = [(entry.name, entry.inode()) for entry in islice(listing, MAX_FILES)]
        return frozenset(key for key in found if self._form.fullmatch(key[0]))
