"""What torchrun says about a failed attempt: the failure table on its standard error, and the ranks' error files.

torchrun prints the table after it has ended the other ranks (torch.distributed.elastic.multiprocessing.errors,
ChildFailedError). It marks the failure it saw first as the root cause; with a monitor interval of 0.1 s several deaths
look simultaneous to it, so its order is a hint, not a fact. The parser takes what it can from a table that is cut,
interleaved with other output, or of another version, and never raises.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from trainwarden.core.model import Json

MAX_BYTES = 256 * 1024
"""How much of the end of the launcher's output is searched, and how much of an error file is read."""

_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*?)\s*$")
_RANK = re.compile(r"^(\d+)")
_EXIT = re.compile(r"^(-?\d+)(?:\s*\(pid:\s*(\d+)\))?")


def parse_failures(text: str) -> tuple[list[dict[str, Json]], int | None]:
    """The failures {rank, pid, exitcode, error_file, message, time} and the root cause's rank (None: no table).

    >>> table = '''Root Cause (first observed failure):
    ... [0]:
    ...   time      : 2026-01-02_03:04:05
    ...   rank      : 2 (local_rank: 2)
    ...   exitcode  : -9 (pid: 77)
    ...   error_file: <N/A>
    ...   traceback : Signal 9 (SIGKILL) received by PID 77'''
    >>> failures, root = parse_failures(table)
    >>> root, failures[0]["exitcode"], failures[0]["pid"]
    (2, -9, 77)
    """
    found: dict[int, dict[str, Json]] = {}
    root: int | None = None
    block: dict[str, str] = {}
    in_root = False
    for line in text.splitlines():
        if "Root Cause" in line:
            in_root = True
        field = _FIELD.match(line)
        if field is None:
            continue
        name, value = field.groups()
        block[name] = value
        if name == "traceback":
            failure = _failure(block)
            block = {}
            if failure is None:
                continue
            rank = int(str(failure["rank"]))
            found[rank] = failure
            root = rank if in_root else root
            in_root = False
    return list(found.values()), root


def _failure(block: Mapping[str, str]) -> dict[str, Json] | None:
    rank = _RANK.match(block.get("rank", ""))
    code = _EXIT.match(block.get("exitcode", ""))
    if rank is None or code is None:
        return None
    file = block.get("error_file", "")
    return {
        "rank": int(rank.group(1)),
        "exitcode": int(code.group(1)),
        "pid": int(code.group(2)) if code.group(2) else None,
        "error_file": None if file in ("", "<N/A>") else file,
        "message": block["traceback"],
        "time": block.get("time", ""),
    }


def read_error_file(path: Path) -> str | None:
    """The message of a TORCHELASTIC_ERROR_FILE; None if there is none that can be read."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    return message if isinstance(message, str) else None


def read_failures(err_log: Path) -> tuple[list[dict[str, Json]], int | None]:
    """The failure table at the end of a launcher's error output, with the messages of error files where there are."""
    try:
        with err_log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MAX_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return [], None
    failures, root = parse_failures(text)
    for failure in failures:
        message = read_error_file(Path(str(failure["error_file"]))) if failure["error_file"] else None
        if message is not None:
            failure["message"] = message
    return failures, root
