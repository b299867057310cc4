"""Gathers what a job's folder holds into the facts of a report, while the job runs or after.

The recording is read once, front to back, and nothing of a rank is kept but its place on a grid of bounded size, so
that memory grows by 180 bytes a step whatever the number of ranks. What is missing or cannot be read is said in the
report ("What could not be seen"); only a folder that is no job's is refused.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pandas as pd

from trainwarden.app.folders import AttemptFolder, JobFolder
from trainwarden.app.recorded import Recorded, label
from trainwarden.app.story import IncidentStory, PlanStory, Story
from trainwarden.core.errors import ConfigError
from trainwarden.core.kinds import KINDS
from trainwarden.core.model import Event, Incident, JobId, Outcome
from trainwarden.core.recording import step_table
from trainwarden.core.records import attempt_of
from trainwarden.core.version import __version__
from trainwarden.dashboards.facts import Attempt, Plan, Report, Rollback, Rung, Trouble
from trainwarden.dashboards.report import render
from trainwarden.detectors.straggler import StragglerConfig
from trainwarden.remediation.checkpoints.dcp import DcpStore
from trainwarden.remediation.checkpoints.select import Entry
from trainwarden.remediation.plans import DONE

LISTED: Final = 20
"""Of one sort of trouble with seeing at most; the rest are counted."""
EARLIER: Final = {"stopped": "stopped", "running": "runs again", "verified": "verified"}
"""Goal of a rung -> what an incident's lane says when it is reached."""
LOST: Final = {
    "copies": "rows that came twice",
    "late": "rows of steps that had closed without them",
    "old_epoch": "rows of an attempt that was over",
    "garbage": "rows with an impossible step or rank",
    "bad_events": "hellos or memberships that could not be used",
    "partial": "steps that closed without all ranks",
}


def find_run(named: str, state: Path) -> JobFolder:
    """The folder of a job: by its name below STATE, or by its path. Raises ConfigError."""
    for path in (state / named, Path(named)):
        if any((path / part).exists() for part in ("attempt", "frames", "journal.sqlite")):
            return JobFolder(path=path.resolve(), job=_job_of(path.resolve()))
    raise ConfigError(
        f"RUN: no run {named!r}: neither a job below {state} nor the path of a job's folder (STATE/<job>); "
        "name the job as `trainwarden run` did, with its --state"
    )


def gather(folder: JobFolder) -> Report:
    """Everything a report shows. Never raises for what is missing or damaged in the folder."""
    seen = Recorded(folder)
    steps = _labelled(step_table(seen.steps()))
    attempts = [folder.attempt(number) for number in sorted({*_attempts(folder.path), *seen.began_ns})]
    starts_ns = {one.number: seen.began_ns.get(one.number) or _kept_ns(one) for one in attempts}
    began_ns = min((t_ns for t_ns in (*starts_ns.values(), seen.first_ns) if t_ns), default=0)
    clock = _Clock(began_ns)
    steps["t_s"] = (steps.seen_ns - began_ns) / 1e9
    story = Story(folder.path / "story.jsonl")
    decided = (folder.path / "story.jsonl").exists() or not (folder.path / "notices.jsonl").exists()
    end_s = clock.s(seen.last_ns)
    checkpoints = DcpStore(folder.path / "checkpoints", folder.job).entries()
    spec = _read(attempts[-1].path / "spec.json") if attempts else {}
    shown = [_attempt(one, clock.s(starts_ns[one.number]), seen, clock) for one in attempts]
    return Report(
        job=folder.job,
        node=str(spec.get("env", {}).get("TRAINWARDEN_NODE", "")),
        command=" ".join(map(str, spec.get("command", ()))),
        ranks=seen.ranks,
        began=f"{datetime.fromtimestamp(began_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC" if began_ns else "not known",
        wall_s=end_s,
        ended=f"Attempt {shown[-1].number} ended, {shown[-1].end}." if shown and shown[-1].end else "",
        attempts=tuple(shown),
        steps=steps,
        rollbacks=_rollbacks(steps, {one.number: _origin(one) for one in attempts}),
        skipped=tuple({(int(a), int(b)): None for one in attempts for a, b in _told(one).get("skip", ())}),
        grid=seen.grid,
        slow=StragglerConfig().slow,
        activity_s=seen.split.seconds() if seen.items else {},
        decided=decided,
        troubles=tuple(_trouble(folder, one, clock, end_s) for one in story.incidents.values()),
        plans=tuple(_plan(one, of.newest, clock) for of in story.incidents.values() for one in of.plans),
        said=tuple(_said(event, clock) for event in seen.commands),
        checkpoints=pd.DataFrame([_checkpoint(one, clock, folder.path) for one in checkpoints], columns=_COLUMNS),
        unseen=tuple(_unseen(folder, seen, story, decided, clock)),
        made=(
            ("by", f"trainwarden {__version__}: trainwarden report {folder.job}"),
            ("from", str(folder.path)),
            ("recording", f"{seen.items} items in {end_s:.1f} s, {len(steps)} closed steps"),
        ),
    )


