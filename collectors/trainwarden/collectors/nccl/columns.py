"""The child that reads dumps: files in, columns of numbers out (dumps.py starts it and reads what it says).

Each dump is loaded, turned into one array a field and dropped before the next, so that no entry stays an object. Fields
are found by their keys, never by the dump's version: what a version lacks has a default, what is of another type than
it should be refuses the dump. Standard library only: the child starts in 25 ms and needs 10 MB.

Said of each file, in the order of the arguments: HEAD (bytes of the two parts that follow), a JSON header and, one
after the other, the COLUMNS; the header of a file that is not read has `why`.
"""

import gc
import json
import os
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count
from math import prod
from operator import itemgetter
from typing import Any, Final

from trainwarden.collectors.nccl import restricted
from trainwarden.collectors.nccl.restricted import Refused, plain

HEAD: Final = struct.Struct("<II")
STATES: Final = ("scheduled", "started", "completed")
COLUMNS: Final = (
    *(("record", "q"), ("created", "q"), ("started", "q"), ("completed", "q"), ("seq", "q"), ("p2p_seq", "q")),
    *(("bytes", "q"), ("group", "H"), ("op", "H"), ("state", "B"), ("retired", "B"), ("p2p", "B")),
)
"""Name and struct code. Times: Unix ns, 0: not seen. group and op index the header's names; state: STATES."""
GROUPS_MAX: Final = 4096
"""A rank of the largest published jobs is in some 20 groups."""
NAME_MAX: Final = 128
RUNS_MAX: Final = 4096
"""Members of a group are told as runs (first, last, step): what parallel dimensions make is one or a few."""
_COUNTS: Final = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
_WRONG: Final = (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError, OverflowError, struct.error)
_NO_SHAPES: Final = ((),)
"""Of an entry without sizes: a tensor of no known type."""


class _Index(dict[Any, int]):
    """Numbers things in the order in which they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = place = len(self)
        return place


class _Widths(dict[str, int]):
    """Bytes of an element by the name of its type (c10/core/ScalarType.h); of one that is not known: -1."""

    def __missing__(self, key: str) -> int:
        return -1


_WIDTH: Final = _Widths(
    dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4", "Float4_e2m1fn_x2"), 1)
    | dict.fromkeys(("Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz", "Float8_e8m0fnu"), 1)
    | dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2)
    | dict.fromkeys(("Int", "Float", "ComplexHalf", "QInt32", "UInt32"), 4)
    | dict.fromkeys(("Long", "Double", "ComplexFloat", "UInt64"), 8)
    | {"ComplexDouble": 16}
)


def columns(dump: Any) -> tuple[dict[str, Any], bytes]:
    """Header and columns of a loaded dump. Raises Refused."""
    if not isinstance(dump, dict) or not isinstance(dump.get("version"), str):
        raise Refused("no flight recorder dump: no mapping with a version")
    entries = dump.get("entries") or []
    if not isinstance(entries, list):
        raise Refused(f"entries: expected a list, got {type(entries).__name__}")
    try:
        header, table = _table(entries)
        header["config"], header["status"] = _config(dump.get("pg_config") or {}), _status(dump.get("pg_status") or {})
        data = b"".join(struct.pack(f"<{len(entries)}{code}", *table[name]) for name, code in COLUMNS)
    except _WRONG as error:
        raise Refused(f"an entry is not what it should be: {type(error).__name__}: {error}") from None
    library = dump.get("comm_lib_version", dump.get("nccl_version", ""))
    header |= {"version": plain(dump["version"], 16), "library": plain(str(library), 32), "entries": len(entries)}
    return header, data


def _table(entries: list[Any]) -> tuple[dict[str, Any], dict[str, Sequence[int]]]:
    """What the columns index, and the columns by name."""
    first = entries[0] if entries else {}
    shapes, types, kinds = _tensors(entries)
    groups, ops, states = _Index(), _Index(), _Index(zip(STATES, count()))
    table: dict[str, Sequence[int]] = {
        "record": _field(entries, "record_id", -1) if "record_id" in first else range(len(entries)),
        "created": _times(entries, "time_created_ns"),
        "started": _times(entries, "time_discovered_started_ns"),
        "completed": _times(entries, "time_discovered_completed_ns"),
        "seq": _field(entries, "collective_seq_id" if "collective_seq_id" in first else "seq_id", -1),
        "p2p_seq": _field(entries, "p2p_seq_id", -1),
        "bytes": [
            prod(shape[0]) * _WIDTH[kind] if len(shape) == len(type_) == 1 else _sum(shape, type_)
            for shape, type_, kind in zip(shapes, types, kinds, strict=True)
        ],
        "group": list(map(groups.__getitem__, _groups(entries, "process_group" in first))),
        "op": list(map(ops.__getitem__, zip(_field(entries, "profiling_name", ""), kinds, strict=True))),
        "state": list(map(states.__getitem__, _field(entries, "state", STATES[0]))),
        "retired": _field(entries, "retired", False),
        "p2p": _field(entries, "is_p2p", False),
    }
    header = {
        "groups": [(plain(name, NAME_MAX), plain(about, NAME_MAX)) for _, (name, about) in groups],
        "ops": [plain(f"{name}/{kind}" if kind else name, NAME_MAX) for name, kind in ops],
        "numbers": {str(number): place for place, (number, _) in enumerate(groups)},
    }
    return header, table


def _groups(entries: list[Any], named: bool) -> Iterable[tuple[Any, tuple[Any, ...]]]:
    """The process's own number of each entry's group, and the group's name and description."""
    numbers = _field(entries, "pg_id", 0)
    if not named:
        return ((number, (str(number), "")) for number in numbers)
    return zip(numbers, map(tuple, _field(entries, "process_group", ())), strict=True)


