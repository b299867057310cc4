"""Durations as people write them: a number and a unit. A bare number is refused, for nobody can tell its unit."""

import re
from datetime import timedelta
from typing import Final

UNITS: Final = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "min": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}

WRITTEN: Final = rf"^\s*\d+(\.\d+)?\s*({'|'.join(UNITS)})\s*$"
"""What a duration looks like, as a regular expression (also part of the JSON schema)."""

_PARTS: Final = re.compile(r"\s*([\d.]+)\s*([a-z]+)\s*")


def parse_duration(text: str) -> timedelta:
    """Raises ValueError for anything else than a number and a unit.

    >>> parse_duration("20 min"), parse_duration("250ms")
    (datetime.timedelta(seconds=1200), datetime.timedelta(microseconds=250000))
    """
    if not re.match(WRITTEN, text, re.ASCII):
        raise ValueError(f"no duration: {text!r}")
    parts = _PARTS.fullmatch(text)
    assert parts is not None
    try:
        return float(parts[1]) * UNITS[parts[2]]
    except OverflowError as error:
        raise ValueError(f"too long: {text!r}") from error


def format_duration(duration: timedelta) -> str:
    """The shortest way to write it.

    >>> format_duration(timedelta(seconds=90)), format_duration(timedelta(hours=2))
    ('90 s', '2 h')
    """
    for unit in reversed(UNITS):
        if duration % UNITS[unit] == timedelta(0) and duration >= UNITS[unit]:
            return f"{duration // UNITS[unit]} {unit}"
    return f"{duration / UNITS['ms']:g} ms"