def write_report(folder: JobFolder, out: Path | None = None) -> Path:
    """Gather, render and write, as a whole or not at all; where it is. Raises ConfigError where it cannot be."""
    path = folder.path / "report.html" if out is None else out
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    page = render(gather(folder))
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigError(f"--out: cannot write {path}: {error.strerror}; name a file in a folder of yours") from error
    return path


class _Clock:
    """Unix nanoseconds -> seconds of the report."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns

    def s(self, t_ns: int) -> float:
        return max(0, t_ns - self._began_ns) / 1e9 if t_ns else 0.0


def _labelled(steps: pd.DataFrame) -> pd.DataFrame:
    """With the attempt's label, and whether a later epoch did the step again."""
    first = steps.groupby("epoch").step.min().sort_index()
    again_from = first[::-1].cummin()[::-1].shift(-1)
    bar = steps.epoch.map(again_from)
    return steps.assign(attempt=steps.epoch.map(label).astype(object), kept=~(steps.step >= bar))


def _rollbacks(steps: pd.DataFrame, origins: Mapping[int, str]) -> tuple[Rollback, ...]:
    ends = steps.groupby("epoch").step.agg(["min", "max"]).sort_index()
    reached, found = -1, []
    for epoch, first, last in ends.itertuples():
        if first <= reached:
            found.append(Rollback(last=reached, kept=int(first) - 1, origin=origins.get(attempt_of(epoch), "")))
        reached = int(last)
    return tuple(found)


# the folder


def _attempts(path: Path) -> list[int]:
    return sorted(int(one.name) for one in (path / "attempt").glob("*") if one.name.isdigit())


def _attempt(one: AttemptFolder, began_s: float, seen: Recorded, clock: _Clock) -> Attempt:
    told, ended = _told(one), seen.ended.get(one.number)
    return Attempt(
        number=one.number,
        began_s=began_s,
        ended_s=None if ended is None else clock.s(ended.t_ns),
        end=_end(_read(one.path / "ended.json") or ({} if ended is None else ended.data)),
        origin=_origin(one),
        changes="; ".join(_changes(told)),
    )


def _changes(told: Mapping[str, Any]) -> list[str]:
    """What an attempt does without, in words."""
    without, skip = told.get("without") or (), told.get("skip") or ()
    words = [f"without {', '.join(map(str, without))}"] if without else []
    return words + [f"skips batch{'' if a == b else 'es'} {a}{'' if a == b else f' to {b}'}" for a, b in skip]


def _kept_ns(one: AttemptFolder) -> int:
    """When its keeper started the launcher; 0: not known."""
    keeper = _read(one.path / "keeper.json")
    return int(keeper.get("started_ns", 0))


def _end(said: Mapping[str, Any]) -> str:
    """How an attempt ended, in words; "": nothing is said of it."""
    code = said.get("code")
    if code is None:
        return "exit status seen by nobody" if said else ""
    return "in order (exit status 0)" if code == 0 else f"exit status {code}"


