"""Durations and foreign text as a reader gets them."""


def duration(seconds: float) -> str:
    """In words, to two or three digits.

    >>> duration(0.0234), duration(29.04), duration(200), duration(7500), duration(200_000)
    ('0.02 s', '29.0 s', '3 min 20 s', '2 h 05 min', '2 d 7 h')
    """
    if seconds < 100:
        return f"{seconds:.2f} s" if abs(seconds) < 10 else f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes} min {rest_s:02} s"
    return f"{hours} h {rest_min:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def unit_of(span_s: float) -> tuple[float, str]:
    """Of an axis that is so long: its seconds and its name."""
    units = ((300, 1.0, "seconds"), (3 * 3600, 60.0, "minutes"), (3 * 86400, 3600.0, "hours"))
    return next(((unit_s, name) for most_s, unit_s, name in units if span_s <= most_s), (86400.0, "days"))


def harmless(text: str) -> str:
    """Without what a reader would not see or be misled by: control characters and marks of direction are spelt out.

    >>> harmless("a\\nb")
    'a\\\\nb'
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def short(text: str, most: int = 28) -> str:
    """A name in a figure."""
    text = harmless(text)
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"
