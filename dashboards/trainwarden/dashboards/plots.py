"""The figures of a report: facts in, SVG to stand inside HTML out. The same facts give the same bytes.

Colours are names: each is drawn as a colour that nobody else uses and then written as a CSS variable, so that the page
decides (by day, by night, on paper) what it looks like. The one picture, the grid of ranks and steps, keeps its own
(viridis: no grey in it, and read alike by the colour-blind); grey and hatched is what could not be told.
Text stays text. Long series keep the smallest and the largest value of each stretch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any, Final
from warnings import catch_warnings, filterwarnings

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from trainwarden.core.records import NONFINITE
from trainwarden.core.signals import ACTIVITIES
from trainwarden.dashboards.facts import TIERS, Report, Rollback, Trouble, spread, thinned, thinned_words
from trainwarden.dashboards.wording import duration, short, unit_of

LANES, LANES_IN_WORDS, ARROWS = 40, 8, 6
"""Incidents drawn; up to how many of them with words; rollbacks drawn. What is left out is said in the caption."""
OFTEN: Final = 0.05
"""Share of the columns from which on a slow row gets a triangle: single slow steps happen on a busy host."""
WIDTH_IN: Final = 10.4
LINES: Final = tuple(f"line{number}" for number in range(6))
"""Attempts, in turn."""
PHASES: Final = ("detect", "decide", "stop", "start", "load", "warm_up")
COLOURS: Final = ("ink", "soft", "faint", "band", *LINES, *map(str.lower, TIERS), *ACTIVITIES, *PHASES)
"""Names of CSS variables, without `--`: the page must give each a value."""
_HEX: Final = {name: f"#fe01{number:02x}" for number, name in enumerate(COLOURS)}
_WRITTEN: Final = re.compile(r"((?:fill|stroke): ?)#fe01([0-9a-f]{2})")
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trainwarden",
    "text.parse_math": False,
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "text.color": _HEX["ink"],
    "axes.labelcolor": _HEX["soft"],
    "axes.edgecolor": _HEX["faint"],
    "grid.color": _HEX["band"],
    **{
        f"{axis}tick.{part}": _HEX[name] for axis in "xy" for part, name in (("color", "faint"), ("labelcolor", "soft"))
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One figure: what one sees in words, and the picture."""

    caption: str
    svg: str


def timeline(report: Report) -> Drawing | None:
    """Incidents over the wall time, a lane each; None: there was none."""
    shown = sorted(sorted(report.troubles, key=lambda one: one.order)[:LANES], key=lambda one: one.instants[0][1])
    if not shown:
        return None
    in_words = len(shown) <= LANES_IN_WORDS
    unit_s, unit = unit_of(report.wall_s)
    ends_s = [*(one.began_s for one in report.attempts[1:]), report.wall_s]
    with _figure(0.8 + len(shown) * (1.15 if in_words else 0.3)) as (figure, axes):
        for number, attempt in enumerate(report.attempts):
            end_s = ends_s[number] if attempt.ended_s is None else attempt.ended_s
            axes.axvspan(attempt.began_s / unit_s, end_s / unit_s, color=_HEX["band"], lw=0, alpha=1 - number % 2 / 2)
            if end_s - attempt.began_s > 0.07 * report.wall_s:
                _word(axes, f"attempt {attempt.number}", (attempt.began_s / unit_s, 1.0), (3, 5), across=True)
        for lane, trouble in enumerate(shown):
            _lane(axes, trouble, 7.0 * lane, unit_s, report.wall_s if in_words else None)
        axes.set(xlim=(0, report.wall_s / unit_s), ylim=(7 * len(shown) - 0.5, -1), xlabel=f"{unit} since the start")
        names = [f"{short(one.kind)}\n{short(one.culprit)}" if in_words else short(one.kind) for one in shown]
        axes.set_yticks([7 * lane + 2.5 for lane in range(len(shown))], names)
        axes.tick_params("y", length=0, labelcolor=_HEX["ink"])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        rest = len(report.troubles) - len(shown)
        caption = (
            f"Each lane is one incident, from its first abnormal sign until it was resolved, coloured by tier; "
            f"shaded: attempts of the job. {'' if not rest else f'{rest} quieter ones are not drawn. '}"
            f"{'' if in_words else 'Dots, from above: ' + ', '.join(_instants(shown)) + '.'}"
        )
        return _drawn(figure, caption.strip())


