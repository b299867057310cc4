"""Flight-recorder dumps of every version become the same rows; real ones tell what was injected into their jobs."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.collectors.dumpmaking import T0, VERSIONS, a_dump, an_entry, as_json, of_version, pending, pickled

from trainwarden.collectors.nccl.dumps import Dump, NotRead, read_dumps
from trainwarden.collectors.nccl.reader import DumpLimits

LIMITS = DumpLimits()
UNSEEN = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")
SHAPES = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")


def read(folder: Path, content: bytes, rank: int = 0) -> Dump:
    found = look(folder, content, rank)
    assert isinstance(found, Dump), found
    return found


def look(folder: Path, content: bytes, rank: int = 0) -> Dump | NotRead:
    path = folder / f"dump_{rank}"
    path.write_bytes(content)
    (found,) = read_dumps({str(path): rank}, owner_uid=os.getuid(), limits=LIMITS)
    return found


def said(dump: Dump) -> list[tuple[Any, ...]]:
    """Rows in words: group, op, seq, bytes, enqueued, started and completed since T0 (or -1, 0)."""
    return [
        (dump.names[group], dump.names[op], seq, size, *(time - T0 if time > 0 else time for time in times))
        for _, group, op, seq, *times, size in dump.rows_N.tolist()
    ]


def test_each_version_is_read_by_its_keys_and_what_it_lacks_is_not_made_up(tmp_path: Path) -> None:
    for version in VERSIONS:
        dump = read(tmp_path, pickled(of_version(version, an_entry(0), pending(1))))
        assert (dump.version, dump.rank, len(dump.rows_N)) == (version, 0, 2)
        assert dump.record_N.tolist() == [0, 1]
        assert dump.rows_N["seq"].tolist() == [1, 2]
        assert (dump.rows_N["enqueued_ns"] - T0).tolist() == [0, 1000]
        typed = version not in ("1.1", "1.4", "2.0")
        assert [row[1] for row in said(dump)] == ["nccl:all_reduce/BFloat16" if typed else "nccl:all_reduce"] * 2
        assert dump.rows_N["bytes"].tolist() == [12 if typed else -1] * 2
        assert dump.rows_N["completed_ns"].tolist() == [T0 + 300 if typed else 0, -1]
        assert dump.rows_N["started_ns"].tolist() == [T0 + 100 if typed else 0, -1]
        assert ("enqueued" in told(dump, "0")) == (version not in ("1.1", "1.4", "2.0", "2.2"))


def test_pickle_and_json_of_one_ring_tell_the_same(tmp_path: Path) -> None:
    made = a_dump(an_entry(0), pending(1), an_entry(2, process_group=("7", "tp")), version="2.10")
    by_pickle, by_json = read(tmp_path, pickled(made)), read(tmp_path, as_json(made))
    assert by_json.rows_N.tolist() == by_pickle.rows_N.tolist()
    assert (by_json.names, by_json.groups) == (by_pickle.names, by_pickle.groups)
    assert len(read(tmp_path, as_json(a_dump())).rows_N) == 0


@pytest.mark.parametrize(
    ("changes", "started", "completed"),
    [
        pytest.param({}, -1, -1, id="enqueued"),
        pytest.param({"state": "started", "time_discovered_started_ns": T0 + 5}, T0 + 5, -1, id="started"),
        pytest.param({"state": "started"}, 0, -1, id="started without timing"),
        pytest.param({"state": "completed"}, 0, 0, id="completed without timing"),
        pytest.param({"time_discovered_completed_ns": T0 + 9}, 0, T0 + 9, id="completed before it was seen to start"),
        pytest.param({"retired": True}, -1, -1, id="timed out"),
        pytest.param({"retired": True, "profiling_name": "gloo:all_reduce"}, 0, 0, id="gloo, done"),
        pytest.param({"profiling_name": "gloo:all_reduce"}, -1, -1, id="gloo, waiting"),
        pytest.param({"state": "a newer word"}, -1, -1, id="a state of a newer version"),
    ],
)
def test_what_happened_is_told_apart_from_what_did_not(
    tmp_path: Path, changes: dict[str, Any], started: int, completed: int
) -> None:
    row = read(tmp_path, pickled(a_dump(pending(0, **changes)))).rows_N[0]
    assert (row["started_ns"], row["completed_ns"]) == (started, completed)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        pytest.param({"input_sizes": [[2, 3], [5]], "input_dtypes": ["Float", "Long"]}, 64, id="two tensors"),
        pytest.param({"input_sizes": [[]], "input_dtypes": ["Double"]}, 8, id="a scalar"),
        pytest.param({"input_sizes": [[0, 7]], "input_dtypes": ["Half"]}, 0, id="nothing in it"),
        pytest.param({"input_sizes": [], "input_dtypes": []}, 12, id="only output"),
        pytest.param({"input_sizes": [[4]], "input_dtypes": ["Float3_new"]}, -1, id="a type of a newer version"),
        pytest.param({"input_sizes": [[4], [4]], "input_dtypes": ["Byte", "Float3_new"]}, -1, id="one of two unknown"),
        pytest.param({"input_sizes": [[4], [4]], "input_dtypes": ["Byte"]}, -1, id="a type is missing"),
        pytest.param({key: [] for key in SHAPES}, 0, id="a barrier"),
    ],
)
def test_bytes_are_those_of_the_tensors_or_not_told(tmp_path: Path, changes: dict[str, Any], size: int) -> None:
    (row,) = read(tmp_path, pickled(a_dump(an_entry(0, **changes)))).rows_N
    assert row["bytes"] == size


def test_point_to_point_calls_count_by_themselves(tmp_path: Path) -> None:
    sends = [
        an_entry(n, profiling_name="nccl:send 0->3", is_p2p=True, collective_seq_id=7, p2p_seq_id=40 + n)
        for n in (0, 1)
    ]
    assert [row[1:3] for row in said(read(tmp_path, pickled(a_dump(*sends))))] == [
        ("nccl:send 0->3/BFloat16", 40),
        ("nccl:send 0->3/BFloat16", 41),
    ]


def test_a_coalesced_call_completes_as_a_whole(tmp_path: Path) -> None:
    def part(number: int, seq: int) -> dict[str, Any]:
        return pending(number, profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=seq)

    def end(number: int, seq: int, **changes: Any) -> dict[str, Any]:
        return an_entry(number, profiling_name="nccl:coalesced", is_p2p=True, p2p_seq_id=seq, input_sizes=[]) | changes

    unseen = {key: pending()[key] for key in UNSEEN}
    other = pending(7, p2p_seq_id=5)  # a collective: the number of its last call counts something else
    entries = [part(0, 5), part(1, 5), end(2, 5), part(3, 6), end(4, 6, **unseen), other]
    rows_N = read(tmp_path, pickled(a_dump(*entries))).rows_N
    assert rows_N["completed_ns"].tolist() == [T0 + 2300, T0 + 2300, T0 + 2300, -1, -1, -1]
    assert rows_N["started_ns"].tolist() == [T0 + 2100, T0 + 2100, T0 + 2100, -1, -1, -1]


def test_a_file_whose_rank_is_in_none_of_its_groups_is_of_another_rank(tmp_path: Path) -> None:
    found = look(tmp_path, pickled(a_dump(an_entry(), ranks="[0, 2, 4, 6]")), rank=3)
    assert isinstance(found, NotRead)
    assert found.why == "is no dump of rank 3, as its file's name has it: group 0 is without that rank"
    assert isinstance(look(tmp_path, pickled(a_dump(an_entry(), ranks="[0, 2, 4, 6]")), rank=6), Dump)


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("[0, 1, 2, 3]", [[0, 3, 1]]),
        ("[3, 7, 11, 15]", [[3, 15, 4]]),
        ("[0, 1, 4, 5]", [[0, 1, 1], [4, 5, 1]]),
        ("[5, 0]", [[5, 5, 1], [0, 0, 1]]),
        ("[]", None),
        ("", None),
    ],
)
def test_members_are_told_as_runs_in_the_group_s_order(tmp_path: Path, text: str, runs: Any) -> None:
    rank = 0 if runs is None else runs[0][0]
    group: Any = read(tmp_path, pickled(a_dump(an_entry(), ranks=text)), rank).groups["0"]
    assert group["ranks"] == runs
    members = [member for first, last, step in runs or () for member in range(first, last + 1, step)]
    assert members == json.loads(text or "[]")


def test_a_number_that_fits_nowhere_refuses_the_dump_and_says_so(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"record_id": 1 << 70, "time_created_ns": "now", "collective_seq_id": None, "state": []}
    for key, value in wrong.items():
        found = look(tmp_path, pickled(a_dump(an_entry(0), an_entry(1, **{key: value}))))
        assert isinstance(found, NotRead)
        assert found.why.startswith("an entry is not what it should be: ")
    found = look(tmp_path, pickled({"loss": 3.0}))
    assert isinstance(found, NotRead)
    assert found.why == "no flight recorder dump: no mapping with a version"


# real dumps


def of_folder(folder: Path, form: str, ranks: int) -> dict[int, Dump | NotRead]:
    files = {str(folder / form.format(rank)): rank for rank in range(ranks)}
    found = read_dumps(files, owner_uid=-1, limits=LIMITS)
    return dict(zip(range(ranks), found, strict=True))


def told(dump: Dump | NotRead, group: str) -> dict[str, Any]:
    """What a dump tells of a group; empty: it does not know it."""
    assert isinstance(dump, Dump)
    counts: Any = dump.groups.get(group, {})
    return dict(counts)


def newest(dump: Dump | NotRead, group: str) -> int:
    """Number of the last collective that a rank entered in a group."""
    assert isinstance(dump, Dump)
    rows_N = dump.rows_N
    return int(rows_N["seq"][rows_N["group"] == dump.names.index(group)].max())


@pytest.fixture(scope="module")
def labels(shared: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((shared / "data" / "labels.json").read_text())
    return told


@pytest.mark.parametrize(("case", "ranks"), [("fr_nvrx_gpu_error_1st", 16), ("fr_nvrx_lock_gil_1st", 16)])
def test_real_nccl_dumps_show_who_is_missing_where_the_reference_says_so(
    shared: Path, labels: dict[str, Any], case: str, ranks: int
) -> None:
    found = of_folder(shared / "data" / "hangs" / case, "_dump_{}", ranks)
    ((group, missing),) = labels[f"hangs/{case}.json.gz"]["reference_missing"].items()
    groups = {rank: counts for rank, dump in found.items() if (counts := told(dump, group))}
    ((first, last, _),) = groups[missing[0]]["ranks"]
    assert sorted(groups) == [*range(first, last + 1)]
    assert {counts["desc"] for counts in groups.values()} == {"EXPERT_MODEL_PARALLEL_GROUP"}
    behind = min(counts["completed"] for counts in groups.values())
    assert set(missing) <= {rank for rank, counts in groups.items() if counts["completed"] == behind}
    with gzip.open(shared / "data" / "hangs" / f"{case}.json.gz") as file:
        merged = json.load(file)["dumps"]
    for rank, dump in found.items():
        assert isinstance(dump, Dump)
        assert len(dump.rows_N) == len(merged[str(rank)]["entries"])
        assert set(dump.groups) == set(merged[str(rank)]["pg_config"]), "each count has found its group"


def test_a_rank_that_holds_no_entry_still_tells_how_far_it_came(shared: Path, labels: dict[str, Any]) -> None:
    """LOCK_GIL: the rank that hangs has an empty ring; its counts are known by the order of its groups."""
    found = of_folder(shared / "data" / "hangs" / "fr_nvrx_lock_gil_1st", "_dump_{}", 16)
    groups = {rank: counts for rank, dump in found.items() if (counts := told(dump, "72"))}
    behind = {rank for rank, counts in groups.items() if counts["enqueued"] == 45264}
    assert behind == set(labels["hangs/fr_nvrx_lock_gil_1st.json.gz"]["injected_ranks"])
    assert {rank for rank, counts in groups.items() if counts["inferred"]} == behind


def test_a_real_gloo_hang_shows_who_never_came_though_one_dump_is_empty(shared: Path) -> None:
    found = of_folder(shared / "data" / "hangs" / "fr_gloo_hang_rank5", "rank_{}.pickle", 8)
    assert [rank for rank, dump in found.items() if isinstance(dump, NotRead)] == [4]
    assert [newest(found[rank], "6") for rank in (1, 3, 5, 7)] == [5, 5, 4, 5]
    assert not any(told(found[rank], "6")["completed"] for rank in (1, 3, 5, 7)), "gloo counts what it gave up"


@pytest.mark.parametrize("case", ["fr_gloo_hang_rank5", "fr_gloo_healthy", "fr_gloo_skip_rank2"])
def test_real_json_and_pickle_of_gloo_tell_the_same(shared: Path, tmp_path: Path, case: str) -> None:
    by_json = json.loads((shared / "data" / "hangs" / f"{case}.json").read_text())
    by_pickle = of_folder(shared / "data" / "hangs" / case, "rank_{}.pickle", 8)
    for rank, dump in by_pickle.items():
        if isinstance(dump, Dump):
            again = read(tmp_path, json.dumps(by_json[str(rank)]).encode(), rank)
            assert again.rows_N.tolist() == dump.rows_N.tolist()
            assert (again.names, again.groups) == (dump.names, dump.groups)


RECORD = """
import os, pickle, sys, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
pair = dist.new_group([0, 1], group_desc="pair")
for _ in range(3):
    dist.all_reduce(torch.ones(4, 8))
