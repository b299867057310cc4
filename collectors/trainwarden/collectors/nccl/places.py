"""Where a rank's flight recorder writes its dumps, and the pipe that asks it for one: as its environment says.

Names and defaults are those of torch/csrc/distributed/c10d/FlightRecorder.cpp and ProcessGroupNCCL.hpp. What a script
sets in os.environ after its start is not seen from outside: such places are named by the agent's settings.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainwarden.core.process import PROC

PREFIX_KEYS: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PIPE_KEY: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_CACHED: Final = ("torch/comm_lib_trace_rank_", "torch/nccl_trace_rank_")
_OLDEST: Final = "/tmp/nccl_trace_rank_"
_ENVIRON_BYTES: Final = 1 << 20
"""More is not read: the kernel's own limit for a start is a quarter of the stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Of one process. A rank's number is appended to each."""

    prefixes: tuple[str, ...]
    pipe: str
    """Then `.pipe`; empty: it takes no requests."""
    local_rank: int | None
    """As torchrun says it; None: it does not."""


def read_places(pid: int, proc: Path = PROC) -> Places:
    """Raises OSError where the process's environment may not be read."""
    with (proc / str(pid) / "environ").open("rb") as file:
        pairs = (item.partition(b"=") for item in file.read(_ENVIRON_BYTES).split(b"\0"))
        said = {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs if value}
    named = [said[key] for key in PREFIX_KEYS if key in said][:1]
    cache = said.get("XDG_CACHE_HOME") or os.path.join(said.get("HOME", "/"), ".cache")
    prefixes = named or [*(os.path.join(cache, name) for name in _CACHED), _OLDEST]
    try:
        where = os.readlink(proc / str(pid) / "cwd")
    except OSError:
        where = "/"
    pipe = said.get(PIPE_KEY, "")
    return Places(
        prefixes=tuple(os.path.join(where, prefix) for prefix in prefixes),
        pipe=os.path.join(where, pipe) if pipe else "",
        local_rank=int(local) if (local := said.get("LOCAL_RANK", "")).isdecimal() and len(local) < 5 else None,
    )
