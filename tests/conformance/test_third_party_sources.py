"""Sources of other packages: found by their entry points, polled like ours; a broken one is named and harms nobody."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainwarden.app.isolation import Isolation, IsolationConfig, Item
from trainwarden.app.node_sources import AgentConfig, Devices, NodeSettings, build_sources
from trainwarden.core.model import Event, Frame

LIMIT_S = 20.0
PACKAGE = '''
"""Somebody's package."""
import sys
import threading
from dataclasses import replace
from trainwarden.collectors.readingframes import ReadingFrames
from trainwarden.core.emit import Emitter
from trainwarden.core.model import Event, Subject

ended = []


class Fans:
    """A source as it should be."""

    period_s = 0.05

    def __init__(self, *, node, start_ns, name="fans"):
        self.name = f"{name}@{node}"
        self.frames = ReadingFrames(self.name, start_ns=start_ns)
        self.emit = Emitter(self.name, job=None, start_ns=start_ns)

    def poll(self, now_ns):
        return self.frames([("node:n1", "node_temperature_celsius", 40.0)], now_ns)

    def close(self):
        ended.append(self.name)


class Odd(Fans):
    """One that gives what nobody takes."""

    def __init__(self, *, node, start_ns):
        super().__init__(node=node, start_ns=start_ns, name="odd")


class Garbage(Odd):
    def poll(self, now_ns):
        (frame,) = super().poll(now_ns)
        yield replace(frame, names=())


class Impostor(Odd):
    def poll(self, now_ns):
        yield from Fans(node="n1", start_ns=now_ns, name="nvml").poll(now_ns)


class Unknown(Odd):
    def poll(self, now_ns):
        subject = Subject(kind="node", id="n1")
        yield Event(kind="fan.stopped", subject=subject, source=self.name, seq=1, t_ns=now_ns, seen_ns=now_ns)


class Lacking(Odd):
    def poll(self, now_ns):
        subject = Subject(kind="source", id=self.name)
        yield Event(kind="source.blind", subject=subject, source=self.name, seq=1, t_ns=now_ns, seen_ns=now_ns)


class Breathless(Odd):
    period_s = 0.0


class NoSource(Odd):
    def poll(self, now_ns):
        yield {"fan": 1}


def exits(*, node, start_ns):
    sys.exit(3)


def hangs(*, node, start_ns):
    threading.Event().wait(0.5)


def misnamed(*, node, start_ns):
    return Fans(node=node, start_ns=start_ns, name="host")


