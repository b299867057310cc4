"""What the words of core/model.py look like outside: text for things, bytes for frames.

A thing is one line of strict, canonical JSON: sorted keys and a tag `type`. `loads` is driven by the dataclasses' own
annotations (core/fromjson.py), so a new field needs no line here. JSON has no NaN: a float that is not finite is
written "NaN", "Infinity" or "-Infinity"; a field declared float reads it back as the number, a value of type Json stays
text. Inside Json a tuple comes back as a list.

A frame is FRAME_MAGIC, the length of its header, the header as JSON, and its rows as they lie in memory.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Final, NoReturn, TypeAlias, get_args

import numpy as np

from trainwarden.core import model
from trainwarden.core.errors import DataError
from trainwarden.core.fromjson import decoder
from trainwarden.core.schemas import DTYPES

Thing: TypeAlias = (
    model.Subject
    | model.Event
    | model.Tick
    | model.Evidence
    | model.Finding
    | model.Incident
    | model.Notice
    | model.Look
    | model.Rung
    | model.Plan
    | model.Outcome
    | model.Start
    | model.Tell
    | model.Checkpoint
    | model.JobStatus
)
"""Everything that has a text form."""

_CLASSES: Final[Mapping[str, type[Any]]] = {cls.__name__: cls for cls in get_args(Thing)}


def dumps(thing: Thing) -> str:
    """One line of JSON.

    >>> dumps(model.Subject(kind="rank", id="3"))
    '{"id":"3","kind":"rank","type":"Subject"}'
    """
    name = type(thing).__name__
    if _CLASSES.get(name) is not type(thing):
        raise TypeError(f"{name} has no text form")
    tagged = {**_plain(thing), "type": name}
    try:
        return _ENCODE(tagged)
    except ValueError:  # a float that is not finite: rare, so only then the whole thing is walked
        return _ENCODE(_finite(tagged))


def loads(text: str | bytes) -> Thing:
    """The thing that `dumps` wrote. Raises DataError naming type and key.

    >>> loads('{"id":"3","kind":"rank","type":"Subject"}')
    Subject(kind='rank', id='3')
    """
    try:
        parsed = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from error
    name = parsed.get("type") if isinstance(parsed, dict) else None
    if not isinstance(name, str) or name not in _CLASSES:
        raise DataError(f"no known type: {name!r}")
    thing: Thing = decoder(_CLASSES[name])(parsed, name)
    return thing


def _plain(value: Any) -> Any:
    """What json does not know, as what it knows; called by the encoder for such values only."""
    if is_dataclass(value):
        cls: Any = type(value)
        names, read = _reader(cls)
        return dict(zip(names, read(value), strict=True))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


@cache
def _reader(cls: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(field.name for field in fields(cls))
    read = attrgetter(*names)
    return names, read if len(names) > 1 else lambda thing: (read(thing),)


def _finite(value: Any) -> Any:
    """The same with each float that is not finite as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _spell(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_finite(inner) for inner in value]
    return _finite(_plain(value))


def _spell(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_ENCODE: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain).encode


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not strict JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)


FRAME_MAGIC: Final = b"TWFRAME1"
"""First bytes of a frame; the digit is the version of the layout."""

_LENGTH: Final = struct.Struct("<I")
_ROWS_AT: Final = len(FRAME_MAGIC) + _LENGTH.size

NAMED: Final[Mapping[str, tuple[str, ...]]] = {
    "step": (),
    "live": ("phase",),
    "span": ("kind",),
    "reading": ("subject", "signal"),
    "collective": ("group", "op"),
}
"""Columns that index Frame.names."""


def frame_to_bytes(frame: model.Frame) -> bytes:
    """The bytes of a frame; `frame_from_bytes` gives them back bit by bit."""
    if frame.rows.dtype != DTYPES[frame.schema]:
        raise TypeError(f"frame of {frame.source}: rows are not of schema {frame.schema}")
    fixed = {
        "epoch": frame.epoch,
        "job": frame.job,
        "row_bytes": frame.rows.dtype.itemsize,
        "rows": len(frame.rows),
        "schema": frame.schema,
        "seen_ns": frame.seen_ns,
        "sent_ns": frame.sent_ns,
        "seq": frame.seq,
        "source": frame.source,
    }
    header = f'{_ENCODE(fixed)[:-1]},"names":{_names_text(frame.names)}}}'.encode()
    return b"".join((FRAME_MAGIC, _LENGTH.pack(len(header)), header, frame.rows.tobytes()))


def frame_from_bytes(body: bytes) -> model.Frame:
    """The frame in these bytes; its rows are a read-only view of them. Raises DataError saying what is wrong."""
    header = _header(body)
    schema, names, count = header["schema"], header["names"], header["rows"]
    row_bytes, at = DTYPES[schema].itemsize, _ROWS_AT + header["bytes"]
    if header["row_bytes"] != row_bytes:
        raise DataError(
            f"frame: rows of schema {schema} have {header['row_bytes']} bytes, this version knows {row_bytes}"
        )
    if len(body) - at != count * row_bytes:
        raise DataError(f"frame: {count} rows of {row_bytes} bytes announced, {len(body) - at} bytes there")
    rows = np.frombuffer(body, DTYPES[schema], count, at) if count else np.empty(0, DTYPES[schema])
    for column in NAMED[schema]:
        if count and (highest := int(rows[column].max())) >= len(names):
            raise DataError(f"frame: {column} {highest} of a {schema} row names none of {len(names)} names")
    plain = {key: header[key] for key in ("schema", "source", "job", "epoch", "seq", "sent_ns", "seen_ns")}
    return model.Frame(**plain, names=names, rows=rows)


@lru_cache(maxsize=1024)
def _names_text(names: tuple[str, ...]) -> str:
    """A source sends the same names again and again."""
    return _ENCODE(names)


def _header(body: bytes) -> dict[str, Any]:
    """The header with each value of its declared type; `bytes` is its own length."""
    magic = body[: len(FRAME_MAGIC)]
    if magic != FRAME_MAGIC:
        newer = magic[:-1] == FRAME_MAGIC[:-1] and magic > FRAME_MAGIC
        hint = " (a newer trainwarden wrote it: upgrade this one)" if newer else ""
        raise DataError(f"frame: starts with {magic!r}, not {FRAME_MAGIC!r}{hint}")
    if len(body) < _ROWS_AT:
        raise DataError(f"frame: truncated after {len(body)} bytes, before its header")
    (length,) = _LENGTH.unpack_from(body, len(FRAME_MAGIC))
    if len(body) < _ROWS_AT + length:
        raise DataError(f"frame: truncated inside its header ({len(body) - _ROWS_AT} of {length} bytes)")
    try:
        said = _DECODER.decode(body[_ROWS_AT : _ROWS_AT + length].decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"frame: header is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise DataError("frame: header is not a mapping")
    header = {key: _header_value(said, key, kind) for key, kind in _HEADER.items()}
    if header["rows"] < 0:
        raise DataError(f"frame: {header['rows']} rows announced")
    return {**header, "bytes": length}


_HEADER: Final[Mapping[str, Any]] = {
    "schema": model.Schema,
    "source": str,
    "job": str | None,
    "epoch": int | None,
    "seq": int,
    "sent_ns": int,
    "seen_ns": int,
    "names": tuple[str, ...],
    "row_bytes": int,
    "rows": int,
}


def _header_value(said: Mapping[str, Any], key: str, kind: Any) -> Any:
    if key not in said:
        raise DataError(f"frame: {key} missing")
    return decoder(kind)(said[key], f"frame: {key}")
