"""The docstrings under the fields of a dataclass: written once, shown in documentation and JSON schema."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any


def field_docs(cls: type[Any]) -> Mapping[str, str]:
    """Field -> the text under it, on one line, inherited ones first; fields without one are left out.

    Empty where there is no source to read (an installation of byte code only).
    """
    known: list[Any] = [one for one in reversed(cls.__mro__) if is_dataclass(one)]
    return dict(pair for one in known for pair in _read(one))


@cache
def _read(cls: Any) -> tuple[tuple[str, str], ...]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return ()
    return tuple(_documented(ast.parse(source)))


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    (written,) = tree.body
    assert isinstance(written, ast.ClassDef)
    for field, below in pairwise(written.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and (text := _text(below)):
            yield field.target.id, " ".join(text.split())


def _text(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else ""
    return ""
