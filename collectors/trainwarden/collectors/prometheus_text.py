"""What an exporter says: Prometheus' text format, fetched by a deadline and read line by line.

The parser of prometheus-client is the measure (a test compares the two) and is not used: it goes through a line one
character at a time (25 ms for 8 GPUs x 60 series where this one takes 2), gives up at the first bad line, and renames
counters. Here a line that cannot be read costs itself only and is counted. Grammar: Prometheus' exposition formats
(text 0.0.4, names in quotes as of version 3); comments, timestamps and exemplars are passed over.
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from trainwarden.core.clock import Clock
from trainwarden.core.errors import DeliveryError
from trainwarden.core.net import get, place_of, value_at

BODY_MAX_BYTES: Final = 4 << 20
"""Of one answer. 16 GPUs in 7 slices each, 60 series a slice, 300 bytes a line are 2 MB."""

SAMPLES_MAX: Final = 50_000
"""Of one answer; what comes after them is counted, not kept."""

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABELS = rf"(?:\s*(?:{_NAME}|{_STRING})\s*(?:=\s*{_STRING}\s*)?(?:,|(?=\}})))*\s*"
_LINE = re.compile(
    rf"(?:({_NAME})?\s*\{{({_LABELS})\}}\s*|({_NAME})\s+)([^\s#]+)(?:\s+[-+.0-9eE]+)?\s*(?:#.*)?", re.ASCII
)
_PAIR = re.compile(rf"\s*({_NAME}|{_STRING})\s*(?:=\s*({_STRING}))?\s*(?:,|$)", re.ASCII)
_ESCAPE = re.compile(r'\\([\\"n])')


class Sample(NamedTuple):
    """One number. Samples of one answer that carry the same labels share them."""

    name: str
    labels: Mapping[str, str]
    value: float
    whole: bool
    """Written without point or exponent: tells a percentage from a ratio where both have the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What an answer says, and what of it could not be read."""

    samples: tuple[Sample, ...]
    bad_lines: int = 0
    first_bad: str = ""
    """The beginning of the first of them, printable."""
    left_out: int = 0
    """Lines beyond SAMPLES_MAX samples."""


def parse(body: bytes) -> Parsed:
    r"""Every sample of an answer. Raises nothing, whatever the bytes.

    >>> read = parse(b'# TYPE up gauge\nup{job="a\\"b"} 1 1700000000000\nup{job=\nfree 2.5\n')
    >>> [(sample.name, *sample.labels.values(), sample.value) for sample in read.samples], read.first_bad
    ([('up', 'a"b', 1.0), ('free', 2.5)], "'up{job='")
    """
    samples: list[Sample] = []
    known: dict[str, tuple[str, Mapping[str, str]]] = {}
    bad = left_out = 0
    first_bad = ""
    for raw in io.StringIO(body.decode(errors="replace"), newline="\n"):
        line = raw.strip()
        if not line or line[0] == "#":
            continue
        if len(samples) == SAMPLES_MAX:
            left_out += 1
        elif (sample := _sample(line, known)) is not None:
            samples.append(sample)
        else:
            bad += 1
            first_bad = first_bad or ascii(line[:60])
    return Parsed(samples=tuple(samples), bad_lines=bad, first_bad=first_bad, left_out=left_out)


def _sample(line: str, known: dict[str, tuple[str, Mapping[str, str]]]) -> Sample | None:
    """What a line says; known: label texts read before. None: it is no sample."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    before, text, alone, number = found.groups()
    try:
        quoted, labels = known[text or ""]
    except KeyError:
        read = _labels(text or "")
        if read is None:
            return None
        quoted, labels = known[text or ""] = read
    name = before or alone or quoted
    if not name or "_" in number or (quoted and before):
        return None
    try:
        return Sample(name, labels, float(number), number.lstrip("+-").isdecimal())
    except ValueError:
        return None


def _labels(text: str) -> tuple[str, Mapping[str, str]] | None:
    """The metric's name where it stands among the labels, and the labels; None: a name twice, or one without value."""
    name, labels = "", dict[str, str]()
    for key, value in _PAIR.findall(text):
        plain = _plain(key[1:-1]) if key[0] == '"' else key
        if value and plain not in labels:
            labels[plain] = _plain(value[1:-1])
        elif not value and key[0] == '"' and not name:
            name = plain
        else:
            return None
    return name, labels


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text) if "\\" in text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one scrape brought."""

    place: str
    """Scheme, host and port: a URL may hold a password."""
    t_ns: int
    """When it had arrived, Unix."""
    parsed: Parsed
    digest: int
    """Tells whether two answers of one process are the same bytes."""


def scrape(url: str, deadline_s: float, clock: Clock) -> Answer | str:
    """What an exporter says now, or in words why it says nothing: over at the deadline. url: as core.net.value_at takes
    it."""
    try:
        where = value_at(url)
        body = get(where, {}, deadline_s, BODY_MAX_BYTES).body
    except DeliveryError as error:
        return str(error)
    return Answer(place=place_of(where), t_ns=clock(), parsed=parse(body), digest=hash(body))
