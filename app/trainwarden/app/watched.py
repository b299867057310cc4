"""One attempt while it is watched: its keeper, its processes, its output, and how it ended."""

import sys
from collections.abc import Mapping, Sequence

from trainwarden.app.folders import AttemptFolder, Keeper
from trainwarden.app.follow import Follower
from trainwarden.collectors.processes import Processes
from trainwarden.core.model import Event, JobId, Json
from trainwarden.core.process import alive


class Watched:
    """What the supervisor knows of the attempt that runs."""

    def __init__(
        self,
        attempt: AttemptFolder,
        keeper: Keeper | None,
        *,
        node: str,
        job: JobId,
        now_ns: int,
        show_from: str | None,
    ) -> None:
        """show_from: where its output is shown from, `begin` or `end`; None: it is not shown."""
        self.attempt, self.keeper = attempt, keeper
        self.started_ns = now_ns if keeper is None else keeper.started_ns
        self.processes = Processes(node=node, job=job, attempt=attempt.number, folder=attempt.path, start_ns=now_ns)
        if keeper is not None:
            self.processes.watch_launcher(keeper.launcher)
        self._followers = self._follow(show_from)
        self.said_hello = False
        self.code: int | None = None
        """Exit status of the launcher as a shell shows it; None: not seen."""
        self.by = "nobody"
        """Who told it."""

    def hear(self, items: Sequence[object]) -> None:
        """Take note of hellos and of the launcher's end."""
        for item in items:
            if not isinstance(item, Event):
                continue
            self.said_hello |= item.kind == "hello"
            if item.kind == "process.exit" and item.data["rank"] is None:
                self.code, self.by = shell_status(item.data), str(item.data["by"])

    def show(self) -> None:
        """Show what the launcher wrote since."""
        for follower in self._followers:
            follower.look()

    @property
    def lives(self) -> bool:
        """Whether the launcher or a rank that said hello is alive."""
        launcher_lives = self.keeper is not None and alive(self.keeper.launcher)
        return launcher_lives or any(alive(rank) for rank in self.processes.ranks.values())

    def close(self) -> None:
        """Stop watching; nothing happens to the processes."""
        self.show()
        self.processes.close()

    def _follow(self, show_from: str | None) -> Sequence[Follower]:
        if show_from is None:
            return ()
        streams = (("out.log", sys.stdout.buffer), ("err.log", sys.stderr.buffer))
        return [Follower(self.attempt.path / name, stream, from_end=show_from == "end") for name, stream in streams]


def shell_status(exit_: Mapping[str, Json]) -> int | None:
    """The data of a process.exit as a shell's $?: 128 + n for a signal; None: nobody saw it.

    >>> shell_status({"code": None, "signal": 9}), shell_status({"code": 3, "signal": None})
    (137, 3)
    """
    code, number = exit_["code"], exit_["signal"]
    if isinstance(number, int):
        return 128 + number
    return code if isinstance(code, int) else None
