"""The rank's side of requests: read in end(), decided together with the other ranks of this host, obeyed or void."""

import time
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from trainwarden.collectors.rank.ring import Ring
from trainwarden.collectors.rank.words import BETWEEN, WAIT
from trainwarden.core.control import (
    ACKED,
    OBEYED,
    QUIESCE,
    RESUME,
    VOID,
    Block,
    Request,
    close_blocks,
    open_blocks,
    pack,
    unpack,
)
from trainwarden.core.identity import Identity
from trainwarden.core.manifest import write_rank_file
from trainwarden.core.records import CONTROL_OFFSET

_LOOK_S = 0.001
_LOOKS_A_DEATH = 50
"""Whether a rank is dead is asked by a system call, and only seldom."""

Agree: TypeAlias = Callable[[bool], bool]
"""A script's own min-reduce over all ranks: True only if it is given True by every rank."""


class Desk:
    """Answers the requests of one rank (one thread), and signs its parts of checkpoints (any thread)."""

    def __init__(self, ring: Ring, me: Identity) -> None:
        self._folder, self._me = ring.path.parent, me
        self.words = ring.view[CONTROL_OFFSET : CONTROL_OFFSET + 3 * 8].cast("q")
        """Request, its argument, our answer."""
        self._local = me.local_world_size
        self._peers: Sequence[Block] | None = None

    def attend(self, step: int, live: MutableSequence[float], agree: Agree | None) -> Request | None:
        """end(step) found a request: wait for the others if its step has come; what the script has to do, if anything.

        live: the live stamps: a rank that waits here is in phase `wait`.
        """
        request = self._pending(step)
        if request is None:
            return None
        live[WAIT] = time.perf_counter()
        request = self._decide(request, agree)
        live[BETWEEN] = time.perf_counter()
        return request

    def _pending(self, step: int) -> Request | None:
        """The request that end(step) must decide on; one whose step is over is answered `void` here."""
        word, arg = self.words[0], self.words[1]
        seq, code, at_step = unpack(word)
        if step < at_step and code != RESUME:
            return None
        request = Request(seq=seq, code=code, at_step=at_step, arg=arg)
        if step > at_step or code == RESUME:
            self._answer(request, OBEYED if code == RESUME else VOID)
            return None
        return request

    def _decide(self, request: Request, agree: Agree | None) -> Request | None:
        """Wait for the other ranks of this host; the request if all obey and the script has to act on it."""
        self.words[2] = pack(request.seq, ACKED, request.at_step)
        peers = self._open_peers()
        obey = len(peers) == self._local - 1 and all(self._joins(peer, request) for peer in peers)
        if self._me.world_size > self._local:
            obey = agree is not None and agree(obey)
        self._answer(request, OBEYED if obey else VOID)
        if obey and request.code == QUIESCE:
            self._stand_still(request)
            return None
        return request if obey else None

    def commit(self, path: Path, step: int, data_position: Any, files: Sequence[str]) -> None:
        """Write this rank's file of a staged checkpoint. Raises DataError, OSError."""
        write_rank_file(path, rank=self._me.rank, step=step, files=files, data_position=data_position)

    def close(self) -> None:
        """Unmap the other rings."""
        close_blocks(self._peers or ())
        self._peers = None

    def _answer(self, request: Request, answer: int) -> None:
        self.words[0] = 0  # before the answer: once that is there, the next request may come
        self.words[2] = pack(request.seq, answer, request.at_step)

    def _stand_still(self, request: Request) -> None:
        """Until another request comes, at most `arg` seconds: whoever asked may have died."""
        end_s = time.monotonic() + request.arg
        while time.monotonic() < end_s and self.words[0] == 0:
            time.sleep(_LOOK_S)

    def _joins(self, peer: Block, request: Request) -> bool:
        """Wait until a peer has answered, or cannot any more."""
        looks = 0
        while True:
            looks += 1
            over = peer.begun_step > request.at_step or (looks % _LOOKS_A_DEATH == 1 and peer.gone)
            seq, answer, _ = peer.answer  # read after `over`: an answer that came first is seen
            if seq >= request.seq:
                return seq == request.seq and answer != VOID
            if over:
                return False
            time.sleep(_LOOK_S)

    def _open_peers(self) -> Sequence[Block]:
        if self._peers is None:
            blocks = open_blocks(self._folder, self._me.attempt, self._me.restart)
            self._peers = [block for block in blocks if block.rank != self._me.rank]
        return self._peers
