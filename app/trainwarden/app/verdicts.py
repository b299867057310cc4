"""The demo's table: a row a scenario, what was said and what was done, each against what was expected."""

from collections.abc import Sequence

from rich.table import Table

from trainwarden.app.demo import Result
from trainwarden.rehearsal.judging import Repaired

COLUMNS = (
    "scenario",
    "what happens",
    "detected after\n(goal)",
    "culprit",
    "kind",
    "tier",
    "false\nalarms",
    "action",
    "recovered\nafter",
    "steps\nlost",
    "final loss",
)
WRAPPED = ("what happens", "action")
"""Columns of sentences; the others hold names and numbers, which are not broken into lines."""
FOOTNOTE = (
    "recovered after: from the fault until the journal has that every rank of the new attempt has begun a step; "
    "steps lost: steps that had begun and were done again; final loss: compared to the last bit"
)


def table(results: Sequence[Result]) -> Table:
    """All of it."""
    table = Table(caption=FOOTNOTE, caption_justify="left")
    for name in COLUMNS:
        table.add_column(name, no_wrap=name not in WRAPPED)
    for result in results:
        table.add_row(*_said(result), *_done(result))
    return table


def _said(result: Result) -> list[str]:
    verdict, title = result.verdict, result.scenario.title
    alarms = str(len(verdict.false_alarms))
    if not verdict.found:
        return [verdict.scenario, title, "nothing to say", "-", "-", "-", alarms]
    told = verdict.found[0].told
    culprit = f"{told.culprit if told else 'nobody'}{'' if verdict.culprit_right else ' WRONG'}"
    kind = f"{told.kind if told else 'nothing'}{'' if verdict.kind_right else ' WRONG'}"
    tier = f"{told.tier.name if told else '-'}{'' if verdict.tier_right else ' WRONG'}"
    return [verdict.scenario, title, _after(result), culprit, kind, tier, alarms]


def _after(result: Result) -> str:
    """Measured against the goal, in the goal's unit."""
    found, verdict = result.verdict.found[0], result.verdict
    late = "" if found.in_time else " LATE"
    if found.expect.within_steps is not None:
        return f"{verdict.detected_after_steps} steps ({found.expect.within_steps}){late}"
    seconds = "never" if verdict.detected_after_s is None else f"{verdict.detected_after_s:.2f} s"
    return f"{seconds} ({found.expect.within_s:g} s){late}"


def _done(result: Result) -> list[str]:
    repaired = result.repaired
    action = action_of(repaired) + ("" if result.verdict.repair_right else " WRONG")
    recovered = "-" if repaired.recovered_after_s is None else f"{repaired.recovered_after_s:.1f} s"
    lost = "-" if repaired.steps_lost is None else str(repaired.steps_lost)
    return [action, recovered, lost, _loss(result)]


def action_of(repaired: Repaired) -> str:
    """What was done, in words."""
    if repaired.attempts <= 1:
        return "none"
    start = "the beginning" if repaired.checkpoint is None else f"step {repaired.checkpoint}"
    parts = [f"restart from {start}"]
    if repaired.refused:
        parts.append(f"not from {_listed(repaired.refused)}")
    if repaired.without:
        parts.append(f"without slot {_listed(repaired.without)}")
    if repaired.skip:
        parts.append(f"skip batch {_listed(repaired.skip)}")
    if repaired.attempts > 2:
        parts.append(f"{repaired.attempts - 1} restarts")
    if repaired.relapses:
        parts.append(f"again {', '.join(repaired.relapses)}")
    return ", ".join(parts)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _loss(result: Result) -> str:
    if result.final_loss is None:
        return "none" if result.verdict.loss_right else "none WRONG"
    other, acted = result.scenario.compared_with, result.compared
    loss = f"{result.final_loss:.6f}"
    if other is None or not acted:
        return loss
    return f"{loss}\n= {other}" if result.verdict.loss_right else f"{loss}\nDIFFERENT"
