"""A supervisor in small, to be killed: journal, engine, carrier and the light runtime. Run as

    python -m tests.fakes.supervisor FOLDER

FOLDER/plans.jsonl holds plans, FOLDER/tells.jsonl what they are told. TRAINWARDEN_CRASH names where it dies, as JSON:
job -> "before/<goal>", "after/<goal>" (the effect), "recorded/<goal>" (the end of the rung), "told" (the plan's end is
handed out, not written down) or "written" (it is written down, the plan does not know). It holds still wherever it is
told to, and when every plan named stands where it should, it kills itself: one death at many points. Without: it ends
when all plans have. FOLDER/<job>-waits says that a plan waits for a person, FOLDER/<job>-holds that it holds still,
and FOLDER/go lets all go on.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.fakes.runtime import GOALS, Children

from trainwarden.app.carrier import Carrier
from trainwarden.app.carry import Message, Permit, Step, Work
from trainwarden.app.engine import Engine
from trainwarden.app.store import Store
from trainwarden.core.clock import unix_ns
from trainwarden.core.codec import loads
from trainwarden.core.model import JobId, Outcome, Plan, Tell
from trainwarden.core.process import identify
from trainwarden.remediation.plans import next_step, whole

JOB = JobId("fleet")
"""Whose owner this is; the jobs of the light runtime are its parts."""


class Crashes:
    """Where to hold still, and who does already."""

    def __init__(self, folder: Path, points: dict[str, str]) -> None:
        self._folder, self._points = folder, points
        self._held: set[str] = set()

    def __call__(self, point: str, job: str, goal: str = "") -> None:
        """In a plan's thread: stay here, if this is the place."""
        if self.hits(point, job, goal):
            (self._folder / f"{job}-holds").touch()
            while not (self._folder / "go").exists():
                time.sleep(0.02)

    def hits(self, point: str, job: str, goal: str = "") -> bool:
        if self._points.get(job) != f"{point}/{goal}".removesuffix("/"):
            return False
        self._held.add(job)
        if len(self._held) == len(self._points):
            os.kill(os.getpid(), signal.SIGKILL)
        return True


def main(folder: Path) -> None:
    crashes = Crashes(folder, json.loads(os.environ.get("TRAINWARDEN_CRASH", "{}")))
    store, asked = Store(folder / "journal.sqlite"), Store(folder / "journal.sqlite")
    own = identify(os.getpid())
    assert own is not None
    term = store.claim(JOB, own.pid, own.start_time, unix_ns())
    children = Children(folder, lambda fence: store.check(JOB, fence), crashes)

    def step(plan: Plan, outcomes: Sequence[Outcome], told: Sequence[Message], now_ns: int) -> Step:
        if outcomes:
            crashes("recorded", plan.ladder[0].target.id, plan.ladder[len(outcomes) - 1].goal)
        following = next_step(plan, outcomes, told, now_ns)
        if following == "wait":
            (folder / f"{plan.ladder[0].target.id}-waits").touch()
        return following

    work = Work(
        actuators=dict.fromkeys(GOALS, children),
        guard=Permit(asked, JOB, [folder / "stop-all"]),
        next_step=step,
        whole=whole,
    )
    carrier = Carrier(folder, term, work, silence_s=float(os.environ.get("TRAINWARDEN_SILENCE_S", "60")))
    engine = Engine(store, {}, fence=(JOB, term))
    carrier.resume()
    turns(folder, carrier, engine, crashes, store, term)
    carrier.close()
    store.release(JOB, term)
    store.close()
    asked.close()


def turns(folder: Path, carrier: Carrier, engine: Engine, crashes: Crashes, store: Store, term: int) -> None:
    open_plans: dict[str, Plan] = {}
    for line in (folder / "plans.jsonl").read_text().splitlines():
        plan = loads(line)
        assert isinstance(plan, Plan)
        open_plans[plan.id] = plan
    for row in store.tail():
        open_plans.pop(row.key.removesuffix("/-1"), None)
    for plan in open_plans.values():
        carrier.start(plan)
    for line in _lines(folder / "tells.jsonl"):
        tell = loads(line)
        assert isinstance(tell, Tell)
        carrier.tell(tell)
    while open_plans:
        store.renew(JOB, term, unix_ns())
        for outcome in carrier.drain():
            job = open_plans[outcome.plan].ladder[0].target.id if outcome.plan in open_plans else ""
            if outcome.index == -1 and crashes.hits("told", job):
                stand_still()
            engine.handle(outcome)
            if outcome.index == -1:
                if crashes.hits("written", job):
                    stand_still()
                open_plans.pop(outcome.plan, None)
        time.sleep(0.02)
    time.sleep(0.3)  # let the last one hear that it is written down
    carrier.drain()


def stand_still() -> NoReturn:
    """The main thread holds; plans go on to where they hold."""
    while True:
        time.sleep(60)


def _lines(path: Path) -> Sequence[str]:
    return path.read_text().splitlines() if path.exists() else ()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
