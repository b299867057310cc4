"""What a tenant wrote is read by a child that has nothing to lose; what is hostile does nothing and is named."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectors.dumpmaking import a_dump, an_entry, pickled

from trainwarden.collectors.nccl import restricted
from trainwarden.collectors.nccl.columns import columns
from trainwarden.collectors.nccl.dumps import Dump, NotRead, read_dumps
from trainwarden.collectors.nccl.reader import DumpLimits
from trainwarden.collectors.nccl.restricted import Refused, load
from trainwarden.core.errors import ConfigError

LIMITS = DumpLimits(cpu=timedelta(milliseconds=500), memory_bytes=256 << 20)
GOOD = pickled(a_dump(*map(an_entry, range(3)), ranks=str([*range(64)])))


class Runs:
    """A pickle of it calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def read(folder: Path, *contents: bytes, limits: DumpLimits = LIMITS) -> list[Dump | NotRead]:
    files = {str(folder / f"dump_{rank}"): rank for rank in range(len(contents))}
    for path, content in zip(files, contents, strict=True):
        Path(path).write_bytes(content)
    return list(read_dumps(files, owner_uid=os.getuid(), limits=limits))


def refusals(found: list[Dump | NotRead]) -> list[str]:
    return [one.why for one in found if isinstance(one, NotRead)]


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_a_pickle_that_calls_something_calls_nothing_and_is_named(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "was-here"
    hostile = pickle.dumps({"version": "2.10", "entries": [Runs(os.mkdir, str(trace))]}, protocol)
    found = read(tmp_path, GOOD, hostile, GOOD)
    assert not trace.exists()
    assert refusals(found) == ["hostile: it names the global posix.mkdir; only plain containers and numbers are read"]
    assert [isinstance(one, Dump) for one in found] == [True, False, True]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"\x80\x02]Q.", "an object outside", id="persistent id"),
        pytest.param(b"\x80\x02\x82\x01.", "extension", id="extension registry"),
        pytest.param(b"cbuiltins\neval\n.", "global builtins.eval", id="GLOBAL"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "global os.system", id="STACK_GLOBAL"),
        pytest.param(b"(ios\nsystem\n.", "global os.system", id="INST"),
        pytest.param(b"\x80\x02X\x01\0\0\0a)R.", "not callable", id="REDUCE of text"),
        pytest.param(b"\x80\x02])\x81.", "not a class", id="NEWOBJ of a list"),
        pytest.param(b"\x80\x02](o.", "IndexError", id="OBJ of nothing"),
        pytest.param(b"\x80\x02]}X\x01\0\0\0aNsb.", "AttributeError", id="BUILD of a list"),
    ],
)
def test_no_opcode_finds_anything_to_call(data: bytes, why: str) -> None:
    with pytest.raises(Refused) as caught:
        load(data)
    assert why in str(caught.value) or caught.value.args[0].startswith("no whole pickle")


