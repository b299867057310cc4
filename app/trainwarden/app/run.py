"""`trainwarden run`: one host's keeper, agent, line, machines and repairs around one command.

The supervisor owns the job (one row in the journal's database, renewed every second) but not its life: the keeper runs
the launcher in a session of its own. A supervisor that is started again for the same job finds the keeper's attempt and
goes on watching it.
"""

import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trainwarden.app.agent import Agent
from trainwarden.app.attempts import Attempts, Told
from trainwarden.app.commands import Commands
from trainwarden.app.domains import JobSite
from trainwarden.app.endpoint import open_endpoint, open_push
from trainwarden.app.folders import AttemptFolder, JobFolder
from trainwarden.app.launch import check_command, check_restarts, warnings
from trainwarden.app.node_sources import NodeSettings
from trainwarden.app.outlets import Outlets
from trainwarden.app.repair import Repair, Seen
from trainwarden.app.server import Server
from trainwarden.app.store import Store
from trainwarden.app.surroundings import Surroundings
from trainwarden.app.tries import Counted
from trainwarden.app.watched import Watched
from trainwarden.app.wiring import Beside, Settings, acts, build_server, carried_notifiers, choose_policy
from trainwarden.collectors.processes import Processes
from trainwarden.collectors.rings import Rings
from trainwarden.collectors.stacks import Stacks
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import StoreError
from trainwarden.core.model import Epoch, JobId, Json, StepMatrix, Subject
from trainwarden.core.ports import Notifier
from trainwarden.core.process import ProcessId, identify, send
from trainwarden.core.records import epoch_of
from trainwarden.core.site import Table, load_site
from trainwarden.remediation.killing import end
from trainwarden.remediation.policy import Policy

TICK_NS = 250_000_000
RENEW_NS = 1_000_000_000
DRAIN_NS = 500_000_000
"""After the last process: a few polls, so that the rings' last rows are read twice."""
DECIDE_NS = 3_000_000_000
"""The same where a plan may follow: findings become final, and plans start, at ticks and after cool-downs."""
CATCH_UP_TURNS = 5
LOOK_NS = 15_000_000_000
"""How long an end waits for stacks that are being taken (the witness's own deadline is 10 s)."""
SILENCE_NS = 60_000_000_000
"""After this long without a hello a person is told; importing torch on a cold disk takes up to a minute."""


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
    policy: Policy = field(default_factory=lambda: choose_policy(None))
    """What may be done; the default only observes."""
    sources: tuple[Beside, ...] | None = ()
    """What is read of this host beside the ranks; None: what it lets us read."""
    beside: NodeSettings = field(default_factory=NodeSettings)
    """Settings of those."""
    exact: bool = False
    """Whether a resumed training repeats its losses to the last bit (on a GPU it seldom does)."""