dist.all_reduce(torch.ones(5, dtype=torch.float64), group=pair)
if rank == 0:
    dist.all_reduce(torch.ones(7), async_op=True)  # the other never comes
end_s = time.monotonic() + 20
while not all(entry["retired"] for entry in pickle.loads(_dump_fr_trace())["entries"][:4]) and time.monotonic() < end_s:
    time.sleep(0.01)  # it retires a call a moment after the caller goes on
open(f"{folder}/rank_{rank}", "wb").write(_dump_fr_trace())
open(f"{folder}/rank_{rank}.json", "wb").write(_dump_fr_trace_json())
while not os.path.exists(f"{folder}/rank_0.json") and time.monotonic() < end_s:
    time.sleep(0.01)  # who leaves now ends the call that waits for it
os._exit(0)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps that this torch makes of two ranks, one of which leaves the other waiting."""
    folder = tmp_path_factory.mktemp("recorded")
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RECORD, str(rank), str(folder)], env=env, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for child in ranks:
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0, err.decode()
    return folder


@pytest.mark.slow  # two fresh processes that import torch
@pytest.mark.parametrize("form", ["rank_{}", "rank_{}.json"])
def test_dumps_of_this_torch_are_read(recorded: Path, form: str) -> None:
    waits, left = of_folder(recorded, form, 2).values()
    assert isinstance(waits, Dump)
    assert isinstance(left, Dump)
    shapes = [(name, seq, size) for _, name, seq, size, *_ in said(left)]
    assert shapes == [*(("gloo:all_reduce/Float", seq, 128) for seq in (1, 2, 3)), ("gloo:all_reduce/Double", 1, 40)]
    assert [row[1:4] for row in said(waits)] == [*shapes, ("gloo:all_reduce/Float", 4, 28)]
    assert (left.rows_N["completed_ns"] == 0).all()
    assert waits.rows_N["completed_ns"].tolist() == [0, 0, 0, 0, -1]
    assert np.diff(waits.rows_N["enqueued_ns"]).min() >= 0
    pairs = {dump.names[dump.rows_N["group"][3]] for dump in (waits, left)}
    assert len(pairs) == 1
    assert told(waits, pairs.pop())["desc"] == "pair"
