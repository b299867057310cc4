"""Dumps of a job's ranks are found where they are written, told once, and asked for; a folder of them is a source."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.collectors.dumpmaking import T0, a_dump, an_entry, as_json, pending, pickled
from tests.fakes.web import serving

from trainwarden.collectors.files.dumps import DumpFolder, DumpFolderConfig
from trainwarden.collectors.nccl.debug_server import HANDLERS, Fetched
from trainwarden.collectors.nccl.reader import DumpLimits
from trainwarden.collectors.nccl.source import EMPTY_NS, DumpRequests, Dumps, DumpsConfig
from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import missing_data
from trainwarden.core.model import Epoch, Event, Frame, JobId, Look, Subject
from trainwarden.core.process import ProcessId
from trainwarden.core.records import epoch_of

START_NS = 1_000_000_000
JOB, EPOCH = JobId("j"), Epoch(epoch_of(2, 0, 0))
Seen = Sequence[Frame | Event]


@dataclass
class Host:
    """Ranks with an environment, and what looks at them."""

    folder: Path
    processes: dict[int, ProcessId] = field(default_factory=dict)
    fetched: Fetched = field(default_factory=lambda: Fetched(os.getuid()))

    def rank(self, number: int, /, *, pid: int = 0, **environment: str) -> None:
        process = ProcessId(pid=pid or 100 + number, start_time=1)
        self.processes[number] = process
        place = self.folder / "proc" / str(process.pid)
        place.mkdir(parents=True)
        (place / "environ").write_bytes(b"".join(f"{key}={value}\0".encode() for key, value in environment.items()))
        (place / "cwd").symlink_to(self.folder)

    def source(self, config: DumpsConfig | None = None, since_ns: int = START_NS) -> Dumps:
        return Dumps(
            config or DumpsConfig(),
            node="n1",
            job=JOB,
            owner_uid=os.getuid(),
            ranks=lambda: self.processes,
            epoch=lambda: EPOCH,
            since_ns=since_ns,
            start_ns=START_NS,
            fetched=self.fetched,
            proc=self.folder / "proc",
        )

    def requests(self, config: DumpsConfig | None = None) -> DumpRequests:
        return DumpRequests(
            config or DumpsConfig(),
            node="n1",
            job=JOB,
            owner_uid=os.getuid(),
            ranks=lambda: self.processes,
            start_ns=START_NS,
            fetched=self.fetched,
            clock=lambda: 7,
            proc=self.folder / "proc",
        )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.fetched.close()


def twice(source: Dumps, now_ns: int = 2 * T0) -> Seen:
    """A file must look the same at two polls."""
    assert [item for item in source.poll(now_ns) if isinstance(item, Frame)] == []
    return list(source.poll(now_ns + 1))


def kinds(seen: Seen) -> list[str]:
    for event in (item for item in seen if isinstance(item, Event)):
        assert missing_data(event.kind, event.data) == ()
    return [item.schema if isinstance(item, Frame) else item.kind for item in seen]


def records(seen: Seen) -> list[int]:
    """Sequence numbers in the frames."""
    return [seq for item in seen if isinstance(item, Frame) for seq in item.rows["seq"].tolist()]


def refusals(seen: Seen) -> dict[str, str]:
    """Last letter of the path -> why."""
    events = [item for item in seen if isinstance(item, Event) and item.kind == "dump.refused"]
    return {str(event.data["path"])[-1]: str(event.data["why"]) for event in events}


def test_a_dump_is_told_when_it_has_stopped_growing_and_only_once(host: Host) -> None:
    host.rank(3, TORCH_FR_DUMP_TEMP_FILE=str(host.folder / "trace_"))
    source, path = host.source(), host.folder / "trace_3"
    assert list(source.poll(T0)) == []
    path.write_bytes(b"\x80")
    assert list(source.poll(T0)) == []
    path.write_bytes(pickled(a_dump(an_entry(0), pending(1))))
    frame, event = twice(source)
    assert isinstance(frame, Frame)
    assert isinstance(event, Event)
    assert (frame.schema, frame.job, frame.epoch, frame.source) == ("collective", JOB, EPOCH, "dumps@n1")
    assert frame.rows["rank"].tolist() == [3, 3]
    assert (event.kind, event.subject, event.epoch) == ("dump", Subject(kind="rank", id="3"), EPOCH)
    assert (event.data["rank"], event.data["version"], event.data["entries"]) == (3, "2.10", 2)
    assert (event.data["path"], event.data["records"]) == (str(path), [0, 1])
    assert event.t_ns == path.stat().st_mtime_ns
    assert list(source.poll(2 * T0)) == []


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "traces/rank_"}, "traces/rank_0"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "a_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "b_"}, "a_0"),
        ({"XDG_CACHE_HOME": "cache", "HOME": "home"}, "cache/torch/comm_lib_trace_rank_0"),
        ({"HOME": "home"}, "home/.cache/torch/nccl_trace_rank_0"),
    ],
)
def test_dumps_are_looked_for_where_the_recorder_writes_them(
    host: Host, environment: dict[str, str], place: str
) -> None:
    host.rank(0, pid=7, **environment)
    (host.folder / place).parent.mkdir(parents=True, exist_ok=True)
    (host.folder / place).write_bytes(pickled(a_dump(an_entry(0))))
    assert kinds(twice(host.source())) == ["collective", "dump"]


def test_a_dump_from_before_the_job_is_another_job_s(host: Host) -> None:
    host.rank(0, TORCH_FR_DUMP_TEMP_FILE="t_")
    path = host.folder / "t_0"
    path.write_bytes(pickled(a_dump(an_entry(0))))
    source = host.source(since_ns=path.stat().st_mtime_ns + 1)
    assert list(twice(source)) == []
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 2))
    assert kinds(twice(source)) == ["collective", "dump"]


def test_of_a_ring_dumped_again_only_news_are_told(host: Host) -> None:
    host.rank(0, TORCH_FR_DUMP_TEMP_FILE="t_")
    source, path = host.source(), host.folder / "t_0"

    def dumped(*entries: dict[str, Any]) -> list[int]:
        path.unlink(missing_ok=True)
        path.write_bytes(pickled(a_dump(*entries)))
        return records(twice(source))

    assert dumped(an_entry(0), pending(1), pending(2)) == [1, 2, 3]
    assert dumped(an_entry(0), an_entry(1), pending(2), pending(3)) == [2, 4], "one completed since, one is new"
    assert dumped(pending(2), pending(3)) == [], "nothing new is no frame"
    assert dumped(*map(an_entry, range(9, 12))) == [10, 11, 12], "the ring went round"
    restarted = [an_entry(number, time_created_ns=T0 + 10**9 + number) for number in range(14)]
    assert dumped(*restarted[:2]) == [1, 2], "a reset counts from 0 again"
    assert dumped(*restarted) == [*range(3, 15)]
    host.processes.clear()
    host.rank(0, pid=900, TORCH_FR_DUMP_TEMP_FILE="t_")
    assert dumped(*restarted) == [*range(1, 15)], "another process has another ring"


def test_broken_dumps_are_named_once_and_the_others_told(host: Host) -> None:
    for rank in range(5):
        host.rank(rank, TORCH_FR_DUMP_TEMP_FILE="t_")
    good = pickled(a_dump(an_entry(0), ranks="[0, 1, 2, 3, 4]"))
    for rank, content in enumerate((b"", good[:99], good, b"cos\nsystem\n(S'x'\ntR.")):
        (host.folder / f"t_{rank}").write_bytes(content)
    source = host.source()
    now_ns = (host.folder / "t_0").stat().st_mtime_ns + EMPTY_NS // 2
    seen = twice(source, now_ns)
    assert kinds(seen) == ["dump.refused", "collective", "dump", "dump.refused"]
    assert refusals(seen).keys() == {"1", "3"}, "an empty one is given time"
    refused = refusals([*seen, *source.poll(now_ns + EMPTY_NS)])
    assert refused["0"] == "empty: its writer ended, or has not begun"
    assert "global os.system" in refused["3"]
    (host.folder / "t_3").touch()
    assert list(twice(source, now_ns)) == []


def test_of_torchft_s_quorums_the_newest_counts(host: Host) -> None:
    host.rank(0, TORCH_FR_DUMP_TEMP_FILE="trace")
    for quorum, seq in ((9, 1), (10, 2)):
        (host.folder / f"trace_quorum_{quorum}").mkdir()
        (host.folder / f"trace_quorum_{quorum}" / "0").write_bytes(pickled(a_dump(an_entry(0, collective_seq_id=seq))))
    assert records(twice(host.source())) == [2]


def test_an_environment_that_may_not_be_read_is_said_unless_the_settings_name_the_place(host: Host) -> None:
    host.processes[0] = ProcessId(pid=1, start_time=1)
    source = host.source()
    (event,) = source.poll(T0)
    assert isinstance(event, Event)
    assert event.kind == "source.blind"
    assert "collectors.dumps.prefixes" in str(event.data["why"])
    assert list(source.poll(T0)) == []
    (host.folder / "t_0").write_bytes(pickled(a_dump(an_entry(0))))
    named = host.source(DumpsConfig(prefixes=(str(host.folder / "t_"),)))
    assert kinds(twice(named)) == ["collective", "dump"]


# asking


def look(*ranks: int, what: Any = "dump") -> Look:
    return Look(key="k", what=what, subjects=tuple(Subject(kind="rank", id=str(rank)) for rank in ranks))


def test_a_rank_is_asked_by_one_byte_in_its_pipe(host: Host) -> None:
    host.rank(5, TORCH_NCCL_DEBUG_INFO_PIPE_FILE="fr_")
    os.mkfifo(host.folder / "fr_5.pipe")
    reader = os.open(host.folder / "fr_5.pipe", os.O_RDONLY | os.O_NONBLOCK)
    requests = host.requests()
    assert list(requests.look(look(5, 6))) == []
    assert os.read(reader, 10) == b"1"
    assert list(requests.look(look(5, what="stack"))) == []
    assert list(requests.look(look(6))) == [], "not of this host"
    assert os.read(reader, 10) == b""
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    for _ in range(5000):  # a reader that never reads
        if said := list(requests.look(look(5))):
            break
    assert "Resource temporarily unavailable" in str(said[0].data["why"])
    os.close(reader)


WORKER = """
import sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
server = _WorkerServer("::", 0)
print(server.port, flush=True)
sys.stdin.read()
server.shutdown()
dist.destroy_process_group()
"""


def test_a_rank_is_asked_by_torchs_debug_server(host: Host, tmp_path: Path) -> None:
    """A real worker of it; the dump is read like any that lies in a folder."""
    pytest.importorskip("torch")
    command, env = [sys.executable, "-c", WORKER, str(tmp_path)], {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    with subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as rank:
        assert rank.stdout is not None
        port = int(rank.stdout.readline())
        host.rank(0, LOCAL_RANK="1")
        assert list(host.requests(DumpsConfig(worker_port=port - 1)).look(look(0))) == []
    seen = twice(host.source(), time.time_ns())
    assert kinds(seen) == ["collective", "dump"]
    (frame,) = (item for item in seen if isinstance(item, Frame))
    assert [frame.names[op].partition("/")[0] for op in frame.rows["op"]] == ["gloo:all_reduce"] * 3
    (place,) = (Path(prefix).parent for prefix in host.fetched.prefixes)
    host.fetched.close()
    assert not place.exists()


def test_what_is_no_debug_server_is_said_and_its_answers_are_read_as_anybodys(host: Host) -> None:
    host.rank(0, LOCAL_RANK="0")
    host.rank(1)
    with serving() as web:
        config = DumpsConfig(worker_port=int(web.url.rpartition(":")[2]), limits=DumpLimits(max_bytes=10_000))

        def why() -> list[str]:
            return [str(event.data["why"]) for event in host.requests(config).look(look(0, 1))]

        web.body = b"\x80 no JSON"
        assert why() == ["rank 1 cannot be asked for a dump: which port is its own is not known: LOCAL_RANK is not set"]
        assert [asked.path for asked in web.asked] == [f"/handler/{HANDLERS[0]}"]
        assert kinds(twice(host.source(), time.time_ns())) == ["dump.refused"]
        web.body = b"x" * 10_001
        assert "answered more than 10000 bytes" in why()[0]
        web.status = 404
        assert "answered 404" in why()[0]
        assert [asked.path for asked in web.asked[-2:]] == [f"/handler/{handler}" for handler in HANDLERS]
    assert "cannot be asked for a dump: its debug server gives no dump" in why()[0]
    host.fetched.close()
    assert not host.fetched.prefixes


def test_why_a_rank_cannot_be_asked_is_said_without_waiting(host: Host) -> None:
    for rank in range(1, 5):
        host.rank(rank, TORCH_NCCL_DEBUG_INFO_PIPE_FILE="fr_")
    host.rank(0)
    host.rank(5)
    host.processes[6] = ProcessId(pid=66, start_time=1)
    os.mkfifo(host.folder / "fr_1.pipe")
    (host.folder / "fr_2.pipe").write_text("")
    (host.folder / "fr_3.pipe").symlink_to(host.folder / "fr_1.pipe")
    events = list(host.requests().look(look(*range(7))))
    assert kinds(events) == ["dump.refused"] * 6
    assert [str(event.data["why"]) for event in events] == [
        "ranks 0, 5 cannot be asked for a dump: no requests are taken: TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set",
        "rank 1 cannot be asked for a dump: nobody reads its pipe",
        "rank 2 cannot be asked for a dump: what lies there is no pipe of the job's user",
        "rank 3 cannot be asked for a dump: what lies there is no pipe of the job's user",
        "rank 4 cannot be asked for a dump: No such file or directory",
        "rank 6 cannot be asked for a dump: where to ask it is not known: No such file or directory",
    ]
    assert (host.folder / "fr_2.pipe").read_text() == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefixes": ("traces/rank_",)}, r"collectors\.dumps\.prefixes: need absolute paths, got traces/rank_"),
        ({"pipe": "fr_"}, r"collectors\.dumps\.pipe: need absolute paths, got fr_"),
    ],
)
def test_settings_that_depend_on_where_the_agent_runs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DumpsConfig(**changes)


# a folder


def of_folder(folder: Path, **changes: Any) -> list[Frame | Event]:
    source = DumpFolder(DumpFolderConfig(folder=folder, **changes), start_ns=START_NS)
    seen = list(source.poll(2 * T0))
    assert list(source.poll(2 * T0)) == []
    return seen


def test_a_folder_is_told_rank_by_rank_whatever_else_lies_in_it(tmp_path: Path) -> None:
    for name in ("nccl_trace_rank_10", "nccl_trace_rank_2", "readme.txt", "run.log"):
        rank = int(name[-1]) if name.endswith("2") else 10
        (tmp_path / name).write_bytes(pickled(a_dump(an_entry(0), ranks=str([rank]))))
    (tmp_path / "old_3").mkdir()
    seen = of_folder(tmp_path)
    assert kinds(seen) == ["collective", "dump"] * 2
    assert [event.data["rank"] for event in seen if isinstance(event, Event)] == [2, 10]
    assert {item.job for item in seen} == {"dumps"}


def test_where_a_rank_s_pickle_is_broken_its_json_is_taken(tmp_path: Path) -> None:
    made = a_dump(an_entry(0))
    (tmp_path / "rank_0.pickle").write_bytes(pickled(made)[:50])
    (tmp_path / "rank_0.json").write_bytes(as_json(made))
    (tmp_path / "rank_1.pickle").write_bytes(pickled(made))
    (tmp_path / "rank_1.json").write_bytes(as_json(made))
    assert kinds(of_folder(tmp_path)) == ["dump.refused", *["collective", "dump"] * 2]


def test_each_quorum_of_torchft_is_a_restart(tmp_path: Path) -> None:
    for quorum in (2, 11):
        (tmp_path / f"fr_quorum_{quorum}").mkdir()
        (tmp_path / f"fr_quorum_{quorum}" / "0").write_bytes(pickled(a_dump(an_entry(0, collective_seq_id=quorum))))
    seen = of_folder(tmp_path)
    assert records(seen) == [2, 11]
    assert [item.epoch for item in seen] == [epoch_of(0, 0, 0)] * 2 + [epoch_of(0, 1, 0)] * 2


def test_names_of_another_form_are_read_by_a_pattern_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "r3-of-8.dump").write_bytes(pickled(a_dump(an_entry(0))))
    assert kinds(of_folder(tmp_path)) == ["source.blind"]
    assert kinds(of_folder(tmp_path, pattern=r"r(\d+)-of-\d+\.dump")) == ["collective", "dump"]
    assert kinds(of_folder(tmp_path / "none")) == ["source.blind"]
    for pattern in ("(", "rank", "(a)(b)"):
        with pytest.raises(ConfigError, match=r"dumps\.pattern: need"):
            DumpFolderConfig(folder=tmp_path, pattern=pattern)


def test_a_real_folder_with_an_empty_dump_tells_the_other_ranks(shared: Path) -> None:
    seen = of_folder(shared / "data" / "hangs" / "fr_gloo_hang_rank5")
    events = [item for item in seen if isinstance(item, Event)]
    assert [event.data["rank"] for event in events if event.kind == "dump"] == [0, 1, 2, 3, 5, 6, 7]
    (refused,) = (event for event in events if event.kind == "dump.refused")
    assert str(refused.data["path"]).endswith("rank_4.pickle")
