"""The tier table: what each kind of finding means for people, read once from tiers.yaml.

A detector never says how loud a finding is or what to do; this table does, and nothing else. A kind that the table does
not know (a third party's detector) is said as WARN when it is final: seen by people, waking nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """One row of tiers.yaml."""

    kind: str
    tier: Tier
    action: str
    """What a person does, one line."""
    announce: Literal["provisional", "final"] = "final"
    """From which status of a finding on people are told."""
    onset: Literal["exact", "inferred"] = "inferred"
    """Whether the first abnormal sign is one instant, or known only to the length of a phase or of some steps."""
    explains: frozenset[str] = frozenset()
    """Kinds that follow from this one in the same epoch."""
    look: Literal["stack", "dump"] | None = None
    """What to fetch at the first sight of it."""


Tiers = Mapping[str, TierRow]


def row_of(tiers: Tiers, kind: str) -> TierRow:
    """The row of a kind, or what is said of a kind nobody foresaw."""
    unforeseen = "look at the evidence: this kind of finding has no entry in the tier table"
    return tiers.get(kind) or TierRow(kind=kind, tier=Tier.WARN, action=unforeseen)


@cache
def standard_tiers() -> Tiers:
    """The table that ships with trainwarden."""
    text = (files("trainwarden.alerts") / "tiers.yaml").read_text(encoding="utf-8")
    return parse_tiers(text, "tiers.yaml")


def load_tiers(path: Path) -> Tiers:
    """A table of the user's. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_tiers(text, str(path))


def parse_tiers(text: str, name: str) -> Tiers:
    """The table in a YAML text; `name` is what errors call it. Raises ConfigError with the path of the key."""
    try:
        rows = _TABLE.validate_python(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise ConfigError(f"{name}: {path or 'the whole'}: {first['msg']}, got {first['input']!r}") from error
    return {kind: _row(kind, row) for kind, row in rows.items()}


FINDING_KINDS = tuple(name for name, row in KINDS.items() if row.of == "finding")


def _finding_kind(name: str) -> str:
    if name not in FINDING_KINDS:
        raise PydanticCustomError("finding_kind", f"no kind of finding; allowed: {', '.join(FINDING_KINDS)}")
    return name


_FindingKind = Annotated[str, AfterValidator(_finding_kind)]


class _Row(BaseModel):
    """A row as the file has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tier: Literal["INFO", "WARN", "ERROR", "CRITICAL"]
    action: Annotated[str, StringConstraints(pattern=r"^\S[^\n]*\S$")]
    announce: Literal["provisional", "final"]
    onset: Literal["exact", "inferred"]
    explains: list[_FindingKind]
    look: Literal["stack", "dump"] | None = None


_TABLE = TypeAdapter(dict[_FindingKind, _Row])


def _row(kind: str, row: _Row) -> TierRow:
    return TierRow(
        kind=kind,
        tier=Tier[row.tier],
        action=row.action,
        announce=row.announce,
        onset=row.onset,
        explains=frozenset(row.explains),
        look=row.look,
    )
