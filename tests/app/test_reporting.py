"""What a job's folder tells, gathered: complete, damaged, running, and large."""

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.ran import JOB, KEPT, LAST, LOST_S, POISONED, event, ns, ran, steps, write_attempt

from trainwarden.app.folders import JobFolder
from trainwarden.app.reporting import find_run, gather, write_report
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Tick
from trainwarden.core.recording import Recorder
from trainwarden.core.signals import ACTIVITIES
from trainwarden.dashboards import plots
from trainwarden.dashboards.facts import GRID_COLUMNS, Report, Trouble


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> JobFolder:
    return ran(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def report(folder: JobFolder) -> Report:
    return gather(folder)


@pytest.fixture(scope="module", autouse=True)
def fonts(report: Report) -> None:
    """matplotlib opens its fonts once a process and keeps them: before the first test, else it would be a leak."""
    plots.where_time(report)


def trouble(report: Report, name: str) -> Trouble:
    return next(one for one in report.troubles if one.id == name)


def test_steps_that_a_rollback_discarded_are_told_from_those_that_count(report: Report) -> None:
    discarded = report.steps[~report.steps.kept]
    assert discarded.step.tolist() == list(range(KEPT + 1, POISONED + 2))
    assert set(discarded.attempt) == {"attempt 1"}
    assert report.steps[report.steps.kept].step.tolist() == list(range(1, LAST + 1))
    (back,) = report.rollbacks
    assert (back.last, back.kept, back.origin) == (POISONED + 1, KEPT, "step-20-4294967296")
    assert report.skipped == ((POISONED, POISONED),)


def test_the_time_spent_adds_up_to_the_wall_time(report: Report) -> None:
    assert set(report.activity_s) == set(ACTIVITIES)
    assert sum(report.activity_s.values()) == pytest.approx(report.wall_s)
    assert report.activity_s["repeated"] == pytest.approx(7 * 0.45, rel=0.1)


def test_an_incident_has_its_moments_in_order_and_what_its_recovery_cost(report: Report) -> None:
    found = trouble(report, "loss.1")
    assert (found.tier, found.state, found.culprit, found.step) == ("CRITICAL", "resolved", "rank:1", POISONED)
    assert dict(found.instants) == pytest.approx(
        {"first sign": 15.0, "detected": 15.2, "decided": 15.3, "stopped": 16.2, "runs again": 21.0, "verified": 26.0}
    )
    assert found.lost_s == LOST_S
    still = trouble(report, "straggler.2")
    assert still.open
    assert still.until_s == report.wall_s
    assert [what for what, _ in still.instants] == ["first sign", "detected"], "an observing plan decided nothing"


def test_plans_say_what_was_found_refused_and_only_observed(report: Report) -> None:
    watched, acting = report.plans
    assert watched.mode == "observe"
    assert "would have tried" in watched.reason
    assert [rung.result for rung in watched.rungs] == ["", ""], "a rung that nobody tried has no result"
    assert [round(rung.took_s or -1, 1) for rung in acting.rungs] == [0.9, 4.8, 5.0]
    running, verified = acting.rungs[1:]
    assert running.said.startswith("skips batch 26; attempt: 2")
    assert "not from step-30-4294967296: __0_0.distcp: other bytes than were written" in running.said
    assert verified.checks == (("loss", "holds", "10 of 10 steps equal", ""),)


def test_ranks_that_cannot_tell_their_own_work_are_blind_and_the_slow_one_is_slow(report: Report) -> None:
    grid = report.grid
    assert grid.blind_RC[3].all()
    assert not grid.blind_RC[:3].any()
    assert np.isnan(grid.ratio_RC[3]).all(), "never shown as healthy"
    slow = [step for (_, step), ratio in zip(grid.starts, grid.ratio_RC[2], strict=True) if ratio >= report.slow]
    assert slow == list(range(10, 18))
    assert ("own work", "rank 3: the collector cannot tell own work there (47 steps)") in report.unseen


def test_what_could_not_be_seen_is_said(report: Report) -> None:
    assert ("oom@n0 was blind", "permission denied (from 28.0 s until the end)") in report.unseen
    assert report.said == ("28.5 s: ann: stop all  maintenance",)


def test_checkpoints_attempts_and_the_end(report: Report) -> None:
    assert report.checkpoints.step.tolist() == [30, 20]
    assert report.checkpoints.saved_s.tolist() == pytest.approx([27.1, 12.1])
    assert [(one.number, one.origin, one.changes) for one in report.attempts] == [
        (1, "the beginning", ""),
        (2, "step-20-4294967296", "skips batch 26"),
    ]
    assert report.ended == "Attempt 2 ended, in order (exit status 0)."
    assert (report.node, report.ranks, report.began) == ("n0", 4, "2023-11-14 22:13:20 UTC")


def test_a_run_is_found_by_its_name_and_by_its_path_whatever_its_folder_is_called(
    folder: JobFolder, tmp_path: Path
) -> None:
    assert find_run(JOB, folder.path.parent) == folder
    moved = Path(shutil.copytree(folder.path, tmp_path / "of-last-week"))
    assert find_run(str(moved), tmp_path).job == JOB
    with pytest.raises(ConfigError, match=f"RUN: no run 'nobody'.*below {folder.path.parent}"):
        find_run("nobody", folder.path.parent)


def test_the_page_is_written_beside_the_run_and_is_the_same_each_time(folder: JobFolder, tmp_path: Path) -> None:
    first = write_report(folder)
    assert first == folder.path / "report.html"
    second = write_report(folder, tmp_path / "again.html")
    assert first.read_bytes() == second.read_bytes()
    assert list(tmp_path.iterdir()) == [second], "no draft is left"
    with pytest.raises(ConfigError, match=r"--out: cannot write .*nowhere/x.html: No such file"):
        write_report(folder, tmp_path / "nowhere" / "x.html")


def test_a_recording_alone_gives_a_report_that_says_what_is_missing(folder: JobFolder, tmp_path: Path) -> None:
    path = tmp_path / "nano"
    shutil.copytree(folder.path / "frames", path / "frames")
    (path / "notices.jsonl").write_text("{}\n")
    found = gather(find_run(str(path), tmp_path))
    assert len(found.steps) == 47
    assert [one.number for one in found.attempts] == [1, 2]
    assert not found.decided
    assert ("decisions", "were not recorded: there is no story.jsonl; notices.jsonl has what people were told") in (
        found.unseen
    )


def test_damaged_files_are_refused_by_name_and_the_rest_is_shown(folder: JobFolder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder.path, tmp_path / "nano"))
    (path / "frames" / "00000009.parquet").write_bytes(b"PAR1 not really")
    with (path / "story.jsonl").open("a") as story:
        story.write('{"t_ns": 1, "said"')
    (path / "attempt" / "2" / "ended.json").write_text("{")
    (path / "evidence" / "loss.1" / "lost.json").unlink()
    found = gather(find_run(str(path), tmp_path))
    assert len(found.steps) == 47
    assert any(what == "refused" and "00000009.parquet" in why for what, why in found.unseen)
    assert ("decisions", "1 lines of story.jsonl could not be read") in found.unseen
    assert trouble(found, "loss.1").lost_s == {}, "not known, not free"


