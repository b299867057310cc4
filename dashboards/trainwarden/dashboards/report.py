"""A report of one run as one HTML page: no script, nothing fetched, the same facts give the same bytes.

What is shown may have been written by the job's tenant: every value is escaped, control characters are spelt out, and
the page forbids itself scripts, frames and anything from elsewhere.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trainwarden.core.records import attempt_of
from trainwarden.dashboards import plots
from trainwarden.dashboards.facts import Attempt, Report
from trainwarden.dashboards.wording import duration, harmless

LISTED: Final = 50
"""Loudest incidents, newest plans, checkpoints and words of people that are listed; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number of the summary."""

    name: str
    value: str
    note: str = ""
    tone: str = ""
    """Name of a colour; "": as all."""


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters |= {"duration": duration, "words": lambda name: str(name).replace("_", " ")}
    template = environment.from_string((files(__package__) / "report.html.j2").read_text(encoding="utf-8"))
    drawings = {
        name: getattr(plots, name)(report)
        for name in ("timeline", "loss", "step_time", "own_work", "where_time", "costs")
    }
    return template.render(
        report=report,
        troubles=sorted(report.troubles, key=lambda one: one.order)[:LISTED],
        plans=report.plans[-LISTED:],
        tiles=tiles(report),
        figures={name: None if one is None else (Markup(one.svg), one.caption) for name, one in drawings.items()},
        attempts=attempt_rows(report),
        shares=shares(report.activity_s),
        listed=LISTED,
        checkpoints=report.checkpoints.head(LISTED).to_dict("records"),
    )


def tiles(report: Report) -> list[Tile]:
    """What one wants to know first."""
    return [
        Tile(name="wall time", value=duration(report.wall_s), note=_count(len(report.attempts), "attempt")),
        _progress(report.steps),
        _effective(report.activity_s),
        _incidents(report),
        _cost(report),
        _checkpoint(report),
    ]


def attempt_rows(report: Report) -> list[tuple[Attempt, Mapping[Hashable, Any]]]:
    """Each attempt and what its steps were: first, last, closed, again (done again later), median_s, p99_s, loss."""
    steps = report.steps
    by_attempt = steps.assign(again=~steps.kept).groupby(steps.epoch.map(attempt_of))
    table = by_attempt.agg(
        first=("step", "min"),
        last=("step", "max"),
        closed=("step", "size"),
        again=("again", "sum"),
        median_s=("step_s", "median"),
        p99_s=("step_s", lambda took_s: took_s.quantile(0.99)),
        loss=("loss", "last"),
    )
    told = table.to_dict("index")
    return [(one, told.get(one.number, {})) for one in report.attempts]


def shares(activity_s: Mapping[str, float]) -> pd.DataFrame:
    """Seconds and share of each activity, and their sum."""
    table = pd.DataFrame({"seconds": pd.Series(activity_s, dtype=float)})
    table.loc["all of it"] = table.sum()
    table["share"] = table.seconds / (table.seconds["all of it"] or 1.0)
    return table


def _progress(steps: pd.DataFrame) -> Tile:
    if steps.empty:
        return Tile(name="closed steps", value="no data", note="no step has closed")
    again = int((~steps.kept).sum())
    note = f"{again} of them done again, newest {steps.step.iloc[-1]}" if again else f"newest {steps.step.iloc[-1]}"
    return Tile(name="closed steps", value=str(len(steps)), note=note)


def _effective(activity_s: Mapping[str, float]) -> Tile:
    spent_s = sum(activity_s.values())
    if not spent_s:
        return Tile(name="effective training", value="no data")
    return Tile(name="effective training", value=f"{activity_s['training'] / spent_s:.0%}", note="of the wall time")


def _incidents(report: Report) -> Tile:
    if not report.decided:
        return Tile(name="incidents", value="no data", note="decisions were not recorded")
    still = [one for one in report.troubles if one.open]
    if not report.troubles:
        return Tile(name="incidents", value="0")
    loudest = min(report.troubles, key=lambda one: one.order)
    note = f"{len(still)} open" if still else "all resolved"
    tone = loudest.tier.lower() if still else ""
    return Tile(name="incidents", value=str(len(report.troubles)), note=f"{note}, {loudest.tier}", tone=tone)


def _cost(report: Report) -> Tile:
    recovered = [sum(one.lost_s.values()) for one in report.troubles if one.lost_s]
    if not recovered:
        return Tile(name="lost to recoveries", value="0 s" if report.decided else "no data")
    lost_s, ranks = sum(recovered), report.ranks
    note = _count(len(recovered), "recovery", "recoveries")
    if ranks is not None:
        note += f", {ranks} ranks: {ranks * lost_s:.0f} rank-seconds"
    return Tile(name="lost to recoveries", value=duration(lost_s), note=note)


def _checkpoint(report: Report) -> Tile:
    known = report.checkpoints[report.checkpoints.step.notna()]
    if known.empty:
        return Tile(name="last checkpoint", value="none", note="none is published")
    newest = known.iloc[0]
    note = f"{duration(report.wall_s - newest.saved_s)} before the end, {newest.trust}"
    return Tile(name="last checkpoint", value=f"step {newest.step:.0f}", note=note)


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _shown(value: object) -> object:
    """What an expression of the page becomes: text made harmless, what was not told a dash."""
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "\u2013"
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value
