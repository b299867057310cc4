"""`trainwarden run`: one host's keeper, agent, line and machines around one command. Observe only.

The supervisor owns the job (one row in the journal's database, renewed every second) but not its life: the keeper runs
the launcher in a session of its own. A supervisor that is started again for the same job finds the keeper's attempt and
goes on watching it.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from trainwarden.app.agent import Agent
from trainwarden.app.folders import AttemptFolder, JobFolder, Keeper
from trainwarden.app.follow import Follower
from trainwarden.app.launch import check_command, warnings
from trainwarden.app.server import Server
from trainwarden.app.store import Store
from trainwarden.app.wiring import Settings, build_server
from trainwarden.collectors.processes import Processes
from trainwarden.collectors.rings import Rings
from trainwarden.collectors.stacks import Stacks
from trainwarden.core.child import spawn
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError, StoreError
from trainwarden.core.identity import choose_root
from trainwarden.core.model import Epoch, Event, JobId, Json, Subject
from trainwarden.core.ports import Notifier
from trainwarden.core.process import ProcessId, alive, identify, send
from trainwarden.core.records import epoch_of
from trainwarden.remediation.killing import end

TICK_NS = 250_000_000
RENEW_NS = 1_000_000_000
DRAIN_NS = 500_000_000
"""After the last process: a few polls, so that the rings' last rows are read twice."""
LOOK_NS = 15_000_000_000
"""How long an end waits for stacks that are being taken (the witness's own deadline is 10 s)."""
SILENCE_NS = 60_000_000_000
"""After this long without a hello a person is told; importing torch on a cold disk takes up to a minute."""
KEEPER_START_NS = 10_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for."""

    job: JobId
    command: tuple[str, ...]
    state: Path
    settings: Settings
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the command's environment."""
    show_output: bool = True
    terminal: Notifier | None = None
    """Takes the place of the built-in one."""