def _lane(axes: Axes, trouble: Trouble, top: float, unit_s: float, words_to_s: float | None) -> None:
    """First sign at the top, each later instant one row below. words_to_s: width of the figure; None: no words."""
    colour = _HEX[trouble.tier.lower()]
    times = [t_s / unit_s for _, t_s in trouble.instants]
    rows = [top + row for row in range(len(times))]
    ends = times[0], max(trouble.until_s / unit_s, times[0])
    axes.fill_between(ends, top - 0.6, top + 5.6, color=colour, alpha=0.16, lw=0)
    axes.step(times, rows, where="pre", color=colour, lw=1.2)
    axes.plot(times, rows, "o", color=colour, ms=5 if words_to_s else 3)
    for (what, t_s), row in zip(trouble.instants if words_to_s else (), rows, strict=False):
        left = t_s > 0.85 * (words_to_s or 0)  # no room on the right: above the line that comes from the left
        after_s = t_s - trouble.instants[0][1]
        words = f"{what} at {duration(t_s)}" if row == top else f"{what} +{duration(after_s)}"
        _word(axes, words, (t_s / unit_s, row), (-4, 7) if left else (7, 0), left=left, colour="ink")


def _instants(troubles: Sequence[Trouble]) -> list[str]:
    return list(dict.fromkeys(what for one in troubles for what, _ in one.instants))


def loss(report: Report) -> Drawing | None:
    """Loss, and gradient norm where it is told, over steps; None: no step tells a loss."""
    steps = report.steps
    names = [name for name in ("loss", "grad_norm") if np.isfinite(steps[name]).any()]
    if not names:
        return None
    with _figure(2.0 + 1.3 * len(names), rows=len(names), height_ratios=(2, 1)[: len(names)]) as (figure, first):
        for name, axes in zip(names, figure.axes, strict=True):
            _series(axes, steps, name, name.replace("grad_norm", "gradient norm"))
        wrong = steps.step[(steps["flags"] & NONFINITE) != 0]
        if len(wrong):
            at = spread(wrong.to_numpy())
            kind = {"color": _HEX["critical"], "ms": 5, "mew": 1.4, "ls": "", "transform": _across(first)}
            first.plot(at, np.full(len(at), 0.97), "x", label="not finite", clip_on=False, **kind)
        for batches in report.skipped:
            _skip(first, steps, batches)
        for row, one in enumerate(report.rollbacks[-ARROWS:]):
            _back(first, one, 0.86 - 0.11 * row)
        _legend(first)
        figure.axes[-1].set_xlabel("step")
        both = (
            "Loss and gradient norm" if len(names) > 1 else names[0].replace("grad_norm", "gradient norm").capitalize()
        )
        words = [f"{both} of each closed step, a line an attempt."]
        if report.rollbacks:
            words.append(
                "Faint: steps that were done again later; arrows: from the newest step back to the checkpoint."
            )
        if len(report.rollbacks) > ARROWS:
            words.append(f"Of {len(report.rollbacks)} rollbacks the last {ARROWS} have an arrow.")
        if len(wrong):
            words.append(f"Crosses: {len(wrong)} steps with a value that is not finite (it has no place on the line).")
        return _drawn(figure, " ".join([*words, *thinned_words(steps)]))


def _back(axes: Axes, one: Rollback, height: float) -> None:
    """An arrow from the newest step to the last that was kept."""
    arrow = {"arrowstyle": "-|>", "color": _HEX["soft"], "lw": 1.2}
    axes.annotate("", (one.kept, height), (one.last, height), _across(axes), _across(axes), arrowprops=arrow)
    _word(axes, f"back to step {one.kept}", (one.last, height), (6, 0), across=True)


