"""Host lists as Slurm writes them: `gpu[001-128]`, `r[1-2]n[01-16],login`.

Strict, for a list that is read wrongly puts a node into a foreign rack. No library: those on the registry are under
the GPL or the LGPL, and the larger one also runs commands (node groups).
"""

import re
from collections.abc import Iterator
from typing import Final

from trainwarden.core.errors import DataError

HOSTS_MAX: Final = 200_000
"""Of one list: more than the largest clusters have, and `n[0-999999999]` must not fill the memory."""

_WORDS: Final = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART: Final = re.compile(r"([\w.:+/-]+)|\[([^\[\]]+)\]", re.ASCII)
_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Every host of a list, in its order, each once; none for an empty text. Raises DataError.

    >>> expand("gpu[001-002,010],login"), expand("r[1-2]n[08-09]")
    (['gpu001', 'gpu002', 'gpu010', 'login'], ['r1n08', 'r1n09', 'r2n08', 'r2n09'])
    """
    words = _WORDS.findall(text)
    if ",".join(words) != text:
        raise DataError(f"host list {_shown(text)}: needs names with commas between them, brackets closed")
    hosts: dict[str, None] = {}
    for word in words:
        found = [""]
        for part in _parts(word):
            _limit(len(found) * len(part) + len(hosts), text)
            found = [head + tail for head in found for tail in part]
        hosts |= dict.fromkeys(found)
    return [*hosts]


def _parts(word: str) -> Iterator[list[str]]:
    """What stands one after the other in a name: fixed text, or what a bracket lists."""
    parts = [*_PART.finditer(word)]
    if "".join(part[0] for part in parts) != word:
        raise DataError(f"host list {_shown(word)}: needs letters, digits, ._:+/- and [ranges] only")
    for part in parts:
        yield [part[1]] if part[1] else [number for one in part[2].split(",") for number in _numbers(one, word)]


def _numbers(text: str, word: str) -> list[str]:
    """The numbers of one range, with the zeros before them that it has."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise DataError(f"host list {_shown(word)}: needs ranges such as 001-128, got {_shown(text)}")
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first) or (len(first) != len(last) and last[0] == "0"):
        raise DataError(f"host list {_shown(word)}: needs a range that counts up, both ends as wide, got {text}")
    _limit(int(last) - int(first) + 1, word)
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def _limit(count: int, text: str) -> None:
    if count > HOSTS_MAX:
        raise DataError(f"host list {_shown(text)}: needs at most {HOSTS_MAX} hosts, got {count}")


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else f"{text[:57]}...")
