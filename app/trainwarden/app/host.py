"""What the torchrun runtime needs of this host: attempts, their processes, and a word to the main loop.

The runtime works in a thread of the durable engine; what it reads here the main loop only replaces, never changes.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from trainwarden.app.attempts import Attempts, Told
from trainwarden.app.folders import AttemptFolder, JobFolder
from trainwarden.app.watched import Watched
from trainwarden.core.errors import ActionError
from trainwarden.core.model import Frame, Json
from trainwarden.core.process import alive, descendants, identify
from trainwarden.core.records import attempt_of
from trainwarden.remediation.checkpoints.dcp import DcpStore
from trainwarden.remediation.checkpoints.publish import close_attempt
from trainwarden.remediation.checkpoints.select import select_verified
from trainwarden.remediation.runtimes.torchrun import Begin, Processes

HEARD_S = 5.0
"""How long the main loop may take to hear an announcement: it turns ten times a second."""


class Announcements:
    """What other threads want the main loop to say as an event, before they go on."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Mapping[str, Json], threading.Event]] = deque()

    def say(self, kind: str, data: Mapping[str, Json]) -> None:
        """Wait until the main loop has said it. Raises ActionError if it does not."""
        heard = threading.Event()
        self._waiting.append((kind, data, heard))
        if not heard.wait(HEARD_S):
            raise ActionError(f"{kind}: the main loop did not say it within {HEARD_S:g} s", retryable=True)

    def drain(self, tell: Callable[[str, Mapping[str, Json]], None]) -> None:
        """Say what is waiting (main loop)."""
        while self._waiting:
            kind, data, heard = self._waiting.popleft()
            tell(kind, data)
            heard.set()


class LocalHost:
    """One job on this host."""

    def __init__(
        self,
        *,
        folder: JobFolder,
        attempts: Attempts,
        checkpoints: Path,
        announcements: Announcements,
        watched: Callable[[], Watched],
        live: Callable[[], Frame | None],
        world_size: Callable[[], int],
        check: Callable[[], None],
    ) -> None:
        """check: raises FencedError when the job is not ours any more."""
        self._folder, self._attempts, self._checkpoints = folder, attempts, checkpoints
        self._announcements, self._watched, self._live = announcements, watched, live
        self._world_size, self._check = world_size, check

    def newest(self) -> int:
        """Number of the newest attempt."""
        return self._newest().number

    def processes(self, attempt: int) -> Processes:
        """Launcher and ranks; ranks of an attempt that is not watched any more were seen to end."""
        folder = self._folder.attempt(attempt)
        keeper = folder.keeper()
        watched = self._watched()
        ranks = watched.processes.ranks if watched.attempt.number == attempt else {}
        slots = {int(rank): str(slot) for rank, slot in folder.told()["slots"].items()}
        if keeper is None:
            return Processes(launcher=None, ranks=ranks, slots=slots)
        below = [identify(pid) for pid in descendants(keeper.keeper.pid)] if alive(keeper.keeper) else []
        others = [one for one in below if one is not None and one != keeper.launcher]
        return Processes(launcher=keeper.launcher, ranks=ranks, slots=slots, others=others)

    def begun(self, attempt: int) -> bool:
        """Whether the newest live frame shows every rank of the attempt in a step."""
        live = self._live()
        if live is None or live.epoch is None or attempt_of(live.epoch) != attempt:
            return False
        return 0 < self._world_size() <= len(live.rows) and bool((live.rows["step"] >= 0).all())

    def found(self, attempt: int) -> Mapping[str, Json]:
        """The checkpoint that an attempt was started from."""
        checkpoint = self._folder.attempt(attempt).told()["checkpoint"]
        return {"attempt": attempt, "checkpoint": None if checkpoint is None else Path(checkpoint).name}

    def announce_stop(self, attempt: int, by: str) -> None:
        """Have attempt.stopping said, so that the ends that follow are no new faults."""
        self._check()
        self._announcements.say("attempt.stopping", {"attempt": attempt, "by": by})

    def begin(self, begin: Begin, fence: int) -> Mapping[str, Json]:
        """Close the old attempt, choose the newest checkpoint that verifies, issue the attempt."""
        self._check()
        old = self._newest()
        told = old.told()
        store = DcpStore(self._checkpoints, self._folder.job)
        close_attempt(self._checkpoints, old.number, self._check)
        if begin.before_ns is not None:  # a later restart without a bound must not take one from behind the onset
            store.distrust_since(begin.before_ns, f"saved after the onset that attempt {begin.attempt} goes back from")
        chosen, refused = select_verified(store, begin.before_ns)
        name = None if chosen is None else chosen.name
        self._check()
        self._attempts.launch(
            Told(
                term=fence,
                checkpoint=None if name is None else str(store.path(name)),
                skip=tuple(dict.fromkeys([*((int(a), int(b)) for a, b in told["skip"]), *begin.skip])),
                without=tuple(dict.fromkeys([*told["without"], *begin.without])),
            )
        )
        return {"checkpoint": name, "refused": dict(refused)}

    def _newest(self) -> AttemptFolder:
        newest = self._folder.newest_attempt()
        assert newest is not None, "a job that is owned has an attempt"
        return newest
