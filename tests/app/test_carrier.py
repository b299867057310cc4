"""The carrier on its real engine, in this process: what it is told, what it says, and that it leaves nothing behind."""

import contextlib
import os
import resource
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.app.test_delivery import NOTICE, busy
from tests.fakes.runtime import Scripted, ladder

from trainwarden.app import carrier as module
from trainwarden.app.carrier import Carrier
from trainwarden.app.carry import Guard, Permit, Work
from trainwarden.app.delivery import DeliveryConfig
from trainwarden.app.store import Store
from trainwarden.core.errors import DeliveryError
from trainwarden.core.model import JobId, Json, Notice, Outcome, Plan, Rung, Tell
from trainwarden.core.ports import Actuator
from trainwarden.remediation.plans import next_step, whole

JOB = JobId("job")
PLAN = Plan(
    id="incident/plan-1",
    incident="incident",
    rule="process.killed",
    mode="act",
    fence=1,
    deadline_ns=4 * 10**18,
    ladder=ladder(JOB, 60.0, ("running",)),
)
WAITS = replace(PLAN, mode="approve")


class Desk:
    """Makes carriers, one after the other, and reads what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.term = folder, 0
        self.said: list[Outcome] = []
        self.guard: Guard = lambda plan: None
        self.settled: list[str] = []
        self.now: Carrier | None = None

    def open(self, actuator: Actuator, term: int | None = None, **more: object) -> Carrier:
        self.term = self.term + 1 if term is None else term
        work = Work(
            actuators={"running": actuator},
            guard=lambda plan: self.guard(plan),
            next_step=next_step,
            whole=whole,
            settle=lambda plan, outcomes: self.settled.append(plan.id),
        )
        self.now = Carrier(self.folder, self.term, work, **more)  # type: ignore[arg-type]  # options of one test
        return self.now

    def close(self) -> None:
        if self.now is not None:
            assert self.now.close()
            self.now = None

    def until(self, so: Callable[[], bool], within_s: float = 20.0) -> None:
        """Drain, as a main thread does, until it is so."""
        end_s = time.monotonic() + within_s
        while not so():
            assert self.now is not None
            self.said += self.now.drain()
            assert time.monotonic() < end_s, f"not within {within_s:g} s; said: {self.said}"
            time.sleep(0.01)

    def end_of(self, plan: Plan = PLAN) -> Outcome:
        """The end of a plan, when it is there and written down."""
        self.until(lambda: any((one.plan, one.index) == (plan.id, -1) for one in self.said))
        assert self.now is not None
        self.said += self.now.drain()
        return next(one for one in self.said if (one.plan, one.index) == (plan.id, -1))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    one = Desk(tmp_path)
    yield one
    one.close()


def tell(verb: str, key: str = "cli/1", plan: Plan = WAITS) -> Tell:
    return Tell(key=key, plan=plan.id, message={"verb": verb, "who": "ops", "why": "so", "expires_ns": 4 * 10**18})


class Slow(Scripted):
    """Is on its way for ever."""

    def __init__(self) -> None:
        super().__init__(False)


def test_a_plan_is_carried_out_once_however_often_it_is_started(desk: Desk) -> None:
    actuator = Scripted(False, True, pursue={"checkpoint": "step-400"})
    carrier = desk.open(actuator)
    for _ in range(3):
        carrier.start(PLAN)
    assert desk.end_of().result == "reached"
    assert [one.found for one in desk.said if one.index == 0] == [{"checkpoint": "step-400"}]
    assert actuator.calls == ["reached", "pursue 1", "reached"]
    assert desk.settled == [PLAN.id]


def test_one_that_has_ended_says_so_again(desk: Desk) -> None:
    """The engine asks again for a start whose end it does not know."""
    actuator = Scripted(True)
    desk.open(actuator).start(PLAN)
    first = desk.end_of()
    desk.until(lambda: statuses(desk.folder) == ["SUCCESS"])
    desk.close()
    desk.said.clear()
    carrier = desk.open(actuator)

    carrier.start(PLAN)
    assert carrier.drain() == [first]
    assert actuator.calls == ["reached"]


def statuses(folder: Path) -> list[str]:
    """Of all workflows."""
    (file,) = folder.glob("durable-*.sqlite")
    with contextlib.closing(sqlite3.connect(file)) as database:
        return [status for (status,) in database.execute("SELECT status FROM workflow_status")]


@pytest.mark.parametrize(("verb", "result"), [("approve", "already"), ("deny", "refused")])
def test_a_plan_waits_for_a_person_and_hears_at_once(desk: Desk, verb: str, result: str) -> None:
    carrier = desk.open(Scripted(True))
    carrier.start(WAITS)
    time.sleep(0.5)
    assert carrier.drain() == []
    asked_s = time.monotonic()
    carrier.tell(tell(verb))
    end = desk.end_of()
    assert time.monotonic() - asked_s < 5.0
    assert end.result == ("refused" if verb == "deny" else "reached")
    assert [one.result for one in desk.said if one.index == 0] == ([] if verb == "deny" else [result])


def test_nobody_is_waited_for_longer_than_the_plan_says(desk: Desk) -> None:
    short = replace(WAITS, deadline_ns=time.time_ns() + int(60.5e9))
    desk.open(Scripted(True)).start(short)
    assert desk.end_of().result == "expired"


def test_what_is_told_twice_is_heard_once_and_what_nobody_waits_for_is_dropped(desk: Desk) -> None:
    carrier = desk.open(Scripted(True))
    carrier.tell(tell("approve", plan=replace(WAITS, id="never/started")))
    carrier.start(WAITS)
    carrier.tell(tell("approve"))
    carrier.tell(tell("approve"))
    assert desk.end_of().result == "reached"
    carrier.tell(tell("deny", key="cli/2"))
    with contextlib.closing(sqlite3.connect(desk.folder / "durable-1.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM notifications").fetchone() == (2,)


def test_what_was_told_just_before_the_end_of_a_life_is_heard_in_the_next(desk: Desk) -> None:
    carrier = desk.open(Scripted(True))
    carrier.start(WAITS)
    time.sleep(0.5)
    assert carrier.close()
    carrier = desk.open(Scripted(True))
    carrier.tell(tell("approve"))  # before it was taken up again
    desk.close()
    desk.open(Scripted(True)).resume()
    assert desk.end_of().result == "reached"


def test_the_switch_is_honoured_within_a_second_while_a_rung_is_on_its_way(desk: Desk) -> None:
    store = Store(desk.folder / "journal.sqlite")
    assert store.claim(JOB, os.getpid(), 0, 0) == 1
    switch = desk.folder / "stop-all"
    permit, honoured_s = Permit(store, JOB, [switch]), list[float]()

    def guard(plan: Plan) -> str | None:
        why = permit(plan)
        honoured_s.extend([time.monotonic()] if why is not None else [])
        return why

    desk.guard = guard
    actuator = Slow()
    desk.open(actuator).start(PLAN)
    desk.until(lambda: "pursue 1" in actuator.calls)
    switched_s = time.monotonic()
    switch.touch()
    end = desk.end_of()
    assert honoured_s[0] - switched_s < 1.0
    assert (end.result, end.reason) == ("refused", f"running: all actions are switched off: {switch} exists")
    store.close()


def test_a_plan_of_an_owner_before_is_carried_on_in_the_term_of_the_new_one(desk: Desk) -> None:
    slow = Slow()
    desk.open(slow).start(PLAN)
    desk.until(lambda: "pursue 1" in slow.calls)
    desk.close()
    actuator = Scripted(False, True)
    desk.open(actuator, term=7).resume()
    assert desk.end_of().result == "reached"
    assert "pursue 7" in actuator.calls


def test_one_that_is_not_the_owner_any_more_does_nothing_more(desk: Desk) -> None:
    """Fenced in the middle: the rung is refused, and so is the plan."""
    store = Store(desk.folder / "journal.sqlite")
    assert store.claim(JOB, os.getpid(), 0, 0) == 1
    desk.guard = Permit(store, JOB)
    actuator = Slow()
    desk.open(actuator).start(PLAN)
    desk.until(lambda: "pursue 1" in actuator.calls)
    store.claim(JOB, os.getpid(), 0, 4 * 10**18)
    end = desk.end_of()
    assert (end.result, end.reason) == ("refused", "running: job job is not ours any more: our term 1 is over")
    assert [call for call in actuator.calls if call != "reached"] == ["pursue 1"]
    store.close()


def test_our_own_fault_ends_the_plan_and_not_the_carrier(desk: Desk) -> None:
    class Broken(Scripted):
        def found(self, rung: Rung) -> Mapping[str, Json]:
            raise AssertionError

    carrier = desk.open(Broken(True))
    desk.guard = lambda plan: str(1 // 0)
    carrier.start(PLAN)
    assert desk.end_of().reason == "running: ZeroDivisionError: integer division or modulo by zero"
    odd = replace(WAITS, id="incident/plan-2")
    carrier.start(odd)
    carrier.tell(Tell(key="cli/2", plan=odd.id, message={}))  # no verb
    assert desk.end_of(odd).reason == "KeyError: 'verb'"
    assert carrier.broken is None


def test_closed_in_the_middle_it_leaves_no_thread_and_says_nothing(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threading.active_count()
    carrier = desk.open(Slow())
    carrier.start(PLAN)
    carrier.start(replace(WAITS, id="incident/plan-2"))
    desk.until(lambda: threading.active_count() > before + 2)
    desk.close()
    assert threading.active_count() == before
    assert carrier.drain() == []
    assert capfd.readouterr() == ("", "")
    carrier.start(PLAN)
    (refused,) = carrier.drain()
    assert (refused.result, refused.reason) == (
        "refused",
        "no durable record, no action: the job is not ours any more",
    )


def test_it_waits_asleep_and_falls_asleep_again(desk: Desk) -> None:
    before = threading.active_count()
    carrier = desk.open(Scripted(True), idle_s=0.2)
    carrier.resume()
    assert carrier.drain() == []
    assert threading.active_count() == before, "nothing to do: the engine is not even imported for it"
    carrier.start(PLAN)
    desk.end_of()
    desk.until(lambda: threading.active_count() == before)
    second = replace(PLAN, id="incident/plan-2")
    carrier.start(second)
    assert desk.end_of(second).result == "reached"


def test_it_opens_no_port(desk: Desk) -> None:
    desk.open(Slow()).start(PLAN)
    sockets = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "udp", "tcp6", "udp6")]
    assert [line for lines in tables for line in lines if line.split()[9] in sockets] == []


def test_no_number_of_recoveries_is_too_many(desk: Desk) -> None:
    slow = Slow()
    desk.open(slow).start(PLAN)
    desk.until(lambda: "pursue 1" in slow.calls)
    desk.close()
    with contextlib.closing(sqlite3.connect(desk.folder / "durable-1.sqlite")) as database, database:
        database.execute("UPDATE workflow_status SET recovery_attempts = 1000")
    desk.open(Scripted(True)).resume()
    assert desk.end_of().result == "reached"


def test_a_folder_whose_name_a_url_would_cut_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state?mode=memory"
    folder.mkdir()
    desk = Desk(folder)
    desk.open(Scripted(True)).start(PLAN)
    assert "question mark" in desk.end_of().reason
    desk.close()


def test_nothing_is_pickled(desk: Desk) -> None:
    carrier = desk.open(Scripted(False, True, pursue={"a": [1, {"b": None}]}))
    carrier.start(WAITS)
    carrier.tell(tell("approve"))
    desk.end_of()
    found = set()
    with contextlib.closing(sqlite3.connect(desk.folder / "durable-1.sqlite")) as database:
        for table in ("workflow_status", "operation_outputs", "notifications"):
            found |= {one for (one,) in database.execute(f"SELECT serialization FROM {table}")}
    assert found - {None} == {"portable_json"}


# a disk that is full


@pytest.fixture
def small_files() -> Iterator[Callable[[int | None], None]]:
    """Files of this process cannot grow beyond so many bytes (None: as before): a full disk, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, before if limit is None else (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_a_durable_record_there_is_no_action(desk: Desk, small_files: Callable[[int | None], None]) -> None:
    actuator = Scripted(False, True)
    small_files(100)
    desk.open(actuator).start(PLAN)
    end = desk.end_of()
    small_files(None)
    assert (end.result, end.retryable) == ("refused", True)
    assert end.reason.startswith("no durable record, no action: ")
    assert actuator.calls == []


def test_what_stands_still_for_want_of_space_goes_on_when_there_is_some(
    desk: Desk, small_files: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.2)
    carrier = desk.open(Scripted(False, True))
    carrier.start(WAITS)
    time.sleep(0.3)
    small_files(100)
    carrier.tell(tell("approve"))
    desk.until(lambda: carrier.broken is not None)
    assert desk.said == []
    small_files(None)
    assert desk.end_of(WAITS).result == "reached"
    assert carrier.broken is None


# deliveries


class Web:
    """A channel that fails as told, then takes."""

    def __init__(self, channel: str, *failures: Exception) -> None:
        self.channel, self.failures = channel, list(failures)
        self.keys: list[str] = []

    def notify(self, notice: Notice) -> str:
        self.keys.append(notice.key)
        if self.failures:
            raise self.failures.pop(0)
        return "taken"


QUICK = DeliveryConfig(tries=2, backoff_s=0.01)


def test_a_notice_is_delivered_once_however_often_it_is_handed_over(desk: Desk) -> None:
    web = Web("web", busy())
    carrier = desk.open(Slow(), notifiers={"web": web}, delivery=QUICK)
    notifier = carrier.notifier("web")
    assert notifier.channel == "web"
    for _ in range(3):
        assert notifier.notify(NOTICE) == f"on its way: {NOTICE.key}"
    desk.until(lambda: len(web.keys) == 2)
    desk.close()
    carrier = desk.open(Slow(), notifiers={"web": web}, delivery=QUICK)
    carrier.deliver(NOTICE)
    desk.close()
    assert web.keys == [NOTICE.key] * 2


def test_a_notice_that_nobody_took_is_counted_and_the_next_channel_is_told_first(desk: Desk) -> None:
    web, pager = Web("web", *[busy()] * 9), Web("pager", *[busy()] * 9)
    carrier = desk.open(Slow(), notifiers={"web": web, "pager": pager}, delivery=QUICK)
    carrier.deliver(NOTICE)
    carrier.deliver(replace(NOTICE, key="one/2/unknown", channel="unknown"))
    desk.until(lambda: carrier.undelivered == 2)
    assert (web.keys, pager.keys) == (["one/1/web"] * 2, ["one/1/pager"] * 2)


def test_patience_outlives_us(desk: Desk) -> None:
    web = Web("web", busy(30.0))
    desk.open(Slow(), notifiers={"web": web}).deliver(NOTICE)
    desk.until(lambda: len(web.keys) == 1)
    time.sleep(0.2)
    desk.close()
    carrier = desk.open(Slow(), notifiers={"web": web})
    carrier.resume()
    time.sleep(2.0)
    assert carrier.drain() == []
    assert len(web.keys) == 1, "it was asked to be left alone for 30 s, and still is"


def test_only_so_many_wait_at_once_and_the_sender_keeps_the_rest(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELIVERIES_MAX", 2)
    web = Web("web", *[busy(50.0)] * 9)
    carrier = desk.open(Slow(), notifiers={"web": web})
    carrier.deliver(replace(NOTICE, key="one/1/web"))
    carrier.deliver(replace(NOTICE, key="one/2/web"))
    desk.until(lambda: len(web.keys) == 2)
    with pytest.raises(DeliveryError, match="2 deliveries are under way") as caught:
        carrier.deliver(replace(NOTICE, key="one/3/web"))
    assert caught.value.retryable


def test_a_notice_that_cannot_be_written_down_is_delivered_too(
    desk: Desk, small_files: Callable[[int | None], None]
) -> None:
    web, pager = Web("web", *[busy()] * 9), Web("pager")
    carrier = desk.open(Slow(), notifiers={"web": web, "pager": pager}, delivery=QUICK)
    small_files(100)
    carrier.deliver(NOTICE)
    desk.until(lambda: pager.keys == ["one/1/pager"])
    small_files(None)
    assert web.keys == ["one/1/web"] * 2


def test_a_second_engine_in_one_process_is_refused(desk: Desk, tmp_path: Path) -> None:
    desk.open(Slow()).start(PLAN)
    work = Work(actuators={}, guard=lambda plan: None, next_step=next_step, whole=whole)
    with pytest.raises(AssertionError, match="dbos is one a process"):
        Carrier(tmp_path, 9, work).start(PLAN)