def _field(entries: list[Any], key: str, default: Any) -> list[Any]:
    try:
        return list(map(itemgetter(key), entries))
    except KeyError:
        return [entry.get(key, default) for entry in entries]


def _times(entries: list[Any], key: str) -> list[int]:
    return [time or 0 for time in _field(entries, key, 0)]  # not seen: None in a pickle, 0 in JSON


def _tensors(entries: list[Any]) -> tuple[list[Any], list[Any], list[str]]:
    """Shapes and types of each entry's tensors, and its first type: what goes in, else what comes out."""
    shapes, types = _field(entries, "input_sizes", _NO_SHAPES), _field(entries, "input_dtypes", ())
    if not all(shapes):
        out = zip(_field(entries, "output_sizes", ()), _field(entries, "output_dtypes", ()), strict=True)
        both = [(shape, type_) if shape else other for shape, type_, other in zip(shapes, types, out, strict=True)]
        shapes, types = [shape for shape, _ in both], [type_ for _, type_ in both]
    return shapes, types, [type_[0] if type_ else "" for type_ in types]


def _sum(shapes: Sequence[Any], types: Sequence[str]) -> int:
    """Bytes of some tensors; -1 where a type is not known."""
    if len(shapes) != len(types):
        return -1
    each = [prod(shape) * _WIDTH[type_] for shape, type_ in zip(shapes, types, strict=True)]
    return -1 if min(each, default=0) < 0 else sum(each)


def _config(config: Any) -> dict[str, Any]:
    """Description and members of each group that the dump tells of; members None: not told."""
    if len(config) > GROUPS_MAX:
        raise Refused(f"pg_config: {len(config)} groups, at most {GROUPS_MAX}")
    return {
        plain(name, NAME_MAX): (plain(str(group.get("desc", "")), NAME_MAX), _members(str(group.get("ranks", ""))))
        for name, group in config.items()
        if name
    }


@lru_cache(maxsize=64)  # a world's list of members is the same text in each of its dumps
def _members(text: str) -> list[list[int]] | None:
    """`[0, 2, 4, 9]` as [[0, 4, 2], [9, 9, 1]], in the order of the text."""
    runs: list[list[int]] = []
    for rank in map(int, filter(None, text.strip("[]() ").split(","))):
        run = runs[-1] if runs else None
        if run is not None and rank > run[1] and (run[0] == run[1] or rank - run[1] == run[2]):
            run[1:] = rank, rank - run[1]
        else:
            runs.append([rank, rank, 1])
    return runs if 0 < len(runs) <= RUNS_MAX else None


def _status(status: Any) -> dict[str, list[int | None]]:
    """Newest collective enqueued, started and completed of each group, by the process's own number of the group."""
    if len(status) > GROUPS_MAX:
        raise Refused(f"pg_status: {len(status)} groups, at most {GROUPS_MAX}")
    return {
        plain(str(number), NAME_MAX): [
            seq if 0 <= (seq := int(told.get(key, -1))) < 1 << 63 else None for key in _COUNTS
        ]
        for number, told in status.items()
    }


def main() -> None:
    """Arguments: owner_uid, max_bytes, memory_bytes, cpu_s and the files. Refusals are answers, not failures."""
    owner_uid, max_bytes, memory_bytes, cpu_ms = map(int, sys.argv[1:5])
    restricted.shut_in(owner_uid, sys.argv[5], memory_bytes)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it may have been inherited as ignored
    gc.disable()  # a dump has 100,000 containers and no cycle; a hostile one's are collected after it
    gc.freeze()
    for path in sys.argv[5:]:
        signal.setitimer(signal.ITIMER_PROF, cpu_ms / 1000)  # the kernel ends this process when it has used that
        header, data = _answer(path, owner_uid, max_bytes)
        text = json.dumps(header).encode()
        sys.stdout.buffer.write(HEAD.pack(len(text), len(data)) + text + data)
        sys.stdout.buffer.flush()
        gc.collect()
    os._exit(0)  # nothing here needs an orderly end


def _answer(path: str, owner_uid: int, max_bytes: int) -> tuple[dict[str, Any], bytes]:
    try:
        data, written_ns = restricted.read(path, owner_uid, max_bytes)
        header, table = columns(restricted.load(data))
    except (Refused, OSError) as error:
        return {"why": plain(str(error))}, b""
    except MemoryError:
        return {"why": "needs more memory than it may have"}, b""
    return header | {"written_ns": written_ns}, table