class Supervisor:
    """Runs turn after turn until the attempt has ended: start(), turn() while it says True, finish()."""

    def __init__(self, request: Request, say: Callable[[str], None], clock: Clock = unix_ns) -> None:
        self.request, self._say, self._clock = request, say, clock
        self.node = os.environ.get("TRAINWARDEN_NODE") or socket.gethostname()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainwarden-stop")
        self._tick_ns = self._renew_ns = 0
        self._ended_ns: int | None = None
        self._heard_hello = self._said_silence = False
        self._stopping = False
        self._asked: deque[signal.Signals] = deque()
        self._code: int | None = None
        self._by = "nobody"

    def start(self) -> None:
        """Own the job; find its running attempt or launch one. Raises ConfigError, OwnedError, StoreError."""
        check_command(self.request.command)
        for warning in warnings(self.request.command):
            self._say(f"warning: {warning}")
        now_ns = self._clock()
        self.folder = JobFolder.make(self.request.state, self.request.job)
        self._store = Store(self.folder.path / "journal.sqlite")
        own = identify(os.getpid())
        assert own is not None
        self.term = self._store.claim(self.request.job, own.pid, own.start_time, now_ns)
        attempt = self.folder.newest_attempt()
        attached = attempt is not None and not attempt.ended
        self.attempt = attempt if attempt is not None and attached else self._launch()
        self._root = self.attempt.ring_root
        self._keeper = self._find_keeper(now_ns)
        self._wire(now_ns)
        self._follow(from_end=attached)
        self.server.resume()
        if not attached:
            self._tell("attempt.started", {"attempt": self.attempt.number, "term": self.term, "by": "run"})
        verb = "watching again" if attached else "watching"
        self._say(
            f"{verb} job {self.request.job}, attempt {self.attempt.number} (observe only); it goes on if I end; "
            f"everything is in {self.folder.path}"
        )

    def turn(self) -> bool:
        """Look at everything once, without waiting; False when the attempt has ended and all was read."""
        while self._asked:
            self._forward(self._asked.popleft())
        now_ns = self._clock()
        items = self._agent.poll(now_ns)
        self._hear(items, now_ns)
        self.server.ingest(items, now_ns)
        if now_ns >= self._tick_ns:
            self._tick_ns = now_ns + TICK_NS
            self.server.tick(now_ns)
        if now_ns >= self._renew_ns:
            self._renew_ns = now_ns + RENEW_NS
            with contextlib.suppress(StoreError):  # a full disk: the engine says so; the lease is tried again
                self._store.renew(self.request.job, self.term, now_ns)
        for follower in self._followers:
            follower.look()
        return not self._over(now_ns)

    def ask(self, number: signal.Signals) -> None:
        """A person stops the training through us; taken up by the next turn (a signal handler may call this)."""
        self._asked.append(number)

    def _forward(self, number: signal.Signals) -> None:
        """The first time the launcher is told, the second time all is ended."""
        if self._stopping:
            self.stop(f"second {number.name}")
            return
        self._announce_stop(number.name)
        self._say(f"{number.name}: passed on to the launcher; once more ends every process at once")
        if self._keeper is not None:
            send(self._keeper.launcher, number)

    def stop(self, by: str) -> None:
        """End every process of the attempt, for certain, in the background."""
        self._announce_stop(by)
        launcher = self._keeper.launcher if self._keeper is not None else None
        self._pool.submit(end, list(self._processes.ranks.values()), launcher)

    def finish(self) -> int:
        """Write the end down and let the job go; the launcher's exit status as a shell shows it (1 if unseen)."""
        self._tell(
            "attempt.ended",
            {"attempt": self.attempt.number, "term": self.term, "by": self._by, "code": self._code},
        )
        self.server.finish()
        self._agent.close()
        self._processes.close()
        self._rings.close()
        self._clear_rings(self._root)
        self._pool.shutdown(wait=True)
        (self.attempt.path / "ended.json").write_text(json.dumps({"code": self._code, "by": self._by}))
        self._store.release(self.request.job, self.term)
        self._store.close()
        self._say_end()
        return 1 if self._code is None else self._code

    # starting

    def _choose_root(self) -> Path | None:
        """The tmpfs folder of this STATE: a job of the same name below another STATE is another job."""
        root, why_not = choose_root()
        if root is None:
            self._say(f"warning: there is no tmpfs for the ranks' rings, so only exits are watched: {why_not}")
            return None
        return root / f"state-{hashlib.sha256(bytes(self.request.state)).hexdigest()[:12]}"

    def _clear_rings(self, root: Path | None) -> None:
        """Rings of attempts that are over hold memory, and would be taken for the next attempt's."""
        if root is not None:
            shutil.rmtree(root / self.request.job, ignore_errors=True)

    def _launch(self) -> AttemptFolder:
        root = self._choose_root()
        self._clear_rings(root)
        slots = self.request.settings.run.slots
        told: dict[str, Json] = {"term": self.term, "checkpoint": None, "skip": [], "staging": None}
        told["slots"] = {str(rank): f"{self.node}:{rank}" for rank in range(slots or 0)}
        env = {**self.request.env, "TRAINWARDEN_JOB": self.request.job, "TRAINWARDEN_NODE": self.node}
        if root is not None:
            env["TRAINWARDEN_DIR"] = str(root)
        spec: dict[str, Json] = {"command": list(self.request.command), "cwd": os.getcwd(), "env": env}
        attempt = self.folder.new_attempt(spec, told)
        with (attempt.path / "keeper.log").open("ab") as log:
            keeper = [sys.executable, "-E", "-P", "-m", "trainwarden.app.keeper", str(attempt.path)]
            self._child = spawn(keeper, out=log, err=log)
        return attempt

    def _find_keeper(self, now_ns: int) -> Keeper | None:
        while self._clock() < now_ns + KEEPER_START_NS:
            keeper = self.attempt.keeper()
            if keeper is not None or (self.attempt.path / "exits.jsonl").exists():
                return keeper
        log = (self.attempt.path / "keeper.log").read_text(errors="replace")[-2000:]
        raise ConfigError(f"the keeper of attempt {self.attempt.number} did not start; its log says:\n{log}")

    def _wire(self, now_ns: int) -> None:
        job, node = self.request.job, self.node
        self._emit = Emitter(f"run@{node}", job=job, start_ns=now_ns)
        self._rings = Rings(self._root or self.folder.path / "no-tmpfs", node, job, start_ns=now_ns)
        self._processes = Processes(
            node=node, job=job, attempt=self.attempt.number, folder=self.attempt.path, start_ns=now_ns
        )
        if self._keeper is not None:
            self._processes.watch_launcher(self._keeper.launcher)
        witness = Stacks(node=node, job=job, ranks=lambda: self._processes.ranks, start_ns=now_ns)
        self._agent = Agent([self._rings, self._processes], witness, self._processes.watch)
        self.server: Server = build_server(
            self.request.settings,
            job=job,
            folder=self.folder.path,
            store=self._store,
            fence=(job, self.term),
            look=self._agent.look,
            terminal=self.request.terminal,
        )
        if self._root is not None:
            self.folder.link_rings(self._root / job)

    def _follow(self, *, from_end: bool) -> None:
        self._followers: Sequence[Follower] = ()
        if self.request.show_output:
            self._followers = (
                Follower(self.attempt.path / "out.log", sys.stdout.buffer, from_end=from_end),
                Follower(self.attempt.path / "err.log", sys.stderr.buffer, from_end=from_end),
            )

    # running

    @property
    def ranks(self) -> dict[int, ProcessId]:
        """The ranks that said hello in this attempt."""
        return self._processes.ranks

    def _hear(self, items: Sequence[object], now_ns: int) -> None:
        for item in items:
            if not isinstance(item, Event):
                continue
            self._heard_hello |= item.kind == "hello"
            if item.kind == "process.exit" and item.data["rank"] is None:
                self._code = _shell_status(item.data)
                self._by = str(item.data["by"])
        started_ns = self._keeper.started_ns if self._keeper is not None else now_ns
        if not self._heard_hello and not self._said_silence and now_ns > started_ns + SILENCE_NS:
            self._said_silence = True
            self._say("no rank has said hello for 60 s: does the script call trainwarden.collectors.rank.attach()?")

    def _over(self, now_ns: int) -> bool:
        launcher_lives = self._keeper is not None and alive(self._keeper.launcher)
        if launcher_lives or any(alive(rank) for rank in self._processes.ranks.values()):
            self._ended_ns = None
            return False
        if self._ended_ns is None:
            self._ended_ns = now_ns
        waited_ns = now_ns - self._ended_ns
        told = self._processes.launcher_ended or waited_ns > 3 * DRAIN_NS + Processes.UNSEEN_NS
        return waited_ns > DRAIN_NS and told and (not self._agent.looking or waited_ns > LOOK_NS)

    def _announce_stop(self, by: str) -> None:
        if not self._stopping:
            self._stopping = True
            self._tell("attempt.stopping", {"attempt": self.attempt.number, "by": by})

    def _tell(self, kind: str, data: dict[str, Json]) -> None:
        now_ns = self._clock()
        subject = Subject(kind="job", id=self.request.job)
        epoch = Epoch(epoch_of(self.attempt.number, 0, 0))
        self.server.ingest([self._emit(kind, subject, now_ns=now_ns, data=data, epoch=epoch)], now_ns)

    def _say_end(self) -> None:
        if not self._heard_hello:
            self._say(
                "no rank ever said hello, so only exit statuses were watched; to see steps, hangs and slow ranks add "
                "`from trainwarden.collectors.rank import attach` to the script (README, Embed)"
            )
        status = "not seen by anybody" if self._code is None else str(self._code)
        self._say(f"job {self.request.job}, attempt {self.attempt.number} ended; exit status of the launcher: {status}")


def _shell_status(data: object) -> int | None:
    assert isinstance(data, dict)
    code, number = data["code"], data["signal"]
    if number is not None:
        return 128 + int(number)
    return None if code is None else int(code)