def needs_more(node, start_ns, secret):
    return Fans(node=node, start_ns=start_ns)
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package with these entry points, as pip would."""

    def put(**entries: str) -> None:
        (tmp_path / "fans.py").write_text(PACKAGE)
        (tmp_path / "broken.py").write_text("import no_such_package_at_all\n")
        info = tmp_path / "fans-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fans\nVersion: 1.0\n")
        lines = "".join(f"{name.replace('_', '-')} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[trainwarden.sources]\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "fans", raising=False)

    return put


@pytest.fixture
def isolation() -> Iterator[Isolation]:
    made = Isolation(IsolationConfig(), "n1")
    yield made
    made.close(within_s=LIMIT_S)


def start(isolation: Isolation, settings: NodeSettings | None = None) -> list[str]:
    """Poll what is built of the settings, apart from what is built in."""
    settings = settings or NodeSettings(agent=AgentConfig(sources=("pcie",)))
    made = build_sources(settings, "n1", Devices(), start_ns=time.time_ns())
    others = [source for source in made if source.name != "pcie@n1"]
    for source in others:
        isolation.add(source)
    return [source.name for source in others]


def drained(isolation: Isolation, met: Callable[[list[Item]], object], what: str) -> list[Item]:
    items, end_s = list[Item](), time.monotonic() + LIMIT_S
    while not met(items):
        assert time.monotonic() < end_s, f"never came: {what}; seen: {items}"
        items += isolation.drain()
        time.sleep(0.005)
    return items


def frames(items: list[Item]) -> list[Frame]:
    return [item for item in items if isinstance(item, Frame)]


def whys(items: list[Item]) -> dict[str, str]:
    blind = [item for item in items if isinstance(item, Event) and item.kind == "source.blind"]
    return {item.subject.id: str(item.data["why"]) for item in blind}


def test_what_another_package_sees_is_told_and_closed_with_the_agent(
    install: Callable[..., None], isolation: Isolation
) -> None:
    install(fans="fans:Fans")
    assert start(isolation) == ["fans@n1"]
    items = drained(isolation, lambda items: len(frames(items)) > 2, "three readings")
    seqs = [frame.seq for frame in frames(items)]
    assert {frame.source for frame in frames(items)} == {"fans@n1"}
    assert seqs == [*range(seqs[0], seqs[0] + len(seqs))]
    assert isolation.close(LIMIT_S) == []
    import fans  # type: ignore[import-not-found]  # the fixture wrote it

    assert fans.ended == ["fans@n1"]


def test_the_settings_may_forbid_them(install: Callable[..., None], isolation: Isolation) -> None:
    install(fans="fans:Fans")
    assert start(isolation, NodeSettings(agent=AgentConfig(sources=("pcie",), third_party=False))) == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("broken:Fans", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("fans:Nothing", "AttributeError"),
        ("fans:exits", "SystemExit: 3"),
        ("fans:needs_more", "TypeError: needs_more() missing 1 required positional argument: 'secret'"),
        ("fans:misnamed", "ConfigError: fans:misnamed: need a source called odd@n1, got 'host@n1'"),
        ("fans:Breathless", "ConfigError: fans:Breathless: need a period_s of 0.05 to 3600, got 0"),
        ("fans:Garbage", "DataError: frame: subject 0 of a reading row names none of 0 names"),
        ("fans:Impostor", "DataError: odd@n1 gave an item of source 'nvml@n1'"),
        ("fans:Unknown", "DataError: odd@n1 gave an event 'fan.stopped': no row of core/kinds.py"),
        ("fans:Lacking", "DataError: odd@n1 gave an event source.blind without why"),
        ("fans:NoSource", "AttributeError: 'dict' object has no attribute 'source'"),
    ],
)
def test_a_broken_one_is_blind_by_its_name_and_the_others_go_on(
    install: Callable[..., None], isolation: Isolation, value: str, why: str
) -> None:
    install(odd=value, fans="fans:Fans")
    assert start(isolation) == ["fans@n1", "odd@n1"]
    items = drained(isolation, lambda items: whys(items) and len(frames(items)) > 2, "a reason, and readings")
    assert {frame.source for frame in frames(items)} == {"fans@n1"}
    assert whys(items).keys() == {"odd@n1"}
    assert whys(items)["odd@n1"].startswith(why)


def test_one_that_hangs_while_it_is_made_is_blind_and_the_others_go_on(install: Callable[..., None]) -> None:
    install(odd="fans:hangs", fans="fans:Fans")
    isolation = Isolation(IsolationConfig(deadline=IsolationConfig().deadline / 100), "n1")
    start(isolation)
    items = drained(isolation, lambda items: "odd@n1" in whys(items) and frames(items), "a reason, and a reading")
    assert whys(items)["odd@n1"] == "no answer for 0.1 s"
    isolation.close(LIMIT_S)


def test_a_name_that_is_taken_or_none_is_refused_by_name(install: Callable[..., None], isolation: Isolation) -> None:
    install(Fans="fans:Fans", agent_start="fans:Fans", pcie="fans:Fans", fans="fans:Fans")
    assert start(isolation) == ["third-party-0@n1", "third-party-1@n1", "fans@n1", "third-party-3@n1"]
    items = drained(isolation, lambda items: len(whys(items)) == 3 and frames(items), "three reasons, and a reading")
    named = whys(items)
    assert "entry point 'Fans' of trainwarden.sources: need a name of a-z" in named["third-party-0@n1"]
    assert "entry point 'agent-start'" in named["third-party-1@n1"]
    assert "(fans:Fans): pcie@n1 is the name of another source" in named["third-party-3@n1"]
