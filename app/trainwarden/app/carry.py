"""Carrying out one plan: the part that knows nothing of the engine that makes it durable.

`climb` asks a pure function for the next rung, again and again; everything that looks at a clock, the world or a person
is a recorded step, which is not taken again after a crash. A rung whose end is not recorded is taken again, and has its
effect once only because the world is read for its goal first. What may stop it (the job is not ours any more, actions
are switched off) is read afresh before it acts and at each look while it is on its way. How a rung ended is data:
nothing raises, whatever an actuator does.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from trainwarden.app.store import Store
from trainwarden.core.clock import Clock, unix_ns
from trainwarden.core.codec import dumps, loads
from trainwarden.core.errors import ActionError, FencedError, StoreError
from trainwarden.core.model import JobId, Json, Outcome, Plan, Rung
from trainwarden.core.ports import Actuator

LOOK_S = 0.2
"""Between two looks whether a goal is reached, or may still be pursued (architecture, section 4.2)."""

T = TypeVar("T")
Message: TypeAlias = Mapping[str, Json]
Step: TypeAlias = int | Literal["wait", "done"]
Sleep: TypeAlias = Callable[[float], None]

Guard: TypeAlias = Callable[[Plan], str | None]
"""Why a plan may not act now; None: it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What plans are made of. Actuators, guard and settle are used from several threads."""

    actuators: Mapping[str, Actuator]
    """By goal."""
    guard: Guard
    next_step: Callable[[Plan, Sequence[Outcome], Sequence[Message], int], Step]
    """remediation.plans.next_step."""
    whole: Callable[[Plan, Sequence[Outcome], Sequence[Message], int], Outcome]
    """remediation.plans.whole."""
    settle: Callable[[Plan, Sequence[Outcome]], None] = lambda plan, outcomes: None
    """What is left to do for a plan that has ended, before that is told; called at least once."""
    clock: Clock = unix_ns


class Log(Protocol):
    """The record of one plan's steps."""

    def record(self, name: str, work: Callable[[], T]) -> T:
        """What this step came to when it first came to its end."""
        ...

    def heard(self) -> Sequence[Message]:
        """What the plan was told since it last asked; recorded too."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """An actuator that can say again what it found when it pursued a goal that is reached by now."""

    def found(self, rung: Rung) -> Mapping[str, Json]: ...


class Permit:
    """What must hold whenever a plan acts: the job is ours in the plan's term, and no switch is on.

    store: a connection of its own, since plans ask from their own threads. switches: files that switch all actions off
    by being there. also: facts of others, such as a tripped breaker or a journal that cannot be written.
    """

    def __init__(self, store: Store, job: JobId, switches: Sequence[Path] = (), also: Sequence[Guard] = ()) -> None:
        self._store, self._job, self._switches, self._also = store, job, tuple(switches), tuple(also)

    def __call__(self, plan: Plan) -> str | None:
        for switch in self._switches:
            if switch.exists():
                return f"all actions are switched off: {switch} exists"
        try:
            self._store.check(self._job, plan.fence)
        except (FencedError, StoreError) as error:
            return str(error)
        return next((why for guard in self._also if (why := guard(plan)) is not None), None)


def climb(
    plan: Plan, work: Work, log: Log, say: Callable[[Outcome], None], wake: threading.Event, sleep: Sleep
) -> Outcome:
    """Take rung after rung; how the plan ended. say: is told of each rung, after a crash again. wake: see `_moment`."""
    outcomes: list[Outcome] = []
    told: list[Message] = []
    step: Step | None = None
    while step != "done":
        now_ns = log.record(
            "moment", partial(_moment, plan, work, outcomes, told, wake if step == "wait" else None, sleep)
        )
        told += log.heard()
        step = work.next_step(plan, outcomes, told, now_ns)
        if isinstance(step, int):
            outcomes.append(_outcome(log.record("take", partial(_taken, plan, step, work, sleep))))
            say(outcomes[-1])
    log.record("settle", partial(work.settle, plan, outcomes))
    return work.whole(plan, outcomes, told, now_ns)


def _moment(
    plan: Plan,
    work: Work,
    outcomes: Sequence[Outcome],
    told: Sequence[Message],
    wake: threading.Event | None,
    sleep: Sleep,
) -> int:
    """The time now; with `wake` (a plan that waits) when that is set, or when time alone makes the plan go on."""
    while wake is not None and not wake.is_set() and work.next_step(plan, outcomes, told, work.clock()) == "wait":
        sleep(LOOK_S)
    if wake is not None:
        wake.clear()
    return work.clock()


def _taken(plan: Plan, index: int, work: Work, sleep: Sleep) -> str:
    return dumps(take(plan, index, actuators=work.actuators, guard=work.guard, clock=work.clock, sleep=sleep))


def _outcome(text: str) -> Outcome:
    outcome = loads(text)
    assert isinstance(outcome, Outcome)
    return outcome


# one rung

_Ended: TypeAlias = tuple[Literal["reached", "already", "failed", "refused"], str, bool, Mapping[str, Json]]
"""result, reason, retryable, found."""


def take(
    plan: Plan, index: int, *, actuators: Mapping[str, Actuator], guard: Guard, clock: Clock, sleep: Sleep
) -> Outcome:
    """Reach the goal of one rung within its deadline, or say why not. In mode observe the world is only read."""
    rung = plan.ladder[index]
    actuator = actuators.get(rung.goal)
    try:
        if actuator is None:
            ended: _Ended = "refused", f"nothing here can reach {rung.goal}", False, {}
        elif plan.mode == "observe":
            ended = _watch(rung, actuator)
        else:
            ended = _reach(plan, rung, actuator, guard, clock, sleep)
    except FencedError as error:
        ended = "refused", str(error), False, {}
    except ActionError as error:
        ended = "failed", str(error), error.retryable, {}
    except Exception as error:  # an actuator's own fault ends the rung, not the thread
        ended = "failed", f"{type(error).__name__}: {error}", False, {}
    result, reason, retryable, found = ended
    return Outcome(plan=plan.id, index=index, result=result, reason=reason, retryable=retryable, found=found)


def _watch(rung: Rung, actuator: Actuator) -> _Ended:
    if actuator.reached(rung):
        return "already", "", False, {}
    return "refused", "observe", False, {}


def _reach(plan: Plan, rung: Rung, actuator: Actuator, guard: Guard, clock: Clock, sleep: Sleep) -> _Ended:
    """One who cannot tell whether the goal is reached does not act: its effect may be there already."""
    end_ns = clock() + int(rung.deadline_s * 1e9)
    found: Mapping[str, Json] | None = None
    while True:
        if (why := guard(plan)) is not None:
            return "refused", why, True, found or {}
        reached = actuator.reached(rung)
        if reached and found is None:
            return "already", "", False, actuator.found(rung) if isinstance(actuator, Recalls) else {}
        if reached:
            return "reached", "", False, found or {}
        if clock() >= end_ns:
            state = "cannot be told" if reached is None else "is not reached"
            return "failed", f"{rung.goal} {state} within {rung.deadline_s:g} s", True, found or {}
        if reached is False and found is None:
            found = actuator.pursue(rung, plan.fence)
        else:
            sleep(LOOK_S)
