"""What a server asks the agents of a job's nodes for: stacks and flight-recorder dumps of ranks, when the job stands
still.

Where a rank is follows from its hello, believed only from the agent of its node; a look goes to those nodes and to no
other, again and again until the agent answers or the time is over (an agent carries out one key once). What it sees
comes as events like all else. Who does not answer is said: as source.blind of `looks/<job>@<node>`, and in the place of
each rank's stack as one that was denied, so that the finding tells it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, TypeAlias

from trainwarden.app.ingest import Link
from trainwarden.core.emit import Emitter
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event, Frame, JobId, Json, Look, State, Subject
from trainwarden.core.wire import TAKES_LOOKS, Asked
from trainwarden.detectors.case import say_ranks

AGAIN_NS: Final = 2_000_000_000
"""Between two times that the same is asked of an agent that has not answered: it may have connected since."""
MINUTE_NS: Final = 60_000_000_000
KEYS_MAX: Final = 256
"""Looks remembered, so that a journal that is read again asks for none of them twice."""
_DUMP: Final = "/dump"
"""Behind the key of a look for stacks: the look for dumps that goes with it."""
PLACES_MAX: Final = 1 << 17
"""Ranks whose node is remembered: more than the largest job has."""

Send: TypeAlias = Callable[[Sequence[tuple[str, Asked]]], Sequence[str]]
"""Ask agents, by node; why each cannot be asked, "" where it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LooksConfig:
    """How agents are asked to look closer."""

    ranks: int = 256
    """Of one look, the suspects first: each answers some kB, and waits for the disk."""

    a_minute: int = 6
    """Looks of one job, more are not asked: a hang is said after 10 s at the earliest (detectors.hang.floor). The
    stacks of eight ranks cost their node 3 to 8 s of one core."""

    answer: timedelta = timedelta(seconds=15)
    """An agent of which nothing was heard for this long does not answer. One process takes it at most 12 s
    (collectors/stacks.py); one that is cut off tries to connect again within 12.5 s."""

    dumps: bool = True
    """Ask for a dump of the flight recorder beside each stack."""

    def __post_init__(self) -> None:
        for key, most in (("ranks", 1024), ("a_minute", 60)):
            if not 1 <= getattr(self, key) <= most:
                raise ConfigError(f"server.jobs.looks.{key}: need 1 to {most}, got {getattr(self, key)}")
        if self.answer < timedelta(seconds=1):
            raise ConfigError(f"server.jobs.looks.answer: need at least 1s, got {self.answer.total_seconds():g}s")


@dataclass(slots=True)
class _Waiting:
    """What one agent was asked for."""

    node: str
    asked: Asked
    left: set[int]
    """Ranks of which nothing came yet."""
    until_ns: int
    again_ns: int = 0
    why_not: str = ""
    """Why it could not be asked, the last time."""


def ask_agents(links: Callable[[], Iterable[Link]], asks: Sequence[tuple[str, Asked]]) -> list[str]:
    """A Send, by the connections that there are now."""
    nodes = {node for node, _ in asks}
    old, takers = dict[str, str](), dict[str, list[Link]]()
    for link in links():
        if (hello := link.hello) is not None and link.is_agent and hello.node in nodes:
            old[hello.node] = "its agent takes no looks: upgrade it, or let agent.sources name looks"
            takers.setdefault(hello.node, []).extend([link] * (TAKES_LOOKS in hello.takes))
    for node, asked in asks:
        for link in takers.get(node, ()):  # two where an old connection is half open: one key is one look
            link.ask(asked)
    return ["" if takers.get(node) else old.get(node, "its agent is not connected") for node, _ in asks]


