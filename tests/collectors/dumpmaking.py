"""Flight-recorder dumps as each version of the recorder wrote them, small."""

import json
import pickle
from typing import Any

VERSIONS = ("1.1", "1.4", "2.0", "2.2", "2.3", "2.4", "2.5", "2.7", "2.8", "2.9", "2.10", "2.11")
T0 = 1_796_038_579_000_000_000


def an_entry(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A completed all-reduce of 2 x 3 bfloat16, as the newest version has it."""
    created = T0 + number * 1000
    return {
        "frames": [{"name": "step", "filename": "train.py", "line": 7}],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python3",
        "thread_id": "1",
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[2, 3]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": created + 100,
        "time_discovered_completed_ns": created + 300,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
    } | changes


def pending(number: int = 0, **changes: Any) -> dict[str, Any]:
    """The same, of which only the enqueueing was seen."""
    unseen = {"time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    return an_entry(number, state="scheduled", retired=False, **unseen) | changes


def a_dump(
    *entries: dict[str, Any], version: str = "2.10", ranks: str = "[0, 1, 2, 3]", **changes: Any
) -> dict[str, Any]:
    counts: tuple[str, ...] = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    return {
        "version": version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": dict.fromkeys(counts, len(entries))},
        "comm_lib_version": "2.27.3",
        "entries": list(entries),
    } | changes


_SINCE: dict[str, dict[str, tuple[str, ...]]] = {
    "dump": {"1.4": ("pg_config",), "2.3": ("pg_status",), "2.8": ("comm_lib_version",)},
    "entry": {
        "1.4": ("record_id", "op_id"),
        "2.0": ("collective_seq_id", "p2p_seq_id", "process_group", "is_p2p", "retired"),
        "2.2": ("input_dtypes", "output_dtypes", "time_discovered_started_ns", "time_discovered_completed_ns"),
        "2.4": ("timeout_ms",),
        "2.8": ("thread_id", "thread_name"),
    },
}


def of_version(version: str, *entries: dict[str, Any]) -> dict[str, Any]:
    """A dump with the keys of a version (design of the format: one line a change, newest keys last)."""
    at = VERSIONS.index(version)
    old = {key for since, keys in _SINCE["entry"].items() if VERSIONS.index(since) > at for key in keys}
    made = []
    for entry in entries:
        kept = {key: value for key, value in entry.items() if key not in old}
        made.append(kept if at >= VERSIONS.index("2.0") else kept | {"seq_id": entry["collective_seq_id"]})
    dump = a_dump(*made, version=version)
    for since, keys in _SINCE["dump"].items():
        for key in keys if VERSIONS.index(since) > at else ():
            del dump[key]
    return dump | {"nccl_version": "2.20.5"} if "2.5" <= version < "2.8" and version[:3] != "2.1" else dump


def pickled(dump: Any) -> bytes:
    return pickle.dumps(dump, 2)


def as_json(dump: dict[str, Any]) -> bytes:
    """As _dump_fr_trace_json has it: no stacks, counts as text, 0 for a time that was not seen, no empty list."""
    entries = [{key: 0 if value is None else value for key, value in entry.items()} for entry in dump["entries"]]
    for entry in entries:
        del entry["frames"]
    status = {key: {name: str(count) for name, count in told.items()} for key, told in dump["pg_status"].items()}
    lists = {"entries": entries} if entries else {}
    return json.dumps(
        {key: value for key, value in dump.items() if key != "entries"} | {"pg_status": status} | lists
    ).encode()
