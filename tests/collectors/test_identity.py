"""Who a rank is and where its ring may lie."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from trainwarden.core import identity
from trainwarden.core.errors import ConfigError
from trainwarden.core.identity import choose_root, filesystem_of, identify, make_private, this_process

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TRAINWARDEN_NODE": "n2",
}


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        pytest.param({"TRAINWARDEN_NODE": "n1"}, {}, (0, 1, 0, 0, "n1:0", "job"), id="nobody said: rank 0 of 1"),
        pytest.param(TORCHRUN, {}, (5, 8, 1, 2, "n2:1", "job"), id="torchrun"),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "r7"}, {}, (5, 8, 1, 2, "n2:1", "r7"), id="its run id"),
        pytest.param({**TORCHRUN, "SLURM_JOB_ID": "42"}, {}, (5, 8, 1, 2, "n2:1", "slurm-42"), id="a Slurm job"),
        pytest.param(
            {**TORCHRUN, "SLURM_JOB_ID": "42", "TRAINWARDEN_JOB": "llm"}, {}, (5, 8, 1, 2, "n2:1", "llm"), id="our run"
        ),
        pytest.param(
            TORCHRUN, {"rank": 3, "world_size": 4, "job": "mine"}, (3, 4, 1, 2, "n2:1", "mine"), id="arguments win"
        ),
        pytest.param(
            {"TRAINWARDEN_NODE": "n1"}, {"rank": 3, "world_size": 4}, (3, 4, 3, 0, "n1:3", "job"), id="no local rank"
        ),
    ],
)
def test_identity(environment: dict[str, str], arguments: dict[str, Any], expected: tuple[object, ...]) -> None:
    me = identify(environment, **arguments)
    assert (me.rank, me.world_size, me.local_rank, me.restart, me.slot, me.job) == expected
    assert me.device == me.slot


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        pytest.param({"RANK": "abc"}, {}, "RANK: expected a whole number from 0 to 0, got 'abc'", id="no number"),
        pytest.param(
            {"RANK": "8", "WORLD_SIZE": "8"}, {}, "RANK: expected a whole number from 0 to 7, got '8'", id="8/8"
        ),
        pytest.param({"RANK": "-1", "WORLD_SIZE": "8"}, {}, "RANK: expected a whole number", id="negative"),
        pytest.param({"WORLD_SIZE": "9" * 30}, {}, "WORLD_SIZE: expected a whole number", id="absurd"),
        pytest.param({"LOCAL_RANK": "2.5"}, {}, "LOCAL_RANK: expected a whole number", id="a fraction"),
        pytest.param({"TORCHELASTIC_RESTART_COUNT": "70000"}, {}, "from 0 to 65535, got '70000'", id="over 16 bits"),
        pytest.param({}, {"rank": 1.0}, "RANK: expected a whole number from 0 to 0, got 1.0", id="a float argument"),
        pytest.param({}, {"coords": {"xx": 1}}, "coords: 'xx' is none of pp, tp, dp, ep, cp", id="unknown axis"),
        pytest.param({}, {"coords": {"pp": -1}}, "coords.pp: expected a whole number from 0 to 32767", id="no place"),
        pytest.param({"TRAINWARDEN_JOB": "../up"}, {}, "job: expected letters", id="a job that leads elsewhere"),
        pytest.param({"TRAINWARDEN_ATTEMPT_FILE": "/no/such"}, {}, "TRAINWARDEN_ATTEMPT_FILE: /no/such", id="no file"),
    ],
)
def test_what_is_wrong_is_said(environment: dict[str, str], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        identify(environment, **arguments)


def test_the_attempt_file_tells_attempt_and_slot(tmp_path: Path) -> None:
    told: dict[str, Any] = {"attempt": 3, "term": 1, "checkpoint": None, "skip": [], "slots": {"5": "n9:7"}}
    (tmp_path / "attempt.json").write_text(json.dumps(told))
    me = identify({**TORCHRUN, "TRAINWARDEN_ATTEMPT_FILE": str(tmp_path / "attempt.json")})
    assert (me.attempt, me.slot, me.device, me.told) == (3, "n9:7", "n9:7", told)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[1]", id="a list"),
        pytest.param('{"attempt": 65536}', id="over 16 bits"),
        pytest.param('{"attempt": "x"}', id="no number"),
        pytest.param('{"slots": []}', id="slots of another form"),
        pytest.param('{"slots": {"0": 7}}', id="a slot of another form"),
        pytest.param("\xff\xfe", id="no UTF-8"),
    ],
)
def test_a_broken_attempt_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "attempt.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        identify({"TRAINWARDEN_ATTEMPT_FILE": str(tmp_path / "attempt.json")})


def test_a_process_is_named_for_good() -> None:
    me = this_process()
    assert (me.pid, me.uid) == (os.getpid(), os.geteuid())
    assert me.start_time == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


MOUNTS = r"""
21 1 0:20 / / rw,relatime - ext4 /dev/a rw
22 21 0:21 / /run rw,nosuid shared:5 - tmpfs tmpfs rw
23 22 0:22 / /run/lock rw - ext4 /dev/b rw
24 21 0:23 / /with\040blank rw - tmpfs tmpfs rw
25 21 0:24 / /twice rw - tmpfs tmpfs rw
26 25 0:25 / /twice rw - overlay overlay rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        pytest.param("/run/trainwarden/0", "tmpfs", id="below a mount point"),
        pytest.param("/run", "tmpfs", id="the mount point itself"),
        pytest.param("/run/lock/x", "ext4", id="the longest one counts"),
        pytest.param("/runner", "ext4", id="a name that only begins the same"),
        pytest.param("/with blank/x", "tmpfs", id="escaped names"),
        pytest.param("/twice/x", "overlay", id="the later of two on one point"),
    ],
)
def test_filesystems(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_the_first_tmpfs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts, places = tmp_path / "mounts", [tmp_path / name for name in ("disk", "memory", "more")]
    mounts.write_text(f"1 0 8:1 / / rw - ext4 a rw\n2 1 0:2 / {places[1]} rw - tmpfs b rw\n")
    monkeypatch.setattr(identity, "root_candidates", lambda environment: tuple(places))
    assert choose_root(mounts=mounts) == (places[1], "")
    assert places[1].stat().st_mode & 0o777 == 0o700


def test_without_a_tmpfs_it_is_said_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("1 0 8:1 / / rw - ext4 a rw\n")
    monkeypatch.setattr(identity, "root_candidates", lambda environment: (tmp_path / "x",))
    assert choose_root(mounts=mounts) == (None, f"{tmp_path}/x: on ext4, not on tmpfs")
    assert choose_root(mounts=tmp_path / "none") == (None, f"{tmp_path}/x: No such file or directory")


def test_the_named_folder_comes_first() -> None:
    candidates = identity.root_candidates({"TRAINWARDEN_DIR": "/x"})
    assert candidates == (
        Path("/x"),
        Path(f"/run/trainwarden/{os.geteuid()}"),
        Path(f"/dev/shm/trainwarden-{os.geteuid()}"),
    )


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    assert make_private(tmp_path / "own") is None
    assert make_private(tmp_path / "own") is None, "it may be there already"
    assert make_private(tmp_path / "file") == "File exists"
    assert make_private(tmp_path / "link") == "not a folder"
    assert make_private(tmp_path / "open") == "others may write to it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    os.chown(tmp_path / "foreign", 12345, -1)
    assert make_private(tmp_path / "foreign") == "belongs to user 12345"
