"""torchrun's failure table and error files, whole, cut, and hostile."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.collectors.torchrun import parse_failures, read_error_file, read_failures

TABLE = """\
W1130 12:00:00.000 1 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 12 closing signal SIGTERM
============================================================
examples/train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_12:00:01
  host      : n1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 12)
  error_file: {error_file}
  traceback : To enable traceback see: the documentation
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_12:00:00
  host      : n1
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 13)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 13
============================================================
"""


def test_the_table_names_every_failure_and_the_root() -> None:
    failures, root = parse_failures(TABLE.format(error_file="<N/A>"))
    assert root == 2
    assert [(f["rank"], f["exitcode"], f["pid"]) for f in failures] == [(1, 1, 12), (2, -9, 13)]
    assert failures[1]["message"] == "Signal 9 (SIGKILL) received by PID 13"


@pytest.mark.parametrize(
    ("text", "ranks", "root"),
    [
        pytest.param("", [], None, id="no output at all"),
        pytest.param("Traceback (most recent call last):\n  boom\n", [], None, id="a traceback is no table"),
        pytest.param(TABLE[: TABLE.index("Root Cause")], [1], None, id="cut before the root cause"),
        pytest.param(TABLE[: TABLE.rindex("traceback")], [1], None, id="cut inside the last block"),
        pytest.param(TABLE.replace("rank      : 2", "rank      : two"), [1], None, id="a rank that is no number"),
        pytest.param(TABLE.replace("  host      : n1\n", ""), [1, 2], 2, id="a field less"),
    ],
)
def test_a_damaged_table_gives_what_it_has(text: str, ranks: list[int], root: int | None) -> None:
    failures, found = parse_failures(text)
    assert [f["rank"] for f in failures] == ranks
    assert found == root


def test_an_error_file_replaces_the_table_s_hint(tmp_path: Path) -> None:
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"message": {"message": "ValueError: bad batch", "extraInfo": {}}}))
    (tmp_path / "err.log").write_text(TABLE.format(error_file=error))
    failures, _ = read_failures(tmp_path / "err.log")
    assert failures[0]["message"] == "ValueError: bad batch"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": 3}', "[" * 100_000, '{"message": {"other": 1}}'])
def test_an_unreadable_error_file_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    assert read_error_file(tmp_path / "error.json") is None


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*TABLE.splitlines(), "noise", "", "  rank : 99999999999999999999"]), max_size=60))
def test_shuffled_lines_never_raise(lines: list[str]) -> None:
    failures, _ = parse_failures("\n".join(lines))
    assert all(isinstance(failure["exitcode"], int) for failure in failures)