def _skip(axes: Axes, steps: pd.DataFrame, batches: tuple[int, int]) -> None:
    """A band where the batches were used, by their number where they never were."""
    used = steps.step[steps.batch.between(*batches)]
    first, last = (int(used.min()), int(used.max())) if len(used) else batches
    said = f"batch {batches[0]}" if batches[0] == batches[1] else f"batches {batches[0]}-{batches[1]}"
    axes.axvspan(first - 0.5, last + 0.5, color=_HEX["critical"], alpha=0.16, lw=0)
    _word(axes, f"{said} skipped", (last, 0.45), (5, 0), across=True)


def step_time(report: Report) -> Drawing | None:
    """Wall time of each step; None: no step has closed."""
    steps = report.steps
    known = steps.step_s[np.isfinite(steps.step_s)]
    if not len(known):
        return None
    with _figure(2.7) as (figure, axes):
        _series(axes, steps, "step_s", "seconds a step")
        if known.max() > 10 * known.median():
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.12 * known.max())
        for name, marker, label in (("checkpoint_s", "^", "checkpoint"), ("eval_s", "s", "evaluation")):
            at = spread(steps.step[steps[name] > 0].to_numpy())
            if len(at):
                look: dict[str, Any] = {"color": _HEX["soft"], "ms": 5, "transform": _across(axes), "label": label}
                axes.plot(at, np.full(len(at), 0.03), marker, **look)
        for trouble in report.troubles[:LANES]:
            if trouble.step is not None:
                axes.axvline(trouble.step, color=_HEX[trouble.tier.lower()], lw=1.2, ls=(0, (4, 2)))
                if len(report.troubles) <= LANES_IN_WORDS:
                    name = f"{short(trouble.kind)} {short(trouble.culprit)}"
                    _word(axes, name, (trouble.step, 1.0), (4, -6), across=True)
        _legend(axes)
        axes.set_xlabel("step")
        words = [
            f"Wall time of each closed step on its slowest rank (median {duration(known.median())}, longest "
            f"{duration(known.max())}); at the bottom: steps with a checkpoint or an evaluation, which is part of it."
        ]
        if any(one.step is not None for one in report.troubles):
            words.append("Dashed: first step of an incident.")
        return _drawn(figure, " ".join([*words, *thinned_words(steps)]))


def own_work(report: Report) -> Drawing | None:
    """Ranks x steps: own work against the peers' in the same step; None: no step has closed."""
    grid = report.grid
    ratio_RC, blind_RC = grid.ratio_RC, grid.blind_RC
    rows, columns = ratio_RC.shape
    if not columns:
        return None
    blind_RC = blind_RC & ~(ratio_RC >= report.slow)
    with _figure(1.5 + min(3.2, 0.24 * rows)) as (figure, axes):
        extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        shape: dict[str, Any] = {"aspect": "auto", "interpolation": "none", "extent": extent}
        image = axes.imshow(np.ma.masked_where(blind_RC, ratio_RC), cmap="viridis", vmin=1.0, vmax=2.0, **shape)
        if blind_RC.any():
            axes.imshow(_hatched(blind_RC), **shape)
        bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, ticks=[1.0, report.slow, 1.6, 2.0])
        bar.ax.set_yticklabels(["1 or less", f"{report.slow:g} slow", "1.6", "2 or more"])
        bar.outline.set_visible(False)
        often_R = (ratio_RC >= report.slow).mean(axis=1)
        for row in np.flatnonzero(often_R >= OFTEN).tolist():
            axes.plot(columns - 0.5, row, "<", ms=6, color=_HEX["error"], clip_on=False)
        axes.grid(visible=False)
        at = np.unique(np.linspace(0, columns - 1, min(columns, 12)).astype(int))
        axes.set_xticks(at, [str(grid.starts[column][1]) for column in at])
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.yaxis.set_major_formatter(lambda row, _: f"{row * grid.ranks_per_row:.0f}" if 0 <= row < rows else "")
        axes.set(xlabel="step at its column's beginning", ylabel="rank", xlim=extent[:2], ylim=extent[2:])
        begins = [c for c in range(columns) if c == 0 or grid.starts[c][0] != grid.starts[c - 1][0]]
        for column, following in zip(begins, [*begins[1:], columns], strict=True):
            axes.axvline(column - 0.5, color="#ffffff", lw=1.5 if column else 0)
            if following - column > 0.08 * columns:
                _word(axes, grid.starts[column][0], (column - 0.5, 1.0), (2, 5), across=True)
        return _drawn(figure, " ".join(_own_work_words(report, blind_RC)))