def _told(one: AttemptFolder) -> Mapping[str, Any]:
    return _read(one.attempt_file)


def _origin(one: AttemptFolder) -> str:
    checkpoint = _told(one).get("checkpoint")
    return Path(str(checkpoint)).name if checkpoint else "the beginning"


def _job_of(path: Path) -> JobId:
    """As the newest attempt was told; the folder may have been renamed since."""
    newest = max(_attempts(path), default=0)
    spec = _read(path / "attempt" / str(newest) / "spec.json")
    return JobId(str(spec.get("env", {}).get("TRAINWARDEN_JOB", path.name)))


def _read(path: Path) -> Mapping[str, Any]:
    """A mapping that we wrote; empty when it is not (yet) there, or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# decisions


def _trouble(folder: JobFolder, story: IncidentStory, clock: _Clock, end_s: float) -> Trouble:
    incident = story.newest
    over_ns = next((t_ns for t_ns, one in reversed(story.revisions) if one.state == "resolved"), None)
    over_ns = over_ns if incident.state == "resolved" else None
    instants = [("first sign", incident.onset_ns), ("detected", story.opened_ns)]
    for plan in story.plans:
        if plan.plan.mode != "observe":
            instants.append(("decided", plan.started_ns))
            instants += [(EARLIER[goal], t_ns) for goal, t_ns in _reached(plan) if goal in EARLIER]
    if over_ns is not None and all(abs(over_ns - t_ns) > 1_000_000_000 for _, t_ns in instants):
        instants.append(("resolved", over_ns))
    lost = _read(folder.path / "evidence" / incident.id.replace("/", "_") / "lost.json")
    return Trouble(
        id=incident.id,
        kind=incident.kind,
        tier=incident.tier.name,
        state=incident.state,
        culprit=_culprit(incident),
        reason=incident.reason,
        action=incident.action,
        runbook=KINDS[incident.kind].runbook if incident.kind in KINDS else "",
        step=_step(incident),
        until_s=end_s if over_ns is None else clock.s(over_ns),
        instants=tuple((what, clock.s(t_ns)) for what, t_ns in sorted(instants, key=lambda one: one[1])),
        lost_s={str(phase): float(seconds) for phase, seconds in lost.items()},
    )


def _reached(story: PlanStory) -> list[tuple[str, int]]:
    ladder = story.plan.ladder
    return [(ladder[one.index].goal, t_ns) for t_ns, one in story.outcomes if one.index >= 0 and one.result in DONE]


def _culprit(incident: Incident) -> str:
    return "nobody known" if incident.culprit is None else str(incident.culprit)


def _step(incident: Incident) -> int | None:
    steps = [one.onset_step for one in incident.findings if one.kind == incident.kind and one.onset_step is not None]
    return min(steps, default=None)


def _plan(story: PlanStory, incident: Incident, clock: _Clock) -> Plan:
    plan, whole = story.plan, next((one for _, one in story.outcomes if one.index == -1), None)
    rungs, before_ns = [], story.started_ns
    outcomes = {one.index: (t_ns, one) for t_ns, one in story.outcomes}
    for index, rung in enumerate(plan.ladder):
        t_ns, outcome = outcomes.get(index, (before_ns, None))
        took_s = None if outcome is None else max(0, t_ns - before_ns) / 1e9
        before_ns = t_ns
        result = "" if outcome is None else outcome.result
        said = "; ".join([*_changes(rung.args), *_found(outcome)])
        rungs.append(Rung(goal=rung.goal, result=result, took_s=took_s, said=said, checks=_checks(outcome)))
    return Plan(
        id=plan.id,
        rule=plan.rule,
        culprit=_culprit(incident),
        mode=plan.mode,
        why=plan.why,
        began_s=clock.s(story.started_ns),
        rungs=tuple(rungs),
        result="" if whole is None else whole.result,
        reason="" if whole is None else whole.reason,
    )


_ELSEWHERE = ("checks", "refused", "begun_ns", "normal_ns")


def _found(outcome: Outcome | None) -> list[str]:
    """What a rung found, in words; paths by their last part."""
    if outcome is None:
        return []
    words = [outcome.reason] if outcome.reason else []
    for key, value in outcome.found.items():
        if key not in _ELSEWHERE:
            words.append(f"{key}: {Path(value).name if isinstance(value, str) else value}")
    refused = outcome.found.get("refused")
    for name, why in refused.items() if isinstance(refused, Mapping) else ():
        words.append(f"not from {name}: {str(why).rpartition('/')[2]}")
    return words


def _checks(outcome: Outcome | None) -> tuple[tuple[str, str, str, str], ...]:
    checks = None if outcome is None else outcome.found.get("checks")
    if not isinstance(checks, Mapping):
        return ()
    told = [(name, one) for name, one in checks.items() if isinstance(one, Mapping)]
    said = [(name, *(str(one.get(key, "")) for key in ("result", "got", "expected"))) for name, one in told]
    return tuple((name, result, got, expected) for name, result, got, expected in said)


def _said(event: Event, clock: _Clock) -> str:
    verb, data = event.kind.removeprefix("command.").replace("_", " "), event.data
    return f"{clock.s(event.t_ns):.1f} s: {data['who']}: {verb} {data['plan']} {data['why']}".strip()


_COLUMNS = ["name", "step", "attempt", "saved_s", "loss", "MB", "trust", "pinned", "reason"]


def _checkpoint(entry: Entry, clock: _Clock, root: Path) -> list[object]:
    reason = entry.reason.replace(f"{root}/", "")
    found = entry.checkpoint
    if found is None:
        return [entry.name, None, None, None, None, None, "broken", entry.pinned, reason]
    size = sum(length for length, _ in found.files.values()) / 1e6
    saved_s = clock.s(found.t_ns)
    return [
        entry.name, found.step, attempt_of(found.epoch), saved_s, found.loss, size, found.trust, entry.pinned, reason
    ]  # fmt: skip


# what could not be seen


def _unseen(folder: JobFolder, seen: Recorded, story: Story, decided: bool, clock: _Clock) -> Iterator[tuple[str, str]]:
    if not seen.items:
        yield "recording", f"nothing is recorded below {folder.path / 'frames'}"
    if not decided:
        yield "decisions", "were not recorded: there is no story.jsonl; notices.jsonl has what people were told"
    elif story.failures:
        yield "decisions", f"{story.failures} lines of story.jsonl could not be read"
    files = sorted((folder.path / "frames").glob("*.parquet"))
    if files and (gone := int(files[0].stem) - 1) > 0:
        yield "oldest part", f"{gone} files of the recording are gone: it has outgrown its cap"
    for error in seen.recording.refused[:LISTED]:
        yield "refused", str(error)
    if more := len(seen.recording.refused[LISTED:]):
        yield "refused", f"{more} more files and rows"
    for source, why, since_ns, until_ns in seen.blind[-LISTED:]:
        until = "until the end" if until_ns is None else f"until {clock.s(until_ns):.1f} s"
        yield f"{source} was blind", f"{why} (from {clock.s(since_ns):.1f} s {until})"
    for why, steps in seen.own_work.most_common(LISTED):
        yield "own work", f"{why} ({steps} steps)"
    for since_ns, until_ns in seen.gaps[:LISTED]:
        span = f"from {clock.s(since_ns):.1f} s to {clock.s(until_ns):.1f} s"
        yield "gap", f"nothing was recorded {span}: nobody watched, or the supervisor was frozen"
    if more := len(seen.gaps[LISTED:]):
        yield "gap", f"{more} more"
    for source, times in sorted(seen.lost.items())[:LISTED]:
        yield f"{source} lost rows", f"{times} times"
    counters = asdict(seen.counters)
    yield from ((words, str(counters[name])) for name, words in LOST.items() if counters[name])
