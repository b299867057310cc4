"""Which of several findings is the cause, who did it, who suffered, and the one line that says so. Pure functions.

A finding explains another when the tier table says that its kind does and it came first. First means by onset; but the
onset of a stall or a slowness is inferred, known only to the length of a phase or of some steps. A rank killed in the
middle of a step leaves its peers in a phase that they entered *before* the kill. So an exact sign that came before an
inferred one was even seen, came first; a death after the stall was seen is its consequence (a watchdog, an operator).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainwarden.alerts.tiers import Tiers, row_of
from trainwarden.core.model import Epoch, Finding, Json, Subject, SubjectKind

SLACK_NS = 500_000_000
"""Onsets closer than this have no order, then kinds decide: a value is seen a poll (0.1 s) and a tick (0.25 s) after it
was written, a death at once, and all of it later on a busy host."""

NAMED = 8
"""Subjects named in one line; the rest are counted."""

_SUBJECT_KINDS: tuple[SubjectKind, ...] = (
    *("rank", "device", "node", "link", "group", "domain", "job", "checkpoint", "source"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A finding in a case."""

    finding: Finding
    seen_ns: int
    """When its first revision was seen."""
    dealt: bool = False
    """A plan has repaired it, whatever its detector still says."""

    @property
    def live(self) -> bool:
        return not self.dealt and self.finding.status in ("provisional", "final")


def start_of(epoch: Epoch | None) -> int | None:
    """Attempt and restart: findings of one start of the ranks can explain each other, whatever the lap (in which a
    process's own step number fell back; detectors learn of it at different times)."""
    return None if epoch is None else epoch >> 16


def explains(one: Judged, other: Judged, tiers: Tiers) -> bool:
    """Whether the first came first and is (also) the reason of the second, or says the same of the same subject."""
    same = (one.finding.kind, one.finding.subject) == (other.finding.kind, other.finding.subject)
    if not same and other.finding.kind not in row_of(tiers, one.finding.kind).explains:
        return False
    return _sign_ns(one, other, tiers) <= _sign_ns(other, one, tiers) + SLACK_NS


def _sign_ns(one: Judged, against: Judged, tiers: Tiers) -> int:
    """The first abnormal sign of one, as it counts against another."""
    inferred = row_of(tiers, one.finding.kind).onset == "inferred"
    exact = row_of(tiers, against.finding.kind).onset == "exact"
    return one.seen_ns if inferred and exact else one.finding.onset_ns


def cause_of(judged: Sequence[Judged], tiers: Tiers) -> Judged:
    """The finding that explains the first one that joined, by as many steps as there are."""
    cause = judged[0]
    for one in judged[1:]:
        both = explains(cause, one, tiers)
        if explains(one, cause, tiers) and not (both and cause.finding.onset_ns <= one.finding.onset_ns):
            cause = one
    return cause


def culprit_of(finding: Finding) -> Subject | None:
    """Whom to act on: the strongest suspect, the subject when nobody is suspected, nobody when two are equally."""
    if not finding.suspects:
        return finding.subject
    strongest = max(weight for _, weight in finding.suspects)
    best = [subject for subject, weight in finding.suspects if weight == strongest]
    return best[0] if len(best) == 1 else finding.subject if finding.subject in best else None


def victims_of(judged: Iterable[Judged], culprit: Subject | None) -> tuple[Subject, ...]:
    """Everyone else that the findings name, in order."""
    found: set[Subject] = set()
    for one in judged:
        found.add(one.finding.subject)
        found |= set(named_in(one.finding, "victims"))
    return tuple(sorted(found - {culprit}, key=_order))


def named_in(finding: Finding, what: str) -> tuple[Subject, ...]:
    """Subjects in the evidence of this name: rank numbers, or subjects as `rank:3`; anything else is passed over."""
    values = [entry.value for entry in finding.evidence if entry.what == what]
    items = [item for value in values if isinstance(value, list | tuple) for item in value]
    return tuple(subject for item in items if (subject := _subject(item)) is not None)


def _subject(item: Json) -> Subject | None:
    if isinstance(item, int) and not isinstance(item, bool):
        return Subject(kind="rank", id=str(item))
    kind, colon, name = item.partition(":") if isinstance(item, str) else ("", "", "")
    return next((Subject(kind=known, id=name) for known in _SUBJECT_KINDS if colon and known == kind), None)


def _order(subject: Subject) -> tuple[str, int, str]:
    return subject.kind, int(subject.id) if subject.id.isdecimal() else -1, subject.id


def reason_of(cause: Finding, joined: Sequence[Finding]) -> str:
    """One line: the cause in its detector's words, then what followed from it."""
    followed = [f"{kind} of {say(subjects)}" for kind, subjects in _by_kind(joined).items()]
    return "; ".join([cause.reason, *([f"followed by {', '.join(followed)}"] if followed else [])])


def _by_kind(findings: Sequence[Finding]) -> dict[str, list[Subject]]:
    found: dict[str, list[Subject]] = {}
    for one in findings:
        found.setdefault(one.kind, []).append(one.subject)
    return found


def say(subjects: Iterable[Subject]) -> str:
    """Subjects in words.

    >>> say([Subject(kind="rank", id="3"), Subject(kind="rank", id="1"), Subject(kind="node", id="n1")])
    'node n1, ranks 1, 3'
    """
    ordered = sorted(set(subjects), key=_order)
    named, parts = ordered[:NAMED], list[str]()
    for kind in dict.fromkeys(subject.kind for subject in named):
        names = [subject.id for subject in named if subject.kind == kind]
        parts.append(f"{kind}{'s' if len(names) > 1 else ''} {', '.join(names)}")
    rest = len(ordered) - len(named)
    return ", ".join(parts) + (f" and {rest} more" if rest else "")
