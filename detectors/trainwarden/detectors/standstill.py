"""A job that stands still, in words and evidence: who did not arrive, who waits, where the culprit stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Evidence, JobId, Subject
from trainwarden.detectors.case import Said, Status, fact, job_subject, rank_subject, say_ranks
from trainwarden.detectors.culprit import UNDECIDED, Blame, Stack, blame, say_state, user_frame
from trainwarden.detectors.live import NEVER, Live

KIND = "rank.hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """How the job stands at one tick."""

    rank_K: NDArray[np.intp]
    """Members that can be judged: fresh, or never attached."""
    blind: tuple[int, ...]
    """Members of which no fresh frame was seen."""
    newest_ns: int
    """When somebody last moved."""
    quiet_s: float
    allowed_s: float


def say(
    stand: Stand, live: Live, stacks: Mapping[int, Stack], *, job: JobId | None, now_ns: int, status: Status
) -> Said:
    """The verdict on a standstill, with what the witness saw so far."""
    found = blame(stand.rank_K, live.row_R[stand.rank_K], stacks)
    if not found.decided:
        return _undecided(found, stand, live, stacks, job, status)
    culprit = found.ranks[0]
    row = live.row_R[culprit]
    victims = sorted(set(stand.rank_K.tolist()) - set(found.ranks))
    standing_s = 1e-9 * (now_ns - int(row["moved_ns"])) if row["seen_ns"] else stand.quiet_s
    return Said(
        status=status,
        kind=KIND,
        onset_ns=stand.newest_ns,
        onset_step=_step(row),
        subject=rank_subject(culprit),
        suspects=_suspects(found.ranks, found.confidence),
        confidence=found.confidence[0],
        reason=_reason(culprit, found, stand, victims, live, stacks.get(culprit, {}), standing_s),
        evidence=(
            *_quiet(stand),
            *_place(row, live, standing_s),
            *_stack(stacks.get(culprit, {})),
            fact("victims", victims, source="live"),
        ),
    )


def _undecided(
    found: Blame, stand: Stand, live: Live, stacks: Mapping[int, Stack], job: JobId | None, status: Status
) -> Said:
    # whoever is blind may be who the others wait for, so they come first
    ranks = (*stand.blind, *found.ranks)
    confidence = min(UNDECIDED, 1 / len(ranks))
    row = live.row_R[found.ranks[0]]
    where = _where(row, live)
    nothing = "all look alike" if not stand.blind else f"{say_ranks(stand.blind)} cannot be seen"
    return Said(
        status=status,
        kind=KIND,
        onset_ns=stand.newest_ns,
        onset_step=_step(row),
        subject=job_subject(job),
        suspects=_suspects(ranks, (confidence,) * len(ranks)),
        confidence=confidence,
        reason=f"no rank moves: {stand.quiet_s:.1f} s, allowed {stand.allowed_s:.3g} s; {say_ranks(found.ranks)} "
        f"{where}; nothing tells which one holds the others up: {nothing}",
        evidence=(
            *_quiet(stand),
            *_place(row, live, stand.quiet_s),
            *(_denied(stacks)),
            fact("blind", list(stand.blind), source="live"),
        ),
    )


def _reason(
    culprit: int, found: Blame, stand: Stand, victims: Sequence[int], live: Live, stack: Stack, standing_s: float
) -> str:
    row = live.row_R[culprit]
    others = f" and {len(found.ranks) - 1} more" if len(found.ranks) > 1 else ""
    arrived = "has not arrived" if row["seen_ns"] else "never attached"
    place = f"{standing_s:.1f} s {_where(row, live)}" if row["seen_ns"] else f"{standing_s:.1f} s after the others"
    waiting = f", {say_ranks(victims)} {'wait' if len(victims) > 1 else 'waits'} for it" if victims else ""
    state = f"; it is {say_state(stack)}" if say_state(stack) else ""
    frame = f"; it stands at {user_frame(stack)}" if user_frame(stack) else ""
    return f"rank {culprit}{others} {arrived}: {place} (allowed {stand.allowed_s:.3g} s){waiting}{state}{frame}"


def _step(row: np.void) -> int | None:
    return int(row["step"]) if row["key"] > NEVER else None


def _where(row: np.void, live: Live) -> str:
    phase = live.names[int(row["phase"])]
    return f"in {phase} of step {int(row['step'])}" if row["key"] > NEVER else f"in {phase}"


def _suspects(ranks: Sequence[int], confidence: Sequence[float]) -> tuple[tuple[Subject, float], ...]:
    return tuple((rank_subject(rank), share) for rank, share in zip(ranks, confidence, strict=True))


def _quiet(stand: Stand) -> tuple[Evidence, ...]:
    return (fact("quiet", stand.quiet_s, expected=stand.allowed_s, unit="s", source="live"),)


def _place(row: np.void, live: Live, standing_s: float) -> tuple[Evidence, ...]:
    return (
        fact("phase", live.names[int(row["phase"])], source="live"),
        fact("step", int(row["step"]), source="live"),
        fact("standing", standing_s, unit="s", source="live"),
    )


def _stack(stack: Stack) -> tuple[Evidence, ...]:
    if not stack:
        return ()
    seen = {"frame": user_frame(stack), "process_state": stack.get("state"), "wait_channel": stack.get("wchan")}
    seen["stack_denied"] = stack.get("denied")
    return tuple(fact(what, value, source="stack") for what, value in seen.items() if value)


def _denied(stacks: Mapping[int, Stack]) -> tuple[Evidence, ...]:
    denied = sorted({str(stack["denied"]) for stack in stacks.values() if stack.get("denied")})
    return tuple(fact("stack_denied", why, source="stack") for why in denied)
