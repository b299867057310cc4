"""Plans that are killed at every point: kill -9 of a real process with real children; each effect happens once.

Every plan of a life holds still at its own point, and the process is killed when all stand there.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.fakes.freeze import freeze
from tests.fakes.runtime import GOALS, Children, ended_after, ladder
from tests.fakes.supervisor import JOB

from trainwarden.app.store import Store
from trainwarden.core.codec import dumps, loads
from trainwarden.core.model import Outcome, Plan, Tell

ROOT = Path(__file__).resolve().parents[2]
POINTS = [f"{point}/{goal}" for goal in GOALS for point in ("before", "after", "recorded")] + ["told", "written"]
"""Of a ladder of five rungs, in the order in which a plan meets them."""


def plan_of(job: str, mode: str = "act") -> Plan:
    return Plan(
        id=f"incident-{job}/plan-1",
        incident=f"incident-{job}",
        rule="process.killed",
        mode=mode,  # type: ignore[arg-type]  # one of the three
        fence=1,
        deadline_ns=4 * 10**18,
        ladder=ladder(job),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with ended_after(tmp_path):
        yield tmp_path


def life(folder: Path, crash: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """One life of a supervisor."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRAINWARDEN_CRASH": json.dumps(crash or {})}
    command = [sys.executable, "-m", "tests.fakes.supervisor", str(folder)]
    return subprocess.Popen(command, env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lived(folder: Path, crash: Mapping[str, str] | None = None) -> None:
    """A whole life, with the end that it was to have, and without a word on stderr."""
    process = life(folder, crash)
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (-signal.SIGKILL if crash else 0, "")


def journal(folder: Path) -> dict[str, Outcome]:
    store = Store(folder / "journal.sqlite")
    rows = {row.key: loads(row.text) for row in store.tail()}
    store.close()
    return {key: one for key, one in rows.items() if isinstance(one, Outcome)}


def begin(folder: Path, jobs: list[str], mode: str = "act") -> None:
    runtime = Children(folder)
    for job in jobs:
        runtime.begin(job, 1)
    (folder / "plans.jsonl").write_text("".join(dumps(plan_of(job, mode)) + "\n" for job in jobs))


def test_killed_at_every_point_each_effect_happens_once_and_each_plan_ends_once(folder: Path) -> None:
    jobs = [f"job-{number}" for number in range(len(POINTS) - 1)]
    begin(folder, jobs)
    first = dict(zip(jobs, [*POINTS[:-2], "told"], strict=True))
    second = {job: POINTS[at + 4] for at, job in enumerate(jobs[:11])} | {jobs[-1]: "written"}
    lived(folder, first)
    lived(folder, second)
    lived(folder)
    started = [f"{job} running" for job in jobs]  # attempt 1
    assert Counter(Children(folder).effects) == Counter(started + [f"{job} {goal}" for job in jobs for goal in GOALS])
    outcomes = journal(folder)
    assert {key for key in outcomes if key.endswith("/-1")} == {f"{plan_of(job).id}/-1" for job in jobs}
    assert {one.result for one in outcomes.values()} <= {"reached", "already"}
    for job, point in first.items():
        where, _, goal = point.partition("/")
        if where == "after":
            assert outcomes[f"{plan_of(job).id}/{GOALS.index(goal)}"].result == "already"
    assert len(list(folder.glob("durable-*.sqlite"))) == 1, "each term takes over the file of the one before"


def test_a_frozen_supervisor_that_wakes_up_does_nothing_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds before the effect of `stopped`; another takes over and ends the plan; then it goes on."""
    monkeypatch.setenv("TRAINWARDEN_SILENCE_S", "5")
    begin(folder, ["job-0", "job-1"])
    old = life(folder, {"job-0": "before/stopped", "job-1": "never"})
    try:
        until((folder / "job-0-holds").exists)
        freeze(old.pid, folder / "journal.sqlite")
        let_the_lease_run_out(folder)
        lived(folder)
        effects = Children(folder).effects
        (folder / "go").touch()
        os.kill(old.pid, signal.SIGCONT)
        _, err = old.communicate(timeout=30)
    finally:
        old.kill()
        old.communicate()
    assert (old.returncode, err.splitlines()[-1].split(":")[0]) == (1, "trainwarden.core.errors.FencedError")
    assert Children(folder).effects == effects
    assert Counter(effects)["job-0 stopped"] == 1


def let_the_lease_run_out(folder: Path) -> None:
    """As if five seconds had passed."""
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as database, database:
        database.execute("UPDATE owner SET expires_ns = 0 WHERE job = ?", (JOB,))


def until(so: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_supervisor_that_fails_exits_though_a_plan_waits_for_a_person(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWARDEN_SILENCE_S", "1")
    begin(folder, ["job-0"], mode="approve")
    process = life(folder)
    try:
        until((folder / "job-0-waits").exists)
        let_the_lease_run_out(folder)
        store = Store(folder / "journal.sqlite")
        store.claim(JOB, os.getpid(), 0, 4 * 10**18)
        store.close()
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert Children(folder).effects == ["job-0 running"]


def test_an_approval_that_comes_while_nobody_is_there_counts(folder: Path) -> None:
    begin(folder, ["job-0", "job-1"], mode="approve")
    lived_until_it_waits(folder)
    tells = [
        Tell(
            key=f"cli/{number}",
            plan=plan_of(f"job-{number}").id,
            message={"verb": verb, "who": "ops", "why": "so", "expires_ns": 4 * 10**18},
        )
        for number, verb in enumerate(["approve", "deny"])
    ]
    (folder / "tells.jsonl").write_text("".join(dumps(tell) + "\n" for tell in tells))
    lived(folder)
    outcomes = journal(folder)
    assert outcomes[f"{plan_of('job-0').id}/-1"].result == "reached"
    assert outcomes[f"{plan_of('job-1').id}/-1"].reason == "deny by ops: so"
    assert "job-1 stopped" not in Children(folder).effects


def lived_until_it_waits(folder: Path) -> None:
    process = life(folder)
    try:
        until(lambda: len(list(folder.glob("*-waits"))) == 2)
    finally:
        process.kill()
        process.communicate()
