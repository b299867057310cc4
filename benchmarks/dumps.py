"""What reading flight-recorder dumps costs: against pickle.load of the same files, the least that any reader pays.

    python benchmarks/dumps.py [RANKS]    64 ranks by default (10 s); 1024 is the size of the goal (a minute)

Dumps as NCCL's recorder writes them (version 2.10, 2,000 entries a rank, three frames each; text and frames are written
once and then referred to); tensor, data and world groups mixed; the last rank stops 20 entries early. Both read them
all from the page cache, turn about, in processes of their own; processor time and peak memory include children. Goals
(performance.md 15, 16): at most 1.6 times pickle.load and 250 MB; 5 s of processor time and 3.5 s on the clock at 1,024
ranks. Exit status 1 if a goal is missed.
"""

import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ENTRIES: Final = 2000
EARLY: Final = 20
ROUNDS: Final = 5
RATIO: Final = 1.6
PEAK_MB: Final = 250
CPU_S_A_RANK: Final = 5.0 / 1024
WALL_S_A_RANK: Final = 3.5 / 1024
SIZES: "Final[tuple[Plain, ...]]" = ([[4096, 1, 5120]], [[8192, 5120]], [[64, 1024, 1024]])

Plain = str | int | bool | None | list["Plain"] | tuple["Plain", "Plain"] | dict[str, "Plain"]