@pytest.mark.parametrize(
    "data", [b"", GOOD[: len(GOOD) // 2], b"{", b'{"a": ' + b"[" * 100_000, b"PK\x03\x04", b"\x80\xff"]
)
def test_what_is_no_whole_dump_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        columns(load(data))


BOMBS = {
    "a memo of 2^31 places": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a billion bytes announced": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "sets of 216 bytes for one": b"\x80\x04(" + b"\x8f" * 3_000_000 + b"l.",
    "a key too deep to hash": b"\x80\x02})" + b"\x85" * 2_000_000 + b"Ns.",
    "a key that takes years to hash": b"\x80\x02})" + b"2\x86" * 60 + b"Ns.",
}
PEAK = """
import resource, sys
from datetime import timedelta
from trainwarden.collectors.nccl.dumps import read_dumps
from trainwarden.collectors.nccl.reader import DumpLimits
limits = DumpLimits(cpu=timedelta(milliseconds=500), memory_bytes=256 << 20)
files = {path: rank for rank, path in enumerate(sys.argv[1:])}
for found in read_dumps(files, owner_uid=-1, limits=limits):
    print(getattr(found, "why", "read"))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_bombs_cost_bounded_memory_and_time_and_what_lies_beside_them_is_read(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"dump_{rank}") for rank in range(2 * len(BOMBS))]
    for path, content in zip(paths, (each for bomb in BOMBS.values() for each in (bomb, GOOD)), strict=True):
        Path(path).write_bytes(content)
    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, text=True, check=True, timeout=50)
    *words, peak_kb = done.stdout.splitlines()
    assert int(peak_kb) < 300 * 1024
    assert words[1::2] == ["read"] * len(BOMBS)
    assert "read" not in words[::2]
    assert "processor time" in words[8]
    assert "SIGSEGV" in words[6]
    assert time.monotonic() - begin_s < 30


def test_a_folder_s_symbolic_links_fifos_and_sparse_terabytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(GOOD)
    (tmp_path / "dump_0").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "dump_1")
    with (tmp_path / "dump_2").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "dump_3").mkdir()
    (tmp_path / "dump_4").write_bytes(GOOD)
    (tmp_path / "dump_5").symlink_to("/dev/zero")
    files = {str(tmp_path / f"dump_{rank}"): rank for rank in range(7)}
    found = list(read_dumps(files, owner_uid=os.getuid(), limits=LIMITS))
    assert refusals(found) == [
        "a symbolic link",
        "not a regular file",
        f"has {1 << 40} bytes, at most {LIMITS.max_bytes} are read",
        "not a regular file",
        "a symbolic link",
        "No such file or directory",
    ]


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dump_0"
    path.write_bytes(GOOD)
    (found,) = read_dumps({str(path): 0}, owner_uid=os.getuid() + 1, limits=LIMITS)
    assert isinstance(found, NotRead)
    assert "belongs to user" in found.why or "Permission denied" in found.why  # the reader is that user, if we are root


@pytest.mark.skipif(os.geteuid() != 0, reason="LOUD: only root can become somebody else")
def test_the_reader_of_a_root_agent_has_the_privileges_of_the_job_s_user_only() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for rank, mode in enumerate((0o400, 0o000)):
            path = folder / f"dump_{rank}"
            path.write_bytes(GOOD)
            path.chmod(mode)
            os.chown(path, 12345, 12345)
        files = {str(folder / f"dump_{rank}"): rank for rank in range(2)}
        read_by_owner, refused = read_dumps(files, owner_uid=12345, limits=LIMITS)
    assert isinstance(read_by_owner, Dump)
    assert isinstance(refused, NotRead)
    assert refused.why == "Permission denied"  # root itself could read it


def test_a_file_system_that_does_not_answer_costs_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # says nothing of any file... and ends at once
    found = read(tmp_path, GOOD, GOOD)
    assert [why.startswith("hostile or damaged: its reader ended") for why in refusals(found)] == [True, True]
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    begin_s = time.monotonic()
    found = read(tmp_path, GOOD, GOOD, limits=DumpLimits(answer=timedelta(milliseconds=200)))
    assert time.monotonic() - begin_s < 10
    assert refusals(found) == ["no answer within 0.2 s: does its file system hang?"] * 2


def test_words_of_a_tenant_are_shown_without_what_could_move_a_terminal() -> None:
    assert restricted.plain("a\x1b[31m\n\ud800b" + "x" * 500) == ("a?[31m??b" + "x" * 500)[: restricted.WHY_MAX]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        pytest.param({"max_bytes": 0}, "max_bytes", id="no bytes"),
        pytest.param({"children": -1}, "children", id="no children"),
        pytest.param({"cpu": timedelta(milliseconds=10)}, "cpu", id="no time"),
    ],
)
def test_limits_that_leave_nothing_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"collectors\.dumps\.limits\.{key}: need"):
        DumpLimits(**changes)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=6))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@settings(max_examples=15)
@given(contents=st.lists(mutated() | st.binary(max_size=200), min_size=8, max_size=24))
def test_whatever_the_bytes_are_each_file_is_read_or_refused_with_its_reason(contents: list[bytes]) -> None:
    """Some 250 files: a child reads what one example holds."""
    with tempfile.TemporaryDirectory() as name:
        found = read(Path(name), *contents, GOOD)
    assert [one.path for one in found] == [f"{name}/dump_{rank}" for rank in range(len(contents) + 1)]
    assert all(refusals(found))
    assert isinstance(found[-1], Dump)


def test_a_file_is_opened_only_if_it_is_what_it_should_be(tmp_path: Path) -> None:
    """In this process, as the child does it; what the kernel bounds is tried in the child, above."""
    path = tmp_path / "dump_0"
    path.write_bytes(GOOD)
    data, written_ns = restricted.read(str(path), os.getuid(), 1 << 20)
    assert (data, written_ns) == (GOOD, path.stat().st_mtime_ns)
    header, _ = columns(load(data))
    assert header["config"] == {"0": ("default_pg", [[0, 63, 1]])}
    assert header["status"] == {"0": [3, 3, 3]}
    for owner_uid, max_bytes in ((os.getuid() + 1, 1 << 20), (-1, 10)):
        with pytest.raises(Refused):
            restricted.read(str(path), owner_uid, max_bytes)


def test_a_dump_of_more_groups_than_a_rank_can_be_in_is_refused() -> None:
    for key in ("pg_config", "pg_status"):
        with pytest.raises(Refused, match=f"{key}: 5000 groups, at most 4096"):
            columns(a_dump() | {key: {str(number): {} for number in range(5000)}})


KEYS = st.sampled_from([*an_entry(), "seq_id"]) | st.text(max_size=3)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
PLAIN = LEAVES | st.lists(LEAVES | st.lists(LEAVES, max_size=2), max_size=3) | st.dictionaries(KEYS, LEAVES, max_size=3)


@settings(max_examples=200)
@given(key=KEYS, value=PLAIN, alone=PLAIN, config=st.dictionaries(st.text(max_size=3), PLAIN, max_size=2) | PLAIN)
def test_whatever_stands_in_a_dump_it_is_told_or_refused(key: str, value: Any, alone: Any, config: Any) -> None:
    for entries in ([alone], alone, [an_entry(0), an_entry(1) | {key: value}]):
        try:
            header, data = columns(a_dump() | {"entries": entries, "pg_config": config, "pg_status": config})
        except Refused:
            continue
        assert header["entries"] == len(entries or [])
        assert len(data) == len(entries or []) * (7 * 8 + 2 * 2 + 3)
