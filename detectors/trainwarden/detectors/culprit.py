"""Who did not arrive: of ranks that all stand still, the one that the others wait for.

In a job that moves in step, one stuck rank stops everybody within a step, so nearly every rank that stands still is a
victim. Signs, strongest first: the process is stopped or gone (the kernel says so); it is behind the others by a step,
or not in `wait` while others at the same step are; its Python stack is outside of any collective while others' are
inside; it sleeps in the kernel uninterruptibly. Where no sign tells one from the others, that is said.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwarden.core.model import Json
from trainwarden.detectors.budgets import WAIT

STOPPED, BEHIND, OUTSIDE, ASLEEP = 8, 4, 2, 1
"""Weights: each sign outweighs all weaker ones together."""

CONFIDENCE = {STOPPED: 0.97, BEHIND: 0.9, OUTSIDE: 0.8, ASLEEP: 0.7}
"""Our judgement of how often the strongest sign of a rank names the cause; shared out where several ranks have it."""

UNDECIDED = 0.45
"""Most that is said of a suspect where no sign tells one from the others."""

_COLLECTIVE = re.compile(r"torch/(distributed|autograd/graph)|horovod|mpi4py|deepspeed/comm|\bc10d\b")
"""Innermost frames inside a collective. DDP's all-reduce runs below the autograd engine, so that counts too."""

_NOT_THE_USERS = re.compile(r"site-packages|dist-packages|lib/python3|<frozen|<string>")
_STATES = {
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "dead",
    "X": "dead",
    "gone": "gone",
    "D": "asleep in the kernel",
}

Stack = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Ranks in the order of suspicion."""

    ranks: tuple[int, ...]
    confidence: tuple[float, ...]
    decided: bool
    """A sign tells ranks[0] (and who shares it) from the others."""


def blame(rank_K: NDArray[np.intp], row_K: NDArray[np.void], stacks: Mapping[int, Stack]) -> Blame:
    """rank_K: members that count; row_K: their rows of the live table; stacks: what the witness saw of some."""
    score_K = _behind(row_K) * BEHIND + _seen(rank_K, stacks)
    order = np.lexsort((rank_K, row_K["since_ns"], row_K["moved_ns"], -score_K))
    top = int(score_K[order[0]])
    guilty = int(np.count_nonzero(score_K == top))
    decided = len(rank_K) == 1 or (top > 0 and guilty < len(rank_K))
    if not decided:
        ranks = tuple(rank_K[order].tolist())
        return Blame(ranks=ranks, confidence=(min(UNDECIDED, 1 / len(ranks)),) * len(ranks), decided=False)
    strongest = next((weight for weight in CONFIDENCE if top & weight), BEHIND)
    share = CONFIDENCE[strongest] / guilty
    return Blame(ranks=tuple(rank_K[order[:guilty]].tolist()), confidence=(share,) * guilty, decided=True)


def user_frame(stack: Stack) -> str:
    """The innermost frame of the script itself; else the innermost of all; "" without a stack.

    >>> user_frame({"frames": ["/v/site-packages/torch/x.py:3 f", "/job/train.py:120 share"]})
    '/job/train.py:120 share'
    """
    frames = _frames(stack)
    return next((frame for frame in frames if not _NOT_THE_USERS.search(frame)), frames[0] if frames else "")


def say_state(stack: Stack) -> str:
    """The process state in words where it says something: `stopped (state T)`."""
    letter = str(stack.get("state", ""))
    return f"{_STATES[letter]} (state {letter})" if letter in _STATES else ""


def _behind(row_K: NDArray[np.void]) -> NDArray[np.int64]:
    newest = row_K["key"].max()
    ahead_K = row_K["key"] == newest
    waiting = bool(np.any(ahead_K & (row_K["phase"] == WAIT)))
    never_K = row_K["seen_ns"] == 0
    return np.asarray(never_K | ~ahead_K | (waiting & (row_K["phase"] != WAIT)), np.int64)


def _seen(rank_K: NDArray[np.intp], stacks: Mapping[int, Stack]) -> NDArray[np.int64]:
    score_K = np.zeros(len(rank_K), np.int64)
    inside = any(_inside(stack) for stack in stacks.values())
    for rank, stack in stacks.items():
        state = str(stack.get("state", ""))
        outside = inside and bool(_frames(stack)) and not _inside(stack)
        weight = STOPPED * (state in ("T", "t", "Z", "X", "gone")) + OUTSIDE * outside + ASLEEP * (state == "D")
        score_K[rank_K == rank] += weight
    return score_K


def _inside(stack: Stack) -> bool:
    return any(_COLLECTIVE.search(frame) for frame in _frames(stack))


def _frames(stack: Stack) -> tuple[str, ...]:
    frames = stack.get("frames")
    return tuple(str(frame) for frame in frames) if isinstance(frames, Sequence) and not isinstance(frames, str) else ()
