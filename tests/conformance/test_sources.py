"""The source port: what every source keeps to, ours and those to come. A new one is a line in STAGES.

What it cannot see is blind, said once with the reason, and up when it is back; never an exception, never a zero. Two
sorts: those that see one thing, which can be blind, and those that take what tenants wrote, of which each piece can be
refused while the others are read.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from tests.collectors.nvml_world import compiled
from tests.conformance import stages_node, stages_told
from tests.conformance.stages import GARBAGE, START_NS, Items, Stage
from tests.fakes.sysfs import as_nobody

from trainwarden.app.node_sources import BUILT_IN, PER_JOB
from trainwarden.core.codec import dumps, frame_from_bytes, frame_to_bytes, loads
from trainwarden.core.kinds import KINDS, missing_data
from trainwarden.core.model import Event, Frame
from trainwarden.core.ports import Source
from trainwarden.core.readings import READINGS
from trainwarden.core.schemas import DTYPES

Enter = Callable[[], AbstractContextManager[Stage]]
STAGES: dict[str, dict[str, Enter]] = {
    "host": {"host": stages_node.host},
    "infiniband": {"infiniband": stages_node.infiniband},
    "pcie": {"pcie": stages_node.pcie},
    "mounts": {"mounts": stages_node.mounts},
    "kernel_log": {
        "kmsg": stages_node.kmsg,
        "kernel log file": stages_node.log_file,
        "journal": stages_node.journal,
    },
    "slurm": {"slurm": stages_node.slurm},
    "node_labels": {"node labels": stages_node.node_labels},
    "nvml": {"nvml": stages_told.nvml},
    "dcgm": {"dcgm": stages_told.dcgm},
    "recordings": {"recordings": stages_told.recordings},
}
"""Name in app/node_sources.py -> stages of what sees one thing."""
TAKERS: dict[str, dict[str, Enter]] = {
    "jobs": {"jobs": stages_told.jobs},
    "rings": {"rings": stages_told.rings},
    "dumps": {"dumps": stages_told.dumps, "dump folder": stages_told.dump_folder},
}
"""Stages of what takes the pieces that tenants wrote. A job's own source, its rings, stands in no table."""
ASKED: dict[str, dict[str, Enter]] = {"looks": {"looks": stages_told.looks}}
"""Stages of what tells nothing unless it is asked."""
SEERS = {name: enter for stages in STAGES.values() for name, enter in stages.items()}
TAKEN = {name: enter for stages in TAKERS.values() for name, enter in stages.items()}
ALL = SEERS | TAKEN | {name: enter for stages in ASKED.values() for name, enter in stages.items()}
PURE = ("host", "infiniband", "pcie", "kernel log file", "recordings", "dump folder")
"""Of the others what they look at is used up, or the machine's own time is part of what they tell."""
REFUSALS = ("source.blind", "dump.refused")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    if request.param == "nvml":
        library: Path = request.getfixturevalue("library")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    with ALL[request.param]() as made:
        yield made


every = pytest.mark.parametrize("stage", ALL, indirect=True)
every_seer = pytest.mark.parametrize("stage", SEERS, indirect=True)
every_taker = pytest.mark.parametrize("stage", TAKEN, indirect=True)


def close(source: Source) -> None:
    getattr(source, "close", lambda: None)()


def told(items: Items, *kinds: str) -> list[str]:
    """Subjects of events of these kinds."""
    return [str(item.subject) for item in items if isinstance(item, Event) and item.kind in kinds]


def able(way: str) -> AbstractContextManager[None]:
    """Root may read everything."""
    return as_nobody() if way.endswith("forbidden") else nullcontext()


def test_every_source_that_is_built_in_has_a_stage() -> None:
    assert {*STAGES, *TAKERS, *ASKED} == {*BUILT_IN, *PER_JOB, "rings"}


@every
def test_it_says_what_and_where_it_is_and_may_be_closed_twice(stage: Stage) -> None:
    source = stage.make()
    assert re.fullmatch(r"[a-z][a-z-]*(/[\w.-]+)?@\S+", source.name)
    assert 0 < source.period_s < 3600
    stage.look(source)
    close(source)
    close(source)


@every
def test_what_is_whole_is_told_in_valid_items_numbered_by_one(stage: Stage) -> None:
    source = stage.make()
    looks = [stage.look(source) for _ in range(3)]
    close(source)
    assert stage.told(source, looks[0])
    items = [item for look in looks for item in look]
    assert told(items, *REFUSALS, "source.up", "telemetry.lost") == []
    numbered: dict[tuple[str, str], list[int]] = defaultdict(list)
    for item in items:
        numbered[type(item).__name__, item.source].append(item.seq)
        valid(item)
        if not stage.foreign:
            assert item.source.rpartition("@")[2] == source.name.rpartition("@")[2]
            assert item.seen_ns <= stage.now_ns
    for name, seqs in numbered.items():
        assert seqs == [*range(seqs[0], seqs[0] + len(seqs))], name
        assert stage.foreign or seqs[0] > START_NS // 1000, "a source that restarts says no number again"


