"""A pydantic model of a plain dataclass: type checks and JSON schema at the file boundary, none inside.

The mirror refuses unknown keys and converts nothing (`"5"` is no number), but for what JSON cannot say: a list becomes
a tuple, a text a path, a duration with its unit a timedelta. Nested dataclasses are mirrored as well.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic import create_model as _create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from trainwarden.core.durations import WRITTEN, format_duration, parse_duration
from trainwarden.core.errors import ConfigError
from trainwarden.core.field_docs import field_docs


class Problem(NamedTuple):
    """One thing that is wrong with a file."""

    key: str
    """Full path of the key, `detectors.hang.floor`."""
    text: str


_WANTED: Final = {
    "int_type": "needs a whole number",
    "int_from_float": "needs a whole number",
    "int_parsing": "needs whole numbers as keys",
    "float_type": "needs a number",
    "finite_number": "needs a finite number",
    "bool_type": "needs true or false",
    "string_type": "needs text",
    "path_type": "needs a path",
    "tuple_type": "needs a list",
    "list_type": "needs a list",
    "frozen_set_type": "needs a list",
    "dict_type": "needs a mapping",
    "model_type": "needs a mapping",
    "mapping_type": "needs a mapping",
    "literal_error": "needs {expected}",
    "enum": "needs {expected}",
    "duration": "needs a duration with its unit, such as 250ms, 10s, 20 min or 1h",
}
"""pydantic's error types in our words (others keep pydantic's)."""


def build(cls: Any, said: Mapping[str, Any], where: str, *, also: Collection[str] = ()) -> Any | list[Problem]:
    """The dataclass from what a file says of it, or all that is wrong. `also`: keys that others take care of."""
    own = {key: value for key, value in said.items() if key not in also}
    model = _mirror(cls)
    try:
        checked = model.model_validate_json(json.dumps(own, default=str))
    except ValidationError as error:
        return [_problem(model, where, one, also) for one in error.errors(include_url=False)]
    problems: list[Problem] = []
    made = _unmirrored(checked, where, problems)
    return problems or made


def needs_mapping(where: str, got: object) -> Problem:
    """Something else stands where settings should."""
    return Problem(where, f"needs a mapping, got {_shown(got)}")


def unknown_key(where: str, got: object, allowed: Collection[str]) -> Problem:
    """A key that means nothing here."""
    return Problem(where, f"is not known here, got {_shown(got)}; allowed: {', '.join(sorted(allowed)) or 'nothing'}")


def section_schema(cls: Any) -> dict[str, Any]:
    """The JSON schema of one dataclass, with its nested ones under `$defs`."""
    return _mirror(cls).model_json_schema()


@cache
def _mirror(cls: Any) -> type[BaseModel]:
    docs, hints = field_docs(cls), get_type_hints(cls, include_extras=True)
    mirrored: dict[str, Any] = {}
    for field in fields(cls):
        default = {"default": field.default} if field.default is not MISSING else {}
        if field.default_factory is not MISSING:
            default = {"default_factory": field.default_factory}
        # pydantic would show a default of 10 s as PT10S
        shown: dict[str, Any] = {}
        if isinstance(field.default, timedelta):
            shown["default"] = format_duration(field.default)
        about = Field(**default, description=docs.get(field.name), json_schema_extra=shown)
        mirrored[field.name] = (_mirrored(hints[field.name]), about)
    own_text = None if (cls.__doc__ or "").startswith(f"{cls.__name__}(") else cls.__doc__
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    model: type[BaseModel] = _create_model(cls.__name__, __config__=config, __doc__=own_text, **mirrored)
    _ORIGINALS[model] = cls
    return model


_ORIGINALS: Final[dict[type[BaseModel], Any]] = {}
"""Of which dataclass a model is the mirror."""


def _duration(value: object) -> timedelta:
    try:
        return parse_duration(value if isinstance(value, str) else "")
    except ValueError as error:
        raise PydanticCustomError("duration", "needs a duration") from error


_Duration = Annotated[
    timedelta,
    PlainValidator(_duration),
    WithJsonSchema({"type": "string", "pattern": WRITTEN}),
]


def _mirrored(kind: Any) -> Any:
    """The same type with mirrors for dataclasses and durations for timedeltas, however deep."""
    if kind is timedelta:
        return _Duration
    if is_dataclass(kind):
        cls: Any = kind
        return _mirror(cls)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return Union[tuple(_mirrored(arg) for arg in args)]  # noqa: UP007 (made at run time)
    if origin is None or isinstance(args[0], str | int):  # a plain class, or Literal
        return kind
    return origin[tuple(arg if arg is Ellipsis else _mirrored(arg) for arg in args)]


def _unmirrored(value: Any, where: str, problems: list[Problem]) -> Any:
    """The checked value with real dataclasses; what these refuse themselves is added to the problems."""
    if isinstance(value, BaseModel):
        inner = {
            name: _unmirrored(getattr(value, name), f"{where}.{name}", problems)
            for name in type(value).model_fields
            if name in value.model_fields_set
        }
        return _made(_ORIGINALS[type(value)], inner, where, problems)
    if isinstance(value, tuple | list):
        return type(value)(_unmirrored(item, f"{where}[{at}]", problems) for at, item in enumerate(value))
    if isinstance(value, Mapping):
        return {key: _unmirrored(item, f"{where}.{key}", problems) for key, item in value.items()}
    return value


def _made(cls: Any, inner: dict[str, Any], where: str, problems: list[Problem]) -> Any:
    if any(problem.key.startswith(where) for problem in problems):
        return None  # a part is missing: the whole cannot be judged
    try:
        return cls(**inner)
    except ConfigError as error:
        problems.append(_from_dataclass(cls, str(error), where))
        return None


def _from_dataclass(cls: Any, message: str, where: str) -> Problem:
    """A dataclass may name one of its fields, the whole path, or nothing: `field: what is wrong`."""
    head, _, rest = message.partition(": ")
    if rest and (head == where or head.startswith(f"{where}.")):
        return Problem(head, rest)
    if rest and head.partition(".")[0].partition("[")[0] in {field.name for field in fields(cls)}:
        return Problem(f"{where}.{head}", rest)
    return Problem(where, message)


def _problem(model: type[BaseModel], where: str, error: ErrorDetails, also: Collection[str]) -> Problem:
    loc = tuple(part for part in error["loc"] if part != "[key]")
    key = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    if error["type"] == "extra_forbidden":
        return unknown_key(key, error["input"], [*_allowed(model, loc[:-1]), *(also if len(loc) == 1 else ())])
    if error["type"] == "missing":
        return Problem(key, "is missing")
    wanted = _WANTED.get(error["type"], error["msg"][:1].lower() + error["msg"][1:])
    return Problem(key, f"{wanted.format(**error.get('ctx', {}))}, got {_shown(error['input'])}")


def _allowed(kind: Any, loc: tuple[str | int, ...]) -> Iterator[str]:
    """The keys of the mirror that stands at `loc` below a type."""
    kinds = [kind]
    for part in loc:
        kinds = [inner for one in kinds for inner in _inside(one, part)]
    for one in kinds:
        yield from one.model_fields if isinstance(one, type) and issubclass(one, BaseModel) else ()


def _inside(kind: Any, part: str | int) -> Iterator[Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if part in kind.model_fields:
            yield from _choices(kind.model_fields[str(part)].annotation)
        return
    for arg in get_args(kind):
        if arg is not Ellipsis:
            yield from _choices(arg)


def _choices(kind: Any) -> Iterator[Any]:
    if get_origin(kind) in (Union, UnionType):
        yield from (arg for arg in get_args(kind) if arg is not NoneType)
    else:
        yield kind


def _shown(value: object) -> str:
    """As it would stand in the file, cut short."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
