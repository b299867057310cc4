"""Carries out plans and deliveries, each once from its start to its end, however often we are killed meanwhile.

They are workflows of app/durable.py; what they do is in carry.py and delivery.py. A plan that outlives its owner is
carried on by the next one, in its term. All public methods are the main thread's; plans run in threads of the engine of
workflows, and what they say waits for `drain`.

That engine costs 57 MB and half a second to import and 0.6 % of a core at rest, so it is launched when there is
something to do, and put away when there was nothing for a minute.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeVar

from trainwarden.app.carry import LOOK_S, Log, Message, Sleep, Work, climb
from trainwarden.app.delivery import DeliveryConfig, deliver
from trainwarden.app.store import LEASE_NS
from trainwarden.app.takeover import files, take_over
from trainwarden.core.codec import dumps, loads
from trainwarden.core.errors import DeliveryError, StoreError
from trainwarden.core.model import Notice, Outcome, Plan, Tell
from trainwarden.core.ports import Notifier

if TYPE_CHECKING:
    from trainwarden.app.durable import Workflows

T = TypeVar("T")

RETRY_S = 5.0
"""Between two launches while the file cannot be written: as often as the engine tries its journal."""

CLOSE_S = 5.0
"""For threads to end: they look up every 0.2 s, but one inside an actuator only when that returns."""

IDLE_S = 60.0
"""With nothing to do for so long the engine of workflows is put away."""

SILENCE_S = LEASE_NS / 1e9
"""Plans stand still when nobody drains for so long: the job may be another's by now."""

DELIVERIES_MAX = 32
"""Under way at once, since each holds a thread; the sender keeps the rest."""