def test_a_run_that_has_only_begun_has_no_numbers_yet(tmp_path: Path) -> None:
    folder = JobFolder.make(tmp_path, JOB)
    write_attempt(folder, None, code=None)
    found = gather(folder)
    assert found.steps.empty
    assert found.activity_s == {}
    assert found.ended == ""
    assert ("recording", f"nothing is recorded below {folder.path / 'frames'}") in found.unseen
    assert found.decided, "nobody was told anything, so nothing is missing"


def test_time_that_nobody_watched_and_a_part_that_was_removed_are_gaps(tmp_path: Path) -> None:
    folder = JobFolder.make(tmp_path, JOB)
    with Recorder(folder.path / "frames") as recorder:
        for item in (*steps(1, 1, 4, 0.0), Tick(seen_ns=ns(60)), event("telemetry.lost", 61, {}, 1, "source/rings@n0")):
            recorder.write(item)
    for number, file in enumerate(sorted((folder.path / "frames").iterdir(), reverse=True)):
        file.rename(file.with_name(f"{8 - number:08}.parquet"))
    found = dict(gather(folder).unseen)
    assert found["gap"].startswith("nothing was recorded from 5.0 s to 60.0 s")
    assert found["oldest part"].startswith("6 files")
    assert found["rings@n0 lost rows"] == "1 times"


def test_a_long_recording_is_read_in_bounded_memory_and_the_page_stays_small(tmp_path: Path) -> None:
    folder = JobFolder.make(tmp_path, JOB)
    with Recorder(folder.path / "frames") as recorder:
        for item in steps(1, 1, 700, 0.0, ranks=300):
            recorder.write(item)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = write_report(folder)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 100, "as Python objects 300 x 700 rows would be far more"
    assert page.stat().st_size < 1_000_000
    grid = gather(folder).grid
    assert (grid.ranks_per_row, grid.steps_per_column) == (2, 2)
    assert grid.ratio_RC.shape == (150, 350)
    assert len(grid.starts) <= GRID_COLUMNS


def test_json_of_another_kind_counts_as_missing(tmp_path: Path) -> None:
    folder = JobFolder.make(tmp_path, JOB)
    attempt = write_attempt(folder, None, code=None)
    (attempt.path / "ended.json").write_text(json.dumps([1, 2]))
    assert gather(folder).ended == ""