class Supervisor:
    """Runs turn after turn until the attempt has ended: start(), turn() while it says True, finish()."""

    def __init__(self, request: Request, say: Callable[[str], None], clock: Clock = unix_ns) -> None:
        self.request, self._say, self._clock = request, say, clock
        self.node = os.environ.get("TRAINWARDEN_NODE") or socket.gethostname()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainwarden-stop")
        self._asked: deque[signal.Signals] = deque()
        self._tick_ns = self._renew_ns = self._turns = 0
        self._ended_ns: int | None = None
        self._said_silence = self._stopping = False

    def start(self) -> None:
        """Own the job; find its running attempt or launch one. Raises ConfigError, OwnedError, StoreError."""
        check_command(self.request.command)
        if acts(self.request.policy):
            check_restarts(self.request.command)
        for warning in warnings(self.request.command):
            self._say(f"warning: {warning}")
        site = load_site(file) if (file := self.request.settings.site.file) is not None else None
        push = open_push(self.request.settings.metrics, f"{self.node}/{self.request.job}", self._say)
        self._outlets = Outlets(self.request.settings, self.request.job, self._say, self._clock, push)
        now_ns = self._clock()
        self.folder = JobFolder.make(self.request.state, self.request.job)
        self._store = Store(self.folder.path / "journal.sqlite")
        own = identify(os.getpid())
        assert own is not None
        self.term = self._store.claim(self.request.job, own.pid, own.start_time, now_ns)
        self._attempts = Attempts(
            self.folder,
            command=self.request.command,
            env=self.request.env,
            node=self.node,
            slots=self.request.settings.run.slots,
            say=self._say,
        )
        newest = self.folder.newest_attempt()
        attached = newest is not None and not newest.ended
        attempt = newest if newest is not None and attached else self._attempts.launch(Told(term=self.term))
        self._watched = self._watch(attempt, now_ns, show_from="end" if attached else "begin")
        self._wire(now_ns, attached=attached)
        self.server.resume()
        self._outlets.begin(self.server.parts.incidents.told)
        self._tell_domains(site, now_ns)
        self._say_started("take-over" if attached else "run")
        mode = "repairs as its policy says" if acts(self.request.policy) else "observe only"
        self._say(
            f"{'watching again' if attached else 'watching'} job {self.request.job}, attempt {attempt.number} "
            f"({mode}); it goes on if I end; everything is in {self.folder.path}"
        )

    def turn(self) -> bool:
        """Look at everything once, without waiting; False when the attempt has ended and all was read."""
        while self._asked:
            self._forward(self._asked.popleft())
        now_ns = self._clock()
        self.repair.announcements.drain(self._tell)
        self._adopt_newer(now_ns)
        self._poll(now_ns)
        self.server.take(self.repair.look(now_ns))
        if now_ns >= self._tick_ns:
            self._tick_ns = now_ns + TICK_NS
            self.server.tick(now_ns)
        if now_ns >= self._renew_ns:
            self._renew_ns = now_ns + RENEW_NS
            with contextlib.suppress(StoreError):  # a full disk: the engine says so; the lease is tried again
                self._store.renew(self.request.job, self.term, now_ns)
        self._turns += 1
        if self._turns == CATCH_UP_TURNS:  # by now the ranks that live have said hello again
            self.repair.carrier.resume()
        self._watched.show()
        self._mind_silence(now_ns)
        self._outlets.turned()
        if self._endpoint is not None:
            self._endpoint.turned(self.server, self.repair, now_ns, self._clock())
        return not self._over(now_ns)

    def ask(self, number: signal.Signals) -> None:
        """A person stops the training through us; taken up by the next turn (a signal handler may call this)."""
        self._asked.append(number)

    def stop(self, by: str) -> None:
        """End every process of the attempt, for certain, in the background."""
        self._announce_stop(by)
        keeper = self._watched.keeper
        self._pool.submit(end, list(self.ranks.values()), None if keeper is None else keeper.launcher)

    def finish(self) -> int:
        """Write the end down and let the job go; the launcher's exit status as a shell shows it (1 if unseen)."""
        try:
            self._say_ended()
            self.server.finish()
            self._shut()
            self._rings.close()
            self._attempts.forget_rings(self._watched.attempt)
            self._pool.shutdown(wait=True)
            self._store.release(self.request.job, self.term)
            self._store.close()
        finally:  # last: a receiver that hangs must not keep the job from its next owner
            self._outlets.close(self.server.story)
        self._say_end()
        return 1 if self._watched.code is None else self._watched.code

    def abandon(self) -> None:
        """The job is not ours any more, or we cannot go on: leave everything to the next owner."""
        self._outlets.close(None)
        self._shut()

    @property
    def ranks(self) -> dict[int, ProcessId]:
        """The ranks that said hello in this attempt."""
        return self._watched.processes.ranks

    def _watch(self, attempt: AttemptFolder, now_ns: int, show_from: str) -> Watched:
        keeper = self._attempts.keeper(attempt)
        shown = show_from if self.request.show_output else None
        return Watched(attempt, keeper, node=self.node, job=self.request.job, now_ns=now_ns, show_from=shown)

    def _wire(self, now_ns: int, *, attached: bool) -> None:
        job, node = self.request.job, self.node
        self._emit = Emitter(f"run@{node}", job=job, start_ns=now_ns)
        root = self._watched.attempt.ring_root
        self._rings = Rings(root or self.folder.path / "no-tmpfs", node, job, start_ns=now_ns)
        hellos = self.folder.path / "hello"
        witness = Stacks(node=node, job=job, ranks=lambda: self.ranks, start_ns=now_ns, hellos=hellos)
        commands = Commands(self.folder.path, job, start_ns=now_ns)
        processes = self._watched.processes
        beside = self.request.beside
        self._surroundings = Surroundings(beside, node, self.request.sources, start_ns=now_ns, say=self._say)
        self._agent = Agent([self._rings, processes, commands], witness, processes.watch)
        self.server: Server = build_server(
            self.request.settings,
            job=job,
            folder=self.folder.path,
            store=self._store,
            fence=(job, self.term),
            policy=self.request.policy,
            look=self._agent.look,
            terminal=self.request.terminal,
            also=self._outlets.notifiers,
        )
        plain = carried_notifiers(self.request.settings, self.folder.path)
        notifiers = {channel: Counted(notifier, self.server.tries) for channel, notifier in plain.items()}
        self.repair = Repair(
            folder=self.folder,
            term=self.term,
            attempts=self._attempts,
            witness=witness,
            seen=Seen(watched=self._watched),
            exact=self.request.exact,
            attached=attached,
            broken=lambda plan: "the journal cannot be written" if self.server.engine.degraded else None,
            notifiers=notifiers,
            say=self._say,
        )
        if "webhook" in notifiers:
            self.server.notifiers["webhook"] = self.repair.carrier.notifier("webhook")
            self.server.carried = frozenset({"webhook"})
        self.repair.seen.incidents = self.server.incidents
        self.server.line.on_step = self._stepped
        self.server.start, self.server.tell = self.repair.start, self.repair.carrier.tell
        self.server.on_news = partial(self._outlets.trace, evidence=self.folder.path / "evidence")
        self._show((self._watched.processes.name, commands.name))

    def _show(self, sources: tuple[str, ...]) -> None:
        """Let the metrics hear of everything, if they are wanted."""
        settings = self.request.settings
        self._endpoint = open_endpoint(
            settings.metrics,
            self.folder,
            started_ns=self._watched.started_ns,
            fresh=max(settings.hang.fresh, 3 * settings.run.poll),
            sources=sources,
            peers=self._outlets.peers_up,
            say=self._say,
            push=self._outlets.push,
            exported=self._outlets.exported,
        )
        if self._endpoint is not None:
            self.server.metrics = self._endpoint.metrics
            self.repair.recovered = self._endpoint.metrics.recovered

    def _stepped(self, matrix: StepMatrix) -> None:
        self.repair.note(matrix)
        self._outlets.stepped(matrix)
        if self.server.metrics is not None:
            self.server.metrics.step(matrix)

    def _shut(self) -> None:
        self.repair.close()
        self._agent.close()
        self._surroundings.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _poll(self, now_ns: int) -> None:
        items = [*self._surroundings.poll(now_ns), *self._agent.poll(now_ns)]
        self._outlets.hear(items)
        silent = not self._watched.said_hello
        self._watched.hear(items)
        if silent and self._watched.said_hello:
            self.repair.began(now_ns)
        self.server.ingest(items, now_ns)
        self.repair.seen.live = self.server.line.live

    def _adopt_newer(self, now_ns: int) -> None:
        """A plan has issued the next attempt: that is the one to watch from now on."""
        newest = self.folder.newest_attempt() if self.server.plans else None
        if newest is None or newest.number <= self._watched.attempt.number:
            return
        self._poll(now_ns)  # the last words of the old one
        self._say_ended()
        old, self._watched = self._watched, self._watch(newest, now_ns, show_from="begin")
        self._agent.replace(old.processes, self._watched.processes, self._watched.processes.watch)
        self.repair.seen.watched = self._watched
        told = newest.told()["checkpoint"]
        self.repair.publisher.in_use = None if told is None else Path(told).name
        self._ended_ns, self._stopping = None, False
        self._say_started("plan")
        self._say(f"attempt {newest.number} of job {self.request.job} starts from {told or 'the beginning'}")

    def _tell_domains(self, site: Table | None, now_ns: int) -> None:
        """Where this host hangs, before any rank says hello."""
        source = f"domains@{self.node}"
        said = JobSite(self.server.parts.assembler, source, self.request.job, self._say, start_ns=now_ns)
        self.server.ingest(said.tell([self.node], site, now_ns), now_ns)
        self.server.ingest(said.tell_step(self.node, os.environ, now_ns), now_ns)

    def _say_started(self, by: str) -> None:
        number, slots = self._watched.attempt.number, list(self._attempts.slots)
        self._tell("attempt.started", {"attempt": number, "term": self.term, "by": by, "slots": slots})

    def _say_ended(self) -> None:
        """The watched attempt is over: as an event, and in its folder."""
        watched = self._watched
        number, code, by = watched.attempt.number, watched.code, watched.by
        self._tell("attempt.ended", {"attempt": number, "term": self.term, "by": by, "code": code})
        watched.close()
        (watched.attempt.path / "ended.json").write_text(json.dumps({"code": code, "by": by}))

    def _forward(self, number: signal.Signals) -> None:
        """The first time the launcher is told, the second time all is ended."""
        if self._stopping:
            self.stop(f"second {number.name}")
            return
        self._announce_stop(number.name)
        self._say(f"{number.name}: passed on to the launcher; once more ends every process at once")
        if self._watched.keeper is not None:
            send(self._watched.keeper.launcher, number)

    def _mind_silence(self, now_ns: int) -> None:
        watched = self._watched
        if not watched.said_hello and not self._said_silence and now_ns > watched.started_ns + SILENCE_NS:
            self._said_silence = True
            self._say("no rank has said hello for 60 s: does the script call trainwarden.collectors.rank.attach()?")

    def _over(self, now_ns: int) -> bool:
        if self._watched.lives or self.server.plans:
            self._ended_ns = None
            return False
        if self._ended_ns is None:
            self._ended_ns = now_ns
        waited_ns = now_ns - self._ended_ns
        told = self._watched.processes.launcher_ended or waited_ns > 3 * DRAIN_NS + Processes.UNSEEN_NS
        drain_ns = DECIDE_NS if acts(self.request.policy) and self._watched.code != 0 else DRAIN_NS
        return waited_ns > drain_ns and told and (not self._agent.looking or waited_ns > LOOK_NS)

    def _announce_stop(self, by: str) -> None:
        if not self._stopping:
            self._stopping = True
            self._tell("attempt.stopping", {"attempt": self._watched.attempt.number, "by": by})

    def _tell(self, kind: str, data: Mapping[str, Json]) -> None:
        now_ns = self._clock()
        subject = Subject(kind="job", id=self.request.job)
        epoch = Epoch(epoch_of(self._watched.attempt.number, 0, 0))
        self.server.ingest([self._emit(kind, subject, now_ns=now_ns, data=data, epoch=epoch)], now_ns)

    def _say_end(self) -> None:
        watched = self._watched
        if not watched.said_hello:
            self._say(
                "no rank ever said hello, so only exit statuses were watched; to see steps, hangs and slow ranks add "
                "`from trainwarden.collectors.rank import attach` to the script (README, Embed)"
            )
        status = "not seen by anybody" if watched.code is None else str(watched.code)
        self._say(
            f"job {self.request.job}, attempt {watched.attempt.number} ended; exit status of the launcher: {status}; "
            f"what happened: trainwarden report {self.folder.path}"
        )