class Recorder:
    """Writes pickles as c10's recorder does (torch/csrc/jit/serialization/pickler.cpp): protocol 2, only text kept."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._kept: dict[str, int] = {}

    def put(self, value: Plain) -> None:
        if value is None or isinstance(value, bool):
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            small, medium = 0 <= value < 1 << 8, -(1 << 31) <= value < 1 << 31
            long = b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
            self.out += (
                struct.pack("<cB", b"K", value) if small else struct.pack("<ci", b"J", value) if medium else long
            )
        elif isinstance(value, str):
            self._text(value)
        elif isinstance(value, tuple):
            self.put(value[0])
            self.put(value[1])
            self.out += b"\x86"
        else:
            self._container(value)

    def _kept_before(self, value: str) -> bool:
        """Refer to it, if it was written before."""
        place = self._kept.get(value, -1)
        if place >= 0:
            self.out += struct.pack("<cI", b"j", place) if place > 255 else bytes((0x68, place))
        return place >= 0

    def _keep(self, value: str) -> None:
        place = self._kept[value] = len(self._kept)
        self.out += struct.pack("<cI", b"r", place) if place > 255 else bytes((0x71, place))

    def _text(self, value: str) -> None:
        if not self._kept_before(value):
            data = value.encode()
            self.out += struct.pack("<cI", b"X", len(data)) + data
            self._keep(value)

    def _container(self, value: "list[Plain] | dict[str, Plain]") -> None:
        frame = str(value) if isinstance(value, dict) and "filename" in value else ""
        if frame and self._kept_before(frame):
            return
        self.out += b"](" if isinstance(value, list) else b"}("
        for item in value if isinstance(value, list) else [each for pair in value.items() for each in pair]:
            self.put(item)
        self.out += b"e" if isinstance(value, list) else b"u"
        if frame:
            self._keep(frame)


def entry(number: int, rank: int, seqs: dict[str, int]) -> Plain:
    group, desc = ((str(1 + rank // 8), "tp"), ("900", "dp"), ("0", "default_pg"))[
        0 if number % 4 < 2 else number % 4 - 1
    ]
    seq = seqs[group] = seqs.get(group, 0) + 1
    size = SIZES[number % 3]
    created = 1_796_038_579_000_000_000 + number * 5_000_000 + rank
    frames: Plain = [
        {"name": f"call_{depth}_{number % 7}", "filename": f"/opt/train/lib/layer_{depth}.py", "line": 100 + depth}
        for depth in range(3)
    ]
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": number % 4,
        "process_group": (group, desc),
        "thread_name": "python3",
        "thread_id": "23456244340032",
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": ("nccl:all_reduce", "nccl:_all_gather_base", "nccl:_reduce_scatter_base")[number % 3],
        "time_created_ns": created,
        "input_sizes": size,
        "input_dtypes": ["BFloat16"],
        "output_sizes": size,
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": created + 1_000_000,
        "time_discovered_completed_ns": created + 3_000_000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def write_dumps(folder: Path, ranks: int) -> None:
    """One a tensor group is made, its members' are copies but for their number in the world, which no entry tells."""
    members = str(list(range(ranks)))
    for rank in range(ranks):
        if rank % 8 == 0 or rank == ranks - 1:
            seqs: dict[str, int] = {}
            last = ENTRIES - EARLY if rank == ranks - 1 else ENTRIES
            recorder = Recorder()
            tensor = str(1 + rank // 8)
            recorder.put(
                {
                    "version": "2.10",
                    "pg_config": {
                        "0": {"name": "0", "desc": "default_pg", "ranks": members},
                        tensor: {
                            "name": tensor,
                            "desc": "tp",
                            "ranks": str([*range(rank // 8 * 8, rank // 8 * 8 + 8)]),
                        },
                    },
                    "comm_lib_version": "2.27.3",
                    "pg_status": {
                        "0": {
                            "last_enqueued_collective": 500,
                            "last_started_collective": 500,
                            "last_completed_collective": 500,
                        }
                    },
                    "entries": [entry(number, rank, seqs) for number in range(last)],
                }
            )
            data = bytes(recorder.out) + b"."
        (folder / f"dump_{rank}").write_bytes(data)


LOAD = "import pickle, sys\nfor path in sys.argv[1:]:\n    with open(path, 'rb') as file:\n        pickle.load(file)\n"
READ = """
import sys
from trainwarden.collectors.nccl.dumps import Dump, read_dumps
from trainwarden.collectors.nccl.reader import DumpLimits
ranks = {path: int(path.rpartition('_')[2]) for path in sys.argv[1:]}
found = [dump.rows_N for dump in read_dumps(ranks, owner_uid=-1, limits=DumpLimits()) if isinstance(dump, Dump)]
assert len(found) == len(ranks) and sum(map(len, found)) == ENTRIES * len(ranks) - EARLY, 'not all was read'
""".replace("ENTRIES", str(ENTRIES)).replace("EARLY", str(EARLY))
START = "from trainwarden.collectors.nccl import dumps"


def measure(program: str, paths: list[str]) -> tuple[float, float, float]:
    """Processor s, wall s and peak MB (of the largest process) of a Python program and its children."""
    begin_s = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", program, *paths])
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"exit status {child.returncode}"
    return used.ru_utime + used.ru_stime, time.perf_counter() - begin_s, used.ru_maxrss / 1024


def main() -> int:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dumps(folder, ranks)
        paths = [str(folder / f"dump_{rank}") for rank in range(ranks)]
        size_mb = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        empty = min(measure("pass", [])[0] for _ in range(ROUNDS))
        start = min(measure(START, [])[0] for _ in range(ROUNDS))
        pairs = [(measure(LOAD, paths), measure(READ, paths)) for _ in range(ROUNDS)]
    load_s = min(load[0] for load, _ in pairs) - empty
    read_s = min(read[0] for _, read in pairs) - start
    ratio = statistics.median((read[0] - start) / (load[0] - empty) for load, read in pairs)
    wall_s = min(read[1] for _, read in pairs)
    peak_mb = max(read[2] for _, read in pairs)
    print(f"{ranks} dumps of {ENTRIES} entries, {size_mb:.0f} MB; imports ({start:.2f} s, {empty:.2f} s) taken off")
    print(f"pickle.load   {load_s:6.2f} s processor")
    print(f"trainwarden   {read_s:6.2f} s processor, {wall_s:.2f} s wall with imports, peak {peak_mb:.0f} MB")
    goals = {
        f"ratio {ratio:.2f} <= {RATIO}": ratio <= RATIO,
        f"peak {peak_mb:.0f} MB <= {PEAK_MB} MB": peak_mb <= PEAK_MB,
    }
    if ranks >= 1024:
        goals[f"processor {read_s:.2f} s <= {CPU_S_A_RANK * ranks:.2f} s"] = read_s <= CPU_S_A_RANK * ranks
        goals[f"wall {wall_s:.2f} s <= {WALL_S_A_RANK * ranks:.2f} s"] = wall_s <= WALL_S_A_RANK * ranks
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'} {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