def _own_work_words(report: Report, blind_RC: NDArray[np.bool_]) -> Iterator[str]:
    grid = report.grid
    yield "Own work of each rank over that of its peers in the same step (1: as much as they)."
    if np.isfinite(grid.ratio_RC).any():
        row, column = np.unravel_index(np.nanargmax(grid.ratio_RC), grid.ratio_RC.shape)
        often_R = (grid.ratio_RC >= report.slow).mean(axis=1)
        worst, ranks = int(often_R.argmax()), "rank" if grid.ranks_per_row == 1 else "the ranks from"
        highest = grid.ratio_RC[row, column]
        yield f"Highest: {highest:.2f} on {ranks} {row * grid.ranks_per_row}, step {grid.starts[column][1]}."
        if often_R[worst] >= OFTEN:
            often = f"{ranks} {worst * grid.ranks_per_row}, in {often_R[worst]:.0%} of the columns"
            yield f"Most often at {report.slow:g} or more: {often}. Triangles: rows in {OFTEN:.0%} or more."
    if blind_RC.any():
        yield f"Grey and hatched: not to be told, so not known to be healthy ({blind_RC.mean():.0%} of the cells)."
    if grid.steps_per_column > 1:
        yield f"A column is up to {grid.steps_per_column} steps: the largest ratio of them."
    if grid.ranks_per_row > 1:
        yield f"A row is {grid.ranks_per_row} ranks: the largest ratio of them."