class Carrier:
    """resume() once, then start, tell and deliver; drain() at every turn; close() when the job is not ours any more."""

    def __init__(
        self,
        folder: Path,
        term: int,
        work: Work,
        notifiers: Mapping[str, Notifier] | None = None,
        *,
        delivery: DeliveryConfig | None = None,
        idle_s: float = IDLE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._folder, self._term, self._work = folder, term, work
        self._notifiers, self._delivery = dict(notifiers or {}), delivery or DeliveryConfig()
        self._idle_s, self._silence_s = idle_s, silence_s
        self._file: Path | None = None
        self._workflows: Workflows | None = None
        self._said: SimpleQueue[Outcome] = SimpleQueue()
        self._ends: dict[str, threading.Event] = {}
        """Plans that wait until their end is written down."""
        self._given: set[str] = set()
        self._wakes: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._untold: list[Tell] = []
        self._busy_s = self._retry_s = 0.0
        self._over = threading.Event()
        self._loose: list[threading.Thread] = []
        """Deliveries without a record."""
        self.broken: str | None = None
        """Why plans stand still: their record cannot be written."""
        self.undelivered = 0
        """Notices that were given up on every channel."""

    def resume(self) -> None:
        """Go on with what the owner before left unfinished. Raises StoreError."""
        if files(self._folder):
            self._launched()

    def start(self, plan: Plan) -> None:
        """Carry this plan out, once; one that has ended says so again. Refused where it cannot be written down."""
        try:
            ended = self._launched().begin("carry_out", f"plan/{plan.id}", dumps(plan))
        except StoreError as error:
            self._said.put(_end(plan.id, "refused", f"no durable record, no action: {error}", retryable=True))
        else:
            if ended is not None:
                self._said.put(_read(ended, Outcome))

    def tell(self, tell: Tell) -> None:
        """Let a plan hear something, once; nobody hears it if the plan is over or was never started."""
        self._untold.append(tell)
        self._tell_all()

    def deliver(self, notice: Notice) -> str:
        """Take over a notice's delivery. Raises DeliveryError when too many are under way.

        One that cannot be written down is delivered too, as long as we live: it may be the one that says so.
        """
        try:
            workflows = self._launched()
            if workflows.active("deliver") >= DELIVERIES_MAX:
                raise DeliveryError(f"{DELIVERIES_MAX} deliveries are under way", retryable=True)
            workflows.begin("deliver", f"notice/{notice.key}", dumps(notice))
        except StoreError:
            self._deliver_unrecorded(notice)
        return f"on its way: {notice.key}"

    def notifier(self, channel: str) -> Notifier:
        """The notifier of a channel that hands over to `deliver`."""
        return _Carried(channel, self.deliver)

    def drain(self) -> list[Outcome]:
        """How rungs and plans ended, each at least once. What the call before gave is taken as written down."""
        for plan in self._given:
            self._ends.pop(plan).set()
            self._wakes.pop(plan, None)
        outcomes: list[Outcome] = []
        while not self._said.empty():
            outcomes.append(self._said.get())
        self._given = {one.plan for one in outcomes if one.index == -1 and one.plan in self._ends}
        self._look_after()
        return outcomes

    def close(self) -> bool:
        """Leave everything where it stands, for the next owner. False: an actuator has not returned yet."""
        self._over.set()
        until_s = time.monotonic() + CLOSE_S
        while not (away := self._put_away()) and time.monotonic() < until_s:
            time.sleep(0.02)
        if not away and self._workflows is not None:
            self._workflows.end(wait=False)
        return away

    # the engine of workflows

    def _launched(self) -> "Workflows":
        """Raises StoreError."""
        if self._over.is_set():
            raise StoreError("the job is not ours any more")
        if self._workflows is None:
            from trainwarden.app.durable import Workflows

            self._wakes.clear()
            self._file = self._file or take_over(self._folder, self._term)
            bodies = {"carry_out": self._carry_out, "deliver": self._deliver}
            self._workflows = Workflows(self._file, bodies, self._silence_s)
        self._busy_s = time.monotonic()
        return self._workflows

    def _put_away(self) -> bool:
        """False: threads have still to end; ask again."""
        if self._workflows is not None and not self._workflows.end():
            return False
        self._workflows = None
        return True

    def _look_after(self) -> None:
        """Launch again what broke, put away what is idle."""
        now_s = time.monotonic()
        if self._workflows is not None:
            self._workflows.beat()
            self.broken = self._workflows.broken or self.broken
            self._busy_s = now_s if self._workflows.busy or self._untold else self._busy_s
        if self.broken is not None and now_s >= self._retry_s:
            self._launch_again(now_s)
        elif self._workflows is not None and now_s > self._busy_s + self._idle_s:
            self._put_away()

    def _launch_again(self, now_s: float) -> None:
        if not self._put_away():
            return
        self._retry_s, self.broken = now_s + RETRY_S, None
        try:
            self._launched()
        except StoreError as error:
            self.broken = str(error)
        self._tell_all()

    def _tell_all(self) -> None:
        try:
            while self._untold:
                tell = self._untold[0]
                if self._launched().send(f"plan/{tell.plan}", tell.message, tell.key):
                    self._wake(tell.plan).set()
                del self._untold[0]
        except StoreError as error:
            self.broken = str(error)

    # in its threads

    def _carry_out(self, workflows: "Workflows", text: str) -> str:
        plan = _read(text, Plan)
        plan = replace(plan, fence=max(plan.fence, self._term))
        try:
            end = climb(plan, self._work, workflows, self._said.put, self._wake(plan.id), workflows.rest)
        except StoreError:
            raise
        except Exception as error:  # our own fault: again would be the same, so the plan ends
            workflows.go_on()
            end = _end(plan.id, "failed", f"{type(error).__name__}: {error}", retryable=False)
        written = self._ends[plan.id] = threading.Event()
        self._said.put(end)
        while not written.wait(LOOK_S):
            workflows.go_on()
        return dumps(end)

    def _deliver(self, workflows: "Workflows", text: str) -> str:
        return self._delivered(_read(text, Notice), workflows, workflows.rest)

    def _delivered(self, notice: Notice, log: Log, sleep: Sleep) -> str:
        try:
            done = deliver(notice, self._notifiers, log, self._delivery, self._work.clock, sleep)
        except StoreError:
            raise
        except Exception:  # our own fault: again would be the same
            sleep(0.0)
            done = False
        if not done:
            with self._lock:
                self.undelivered += 1
        return "delivered" if done else "given up"

    def _deliver_unrecorded(self, notice: Notice) -> None:
        if sum(thread.is_alive() for thread in self._loose) >= DELIVERIES_MAX:
            raise DeliveryError(f"{DELIVERIES_MAX} deliveries are under way", retryable=True)
        thread = threading.Thread(target=self._delivered, args=(notice, _Forgetful(), self._sleep), daemon=True)
        self._loose = [*(one for one in self._loose if one.is_alive()), thread]
        thread.start()

    def _sleep(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise SystemExit  # ends the thread, without a word

    def _wake(self, plan: str) -> threading.Event:
        """Set when it is made: what an earlier life was told waits in the file."""
        with self._lock:
            if plan not in self._wakes:
                self._wakes[plan] = threading.Event()
                self._wakes[plan].set()
            return self._wakes[plan]


@dataclass(frozen=True, slots=True)
class _Carried:
    channel: str
    notify: Callable[[Notice], str]


class _Forgetful:
    """A record that keeps nothing."""

    def record(self, name: str, work: Callable[[], T]) -> T:
        return work()

    def heard(self) -> Sequence[Message]:
        return ()


def _read(text: str, kind: type[T]) -> T:
    thing = loads(text)
    assert isinstance(thing, kind)
    return thing


def _end(plan: str, result: Literal["failed", "refused"], reason: str, *, retryable: bool) -> Outcome:
    return Outcome(plan=plan, index=-1, result=result, reason=reason, retryable=retryable, found={})