def valid(item: Frame | Event) -> None:
    """What the wire, recordings and the tables take."""
    if isinstance(item, Event):
        assert KINDS[item.kind].of == "event"
        assert missing_data(item.kind, item.data) == ()
        assert dumps(loads(dumps(item))) == dumps(item)  # type: ignore[type-var,arg-type,unused-ignore]
        return
    assert item.rows.dtype == DTYPES[item.schema]
    assert len(item.rows)
    assert frame_to_bytes(frame_from_bytes(frame_to_bytes(item))) == frame_to_bytes(item)
    if item.schema == "reading" and item.job is None:
        assert all(map(math.isfinite, item.rows["value"].tolist()))
        assert {item.names[signal] for signal in item.rows["signal"]} <= READINGS.keys()


@pytest.mark.parametrize("stage", PURE, indirect=True)
def test_the_same_is_told_of_the_same(stage: Stage) -> None:
    said = []
    for _ in range(2):
        stage.now_ns = START_NS
        source, stage.stir = stage.make(), lambda: None
        items = [*stage.look(source), *stage.look(source)]
        close(source)
        said.append([frame_to_bytes(item) if isinstance(item, Frame) else dumps(item).encode() for item in items])
    assert said[0] == said[1] != []


@every_seer
def test_what_is_broken_is_blind_once_and_up_when_it_is_back(stage: Stage) -> None:
    """From the beginning, and later."""
    for way, harm in stage.harms.items():
        for later in (False, True)[: 1 + stage.later]:
            source = stage.make()
            if later:
                assert stage.told(source, stage.look(source)), way
            harm()
            with able(way):
                first, then = stage.look(source), stage.look(source)
            blind = told([*first, *then], "source.blind")
            assert bool(blind) == (way not in stage.quiet), (way, later)
            assert len(blind) == len(set(blind)), (way, later)
            assert all(one.partition("/")[0] == f"source:{source.name}" for one in blind)
            assert {signal for signal, _ in numbers_of(then)} <= {*stage.left}, way
            assert all(item.data["why"] for item in first if isinstance(item, Event) and item.kind == "source.blind")
            stage.heal()
            healed = [*stage.look(source), *stage.look(source)]
            assert stage.told(source, healed), way
            back = [one for one in blind if not one.endswith("/refused")]
            assert sorted(told(healed, "source.up")) == sorted(back), (way, later)
            assert told(healed, "source.blind") == [], (way, later)
            close(source)


@pytest.mark.parametrize("content", [None, b"", GARBAGE], ids=["missing", "empty", "garbage"])
@pytest.mark.parametrize("stage", ["host", "infiniband", "pcie"], indirect=True)
def test_a_file_that_is_broken_takes_numbers_away_and_changes_none(stage: Stage, content: bytes | None) -> None:
    whole = pairs(stage)
    assert stage.files is not None
    for path in stage.files.kept:
        with stage.files.without(path, content):
            assert pairs(stage) < whole, path


def pairs(stage: Stage) -> set[tuple[str, float]]:
    source = stage.make()
    found = numbers_of(stage.look(source))
    close(source)
    return found


def numbers_of(items: Items) -> set[tuple[str, float]]:
    """Signals and values."""
    frames = [item for item in items if isinstance(item, Frame) and item.schema == "reading"]
    return {(frame.names[row["signal"]], float(row["value"])) for frame in frames for row in frame.rows}


@every_taker
def test_what_a_tenant_put_beside_it_is_refused_once_by_name_and_the_rest_is_told(stage: Stage) -> None:
    for way, harm in stage.harms.items():
        for later in (False, True)[: 1 + stage.later]:
            source = stage.make()
            if later:
                assert stage.told(source, stage.look(source)), way
            harm()
            first, then = stage.look(source), stage.look(source)
            assert stage.told(source, first), (way, later)
            refused = [item for item in (*first, *then) if isinstance(item, Event) and item.kind in REFUSALS]
            assert len(refused) == 1, (way, later, [one.data for one in refused])
            whole = [one.subject.id for one in refused if one.kind == "source.blind"]
            assert source.name not in whole, "one bad piece does not make all of it blind"
            assert all(name.startswith(f"{source.name}/") for name in whole)
            stage.heal()
            close(source)
