"""Verification after recovery: what a resume can get wrong, and what is none of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from trainwarden.app.history import History, own_work_ratio_R
from trainwarden.core.errors import ActionError, ConfigError
from trainwarden.core.model import Checkpoint, Epoch, JobId, Json, Rung, StepMatrix, Subject, Topology
from trainwarden.core.records import FEATURES, GRAD_NONFINITE, LOSS_NONFINITE, epoch_of
from trainwarden.remediation.resumed import Origin
from trainwarden.remediation.verify import Verification, VerificationConfig

JOB = JobId("job")
STEP_NS = 100_000_000
SIGMA = 0.02
"""Deviation of the loss from batch to batch."""
NOISE = np.random.default_rng(7).normal(0.0, SIGMA, 1000)
SAVED, DIED = 80, 95
"""The checkpoint's step, and the last step of the first attempt."""


def curve(step: int, batch: int) -> dict[str, float]:
    """What the training tells at a step: the same for the same data."""
    loss = 2.0 + 3.0 * 0.97**step + NOISE[batch]
    rate = 1e-3 * min(1.0, step / 20) * (1 - step / 10_000)
    return {"loss": loss, "grad_norm": 1.0 + 5 * NOISE[batch], "learning_rate": rate}


@dataclass(kw_only=True)
class Attempt:
    """An attempt to be recorded; by default one that goes on well from the checkpoint."""

    number: int = 2
    first: int = SAVED + 1
    steps: int = 10
    ranks: int = 4
    shift: int = 0
    """Batch minus step."""
    skip: int | None = None
    """Batch that is left out."""
    told: Callable[[int, int], dict[str, float]] = curve
    """Values at (step, batch)."""
    step_s: Callable[[int], float] = lambda nth: 0.1
    """Of the nth step, from 0."""
    flags: Mapping[int, int] = field(default_factory=dict)
    """By step."""
    slow: float = 1.0
    """Own work of rank 2."""
    absent: int | None = None

    def record(self, history: History) -> None:
        self.shifted = self.shift
        for nth in range(self.steps):
            history.add(self._matrix(nth, self.first + nth))

    def _matrix(self, nth: int, step: int) -> StepMatrix:
        if step + self.shifted == self.skip:
            self.shifted += 1
        batch = step + self.shifted
        own_s = np.full(self.ranks, 0.01)
        own_s[2] *= self.slow
        values_FR = np.full((len(FEATURES), self.ranks), np.nan, np.float32)
        for name, value in {**self.told(step, batch), "step_s": self.step_s(nth), "runq_s": 0.0}.items():
            values_FR[FEATURES.index(name)] = value
        values_FR[FEATURES.index("forward_s")] = own_s
        seen_R = np.arange(self.ranks) != (-1 if self.absent is None else self.absent)
        return StepMatrix(
            topology=topology(self.number, self.ranks),
            step=step,
            batch=batch,
            seen_ns=(self.number * 10_000 + nth) * STEP_NS,
            partial=not bool(seen_R.all()),
            values_FR=np.where(seen_R, values_FR, np.nan).astype(np.float32),
            seen_R=seen_R,
            flags_R=np.full(self.ranks, self.flags.get(step, 0), np.uint32),
        )


def topology(attempt: int, ranks: int) -> Topology:
    return Topology(
        job=JOB,
        epoch=Epoch(epoch_of(attempt, 0, 0)),
        device_R=tuple(f"n1:{rank}" for rank in range(ranks)),
        node_R=np.zeros(ranks, np.int32),
        coords_RP=np.full((ranks, 5), -1, np.int16),
        domains={"n1": {}},
    )