class Asking:
    """Of one job. ask() and hear() at any time, turn() at every tick."""

    def __init__(self, config: LooksConfig, job: JobId, emit: Emitter, send: Send, counts: Counter[str]) -> None:
        """counts: looks by their fate, as the metric trainwarden_server_looks_total says."""
        self._config, self._job, self._emit, self._send, self._counts = config, job, emit, send, counts
        self._new: list[Look] = []
        self._places: dict[int, tuple[int, str]] = {}
        """Rank -> epoch of its newest hello, and the node that it came from."""
        self._keys: deque[str] = deque(maxlen=KEYS_MAX)
        self._lately: deque[int] = deque(maxlen=config.a_minute)
        """When the newest looks were asked."""
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        """By key and node."""
        self._answered: list[tuple[_Waiting, str]] = []
        """Those whose answer came since the last turn, and why they looked at nothing."""
        self._blind: set[str] = set()
        """Nodes that did not answer last time."""

    def ask(self, look: Look) -> None:
        """At the next turn."""
        self._new.append(look)

    def hear(self, items: Iterable[Frame | Event], now_ns: int) -> None:
        """What the agent of a node sent: where ranks are, and what it saw."""
        for item in items:
            if not isinstance(item, Event):
                continue
            node, rank = item.source.rpartition("@")[2], item.data.get("rank")
            if item.kind == "hello" and isinstance(rank, int):
                epoch = item.epoch or 0
                if epoch >= self._places.get(rank, (0,))[0] and (rank in self._places or self._has_room):
                    self._places[rank] = epoch, node
            elif item.kind == "stack" and isinstance(rank, int):
                for waiting in self._waiting.values():
                    if waiting.node == node:
                        waiting.until_ns = now_ns + self._answer_ns
                        waiting.left -= {rank} if waiting.asked.look.what == "stack" else set()
            elif item.kind == "look.answer":
                waited = self._waiting.pop((str(item.data.get("key")), node), None)
                if waited is not None:
                    self._answered.append((waited, str(item.data.get("why"))))

    def turn(self, now_ns: int) -> Iterator[Event]:
        """Ask; what has to be said of those who did not answer, or answer again."""
        new, self._new = self._new, []
        for look in new:
            yield from self._begin(look, now_ns)
        due = [one for one in self._waiting.values() if now_ns >= one.again_ns]
        for one, why in zip(due, self._send([(one.node, one.asked) for one in due]) if due else (), strict=True):
            one.again_ns, one.why_not = now_ns + AGAIN_NS, why
        answered, self._answered = self._answered, []
        for one, why in answered:
            self._counts["refused" if why else "answered"] += 1
            yield from self._answers_again(one.node, now_ns)
            yield from self._without(one, why or "it has no such process", now_ns)
        for key, one in [*self._waiting.items()]:
            if now_ns >= one.until_ns:
                del self._waiting[key]
                self._counts["unanswered"] += 1
                why = one.why_not or f"its agent was asked, no answer for {self._config.answer.total_seconds():g} s"
                yield from self._blind_at(one.node, f"{one.asked.look.what} of {say_ranks(one.left)}: {why}", now_ns)
                yield from self._without(one, why, now_ns)

    def snapshot(self) -> State:
        """What lasts longer than a server: looks under way are asked again."""
        at: dict[str, dict[str, list[int]]] = {}
        for rank, (epoch, node) in self._places.items():
            at.setdefault(node, {}).setdefault(str(epoch), []).append(rank)
        waited = {key.removesuffix(_DUMP) for key, _ in self._waiting}
        return {"places": at, "keys": [key for key in self._keys if key not in waited], "blind": sorted(self._blind)}

    def restore(self, state: State) -> None:
        """Take up what snapshot gave; {}: an older server gave none."""
        for node, epochs in state.get("places", {}).items():
            for epoch, ranks in epochs.items():
                self._places |= dict.fromkeys(ranks, (int(epoch), node))
        self._keys.extend(state.get("keys", ()))
        self._blind |= set(state.get("blind", ()))

    # one look

    def _begin(self, look: Look, now_ns: int) -> Iterator[Event]:
        if look.key in self._keys:
            return
        if len(self._lately) == self._config.a_minute and now_ns - self._lately[0] < MINUTE_NS:
            self._counts["too_often"] += 1
            yield from self._blind_at("", f"{self._config.a_minute} looks were asked in the last minute", now_ns)
            return
        self._keys.append(look.key)
        self._lately.append(now_ns)
        ranks = [*dict.fromkeys(self._ranks_of(look.subjects))]
        at: dict[str, list[int]] = {}
        for rank in ranks[: self._config.ranks]:
            at.setdefault(self._places.get(rank, (0, ""))[1], []).append(rank)
        if len(ranks) > self._config.ranks:
            yield from self._blind_at("", f"{self._config.ranks} of {len(ranks)} ranks are asked", now_ns)
        if nowhere := at.pop("", []):
            why = "no agent has said that it is on its node"
            yield from self._blind_at("", f"{look.what} of {say_ranks(nowhere)}: {why}", now_ns)
            yield from self._denied(look.what, nowhere, why, now_ns)
        looks = [look]
        if look.what == "stack" and self._config.dumps:  # first, since asking for it takes no time
            looks.insert(0, replace(look, what="dump", key=f"{look.key}{_DUMP}"))
        for one in looks:
            for node, here in at.items():
                part = replace(one, subjects=tuple(Subject(kind="rank", id=str(rank)) for rank in here))
                asked = Asked(job=self._job, look=part)
                self._waiting[one.key, node] = _Waiting(node, asked, set(here), now_ns + self._answer_ns)
                self._counts["asked"] += 1

    def _ranks_of(self, subjects: Iterable[Subject]) -> Iterator[int]:
        for subject in subjects:
            if subject.kind == "rank" and subject.id.isdecimal():
                yield int(subject.id)
            elif subject.kind == "node":
                yield from (rank for rank, (_, node) in self._places.items() if node == subject.id)

    # what is said

    def _without(self, waited: _Waiting, why: str, now_ns: int) -> Iterator[Event]:
        yield from self._denied(waited.asked.look.what, sorted(waited.left), f"{waited.node}: {why}", now_ns)

    def _denied(self, what: str, ranks: Iterable[int], why: str, now_ns: int) -> Iterator[Event]:
        """In the place of stacks; a dump that is not there is no event."""
        for rank in ranks if what == "stack" else ():
            data: Mapping[str, Json] = {"rank": rank, "frames": [], "state": "", "wchan": "", "denied": why}
            yield self._emit("stack", Subject(kind="rank", id=str(rank)), now_ns=now_ns, data=data)

    def _blind_at(self, node: str, why: str, now_ns: int) -> Iterator[Event]:
        """Once, until it answers again; node "": nobody's agent, each time."""
        if node not in self._blind:
            self._blind |= {node} - {""}
            yield self._emit("source.blind", self._source(node), now_ns=now_ns, data={"why": why})

    def _answers_again(self, node: str, now_ns: int) -> Iterator[Event]:
        if node in self._blind:
            self._blind.discard(node)
            yield self._emit("source.up", self._source(node), now_ns=now_ns, data={"why": "it answers"})

    def _source(self, node: str) -> Subject:
        return Subject(kind="source", id=f"looks/{self._job}@{node}" if node else f"looks/{self._job}")

    @property
    def _answer_ns(self) -> int:
        return self._config.answer // timedelta(microseconds=1) * 1000

    @property
    def _has_room(self) -> bool:
        return len(self._places) < PLACES_MAX
