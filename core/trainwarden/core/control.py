"""Requests to ranks, and their answers, in the control block of each ring. Standard library only.

Every rank must obey a request at the SAME step, or the job deadlocks in the collectives of the save. Without a
collective of our own that takes four rules (docs/architecture.md, Requests):

1. A request names a step beyond every rank's newest begun step plus a lead, and is written to all rings of the host.
2. A rank reads it in end() of that step: it answers `acked` and waits, until every ring of the host has answered this
   request, or shows a rank that has begun a later step, left, or died.
3. All answered: `obeyed`. Else `void`, and it trains on. A rank that meets a request after its step answers `void`.
4. Each rank either answers before it begins the next step or begins it without an answer, so all decide alike, whoever
   is stopped in between for however long. There is no timeout: the ranks would wait for each other anyhow.

A request is one aligned 8-byte store, seq << 40 | code << 32 | step, and so is an answer: neither can be torn. At
CONTROL_OFFSET stand request (0: none), its argument, answer. A rank takes the request away before it gives its last
answer, and the next is only put there when every rank has decided on the last one.
"""

import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwarden.core.errors import ActionError, DataError
from trainwarden.core.records import CONTROL_OFFSET, HEADER, LIVE_OFFSET, MAGIC, PHASES, STATES, VERSION

CHECKPOINT, QUIESCE, STOP, RESUME = 1, 2, 3, 4
CODES = {CHECKPOINT: "checkpoint", QUIESCE: "quiesce", STOP: "stop", RESUME: "resume"}
"""checkpoint: save now. quiesce: stand still, at most `arg` seconds. stop: end in order. resume: ends a quiesce."""
NOTHING, ACKED, OBEYED, VOID = 0, 1, 2, 3
ANSWERS = ("nothing", "acked", "obeyed", "void")

LEAD_STEPS = 2
LEAD_S = 1.0
"""How far ahead of the fastest rank a request is put, whichever is longer: all rings are written within milliseconds;
a requester that is stopped in between for longer makes the request void, which is safe."""

_WORD = struct.Struct("@q")
_BEGUN_OFFSET = LIVE_OFFSET + 8 * len(PHASES)
_STATE_OFFSET = _BEGUN_OFFSET + 4 * 8
_DETACHED = STATES.index("detached")
_NAME = re.compile(r"rank-(\d+)-(\d+)-(\d+)\.ring")
_HIGH = 40
_STEP_MASK = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the ranks are asked for.

    >>> Request(seq=1, code=CHECKPOINT, at_step=40).word >> 40
    1
    """

    seq: int
    """Grows with each request of a job's attempt; 1 to 2^23 - 1."""
    code: int
    at_step: int
    arg: int = 0

    @property
    def word(self) -> int:
        """As it stands in the block."""
        return pack(self.seq, self.code, self.at_step)

    @property
    def name(self) -> str:
        """Its code in words."""
        return CODES[self.code]


def pack(seq: int, kind: int, step: int) -> int:
    """One word of the block: a request (kind = code) or an answer (kind = one of ANSWERS)."""
    return seq << _HIGH | kind << 32 | step & _STEP_MASK


def unpack(word: int) -> tuple[int, int, int]:
    """(seq, kind, step) of a word.

    >>> unpack(pack(3, VOID, 41))
    (3, 3, 41)
    """
    return word >> _HIGH, word >> 32 & 0xFF, word & _STEP_MASK


class Block:
    """The control block of one ring, mapped by somebody who is not its writer."""

    def __init__(self, path: Path) -> None:
        """Map a ring of this version. Raises OSError, DataError."""
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise DataError(f"{path}: no ring's name")
        self.rank, self.attempt, self.restart = (int(part) for part in named.groups())
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(self._fd).st_size < CONTROL_OFFSET + 3 * _WORD.size:
                raise DataError(f"{path}: too short for a ring")
            self._map = mmap.mmap(self._fd, mmap.PAGESIZE)
            magic, version = HEADER.unpack_from(self._map)[:2]
            if magic != MAGIC or version != VERSION:
                raise DataError(f"{path}: no ring of version {VERSION}")
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def begun_step(self) -> int:
        """The newest step that the rank has begun, -1 before the first."""
        return int(_WORD.unpack_from(self._map, _BEGUN_OFFSET)[0])

    @property
    def gone(self) -> bool:
        """Whether the rank has left in order, or its process is dead: nobody holds the ring's lock any more."""
        if self._map[_STATE_OFFSET] == _DETACHED:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    @property
    def answer(self) -> tuple[int, int, int]:
        """(seq, one of ANSWERS, step) of the last answer."""
        return unpack(_WORD.unpack_from(self._map, CONTROL_OFFSET + 2 * _WORD.size)[0])

    @property
    def asked(self) -> int:
        """Number of the newest request, 0 before the first."""
        return max(unpack(_WORD.unpack_from(self._map, CONTROL_OFFSET)[0])[0], self.answer[0])

    @property
    def undecided(self) -> bool:
        """Whether there is a request that this rank, which lives, has not decided on."""
        waiting = _WORD.unpack_from(self._map, CONTROL_OFFSET)[0] != 0 or self.answer[1] == ACKED
        return waiting and not self.gone

    def write(self, request: Request) -> None:
        """Put a request there: its argument first, then the word that makes it one."""
        _WORD.pack_into(self._map, CONTROL_OFFSET + _WORD.size, request.arg)
        _WORD.pack_into(self._map, CONTROL_OFFSET, request.word)

    def close(self) -> None:
        """Unmap."""
        self._map.close()
        os.close(self._fd)


def open_blocks(folder: Path, attempt: int, restart: int) -> list[Block]:
    """The blocks of all rings of one incarnation on this host, by rank; a file that is no ring is left out."""
    blocks = []
    for path in sorted(folder.glob(f"rank-*-{attempt}-{restart}.ring")):
        try:
            blocks.append(Block(path))
        except (OSError, DataError):
            continue
    return sorted(blocks, key=lambda block: block.rank)


def close_blocks(blocks: Iterable[Block]) -> None:
    """Unmap them all."""
    for block in blocks:
        block.close()


def post(blocks: Sequence[Block], *, code: int, lead_steps: int = LEAD_STEPS, arg: int = 0) -> Request:
    """Ask all ranks for something, at a step that none has begun. Raises ActionError while one has yet to decide."""
    late = [block.rank for block in blocks if block.undecided]
    if late:
        raise ActionError(f"ranks {late} have not decided on the request before this one", retryable=True)
    seq = 1 + max((block.asked for block in blocks), default=0)
    newest = max((block.begun_step for block in blocks), default=-1)
    request = Request(seq=seq, code=code, at_step=max(newest, 0) + lead_steps, arg=arg)
    for block in blocks:
        block.write(request)
    return request


def acks(blocks: Sequence[Block], request: Request) -> dict[int, str]:
    """rank -> what it answered to this request."""
    told = {}
    for block in blocks:
        seq, answer, _ = block.answer
        told[block.rank] = ANSWERS[answer] if seq == request.seq else ANSWERS[NOTHING]
    return told