FIRST = Attempt(number=1, first=1, steps=DIED)
ONSET_NS = 20_000 * STEP_NS
CHECKPOINT = Checkpoint(
    name="step-80-1",
    job=JOB,
    epoch=Epoch(epoch_of(1, 0, 0)),
    step=SAVED,
    t_ns=0,
    loss=curve(SAVED, SAVED)["loss"],
    grad_norm=curve(SAVED, SAVED)["grad_norm"],
    data_position=SAVED + 1,
    topology={"world_size": 4},
    rank_steps=dict.fromkeys(range(4), SAVED),
    trust="good",
    pinned=False,
    files={},
)
KILLED = Origin(kind="process.killed", onset_ns=ONSET_NS, checkpoint=CHECKPOINT)
SLOW = replace(KILLED, kind="rank.slow")
AFRESH = replace(KILLED, checkpoint=None)
RUNG = Rung(goal="verified", target=Subject(kind="job", id=JOB), args={"attempt": 2, "steps": 10}, deadline_s=600.0)


def recorded(*attempts: Attempt) -> History:
    history = History()
    for attempt in attempts:
        attempt.record(history)
    return history


def verification(history: History, origin: Origin = KILLED, *, exact: bool = False) -> Verification:
    return Verification(history, lambda rung: origin, own_work_ratio_R, VerificationConfig(exact=exact))


def failure(checked: Verification, rung: Rung = RUNG) -> str:
    with pytest.raises(ActionError) as caught:
        checked.pursue(rung, fence=1)
    assert not caught.value.retryable
    return str(caught.value)


def results(checked: Verification, rung: Rung = RUNG) -> dict[str, Json]:
    found = checked.pursue(rung, fence=1)["checks"]
    assert isinstance(found, Mapping)
    return {name: check["result"] for name, check in found.items() if isinstance(check, Mapping)}


def words(checked: Verification, name: str) -> str:
    found = checked.pursue(RUNG, fence=1)["checks"]
    assert isinstance(found, Mapping)
    check = found[name]
    assert isinstance(check, Mapping)
    return str(check["got"])


def warming_up(nth: int) -> float:
    return 3.0 if nth == 0 else 0.5 if nth < 4 else 0.1


def raised(by: float) -> Callable[[int, int], dict[str, float]]:
    return lambda step, batch: {**curve(step, batch), "loss": curve(step, batch)["loss"] + by}


def restarted_schedule(step: int, batch: int) -> dict[str, float]:
    return {**curve(step, batch), "learning_rate": curve(step - SAVED, batch)["learning_rate"]}


def other_bits(step: int, batch: int) -> dict[str, float]:
    """As from kernels that add up in any order."""
    now = curve(step, batch)
    return {**now, "loss": now["loss"] * (1 + 1e-4 * np.sin(step)), "grad_norm": now["grad_norm"] * 1.001}


def silence(step: int, batch: int) -> dict[str, float]:
    return {}


@pytest.mark.parametrize(
    ("attempt", "origin", "exact"),
    [
        pytest.param(Attempt(), KILLED, True, id="goes on as before"),
        pytest.param(Attempt(told=other_bits), KILLED, False, id="other bits, where bits may differ"),
        pytest.param(Attempt(step_s=warming_up), KILLED, True, id="first steps slow by warm-up only"),
        pytest.param(Attempt(steps=24, step_s=lambda nth: 0.4 if nth < 12 else 0.1), KILLED, True, id="settles late"),
        pytest.param(Attempt(), SLOW, True, id="the slow slot is gone"),
        pytest.param(Attempt(first=1), AFRESH, True, id="started afresh"),
        pytest.param(Attempt(shift=1, first=84), replace(AFRESH, skip=((84, 84),)), False, id="skips its first batch"),
        pytest.param(Attempt(steps=4), replace(KILLED, ended=True), True, id="ended in order before the tenth step"),
        pytest.param(Attempt(ranks=3, step_s=lambda nth: 0.13), replace(KILLED, ranks=3), True, id="fewer ranks"),
    ],
)
def test_a_faithful_resume_is_verified(attempt: Attempt, origin: Origin, exact: bool) -> None:
    checked = verification(recorded(FIRST, attempt), origin, exact=exact)
    assert checked.reached(RUNG) is True, checked.pursue(RUNG, 1)


