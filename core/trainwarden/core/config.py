"""The configuration file: YAML outside, frozen dataclasses inside.

A section is a dotted name (`detectors.hang`) and the dataclass that a component keeps beside its class. pydantic checks
the types on a mirror of it (core/mirror.py), the dataclass itself then says what else must hold. All that is wrong is
told at once, each with the full path of the key, the value got and what is allowed. Nothing unknown is accepted: a
misspelt setting that silently does nothing is worse than no file.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainwarden.core.errors import ConfigError
from trainwarden.core.field_docs import field_docs
from trainwarden.core.mirror import Problem, build, needs_mapping, section_schema, unknown_key

__all__ = ["field_docs", "load", "load_fields", "schema"]

T = TypeVar("T")


def load(path: Path, sections: Mapping[str, type[T]]) -> Mapping[str, T]:
    """Every section as its dataclass; what the file does not set has its default. Raises ConfigError."""
    said = _parsed(path)
    problems = list(_misplaced("", said, sections))
    made: dict[str, T] = {}
    for name, cls in sections.items():
        value = _at(said, name)
        if not isinstance(value, Mapping):
            problems.append(needs_mapping(name, value))
            continue
        built = build(cls, value, name, also=_children(f"{name}.", sections))
        if isinstance(built, list):
            problems += built
        else:
            made[name] = built
    if problems:
        raise ConfigError(_message(path, problems))
    return made


def load_fields(path: Path | None, sections: Mapping[str, tuple[str, type[Any]]]) -> dict[str, Any]:
    """What a file says, by the fields that its sections fill: section -> (field, type); no file, no field.

    Raises ConfigError.
    """
    if path is None:
        return {}
    loaded = load(path, {section: type_ for section, (_, type_) in sections.items()})
    return {sections[section][0]: value for section, value in loaded.items()}


def schema(sections: Mapping[str, type[Any]]) -> dict[str, Any]:
    """One JSON schema of the whole file: for editors, and for the page of settings."""
    definitions: dict[str, Any] = {}
    root = _mapping_schema()
    for name, cls in sorted(sections.items()):
        at = root
        for part in name.split("."):
            at = at["properties"].setdefault(part, _mapping_schema())
        described = section_schema(cls)
        definitions |= described.pop("$defs", {})
        at["properties"] |= described.pop("properties", {})
        at |= described
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _mapping_schema() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _message(path: Path, problems: list[Problem]) -> str:
    lines = [f"{key}: {text}" for key, text in sorted(problems)]
    if len(lines) == 1:
        return f"{path}: {lines[0]}"
    return "\n  ".join([f"{path}: {len(lines)} problems", *lines])


def _children(prefix: str, sections: Collection[str]) -> set[str]:
    """The next part of every section name below a prefix."""
    return {name.removeprefix(prefix).partition(".")[0] for name in sections if name.startswith(prefix)}


def _misplaced(prefix: str, said: Mapping[str, Any], sections: Collection[str]) -> Iterator[Problem]:
    """What stands above the sections and leads to none. (Keys of a section are the section's affair.)"""
    known = _children(prefix, sections)
    for key, value in said.items():
        name = f"{prefix}{key}"
        if key in known and isinstance(value, Mapping) and name not in sections:
            yield from _misplaced(f"{name}.", value, sections)
        elif key in known and value is not None and name not in sections:
            yield needs_mapping(name, value)
        elif key not in known and prefix.rstrip(".") not in sections:
            yield unknown_key(name, value, known)


def _at(said: Mapping[str, Any], name: str) -> object:
    """What the file says of a section; nothing said, or said empty: {}."""
    value: object = said
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return {} if value is None else value


# YAML


class _Loader(yaml.SafeLoader):
    """YAML without its traps: a key stands once; `on`, `no`, dates, `0777` and `1:30` are text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[tuple[str, str], yaml.ScalarNode] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                first = seen.setdefault((key.tag, key.value), key)
                if first is not key:
                    text = f"key {key.value} stands twice, first in line {first.start_mark.line + 1}"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", "true|false", "tf"),
    ("int", "[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", "~|null|", ["~", "n", ""]),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_pattern})$"), [*_first])


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        said = json.loads(json.dumps(yaml.load(path.read_text(encoding="utf-8"), _Loader), default=str))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path}: {line}{error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(said, dict | None):
        raise ConfigError(f"{path}: needs a mapping of sections, got {type(said).__name__}")
    return said or {}
