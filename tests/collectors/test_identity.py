"""Who a rank is and where its ring may lie."""

import json
import multiprocessing as mp
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.collectors.world import World

from trainwarden.collectors.rank import attach
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


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "6",
}
HYDRA = {"PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items() if name != "PMIX_RANK"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_RESTART_COUNT": "3",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(SRUN, (5, 8, 1, 4, 3), id="srun"),
        pytest.param({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "x"}, (5, 8, 1, 8, 3), id="no count for this node: all"),
        pytest.param(BATCH_SCRIPT, (0, 1, 0, 1, 0), id="a Slurm batch script is no task"),
        pytest.param(OPEN_MPI, (6, 16, 2, 4, 0), id="Open MPI"),
        pytest.param(MVAPICH, (6, 16, 2, 4, 0), id="MVAPICH2"),
        pytest.param(HYDRA, (9, 16, 1, 8, 0), id="MPICH and Intel MPI"),
        pytest.param({**SRUN, **OPEN_MPI}, (6, 16, 2, 4, 0), id="mpirun in a Slurm step, which it disagrees with"),
        pytest.param({**SRUN, **HYDRA}, (9, 16, 1, 8, 0), id="Hydra, started by srun once a node"),
        pytest.param({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1, 4, 3), id="srun's own PMI"),
        pytest.param({**SRUN, "PMIX_RANK": "5"}, (5, 8, 1, 4, 3), id="srun's own PMIx"),
        pytest.param(
            {**SRUN, **OPEN_MPI, **TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, (5, 8, 1, 4, 2), id="torchrun is innermost"
        ),
    ],
)
def test_launchers(environment: dict[str, str], expected: tuple[int, ...]) -> None:
    me = identify(environment)
    assert (me.rank, me.world_size, me.local_rank, me.local_world_size, me.restart) == expected


def test_a_rank_without_a_size_is_not_taken_for_a_job_of_one() -> None:
    with pytest.raises(ConfigError, match="PMIX_RANK='3': nothing tells size and local rank: give them to attach"):
        identify({"PMIX_RANK": "3"})
    assert identify({"PMIX_RANK": "3"}, rank=3, world_size=4).rank == 3


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        pytest.param({"RANK": "abc"}, {}, "RANK: expected a whole number from 0 to 0, got 'abc'", id="no number"),
        pytest.param(
            {"RANK": "8", "WORLD_SIZE": "8"}, {}, "RANK: expected a whole number from 0 to 7, got '8'", id="8/8"
        ),
        pytest.param({**SRUN, "SLURM_PROCID": "8"}, {}, "SLURM_PROCID: expected a whole number from 0 to 7", id="srun"),
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


class Arriving:
    """Attaches while it is unpickled, as a script does at its top level when a spawned worker imports it."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.answers = state["answers"]
        self.answers.put(attach().why_off)

    def __call__(self) -> None:
        self.answers.put(attach().why_off)


def test_a_spawned_process_attaches_by_its_own_call_only(world: World) -> None:
    context = mp.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=Arriving(answers))
    process.start()
    try:
        assert [answers.get(timeout=50), answers.get(timeout=50)] == [
            "a spawned process that is still importing the script",
            "",
        ]
    finally:
        process.join()
        process.close()
        answers.close()
        answers.join_thread()
