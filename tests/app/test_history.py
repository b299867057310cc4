"""The recent past of a job: what is kept, what goes, and who may look."""

import threading

import numpy as np
import pytest

from trainwarden.app.history import History, HistoryConfig, own_work_ratio_R
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Epoch, JobId, StepMatrix, Topology
from trainwarden.core.records import FEATURES, epoch_of

JOB = JobId("job")
RANKS = 4
STEP_BYTES = RANKS * (4 * len(FEATURES) + 4 + 1)


def closed(attempt: int, step: int, *, lap: int = 0, ranks: int = RANKS, slow: float = 1.0) -> StepMatrix:
    values_FR = np.full((len(FEATURES), ranks), np.nan, np.float32)
    values_FR[FEATURES.index("forward_s")] = 0.01
    values_FR[FEATURES.index("forward_s"), 2] = 0.01 * slow
    values_FR[FEATURES.index("runq_s")] = 0.0
    return StepMatrix(
        topology=Topology(
            job=JOB,
            epoch=Epoch(epoch_of(attempt, 0, lap)),
            device_R=tuple(f"n1:{rank}" for rank in range(ranks)),
            node_R=np.zeros(ranks, np.int32),
            coords_RP=np.full((ranks, 5), -1, np.int16),
            domains={"n1": {}},
        ),
        step=step,
        batch=step,
        seen_ns=step,
        partial=False,
        values_FR=values_FR,
        seen_R=np.ones(ranks, np.bool_),
        flags_R=np.zeros(ranks, np.uint32),
        micro_MKR=np.zeros((2, 3, ranks), np.float32),
    )


def history(*attempts: tuple[int, int], config: HistoryConfig | None = None, missed: int = -1) -> History:
    """(attempt, how many steps) each."""
    kept = History(config, missed=missed)
    for attempt, steps in attempts:
        for step in range(1, steps + 1):
            kept.add(closed(attempt, step))
    return kept


def numbers(kept: History, attempt: int) -> list[int]:
    return [matrix.step for matrix in kept.of_attempt(attempt)]


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        pytest.param(HistoryConfig(steps=3), [8, 9, 10], id="the newest"),
        pytest.param(HistoryConfig(max_bytes=3 * 5 * STEP_BYTES), [6, 7, 8, 9, 10], id="as many as memory allows"),
        pytest.param(HistoryConfig(max_bytes=1), [10], id="at least one"),
        pytest.param(HistoryConfig(), list(range(1, 11)), id="all that fits"),
    ],
)
def test_what_is_kept_of_an_attempt(config: HistoryConfig, steps: list[int]) -> None:
    kept = history((1, 10), config=config)
    assert numbers(kept, 1) == steps
    assert kept.from_start(1) is (len(steps) == 10)


def test_the_oldest_attempts_go() -> None:
    kept = history((1, 2), (2, 2), (4, 2), (7, 1))
    assert [numbers(kept, attempt) for attempt in (1, 2, 4, 7)] == [[], [1, 2], [1, 2], [1]]
    assert [matrix.step for matrix in kept.before(7)] == [1, 2, 1, 2]
    assert kept.before(2) == []


def test_a_late_step_of_an_attempt_that_went_brings_it_not_back() -> None:
    kept = history((2, 1), (3, 1), (4, 1), (1, 1))
    assert numbers(kept, 1) == []
    assert numbers(kept, 2) == [1]


def test_steps_of_one_epoch_are_found_by_number() -> None:
    kept = history((1, 5))
    kept.add(closed(1, 3, lap=1))
    assert [matrix.step for matrix in kept.steps(JOB, Epoch(epoch_of(1, 0, 0)), 2, 4)] == [2, 3, 4]
    assert [matrix.step for matrix in kept.steps(JOB, Epoch(epoch_of(1, 0, 1)), 2, 4)] == [3]
    assert kept.steps(JobId("another"), Epoch(epoch_of(1, 0, 0)), 2, 4) == []


def test_micro_batches_are_not_kept() -> None:
    assert history((1, 1)).of_attempt(1)[0].micro_MKR is None


def test_the_beginning_of_an_attempt_that_ran_before_us_is_not_claimed() -> None:
    kept = history((2, 1), (3, 1), missed=2)
    assert [kept.from_start(attempt) for attempt in (2, 3, 4)] == [False, True, False]


def test_readers_in_other_threads_see_whole_attempts_in_order() -> None:
    kept, wrong, written = History(HistoryConfig(steps=16)), list[list[int]](), threading.Event()

    def read() -> None:
        while not written.is_set():
            seen = numbers(kept, 1)
            if seen != list(range(seen[0], seen[0] + len(seen))) if seen else False:
                wrong.append(seen)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(2000):
        kept.add(closed(1, step))
    written.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert numbers(kept, 1) == list(range(1984, 2000))


def test_own_work_is_that_of_the_straggler_detector() -> None:
    steps = [closed(1, 1, ranks=3), *(closed(1, step, slow=1.5) for step in range(2, 10))]
    np.testing.assert_allclose(own_work_ratio_R(steps), [1.0, 1.0, 1.5, 1.0], rtol=1e-6)
    assert np.isnan(own_work_ratio_R(steps, blind={2})).tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", ["steps", "attempts", "max_bytes"])
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"history.{name}: need at least 1, got 0"):
        HistoryConfig(**{name: 0})
