"""What /metrics says: every name as the table has it, and nothing that is not known."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from tests.app.metrics_world import Shown, everything
from tests.app.test_carry import Clock
from tests.app.test_delivery import NOTICE, Channel, busy
from tests.detectors.world import JOB, START_NS, step_matrix, topology

from trainwarden.app.endpoint import MetricsConfig
from trainwarden.app.folders import JobFolder
from trainwarden.app.tries import Counted, Tries
from trainwarden.core.errors import DeliveryError
from trainwarden.core.model import Event, StepMatrix
from trainwarden.core.records import FEATURES, GRAD_NONFINITE, LOSS_NONFINITE, epoch_of
from trainwarden.core.signals import ACTIVITIES, METRICS, SIGNALS
from trainwarden.core.version import __version__
from trainwarden.detectors.straggler import OwnWorkSeen, Straggler


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


def test_every_row_of_the_table_is_exported_as_it_stands_there(shown: Shown) -> None:
    scrape = everything(shown).scrape()
    assert scrape.names() == set(METRICS)
    assert scrape.values["trainwarden_build_info", frozenset({("version", __version__)})] == 1


def test_what_they_say(shown: Shown) -> None:
    scrape = everything(shown).scrape()
    expected = {
        ("attempt",): 1, ("ranks", "expected"): 4, ("ranks", "fresh"): 4, ("last_step",): 69,
        ("steps_total", "new"): 69, ("steps_total", "repeated"): 0, ("tokens_total",): 69 * 4 * 0.5,
        ("step_window_seconds", "0.99"): 0.5, ("step_expected_seconds",): 0.5,
        ("nonfinite_steps_total", "loss"): 69, ("nonfinite_steps_total", "grad_norm"): 0,
        ("checkpoint_last_step",): 60, ("checkpoint_interval_seconds",): 30, ("checkpoint_pending_saves",): 1,
        ("checkpoints_total", "published"): 2, ("incidents_opened_total", "process.killed"): 1,
        ("plans_total", "rank.slow", "act", "reached"): 1, ("plans_total", "rank.slow", "act", "failed"): 0,
        ("plan_refusals_total", "budget"): 1, ("notices_total", "jsonl", "taken"): 2, ("rows_total", "late"): 3,
        ("source_up", "processes@n1"): 1, ("source_up", "rings@n0"): 1, ("source_up", "own_work"): 1,
        ("alertmanager_peer_up", "http://am2:9093"): 0, ("journal_writable",): 1, ("plans_running",): 1,
        ("turns_total",): 3, ("turn_seconds_total",): 0.006, ("frame_lag_seconds",): 0,
        ("last_step_timestamp_seconds",): shown.now_ns / 1e9, ("heartbeat_timestamp_seconds",): shown.now_ns / 1e9,
        ("job_start_timestamp_seconds",): START_NS / 1e9, ("checkpoint_last_timestamp_seconds",): START_NS / 1e9 + 30,
        ("last_new_step_timestamp_seconds",): shown.now_ns / 1e9, ("step_loss", "0.5"): 0.5,
    }  # fmt: skip
    found = {(name, *labels): scrape.rows(name).get(tuple(labels)) for name, *labels in expected}
    assert found == pytest.approx(expected)
    activities = scrape.rows("job_activity_seconds_total")
    assert set(activities) == {(name,) for name in ACTIVITIES}
    assert sum(activities.values()) == pytest.approx(scrape.get("job_wall_seconds_total"))
    assert scrape.get("incident_phase_seconds_bucket", phase="detect", le="0.5") == 1
    assert scrape.get("incident_phase_seconds_bucket", phase="stop", le="2") == 0
    assert scrape.get("incident_phase_seconds_bucket", phase="stop", le="5") == 1
    assert scrape.get("incident_phase_seconds_bucket", phase="load", le="1800") == 0
    assert scrape.get("incident_phase_seconds_sum", phase="load") == 4000


def test_what_is_not_known_is_absent_and_what_is_known_to_be_zero_is_zero(shown: Shown) -> None:
    scrape = shown.turn().scrape()
    unknown = (
        *("ranks", "attempt", "last_step", "last_progress_timestamp_seconds", "tokens_total", "frame_lag_seconds"),
        *("step_window_seconds", "step_expected_seconds", "rank_own_work_ratio", "alertmanager_peer_up"),
        *("checkpoint_last_step", "checkpoint_pending_saves", "checkpoint_interval_seconds"),
    )
    assert [name for name in unknown if scrape.rows(name)] == []
    assert [one.metric for one in SIGNALS.values() if one.metric in scrape.names()] == []
    assert set(scrape.rows("incidents_opened_total").values()) == {0}
    assert len(scrape.rows("incidents")) == 4 * 5
    assert scrape.rows("nonfinite_steps_total") == {("loss",): 0, ("grad_norm",): 0, ("local",): 0}
    assert scrape.get("incident_phase_seconds_count", phase="warm_up") == 0
    assert scrape.rows("source_up") == {("processes@n1",): 1}, "the rings have not said anything yet"


def test_rollups_are_exact_and_of_what_was_seen(shown: Shown) -> None:
    loss_R = np.random.default_rng(3).normal(2, 1, 1000).astype(np.float32)
    loss_R[::7] = np.nan
    told = np.where(np.arange(1000) == 5, np.inf, loss_R)
    scrape = shown.start().close(1, 1000, step_s=1.0, loss=told).turn().scrape()
    known = np.delete(loss_R, 5)
    expected = {(str(q),): np.nanquantile(known, q) for q in (0.5, 0.99, 1)}
    assert scrape.rows("step_loss") == pytest.approx(expected)
    assert scrape.rows("step_grad_norm") == {}, "no rank told it"


def test_a_loss_that_is_no_number_is_counted_and_not_shown(shown: Shown) -> None:
    shown.start().close(1, loss=1.0, flags=[0, 0, 0, 0])
    scrape = shown.close(2, loss=np.nan, grad_norm=np.inf, flags=[LOSS_NONFINITE | GRAD_NONFINITE] * 4).turn().scrape()
    assert scrape.rows("step_loss") == {}
    assert scrape.rows("step_grad_norm") == {}
    assert scrape.rows("nonfinite_steps_total") == {("loss",): 1, ("grad_norm",): 1, ("local",): 0}


def test_the_five_slowest_ranks_by_own_work_and_nobody_who_is_blind(shown: Shown) -> None:
    ratio_R = np.array([1.0, 1.4, np.nan, 1.1, 1.2, 1.3, 0.9, 1.7])
    devices = [f"GPU-{rank}" for rank in range(8)]
    devices[1] = 'n1"}\n\\ \x1b[2J\ud800' + "x" * 500
    seen = OwnWorkSeen(ratio_R=ratio_R, device_R=tuple(devices), blind=True)
    rows = shown.start().turn(own_work=seen).scrape().rows("rank_own_work_ratio")
    assert [rank for rank, _ in rows] == ["7", "1", "5", "4", "3"]
    assert max(len(device) for _, device in rows) <= 80
    assert shown.scrape().get("source_up", source="own_work") == 0
    few = replace(seen, ratio_R=np.array([np.nan, 1.2] + [np.nan] * 6))
    assert list(shown.turn(own_work=few).scrape().rows("rank_own_work_ratio").values()) == [1.2]


def test_the_detector_keeps_what_it_saw_of_its_own_work() -> None:
    straggler, here = Straggler(), topology(4, devices=[f"GPU-{rank}" for rank in range(4)])
    assert straggler.own_work is None
    for step in range(12):
        straggler.update(step_matrix(here, step, {"forward_s": [0.1, 0.1, 0.2, 0.1]}))
    assert straggler.own_work is not None
    assert straggler.own_work.ratio_R.tolist() == pytest.approx([1, 1, 2, 1])
    assert not straggler.own_work.blind
    straggler.update(step_matrix(topology(2, epoch=1 << 32), 12, {"forward_s": [0.1, 0.1]}))
    assert straggler.own_work is None, "of another numbering"


def test_a_new_attempt_has_steps_of_its_own(shown: Shown) -> None:
    for step in range(1, 11):
        shown.start().close(step, step_s=1.0, loss=2.0)
    scrape = shown.start(2, "plan").scrape()
    assert scrape.rows("step_window_seconds") == {}
    assert scrape.rows("step_loss") == {}
    assert scrape.get("last_step") == 10
    scrape = shown.close(6, step_s=3.0, loss=2.1).close(11, step_s=3.0).turn().scrape()
    assert scrape.get("step_window_seconds", quantile="0.5") == 3.0
    assert scrape.rows("steps_total") == {("new",): 11, ("repeated",): 1}
    assert scrape.get("attempt") == 2


def test_an_attempt_that_ended_is_shown_for_a_quarter_of_an_hour(shown: Shown) -> None:
    shown.start().close(1, step_s=1.0)
    shown.take(shown.world().event("attempt.ended", None, attempt=1, term=1, by="keeper", code=0))
    shown.now_ns += 899 * 10**9
    assert shown.turn().scrape().rows("step_seconds") != {}
    shown.now_ns += 2 * 10**9
    scrape = shown.turn().scrape()
    assert scrape.rows("step_seconds") == {}
    assert scrape.get("last_step") == 1


def test_what_a_step_should_take_is_set_or_the_best_that_the_job_had(tmp_path: Path, shown: Shown) -> None:
    shown.start()
    for step, seconds in enumerate([3.0] * 64 + [2.0] * 64 + [4.0] * 64):
        shown.close(step, step_s=seconds)
    scrape = shown.turn().scrape()
    assert scrape.get("step_expected_seconds") == 2.0
    assert scrape.get("step_window_seconds", quantile="0.5") == 4.0, "of the newest 100"
    config = MetricsConfig(expected_step=timedelta(seconds=1), checkpoint_interval=timedelta(minutes=5))
    scrape = Shown(tmp_path / "other", config).start().scrape()
    assert scrape.get("step_expected_seconds") == 1.0
    assert scrape.get("checkpoint_interval_seconds") == 300.0


def test_an_evaluation_inside_a_step_makes_no_slow_step(shown: Shown) -> None:
    """Every 25th would be the P99 for ever, and an alert with it."""
    shown.start()
    for step in range(100):
        pause_s = 9.0 if step % 25 == 0 else 0.0
        shown.close(step, step_s=1.0 + pause_s, forward_s=1.0, eval_s=pause_s)
    assert shown.turn().scrape().get("step_window_seconds", quantile="1") == 1.0


def test_a_source_is_blind_until_it_says_otherwise(shown: Shown) -> None:
    def told(kind: str) -> float | None:
        event = shown.world().event(kind, None, why="so").items[0]
        assert isinstance(event, Event)
        subject = replace(event.subject, kind="source", id="kernel-log@n1")
        shown.metrics.take(replace(event, subject=subject))
        return shown.scrape().get("source_up", source="kernel-log@n1")

    shown.start()
    assert shown.scrape().get("source_up", source="kernel-log@n1") is None
    assert told("source.blind") == 0
    assert told("source.up") == 1
    assert told("source.blind") == 0
    assert shown.start(2, "plan").scrape().rows("source_up") == {("processes@n1",): 1}, "all is read anew"


def test_ranks_that_were_not_heard_of_just_now_are_not_fresh(shown: Shown) -> None:
    world = shown.start().world()
    world.silent.add(3)
    world.poll()
    shown.take(world.hello())
    assert shown.turn().scrape().rows("ranks") == {("expected",): 4, ("fresh",): 3}
    shown.now_ns += 2 * 10**9
    assert shown.turn().scrape().rows("ranks") == {("expected",): 4, ("fresh",): 0}


def test_no_counter_falls_when_a_supervisor_is_killed(shown: Shown) -> None:
    before = everything(shown).scrape()
    for step in range(70, 80):
        shown.close(step, step_s=1.0, tokens=1.0)  # nobody asked after this
    shown.begin()
    shown.start(1, "take-over").turn(counts={("rows_total", "late"): 2})
    after = shown.scrape()
    counters = [key for key in before.values if key[0].endswith(("_total", "_bucket"))]
    assert len(counters) > 50
    assert [key for key in counters if not before.values[key] <= after.values[key] <= before.values[key] + 2] == []
    shown.close(60, step_s=1.0).close(70, step_s=1.0)
    after = shown.turn().scrape()
    assert after.rows("steps_total") == {("new",): 70, ("repeated",): 0}, "its line told step 60 again"
    assert after.get("step_expected_seconds") == 0.5
    assert after.get("rows_total", fate="late") == 3, "what its parts had counted is counted once"


def test_a_job_that_a_person_starts_again_has_a_new_start_and_its_old_counts(shown: Shown) -> None:
    shown.start().close(1, step_s=1.0).turn()
    shown.now_ns += 86_400 * 10**9
    scrape = shown.start(2).scrape()
    assert scrape.get("job_start_timestamp_seconds") == shown.now_ns / 1e9
    assert scrape.rows("last_new_step_timestamp_seconds") == {}
    assert scrape.get("steps_total", kind="new") == 1
    assert scrape.get("job_wall_seconds_total") == pytest.approx(1.0), "nobody watched the night"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"counts": 3}', b"\xff"])
def test_counters_that_cannot_be_read_begin_anew(tmp_path: Path, content: bytes) -> None:
    file = JobFolder.make(tmp_path, JOB).path / "metrics.json"
    file.write_bytes(content)
    assert Shown(tmp_path).start().scrape().get("steps_total", kind="new") == 0
    assert json.loads(file.read_text())["counts"]


def test_a_folder_that_takes_no_file_is_no_reason_to_say_nothing(shown: Shown) -> None:
    shutil.rmtree(shown.folder.path)
    assert shown.start().close(1, step_s=1.0).turn().scrape().get("last_step") == 1


RANKS = 16_384


def test_a_scrape_of_many_ranks_is_short_and_costs_little_more_than_the_quantiles_themselves(tmp_path: Path) -> None:
    shown = Shown(tmp_path).start()
    values = np.random.default_rng(0).random((len(FEATURES), RANKS)).astype(np.float32)
    where = topology(RANKS, epoch=epoch_of(1, 0, 0))
    matrix = step_matrix(where, 1, dict(zip(FEATURES, values.astype(np.float64), strict=True)))
    shown.metrics.step(matrix)
    ratio_R = np.random.default_rng(1).random(RANKS)
    own_work = OwnWorkSeen(ratio_R=ratio_R, device_R=where.device_R, blind=False)
    assert len(shown.turn(own_work=own_work).scrape().values) < 500, "as for four ranks"

    def floor(matrix: StepMatrix) -> None:
        for row_R in matrix.values_FR:
            np.quantile(row_R, [0.5, 0.99, 1.0])

    assert best_s(lambda: generate_latest(shown.registry)) < 5 * best_s(lambda: floor(matrix)) + 0.01


def best_s(act: Callable[[], object]) -> float:
    """CPU time of the fastest of several: what others do on the machine does not count."""
    times = []
    for _ in range(7):
        began_s = time.thread_time()
        act()
        times.append(time.thread_time() - began_s)
    return min(times)


def test_tries_to_tell_somebody_are_counted_by_how_they_ended() -> None:
    tries, clock = Tries(), Clock()
    counted = Counted(Channel("web", clock, busy(), DeliveryError("no", retryable=False)), tries)
    for _ in range(2):
        with pytest.raises(DeliveryError):
            counted.notify(NOTICE)
    assert counted.notify(NOTICE) == "taken"
    assert tries.counts() == {("web", "failed"): 2, ("web", "taken"): 1}