@pytest.mark.parametrize(
    ("attempt", "origin", "told"),
    [
        pytest.param(Attempt(first=82), KILLED, "resume: got step 82, expected step 81", id="a step late"),
        pytest.param(Attempt(first=1), KILLED, "resume: got step 1, expected step 81", id="checkpoint not loaded"),
        pytest.param(Attempt(shift=-1), KILLED, "resume: got batch 80, expected batch 81", id="data read again"),
        pytest.param(
            Attempt(),
            replace(KILLED, skip=((81, 82),)),
            "resume: got batch 81, expected batch 83",
            id="batch not skipped",
        ),
        pytest.param(Attempt(ranks=3), KILLED, "resume: got ranks 3, expected ranks 4", id="a rank lost on the way"),
        pytest.param(
            Attempt(told=restarted_schedule),
            KILLED,
            "resume: got learning_rate 4.9995e-05, expected learning_rate 0.0009919",
            id="schedule restarted",
        ),
        pytest.param(
            Attempt(flags={83: LOSS_NONFINITE}), KILLED, "finite: got NaN or infinity at step 83", id="NaN again"
        ),
        pytest.param(
            Attempt(steps=3, flags={83: GRAD_NONFINITE}), KILLED, "at step 83", id="NaN before the tenth step"
        ),
        pytest.param(
            Attempt(told=raised(5 * SIGMA)),
            KILLED,
            "loss: got 0 of 10 steps equal to the last bit; on the same data 0.1 away, expected at most 1 times",
            id="optimizer state lost",
        ),
        pytest.param(
            Attempt(steps=30, step_s=lambda nth: 0.15),
            KILLED,
            "step_time: got 0.15 s (1.50 times the recorded), expected at most 1.30 times the recorded 0.1 s",
            id="slower by half",
        ),
        pytest.param(
            Attempt(steps=30, slow=1.6),
            SLOW,
            "own_work: got rank 2 at 1.60 times its peers, expected every rank below 1.15 times its peers",
            id="slow slot still in use",
        ),
        pytest.param(
            Attempt(steps=30, absent=3),
            KILLED,
            "ranks: got nothing of 1 (first: rank 3), expected",
            id="a rank is silent",
        ),
    ],
)
def test_an_unfaithful_resume_is_named(attempt: Attempt, origin: Origin, told: str) -> None:
    checked = verification(recorded(FIRST, attempt), origin)
    assert checked.reached(RUNG) is False
    assert told in failure(checked)


def test_other_bits_fail_where_bits_must_be_the_same() -> None:
    checked = verification(recorded(FIRST, Attempt(told=other_bits)), exact=True)
    assert checked.reached(RUNG) is False
    assert "to the last bit" in failure(checked)


def test_bits_that_are_the_same_are_told() -> None:
    assert words(verification(recorded(FIRST, Attempt())), "loss") == "10 of 10 steps equal to the last bit"


@pytest.mark.parametrize(
    ("attempt", "origin"),
    [
        pytest.param(Attempt(steps=9), KILLED, id="fewer than ten steps"),
        pytest.param(Attempt(steps=29, step_s=lambda nth: 0.15), KILLED, id="slow, and may still settle"),
        pytest.param(Attempt(steps=29, slow=1.6), SLOW, id="a slow rank may still settle"),
    ],
)
def test_a_resume_is_not_judged_too_early(attempt: Attempt, origin: Origin) -> None:
    checked = verification(recorded(FIRST, attempt), origin)
    assert checked.reached(RUNG) is None
    checked.pursue(RUNG, fence=1)  # says what is found, and does not fail


def test_an_attempt_that_is_not_there_yet_is_not_asked_about() -> None:
    def nobody_knows(rung: Rung) -> Origin:
        raise AssertionError(rung)

    checked = Verification(recorded(FIRST), nobody_knows, own_work_ratio_R)
    assert checked.reached(RUNG) is None
    assert checked.pursue(RUNG, fence=1) == {"steps": 0}


