"""A case: one finding while it is being revised. Its id is made from what it names and never changes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from trainwarden.core.codec import dumps, loads
from trainwarden.core.model import Epoch, Evidence, Finding, JobId, Json, State, Subject

Status: TypeAlias = Literal["provisional", "final", "cleared", "withdrawn"]


def finding_id(detector: str, job: JobId | None, epoch: Epoch | None, first: Subject, number: int) -> str:
    """detector/job/epoch/first subject/n; n counts the detector's findings.

    >>> finding_id("hang", JobId("j"), Epoch(1), rank_subject(2), 0)
    'hang/j/1/rank:2/0'
    """
    return f"{detector}/{job or ''}/{'' if epoch is None else epoch}/{first}/{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a detector says of a case at one moment: the part of a finding that later revisions may change."""

    status: Status
    kind: str
    subject: Subject
    suspects: tuple[tuple[Subject, float], ...]
    onset_ns: int
    onset_step: int | None
    confidence: float
    reason: str
    evidence: tuple[Evidence, ...]
    lost_s_per_step: float | None = None


def opened(detector: str, number: int, said: Said, *, job: JobId | None, epoch: Epoch, seen_ns: int) -> Finding:
    """The first revision of a case; number: how many cases the detector opened before."""
    return Finding(
        id=finding_id(detector, job, epoch, said.subject, number),
        revision=0,
        job=job,
        epoch=epoch,
        seen_ns=seen_ns,
        **_as_dict(said),
    )


def restated(finding: Finding, said: Said, seen_ns: int) -> list[Finding]:
    """The next revision, or nothing where nothing would change."""
    return _revised(finding, seen_ns, _as_dict(said))


def ended(finding: Finding, status: Literal["cleared", "withdrawn"], why: str, seen_ns: int) -> list[Finding]:
    """The last revision."""
    return _revised(finding, seen_ns, {"status": status, "reason": f"{why}; it was: {finding.reason}"})


def confirmed(finding: Finding, seen_ns: int) -> list[Finding]:
    """The same, final; nothing if it was already."""
    return _revised(finding, seen_ns, {"status": "final"})


def rank_subject(rank: int) -> Subject:
    """A rank as the subject of a finding."""
    return Subject(kind="rank", id=str(int(rank)))


def job_subject(job: JobId | None) -> Subject:
    """A job as the subject of a finding."""
    return Subject(kind="job", id=job or "")


def fact(what: str, value: Json, *, expected: Json = None, unit: str = "", source: str = "") -> Evidence:
    """Evidence with finite values: NaN and infinities become strings.

    >>> fact("loss", float("nan")).value
    'NaN'
    """
    return Evidence(what=what, value=finite(value), expected=finite(expected), unit=unit, source=source)


def finite(value: Json) -> Json:
    """The same value, with NaN and infinities written as strings, numbers rounded to 6 digits."""
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return float(f"{value:.6g}")
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def say_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, runs folded.

    >>> say_ranks([3, 0, 1, 2, 7]), say_ranks([4])
    ('ranks 0-3, 7', 'rank 4')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank {words}" if one else f"ranks {words}"


def whole(value: Json) -> int:
    """A whole number out of event data, which may have been through JSON.

    >>> whole("7"), whole(7)
    (7, 7)
    """
    return int(value) if isinstance(value, int | float | str) else 0


def put(prefix: str, state: State) -> State:
    """A part's snapshot inside a larger one: flat, since that is what npz and JSON files hold."""
    return {f"{prefix}.{key}": value for key, value in state.items()}


def take(prefix: str, state: State) -> State:
    """The part that put() put there."""
    return {key.removeprefix(f"{prefix}."): value for key, value in state.items() if key.startswith(f"{prefix}.")}


def written(finding: Finding | None) -> Json:
    """An open finding for a snapshot."""
    return None if finding is None else dumps(finding)


def read(text: Json) -> Finding | None:
    """What written() gave."""
    if text is None:
        return None
    finding = loads(str(text))
    assert isinstance(finding, Finding), finding
    return finding


def _revised(finding: Finding, seen_ns: int, changes: dict[str, Any]) -> list[Finding]:
    if all(getattr(finding, name) == value for name, value in changes.items()):
        return []
    return [replace(finding, **changes, revision=finding.revision + 1, seen_ns=seen_ns)]


def _as_dict(said: Said) -> dict[str, Any]:
    return {field.name: getattr(said, field.name) for field in fields(said)}
