"""A small world for each source: healthy at first, broken and mended when told."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.sysfs import Miniature, public_folder

from trainwarden.core.model import Event, Frame
from trainwarden.core.ports import Source

START_NS = 1_800_000_000_000_000_000
TURN_NS = 20_000_000_000
"""Between two looks: longer than most sources wait before they try again."""
LIMIT_S = 20.0
"""Real time that a look may take on a loaded machine."""
GARBAGE = b"\xff\xfe\x00 -1 nan 1e999 \x1b[2J\n18446744073709551616\n"
Items = list[Frame | Event]
Harm = Callable[[], object]


@dataclass(kw_only=True)
class Stage:
    """One source and what it looks at. A look is a turn of time."""

    make: Callable[[], Source]
    harms: Mapping[str, Harm]
    """What can be done to what it looks at, or beside it."""
    heal: Harm
    stir: Harm = lambda: None
    """Makes something happen that the next look tells, where what is looked at is whole."""
    settled: Callable[[Source], bool] = lambda source: True
    """Whether what was asked for is answered: a look polls until then."""
    polls: int = 1
    """Of one look, at least."""
    told: Callable[[Source, Items], object] = lambda source, items: items
    """Whether a look told what it should of a whole world."""
    quiet: Collection[str] = ()
    """Harms that leave nothing to say: a log without lines, a node without mounts."""
    left: Collection[str] = ()
    """Signals that no harm touches."""
    later: bool = True
    """Whether harms are noticed when the source has begun: a device is held open, a recording is read once."""
    files: "Files | None" = None
    """Files each of which tells some number of its own."""
    foreign: bool = False
    """Whether what it gives was said by others."""
    turn_ns: int = TURN_NS
    now_ns: int = START_NS

    def look(self, source: Source) -> Items:
        """Everything that the source tells now."""
        self.stir()
        self.now_ns += self.turn_ns
        found, end_s = Items(), time.monotonic() + LIMIT_S
        for _ in range(self.polls):
            found += source.poll(self.now_ns)
        while not self.settled(source):
            assert time.monotonic() < end_s, f"{source.name} never answers"
            time.sleep(0.002)
            found += source.poll(self.now_ns)
        return found


class Files:
    """Files that are broken together, and can be mended."""

    def __init__(self, *paths: Path) -> None:
        self.kept = {path: (path.read_bytes(), path.stat().st_mode) for path in paths}

    def harms(self) -> dict[str, Harm]:
        return {
            "missing": self._clear,
            "a folder": lambda: self._each(Path.mkdir),
            "a FIFO": lambda: self._each(os.mkfifo),
            "empty": lambda: self._each(Path.touch),
            "garbage": lambda: self._each(lambda path: path.write_bytes(GARBAGE)),
            "forbidden": self._forbid,
        }

    def heal(self) -> None:
        self._clear()
        for path in self.kept:
            self._put_back(path)

    @contextmanager
    def without(self, path: Path, content: bytes | None) -> Iterator[None]:
        """One file gone, or with another content."""
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        yield
        self._put_back(path)

    def _forbid(self) -> None:
        for path in self.kept:
            path.chmod(0)

    def _put_back(self, path: Path) -> None:
        content, mode = self.kept[path]
        path.write_bytes(content)
        path.chmod(mode)

    def _clear(self) -> None:
        for path in self.kept:
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)

    def _each(self, make: Callable[[Path], object]) -> None:
        self._clear()
        for path in self.kept:
            make(path)


@contextmanager
def miniature() -> Iterator[Miniature]:
    with public_folder() as folder:
        yield Miniature(folder)