def test_bits_agree_up_to_the_skipped_batch_and_values_stay_in_the_band_after_it() -> None:
    poisoned = Attempt(number=1, first=1, steps=86, flags={86: LOSS_NONFINITE})
    onset_ns = (10_000 + 85) * STEP_NS
    origin = Origin(
        kind="loss.nonfinite", onset_ns=onset_ns, before_ns=onset_ns, checkpoint=CHECKPOINT, skip=((86, 86),)
    )
    checked = verification(recorded(poisoned, Attempt(skip=86)), origin, exact=True)
    assert checked.reached(RUNG) is True
    assert words(checked, "loss") == "5 of 5 steps equal to the last bit"


def test_values_after_the_onset_are_no_measure_if_the_trouble_is_in_them() -> None:
    bent = Attempt(number=1, first=1, steps=DIED, told=lambda s, b: raised(0.5)(s, b) if s > 84 else curve(s, b))
    onset_ns = (10_000 + 84) * STEP_NS
    history = recorded(bent, Attempt())
    assert verification(history, replace(KILLED, onset_ns=onset_ns), exact=True).reached(RUNG) is False
    trusted = replace(KILLED, onset_ns=onset_ns, before_ns=onset_ns)
    assert verification(history, trusted, exact=True).reached(RUNG) is True


def test_without_a_past_what_cannot_be_told_is_said() -> None:
    checked = verification(recorded(Attempt()), replace(KILLED, checkpoint=None))
    assert checked.reached(RUNG) is True
    told = results(checked)
    assert {name for name, result in told.items() if result == "cannot tell"} == {"loss", "grad_norm", "step_time"}


def test_without_losses_the_checks_of_losses_cannot_tell() -> None:
    checked = verification(recorded(replace(FIRST, told=silence), Attempt(told=silence)))
    assert checked.reached(RUNG) is True
    assert results(checked) == {
        "resume": "holds",
        "finite": "holds",
        "loss": "cannot tell",
        "loss_at_save": "cannot tell",
        "grad_norm": "cannot tell",
        "grad_norm_at_save": "cannot tell",
        "step_time": "holds",
        "ranks": "holds",
    }


def test_a_jump_is_seen_by_the_checkpoint_alone() -> None:
    """The job was stopped right after its save: nothing is recorded at the same steps."""
    checked = verification(recorded(Attempt(number=1, first=1, steps=SAVED), Attempt(told=raised(0.5))))
    assert checked.reached(RUNG) is False
    assert failure(checked).startswith("loss_at_save: got ")


def test_step_times_are_required() -> None:
    checked = verification(recorded(FIRST, Attempt(steps=30, step_s=lambda nth: np.nan)))
    assert checked.reached(RUNG) is False
    assert "step_time: got no step time" in failure(checked)


def test_a_supervisor_that_came_later_does_not_judge_a_first_step_it_did_not_see() -> None:
    history = History(missed=2)
    for attempt in (FIRST, Attempt(first=90)):
        attempt.record(history)
    assert words(verification(history), "resume") == "the first step was not seen"


def test_an_attempt_that_failed_is_no_measure_for_the_next() -> None:
    bad, good = Attempt(steps=12, told=raised(0.5)), Attempt(number=3, first=91)
    origin = replace(KILLED, checkpoint=None)
    history = recorded(replace(FIRST, steps=90), bad)
    checked = verification(history, origin, exact=True)
    assert checked.reached(RUNG) is False
    good.record(history)
    assert results(checked, replace(RUNG, args={"attempt": 3, "steps": 10}))["loss"] == "cannot tell"


def test_what_is_found_tells_when_work_went_on() -> None:
    found = verification(recorded(FIRST, Attempt(step_s=warming_up))).pursue(RUNG, fence=1)
    assert found["begun_ns"] == 20_000 * STEP_NS - 3_000_000_000
    assert found["normal_ns"] == 20_004 * STEP_NS


@pytest.mark.parametrize(
    "wrong", [{"slow": 1.0}, {"healthy": 0.9}, {"recorded_steps": 8}, {"windows": 0}], ids=lambda wrong: str(wrong)
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        VerificationConfig(**wrong)  # type: ignore[arg-type]  # the table holds whole numbers for whole fields