def _hatched(mask_RC: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Grey with stripes where the mask is, nothing elsewhere."""
    height, width = 240, 960
    rows, columns = (np.arange(n) * parts // n for n, parts in zip((height, width), mask_RC.shape, strict=True))
    stripe_YX = (np.arange(height)[:, None] + np.arange(width)) % 12 < 4
    picture = np.where(stripe_YX, 190, 128).astype(np.uint8)[:, :, None].repeat(4, axis=2)
    picture[..., 3] = np.where(mask_RC[np.ix_(rows, columns)], 255, 0)
    return picture


def where_time(report: Report) -> Drawing | None:
    """The wall time as one bar of activities; None: not known."""
    if not report.activity_s:
        return None
    spent_s = sum(report.activity_s.values())
    caption = f"What {duration(spent_s)} of wall time were spent on, an instant on one thing only."
    if report.wall_s - spent_s > 0.5:
        caption += (
            f" Of {duration(report.wall_s - spent_s)} nobody knows: the job was not watched or not recorded then."
        )
    return _bars({"": report.activity_s}, ACTIVITIES, caption)


def costs(report: Report) -> Drawing | None:
    """A bar an incident that was recovered: its phases; None: there is none."""
    bars = {f"{short(one.kind)}\n{short(one.culprit)}": one.lost_s for one in report.troubles[:LANES] if one.lost_s}
    caption = "From the first abnormal sign until steps took as long as before, an instant in one phase only."
    return _bars(bars, PHASES, caption) if bars else None


def _bars(bars: Mapping[str, Mapping[str, float]], parts: Sequence[str], caption: str) -> Drawing:
    longest_s = max(sum(bar.values()) for bar in bars.values()) or 1.0
    unit_s, unit = unit_of(longest_s)
    with _figure(0.75 + 0.45 * len(bars)) as (figure, axes):
        left = np.zeros(len(bars))
        for part in parts:
            took = np.array([bar.get(part, 0.0) for bar in bars.values()])
            if not took.any():
                continue
            drawn = axes.barh(
                range(len(bars)), took / unit_s, 0.72, left / unit_s, color=_HEX[part], label=part.replace("_", " ")
            )
            wide = [duration(s) if s > 0.07 * longest_s else "" for s in took]
            axes.bar_label(drawn, wide, label_type="center", fontsize=8, color="#ffffff")
            left += took
        axes.set_yticks(range(len(bars)), list(bars))
        axes.tick_params("y", length=0, labelcolor=_HEX["ink"])
        axes.set(xlim=(0, longest_s / unit_s), ylim=(len(bars) - 0.5, -0.5), xlabel=unit)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        _legend(axes)
        return _drawn(figure, caption)


def _series(axes: Axes, steps: pd.DataFrame, name: str, label: str) -> None:
    """A line an attempt; what was done again later is faint."""
    shown = thinned(steps, name)
    for number, (attempt, rows) in enumerate(shown.groupby("attempt", sort=False)):
        colour = _HEX[LINES[number % len(LINES)]]
        kept = rows[rows.kept]
        again = pd.concat([kept.tail(1), rows[~rows.kept]])
        axes.plot(again.step, again[name], color=colour, alpha=0.4, lw=1.2, ls=(0, (3, 1.5)))
        dot = "." if len(kept) < 3 else ""
        fine = 1.4 if len(shown) < 500 else 0.8
        axes.plot(
            kept.step, kept[name], dot or "-", color=colour, lw=fine, label=short(str(attempt)) if number < 8 else None
        )
    positive = shown[name][shown[name] > 0]
    if len(positive) == len(shown) and positive.max() > 100 * positive.min():
        axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)


def _across(axes: Axes) -> Any:
    """Data along x, a fraction of the axes along y."""
    return axes.get_xaxis_transform()


def _legend(axes: Axes) -> None:
    _, labels = axes.get_legend_handles_labels()
    if labels:
        look: dict[str, Any] = {"fontsize": 8, "handlelength": 1.4, "columnspacing": 1.2, "borderaxespad": 0.2}
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=min(8, len(labels)), **look)


def _word(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    shift: tuple[float, float],
    *,
    across: bool = False,
    left: bool = False,
    colour: str = "soft",
) -> None:
    """Text beside a point, by so many points; across: the point's y is a fraction of the axes; left: of the point."""
    where: Any = _across(axes) if across else "data"
    look: dict[str, Any] = {"ha": "right" if left else "left", "va": "center", "fontsize": 8, "color": _HEX[colour]}
    axes.annotate(text, at, shift, xycoords=where, textcoords="offset points", **look)


@contextmanager
def _figure(
    height_in: float, rows: int = 1, height_ratios: Sequence[int] | None = None
) -> Iterator[tuple[Figure, Axes]]:
    """A figure of the page's width, and its first axes."""
    with rc_context(_STYLE), catch_warnings():
        filterwarnings("ignore", "Glyph .* missing")  # the browser has it, or shows that it has not
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        grid = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=height_ratios)
        yield figure, grid[0, 0]


def _drawn(figure: Figure, caption: str) -> Drawing:
    text = StringIO()
    nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=nobody)
    svg = text.getvalue()
    svg = re.sub(r' id="[a-z_.]*_\d+"', "", svg[svg.index("<svg") :])  # of groups: of another figure, too
    svg = _WRITTEN.sub(lambda found: f"{found[1]}var(--{COLOURS[int(found[2], 16)]})", svg)
    box = f"0 0 {72 * figure.get_figwidth():g} {72 * figure.get_figheight():g}"
    head = f'<svg role="img" aria-label="{escape(caption)}" viewBox="{box}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return Drawing(caption=caption, svg=re.sub(r"<svg[^>]*>", head, svg, count=1))
