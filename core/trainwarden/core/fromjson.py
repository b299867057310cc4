"""From parsed JSON to a dataclass, driven by its annotations: one small closure a type, made once.

Knows exactly the types that core/model.py uses; anything else is a mistake of ours and asserts. Unknown keys are
ignored (a newer version wrote them), a missing required one or a wrong type raises DataError naming type and key.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from trainwarden.core.errors import DataError
from trainwarden.core.model import Json

Decode: TypeAlias = Callable[[Any, str], Any]
"""From a parsed JSON value and where it stands (for the message) to the value of the field."""

NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How a float that is not finite is spelt: JSON has no number for it."""

INT64: Final = range(-(2**63), 2**63)
"""Whole numbers beyond are refused: no field of ours is wider, and arrays could not hold them."""


def decoder(kind: Any) -> Decode:
    """How a value of this annotation is read."""
    return _made(kind)


@cache
def _made(kind: Any) -> Decode:
    kind = getattr(kind, "__supertype__", kind)  # NewType
    if kind == Json:
        return _json
    if kind in _SCALARS:
        return _SCALARS[kind]
    if is_dataclass(kind):
        return _of_class(kind)
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return _of_enum(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _of_literal(args)
    if origin in (Union, UnionType):
        return _of_optional(args)
    if origin is tuple:
        return _of_tuple(args)
    assert origin is Mapping, f"no text form for {kind}"
    return _of_mapping(*args)


def _wrong(where: str, wanted: str, got: Any) -> DataError:
    shown = repr(got)
    return DataError(f"{where}: expected {wanted}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _json(value: Any, where: str) -> Any:
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise _wrong(where, "text", value)
    return value


def _whole(value: Any, where: str) -> int:
    if type(value) is not int or value not in INT64:
        raise _wrong(where, "a whole number", value)
    return value


def _truth(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise _wrong(where, "true or false", value)
    return value


def _number(value: Any, where: str) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return _rounded(value, where)
    if type(value) is not str or value not in NON_FINITE:
        raise _wrong(where, "a number", value)
    return NON_FINITE[value]


def _rounded(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise _wrong(where, "a number", value) from error


_SCALARS: Final[Mapping[Any, Decode]] = {str: _text, int: _whole, bool: _truth, float: _number}


def _of_enum(kind: type[IntEnum]) -> Decode:
    members = {member.value: member for member in kind}

    def decode(value: Any, where: str) -> IntEnum:
        if type(value) is not int or value not in members:
            raise _wrong(where, f"one of {', '.join(map(str, members))}", value)
        return members[value]

    return decode


def _of_literal(allowed: tuple[str, ...]) -> Decode:
    def decode(value: Any, where: str) -> str:
        if type(value) is not str or value not in allowed:
            raise _wrong(where, f"one of {', '.join(allowed)}", value)
        return value

    return decode


def _of_optional(args: tuple[Any, ...]) -> Decode:
    inner, *more = (arg for arg in args if arg is not NoneType)
    assert not more, f"no text form for a choice of {args}"
    decode_inner = decoder(inner)

    def decode(value: Any, where: str) -> Any:
        return None if value is None else decode_inner(value, where)

    return decode


def _of_tuple(args: tuple[Any, ...]) -> Decode:
    """Of any length (`tuple[X, ...]`) or fixed."""
    many = args[-1] is Ellipsis
    inner = tuple(decoder(arg) for arg in args if arg is not Ellipsis)

    def decode(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _wrong(where, "a list", value)
        if not many and len(value) != len(inner):
            raise _wrong(where, f"{len(inner)} values", value)
        each = inner * len(value) if many else inner
        return tuple(take(item, f"{where}[{at}]") for at, (take, item) in enumerate(zip(each, value, strict=True)))

    return decode


def _of_mapping(key: Any, inner: Any) -> Decode:
    decode_inner = decoder(inner)
    same = key is str and decode_inner is _json
    by_number = key is int

    def decode(value: Any, where: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _wrong(where, "a mapping", value)
        if same:
            return value
        return {
            _number_key(name, where) if by_number else name: decode_inner(item, f"{where}.{name}")
            for name, item in value.items()
        }

    return decode


def _number_key(name: str, where: str) -> int:
    """JSON keys are text: only the canonical spelling is a number, so that two keys never become one."""
    try:
        number = int(name)
    except ValueError:
        number = None
    if number is None or str(number) != name:
        raise _wrong(where, "whole numbers as keys", name)
    return number


def _of_class(cls: Any) -> Decode:
    name = cls.__name__
    known = tuple((f.name, decoder(f.type), f"{name}.{f.name}", _required(f)) for f in fields(cls))

    def decode(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise _wrong(where, name, value)
        taken = {}
        for key, take, place, required in known:
            if key in value:
                taken[key] = take(value[key], place)
            elif required:
                raise DataError(f"{place}: missing")
        return cls(**taken)

    return decode


def _required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
