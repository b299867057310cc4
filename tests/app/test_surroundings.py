"""What `trainwarden run` reads of its host beside the ranks, with the agent's own sources on files of the test."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trainwarden.app.isolation import Item
from trainwarden.app.node_sources import NodeSettings
from trainwarden.app.surroundings import Surroundings, load_run_settings
from trainwarden.app.wiring import Beside
from trainwarden.collectors.kmsg import KernelLogConfig
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Event

XID = "[ 5000.000000] NVRM: Xid (PCI:0000:9b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.\n"

Open = Callable[..., Surroundings]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(said: list[str]) -> Iterator[Open]:
    opened: list[Surroundings] = []

    def start(settings: NodeSettings, wanted: tuple[Beside, ...] | None) -> Surroundings:
        opened.append(Surroundings(settings, "n1", wanted, start_ns=time.time_ns(), say=said.append))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def reading(log: Path) -> NodeSettings:
    return replace(NodeSettings(), kernel_log=KernelLogConfig(source=str(log), recorded=True))


def seen_until(one: Surroundings, done: Callable[[list[Item]], bool]) -> list[Item]:
    seen: list[Item] = []
    end_s = time.monotonic() + 20
    while not done(seen):
        assert time.monotonic() < end_s, seen
        seen += one.poll(time.time_ns())
        time.sleep(0.01)
    return seen


def kinds(items: list[Item]) -> list[str]:
    return [item.kind for item in items if isinstance(item, Event)]


def test_what_the_kernel_says_of_a_gpu_is_seen_beside_the_ranks(start: Open, tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text(XID)
    seen = seen_until(start(reading(log), ("kernel_log",)), lambda items: "xid" in kinds(items))
    (xid,) = [item for item in seen if isinstance(item, Event) and item.kind == "xid"]
    assert (xid.data["code"], xid.job, xid.epoch) == (79, None, None)


def test_what_this_host_does_not_let_us_read_is_said_and_left_out(start: Open, said: list[str], tmp_path: Path) -> None:
    beside = start(reading(tmp_path / "missing.log"), None)
    seen = seen_until(beside, lambda items: any("kernel-log@n1" in line for line in said))
    assert "source.blind" not in kinds([item for item in seen if item.source == "kernel-log@n1"])
    assert "kernel-log@n1" not in beside.names
    assert "host@n1" in beside.names


def test_what_the_settings_name_is_blind_where_it_cannot_be_read(start: Open, said: list[str], tmp_path: Path) -> None:
    beside = start(reading(tmp_path / "missing.log"), ("kernel_log",))
    seen = seen_until(beside, lambda items: "source.blind" in kinds(items))
    assert [item.subject.id for item in seen if isinstance(item, Event)] == ["kernel-log@n1"]
    assert beside.names == ("kernel-log@n1",)
    assert said == []


def test_a_source_that_is_lost_later_is_blind(start: Open, said: list[str], tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text(XID)
    beside = start(reading(log), None)
    seen_until(beside, lambda items: "xid" in kinds(items))
    seen_until(beside, lambda items: True)
    os.unlink(log)
    seen_until(beside, lambda items: "source.blind" in kinds([one for one in items if one.source == "kernel-log@n1"]))
    assert not [line for line in said if "kernel-log" in line]


def test_nothing_is_read_unasked(start: Open) -> None:
    beside = start(NodeSettings(), ())
    assert (beside.names, beside.poll(time.time_ns())) == ((), [])


def test_one_file_sets_up_the_run_and_its_sources(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {sources: [kernel_log]}\ncollectors: {kernel_log: {source: journal}}\n")
    settings, beside = load_run_settings(file)
    assert (settings.run.sources, beside.kernel_log.source) == (("kernel_log",), "journal")
    file.write_text("uplink: {server: there}\n")
    with pytest.raises(ConfigError, match="uplink"):
        load_run_settings(file)
