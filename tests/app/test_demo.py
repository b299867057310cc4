"""What the demo reads from a finished run, and how it shows it. No training is run here."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from trainwarden.app.cli.demo import TABLE_WIDTH
from trainwarden.app.demo import Result
from trainwarden.app.folders import JobFolder
from trainwarden.app.repaired import read_loss, read_repaired
from trainwarden.app.store import Store
from trainwarden.app.verdicts import COLUMNS, action_of, table
from trainwarden.core.codec import dumps
from trainwarden.core.model import Epoch, Event, Finding, JobId, Json, Outcome, Stimulus, Subject, Tier
from trainwarden.core.records import epoch_of
from trainwarden.rehearsal.faults import Strike
from trainwarden.rehearsal.judging import Repaired, Told, judge
from trainwarden.rehearsal.scenario import built_in

JOB = JobId("job")
SECOND = 1_000_000_000
STRUCK_NS = 100 * SECOND
PROGRESS = [((90 + step // 4) * SECOND, step) for step in range(1, 46)]
"""Step 43 has begun when the fault strikes; step 44 begins a second after it, when attempt 2 has started."""
BITS = (1.5).hex()


def attempt(folder: JobFolder, **told: Json) -> None:
    folder.new_attempt({"env": {}}, {"checkpoint": None, "skip": [], "without": [], **told})


def started(number: int, after_s: float) -> Event:
    return Event(
        kind="attempt.started",
        subject=Subject(kind="job", id=JOB),
        source="run@n1",
        seq=number,
        t_ns=round(STRUCK_NS + after_s * SECOND),
        seen_ns=0,
        job=JOB,
        epoch=Epoch(epoch_of(number, 0, 0)),
        data={"attempt": number, "term": 1, "by": "plan"},
    )


def ran(number: int, **changed: Mapping[str, Json]) -> Outcome:
    found: dict[str, Json] = {"attempt": number, "checkpoint": "step-20-4294967296", "refused": {}, **changed}
    return Outcome(plan="i/plan-1", index=1, result="reached", reason="", retryable=False, found=found)


def finding(number: int, status: Literal["provisional", "final", "cleared"] = "final") -> Finding:
    return Finding(
        id="straggler",
        revision=0,
        status=status,
        kind="rank.slow",
        subject=Subject(kind="rank", id="2"),
        suspects=(),
        job=JOB,
        epoch=Epoch(epoch_of(number, 0, 0)),
        onset_ns=0,
        onset_step=None,
        seen_ns=0,
        confidence=1.0,
        reason="",
        evidence=(),
    )


def write(folder: JobFolder, entries: Sequence[tuple[float, Stimulus]]) -> None:
    """Entries and when they were written down, in seconds after the fault."""
    store = Store(folder.path / "journal.sqlite")
    for number, (after_s, entry) in enumerate(entries):
        store.append(str(number), round(STRUCK_NS + after_s * SECOND), dumps(entry))
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    folder = JobFolder.make(tmp_path, JOB)
    attempt(folder)
    return folder


def read(folder: JobFolder, struck_ns: int | None = STRUCK_NS) -> Repaired:
    return read_repaired(folder, struck_ns, PROGRESS, BITS)


def test_a_run_that_nobody_touched(folder: JobFolder) -> None:
    write(folder, [(-20.0, started(1, -20.0)), (1.0, finding(1))])
    assert read(folder) == Repaired(attempts=1, final_loss=BITS)


def test_a_run_that_was_restarted(folder: JobFolder) -> None:
    attempt(folder, checkpoint="/s/checkpoints/published/step-20-4294967296")
    write(folder, [(-20.0, started(1, -20.0)), (0.2, finding(1)), (0.5, started(2, 0.5)), (11.25, ran(2))])
    assert read(folder) == Repaired(
        attempts=2, checkpoint=20, recovered_after_s=11.25, steps_lost=43 - 20, final_loss=BITS
    )


def test_a_run_without_a_slot_and_a_batch(folder: JobFolder) -> None:
    attempt(folder, checkpoint="/p/step-20-1", without=["n1:2"], skip=[[35, 36], [40, 40]])
    write(folder, [(0.5, started(2, 0.5)), (11.0, ran(2))])
    found = read(folder)
    assert (found.without, found.skip) == ((2,), (35, 36, 40))


def test_a_checkpoint_that_was_refused_is_told(folder: JobFolder) -> None:
    attempt(folder, checkpoint="/p/step-20-1")
    write(folder, [(0.5, started(2, 0.5)), (9.0, ran(2, refused={"step-40-1": "digest", "step-9-1": "distrusted"}))])
    assert read(folder).refused == (9, 40)


def test_a_run_that_was_restarted_from_the_beginning(folder: JobFolder) -> None:
    attempt(folder)
    write(folder, [(0.5, started(2, 0.5)), (9.0, ran(2))])
    assert (read(folder).checkpoint, read(folder).steps_lost) == (None, 43)


@pytest.mark.parametrize(
    ("outcome", "recovered_after_s"),
    [
        pytest.param(replace(ran(2), result="already"), 9.0, id="found running after an interruption"),
        pytest.param(replace(ran(2), result="failed"), None, id="it did not come up"),
        pytest.param(ran(1), None, id="of an older attempt"),
    ],
)
def test_when_a_run_has_recovered(outcome: Outcome, recovered_after_s: float | None, folder: JobFolder) -> None:
    attempt(folder, checkpoint="/p/step-20-1")
    write(folder, [(0.5, started(2, 0.5)), (9.0, outcome)])
    assert read(folder).recovered_after_s == recovered_after_s
    assert read(folder, struck_ns=None).recovered_after_s is None


@pytest.mark.parametrize(
    ("found", "relapses"),
    [
        pytest.param(finding(2), ("rank.slow",), id="found again"),
        pytest.param(finding(2, "provisional"), (), id="only suspected"),
        pytest.param(finding(1, "cleared"), (), id="the old one is cleared"),
        pytest.param(finding(1), (), id="the old one"),
    ],
)
def test_what_goes_wrong_after_the_repair(found: Finding, relapses: tuple[str, ...], folder: JobFolder) -> None:
    attempt(folder, checkpoint="/p/step-20-1")
    write(folder, [(0.5, started(2, 0.5)), (9.0, ran(2)), (12.0, found)])
    assert read(folder).relapses == relapses


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        pytest.param(json.dumps({"step": 80, "loss": 1.5, "hex": BITS}), (1.5, BITS), id="the end"),
        pytest.param(json.dumps({"step": 80, "loss": None, "hex": "nan"}), None, id="not finite"),
        pytest.param('{"step": 8', None, id="cut off"),
        pytest.param(None, None, id="never written"),
    ],
)
def test_the_final_loss(text: str | None, loss: tuple[float, str] | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "out.json").write_text(text)
    assert read_loss(tmp_path / "out.json") == loss


BACK = Repaired(attempts=2, checkpoint=20, recovered_after_s=11.0, steps_lost=10, final_loss=BITS)


@pytest.mark.parametrize(
    ("repaired", "words"),
    [
        pytest.param(Repaired(attempts=1), "none", id="nothing"),
        pytest.param(BACK, "restart from step 20", id="a restart"),
        pytest.param(replace(BACK, checkpoint=None), "restart from the beginning", id="without a checkpoint"),
        pytest.param(replace(BACK, refused=(40,)), "restart from step 20, not from 40", id="one is refused"),
        pytest.param(replace(BACK, without=(2,)), "restart from step 20, without slot 2", id="moved"),
        pytest.param(replace(BACK, skip=(35, 36)), "restart from step 20, skip batch 35, 36", id="rolled back"),
        pytest.param(replace(BACK, attempts=3), "restart from step 20, 2 restarts", id="twice"),
        pytest.param(replace(BACK, relapses=("rank.slow",)), "restart from step 20, again rank.slow", id="in vain"),
    ],
)
def test_what_was_done_in_words(repaired: Repaired, words: str) -> None:
    assert action_of(repaired) == words


def result(repaired: Repaired, loss: str | None, *, compared: bool = True) -> Result:
    """Of scenario a."""
    scenario = built_in()["a-killed"]
    told = Told(t_ns=STRUCK_NS + SECOND // 5, id="i", kind="process.killed", tier=Tier.ERROR, culprit="rank:2")
    strikes = [Strike(fault=0, step=30, t_ns=STRUCK_NS, rank=2)]
    verdict = judge(scenario, [told], strikes, PROGRESS, repaired if compared else None, {"undisturbed": loss})
    return Result(
        scenario=scenario,
        verdict=verdict,
        repaired=repaired,
        compared=compared,
        final_loss=None if repaired.final_loss is None else float.fromhex(repaired.final_loss),
        wall_s=1.0,
        folder=Path("/nowhere"),
    )


def shown(one: Result, width: int = 400) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table([one]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("one", "words"),
    [
        pytest.param(result(BACK, BITS), "= undisturbed", id="the same loss"),
        pytest.param(result(BACK, (1.25).hex()), "DIFFERENT", id="another loss"),
        pytest.param(result(replace(BACK, final_loss=None), BITS), "none WRONG", id="no loss"),
        pytest.param(result(replace(BACK, checkpoint=40), BITS), "WRONG", id="another checkpoint"),
        pytest.param(result(BACK, BITS), "11.0 s", id="how long it took"),
        pytest.param(result(Repaired(attempts=1), None, compared=False), "none", id="only observed"),
    ],
)
def test_what_the_table_shows(one: Result, words: str) -> None:
    assert words in shown(one)
    assert "WRONG" not in shown(one) or not one.verdict.ok


def test_a_name_is_not_broken_in_the_width_of_a_log() -> None:
    text = shown(result(BACK, BITS), TABLE_WIDTH)
    whole = ["a-killed", "process.killed", "ERROR", "rank:2", "= undisturbed", "11.0 s"]
    assert all(words in text for words in (*whole, *(word for name in COLUMNS for word in name.split())))
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
