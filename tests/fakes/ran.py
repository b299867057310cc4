"""A run as `trainwarden run` leaves it, made without a training: rank 1 gives NaN at step 26, a plan goes back to step
20 and skips the batch; before that rank 2 was slow, which was only observed; rank 3 cannot tell its own work."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from trainwarden.app.folders import AttemptFolder, JobFolder
from trainwarden.app.story import Story
from trainwarden.core.manifest import write_rank_file
from trainwarden.core.model import (
    Epoch,
    Event,
    Finding,
    Frame,
    Incident,
    JobId,
    Json,
    Outcome,
    Plan,
    Rung,
    Start,
    Subject,
    Tick,
    Tier,
)
from trainwarden.core.recording import Recorder
from trainwarden.core.records import FEATURES, GRAD_NONFINITE, LOSS_NONFINITE, epoch_of
from trainwarden.core.schemas import DTYPES
from trainwarden.remediation.checkpoints.folder import CheckpointFolder
from trainwarden.remediation.checkpoints.publish import StepValues, publish
from trainwarden.remediation.policy import RungsConfig

JOB = JobId("nano")
RANKS = 4
T0_NS = 1_700_000_000_000_000_000
STEP_S = 0.5
POISONED, KEPT, LAST = 26, 20, 40
LOST_S = {"detect": 0.2, "decide": 0.1, "stop": 0.9, "start": 4.0, "load": 0.8, "warm_up": 0.5}
ROW = {name: number for number, name in enumerate(FEATURES)}


def ns(t_s: float) -> int:
    return T0_NS + round(t_s * 1e9)


def epoch(attempt: int) -> Epoch:
    return Epoch(epoch_of(attempt, 0, 0))


def event(kind: str, t_s: float, data: Mapping[str, Json], attempt: int = 1, subject: str = "job/nano") -> Event:
    of, _, name = subject.partition("/")
    about = Subject(kind="rank" if of == "rank" else "source" if of == "source" else "job", id=name)
    at_ns = ns(t_s)
    return Event(
        kind=kind,
        subject=about,
        source="test",
        seq=at_ns,
        t_ns=at_ns,
        seen_ns=at_ns,
        job=JOB,
        epoch=epoch(attempt),
        data=data,
    )


def steps(attempt: int, first: int, last: int, t_s: float, ranks: int = RANKS) -> Iterator[Frame | Event | Tick]:
    """An attempt: hellos, a step each half second with a tick before it, and its end."""
    yield event(
        "attempt.started", t_s, {"attempt": attempt, "term": 1, "by": "plan" if attempt > 1 else "run"}, attempt
    )
    for rank in range(ranks):
        told: dict[str, Json] = {"rank": rank, "world_size": ranks, "device": f"n0:{rank}", "node": "n0"}
        told |= {"attempt": attempt, "restart": 0, "lap": 0, "blind": ["own_work"] if rank == 3 else []}
        yield event("hello", t_s + 2, told, attempt, f"rank/{rank}")
    for number, step in enumerate(range(first, last + 1), 1):
        at_s = t_s + 2 + number * STEP_S
        yield Tick(seen_ns=ns(at_s - STEP_S / 2))
        yield Frame(
            schema="step",
            source="rings@n0",
            job=JOB,
            epoch=epoch(attempt),
            seq=step,
            sent_ns=ns(at_s),
            seen_ns=ns(at_s),
            names=(),
            rows=rows(attempt, step, ranks),
        )
    end_s = t_s + 3 + (last - first + 1) * STEP_S
    yield event("attempt.ended", end_s, {"attempt": attempt, "term": 1, "by": "keeper", "code": 0}, attempt)


def rows(attempt: int, step: int, ranks: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    made = np.zeros(ranks, DTYPES["step"])
    made["rank"], made["step"], made["batch"] = range(ranks), step, step + (attempt > 1 and step >= POISONED)
    values, poisoned = made["values"], attempt == 1 and step >= POISONED
    values[:] = np.nan
    values[:, ROW["step_s"]], values[:, ROW["runq_s"]] = 0.45, 0.01
    own_R = np.full(ranks, 0.3)
    own_R[2 % ranks] *= 1.6 if 10 <= step < 18 else 1.0
    values[:, ROW["forward_s"]], values[:, ROW["cpu_s"]], values[:, ROW["tokens"]] = own_R, own_R, 1024
    values[:, ROW["loss"]] = math.nan if poisoned else 1 + 3 / step
    values[:, ROW["grad_norm"]] = math.nan if poisoned else 1 / math.sqrt(step)
    made["flags"] = LOSS_NONFINITE | GRAD_NONFINITE if poisoned else 0
    if step % 10 == 0:
        values[:, ROW["checkpoint_s"]] = 0.05
    return made


def incident(
    name: str, kind: str, tier: Tier, rank: int, reason: str, step: int, t_s: float, **more: object
) -> Incident:
    """A revision of one; more: fields that differ."""
    subject = Subject(kind="rank", id=str(rank))
    finding = Finding(
        id=f"test/{JOB}/{name}",
        revision=0,
        status="final",
        kind=kind,
        subject=subject,
        suspects=(),
        job=JOB,
        epoch=epoch(1),
        onset_ns=ns(t_s),
        onset_step=step,
        seen_ns=ns(t_s),
        confidence=0.9,
        reason=reason,
        evidence=(),
    )
    fields: dict[str, object] = {
        "id": name,
        "revision": 0,
        "state": "confirmed",
        "tier": tier,
        "kind": kind,
        "culprit": subject,
        "victims": (),
        "job": JOB,
        "epoch": epoch(1),
        "onset_ns": ns(t_s),
        "findings": (finding,),
        "events": (),
        "reason": reason,
        "action": "restart the job from an older checkpoint",
        "plans": (),
        "lost_s": {},
    }
    return Incident(**{**fields, **more})  # type: ignore[arg-type]


def plan(of: Incident, mode: str, goals: Mapping[str, Mapping[str, Json]], why: str = "") -> Plan:
    target = Subject(kind="job", id=JOB)
    rungs = RungsConfig()
    return Plan(
        id=f"{of.id}/plan-1",
        incident=of.id,
        rule=of.kind,
        mode="act" if mode == "act" else "observe",
        fence=1,
        deadline_ns=ns(900),
        ladder=tuple(
            Rung(goal=goal, target=target, args=args, deadline_s=rungs.deadline_s(goal)) for goal, args in goals.items()
        ),
        why=why,
    )


def outcome(of: Plan, index: int, *, refused: str = "", **found: Json) -> Outcome:
    """Reached; refused: why not."""
    result: Literal["reached", "refused"] = "refused" if refused else "reached"
    return Outcome(plan=of.id, index=index, result=result, reason=refused, retryable=False, found=found)


def write_story(folder: JobFolder, reason: str) -> None:
    """What was decided, as the supervisor notes it."""
    story = Story(folder.path / "story.jsonl")
    slow = incident("straggler.2", "rank.slow", Tier.WARN, 2, "rank 2 needs 1.6 times its peers' own work", 10, 6.5)
    watched = plan(slow, "observe", {"checkpoint_taken": {}, "stopped": {}}, "refused: budget: 3 restarts this hour")
    story.note(slow, ns(8.0))
    story.note(Start(plan=watched), ns(8.1))
    story.note(outcome(watched, -1, refused="observed only: would have tried checkpoint_taken, stopped"), ns(8.2))
    bad = incident("loss.1", "loss.nonfinite", Tier.CRITICAL, 1, reason, POISONED, 15.0)
    running: Mapping[str, Json] = {"attempt": 2, "without": [], "skip": [[POISONED, POISONED]]}
    acting = plan(bad, "act", {"stopped": {"attempt": 1}, "running": running, "verified": {"attempt": 2, "steps": 10}})
    story.note(bad, ns(15.2))
    story.note(Start(plan=acting), ns(15.3))
    story.note(outcome(acting, 0, ended=RANKS), ns(16.2))
    damaged: Json = {
        "step-30-4294967296": "/state/published/step-30-4294967296/__0_0.distcp: other bytes than were written"
    }
    story.note(replace(outcome(acting, 1), found={"attempt": 2, "refused": damaged}), ns(21.0))
    checks: Json = {"loss": {"result": "holds", "got": "10 of 10 steps equal", "expected": ""}}
    story.note(outcome(acting, 2, checks=checks, steps=10), ns(26.0))
    story.note(outcome(acting, -1), ns(26.0))
    over = {"revision": 1, "state": "resolved", "plans": (acting.id,)}
    story.note(incident("loss.1", "loss.nonfinite", Tier.CRITICAL, 1, reason, POISONED, 15.0, **over), ns(26.0))
    evidence = folder.path / "evidence" / bad.id
    evidence.mkdir()
    (evidence / "lost.json").write_text(json.dumps(LOST_S))


def write_checkpoint(folder: JobFolder, attempt: int, step: int, t_s: float) -> str:
    """Staged by all ranks and published; its name."""
    root = folder.path / "checkpoints"
    stage = CheckpointFolder(root).stage(epoch(attempt), step)
    stage.mkdir(parents=True)
    for rank in range(RANKS):
        (stage / f"__{rank}_0.distcp").write_bytes(bytes(1000))
    (stage / ".metadata").write_bytes(b"".join(b"__%d_0.distcp " % rank for rank in range(RANKS)))
    for rank in range(RANKS):
        write_rank_file(stage, rank=rank, step=step, data_position=step + 1, t_ns=ns(t_s))
    told = publish(
        root,
        job=JOB,
        attempt=attempt,
        epoch=epoch(attempt),
        step=step,
        world_size=RANKS,
        values=StepValues(loss=1 + 3 / step, grad_norm=0.2, finite=True),
        topology=None,
        check=lambda: None,
    )
    assert told.result == "published", told
    return told.name


def write_attempt(folder: JobFolder, checkpoint: str | None, code: int | None) -> AttemptFolder:
    """code None: it still runs."""
    spec: Mapping[str, Json] = {
        "command": ["torchrun", "--nproc-per-node", "4", "train.py"],
        "env": {"TRAINWARDEN_JOB": JOB, "TRAINWARDEN_NODE": "n0"},
    }
    skip: Json = [] if checkpoint is None else [[POISONED, POISONED]]
    path = None if checkpoint is None else str(folder.path / "checkpoints" / "published" / checkpoint)
    attempt = folder.new_attempt(spec, {"checkpoint": path, "skip": skip, "without": []})
    if code is not None:
        (attempt.path / "ended.json").write_text(json.dumps({"code": code, "by": "keeper"}))
    return attempt


def ran(state: Path, reason: str = "loss is not finite on rank 1 at step 26 (batch 26)") -> JobFolder:
    """The whole folder. reason: of the incident, in the words of the job's tenant."""
    folder = JobFolder.make(state, JOB)
    write_attempt(folder, None, code=1)
    name = write_checkpoint(folder, 1, KEPT, 12.1)
    write_attempt(folder, name, code=0)
    write_checkpoint(folder, 2, 30, 27.1)
    write_story(folder, reason)
    with Recorder(folder.path / "frames") as recorder:
        for item in (*steps(1, 1, POISONED + 1, 0.0), *steps(2, KEPT + 1, LAST, 18.0)):
            recorder.write(item)
        recorder.write(event("source.blind", 28.0, {"why": "permission denied"}, 2, "source/oom@n0"))
        recorder.write(event("command.stop_all", 28.5, {"plan": "", "who": "ann", "why": "maintenance"}, 2))
    return folder
