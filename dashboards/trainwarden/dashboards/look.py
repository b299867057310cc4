"""How a panel of each sort looks: colours that mean something, and "no data" as a state of its own.

Colours are those of Okabe and Ito (Color Universal Design, 2008), which colour-blind people tell apart; what must be
acted on is said in words or numbers too. A judged panel is grey where it has no value, never the colour of health: grey
is the lowest step of its scale, below every real value. Single values are asked for as of now, not as the last of a
range, so that what is no longer exported is "no data" at once.

"The reference" is that of the alert rules (alerts/rules): where a rule asks the same question, its bar is taken.

The models are those of grafana-foundation-sdk for dashboard schema v1, which every Grafana since 9 reads. This module
and `job` are for making the JSON only: the SDK comes with the extra `dev`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.models import bargauge, common, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.models import dashboard as grafana

BLUE, SKY, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
PURPLE, YELLOW, GREEN, GREY = "#CC79A7", "#F0E442", "#009E73", "#808080"
GOOD, NOTICE, WARN, BAD, UNKNOWN = BLUE, SKY, ORANGE, VERMILION, GREY

COLUMNS: Final = 24
"""Of Grafana's grid; a unit of height is 38 pixels."""

NO_DATA: Final = "no data"
DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

SECONDS, SHARE, PLAIN = "s", "percentunit", "none"
TOKENS_PER_SECOND, ROWS_PER_SECOND = "count:tokens/s", "count:rows/s"
"""Units as Grafana names them; 1.0 of a share is shown as 100 %."""

Scale = Sequence[tuple[float, str]]
"""(from this value on, colour), ascending; below the first is UNKNOWN."""
Meanings = Mapping[str, tuple[str, str]]
"""Value as Prometheus writes it -> word instead of it, colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How one series is drawn that has this name by its legend."""

    colour: str
    name: str = ""
    """Shown instead."""
    dashed: bool = False


STALLED = ((0, GOOD), (300, BAD))
"""Seconds without progress: 5 min is a stalled training (the reference; alert TrainwardenJobStalled)."""
SLOWER = ((0, GOOD), (1.1, WARN), (1.5, BAD))
"""Step time over the expected: 10 % of the mean is what Greyhound verifies a slow-down by (arXiv 2410.12588); 1.5 is
the reference's (alert TrainwardenStepTimeHigh)."""
EFFECTIVE = ((0, BAD), (0.75, WARN), (0.9, GOOD))
"""Share of the wall time: the industry's middle, and the good level (the reference; TrainwardenEffectiveRatioLow)."""
OWN_WORK = ((0, GOOD), (1.15, WARN), (1.30, BAD))
"""Over the peers': the bars of the straggler detector (detectors/straggler.py)."""
OVERDUE = ((0, GOOD), (1.5, WARN), (2, BAD))
"""Checkpoint age in intervals: 2 is late (the reference; TrainwardenCheckpointOld); 1.5, half way there, is our choice.
"""
SILENT = ((0, GOOD), (30, BAD))
"""Seconds since the last heartbeat (alert TrainwardenDeadMan)."""
SOME = ((0, GOOD), (1, WARN))
ANY = ((0, GOOD), (1, BAD))
"""Numbers of things that should not be."""
DOING = ((0, GOOD), (1, NOTICE))
"""Numbers of things that are being done about it."""
UP = {"0": ("no", BAD), "1": ("yes", GOOD)}

ACTIVITIES: Final = {
    "training": Shown(colour=GOOD),
    "repeated": Shown(colour=ORANGE),
    "checkpoint": Shown(colour=SKY),
    "evaluation": Shown(colour=GREEN),
    "starting": Shown(colour=YELLOW),
    "interrupted": Shown(colour=VERMILION),
    "other": Shown(colour=GREY),
}
TIERS: Final = {
    "INFO": Shown(colour=NOTICE),
    "WARN": Shown(colour=WARN),
    "ERROR": Shown(colour=BAD),
    "CRITICAL": Shown(colour=PURPLE),
}
EXPECTED = Shown(colour=GREY, dashed=True)
OF_STEPS = {
    "0.5": Shown(colour=GOOD, name="P50"),
    "0.99": Shown(colour=ORANGE, name="P99"),
    "1": Shown(colour=VERMILION, name="max"),
    "expected": EXPECTED,
}
OF_RANKS = {
    "0.5": Shown(colour=GOOD, name="median rank"),
    "0.99": Shown(colour=ORANGE, name="P99 of ranks"),
    "1": Shown(colour=VERMILION, name="highest rank"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Panels below a heading, from left to right, then the next line; without a heading it is what is seen first."""

    heading: str = ""
    folded: bool = False
    """Only the heading is shown, and nothing is asked, until it is opened."""
    panels: Sequence[tuple[int, int, grafana.Panel]]
    """(width, height, panel)."""


def number(
    title: str,
    question: str,
    expr: str,
    unit: str,
    *,
    legend: str = "",
    scale: Scale = (),
    meanings: Meanings | None = None,
    shown: Mapping[str, Shown] | None = None,
    decimals: float | None = None,
) -> grafana.Panel:
    """One value as of now; its background is its judgement, if it is judged. With `shown` the series' name stands
    there (by its legend) instead of the value."""
    judged = scale or meanings or shown
    options = stat.Options(
        graph_mode=common.BigValueGraphMode.NONE,
        color_mode=common.BigValueColorMode.BACKGROUND_SOLID if judged else common.BigValueColorMode.NONE,
        text_mode=common.BigValueTextMode.NAME if shown else common.BigValueTextMode.VALUE,
        reduce_options=common.ReduceDataOptions(calcs=["lastNotNull"]),
    )
    field = _field(unit, scale, meanings)
    field.decimals = decimals
    return _panel("stat", title, question, {legend: expr}, options, field, shown, now=True)


def lines(
    title: str,
    question: str,
    exprs: Mapping[str, str],
    unit: str,
    *,
    shown: Mapping[str, Shown] | None = None,
    stacked: bool = False,
) -> grafana.Panel:
    """Values over time; a gap where nothing was known. exprs: legend -> PromQL, {{label}} for a label's value."""
    options = timeseries.Options(
        tooltip=common.VizTooltipOptions(mode=common.TooltipDisplayMode.MULTI, sort=common.SortOrder.DESCENDING)
    )
    field = _field(unit)
    field.color = grafana.FieldColor(mode=grafana.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
    field.min_val = 0 if stacked else None
    field.custom = common.GraphFieldConfig(
        line_width=0 if stacked else 2,
        fill_opacity=80 if stacked else 0,
        stacking=common.StackingConfig(mode=common.StackingMode.NORMAL, group="A") if stacked else None,
        show_points=common.VisibilityMode.AUTO,
        span_nulls=False,
    )
    return _panel("timeseries", title, question, exprs, options, field, shown)


def bars(
    title: str,
    question: str,
    expr: str,
    unit: str,
    *,
    legend: str,
    scale: Scale = (),
    shown: Mapping[str, Shown] | None = None,
) -> grafana.Panel:
    """A few named values as of now, one bar each from 0 on."""
    options = bargauge.Options(
        display_mode=common.BarGaugeDisplayMode.BASIC,
        orientation=common.VizOrientation.HORIZONTAL,
        reduce_options=common.ReduceDataOptions(calcs=["lastNotNull"]),
    )
    field = _field(unit, scale or ((0, NOTICE),))
    field.min_val = 0
    return _panel("bargauge", title, question, {legend: expr}, options, field, shown, now=True)


def rows(
    title: str,
    question: str,
    expr: str,
    unit: str,
    *,
    value: str,
    lowest_first: bool = False,
    links: Mapping[str, str] | None = None,
    meanings: Meanings | None = None,
) -> grafana.Panel:
    """A table as of now: a column a label, then the value, by which it is sorted. links: column -> URL of its cells."""
    options = table.Options(sort_by=[common.TableSortByFieldState(display_name=value, desc=not lowest_first)])
    panel = _panel("table", title, question, {"": expr}, options, _field(unit, meanings=meanings), None, now=True)
    for target in panel.targets or ():
        assert isinstance(target, prometheus.Dataquery)
        target.format_val = prometheus.PromQueryFormat.TABLE
    naming = {"excludeByName": {"Time": True}, "renameByName": {"Value": value}}
    panel.transformations = [grafana.DataTransformerConfig(id_val="organize", options=naming)]
    assert panel.field_config is not None
    panel.field_config.overrides = [
        _override(column, {"links": [{"title": "What to do", "url": url, "targetBlank": True}]})
        for column, url in (links or {}).items()
    ]
    if meanings:
        painted = {"custom.cellOptions": {"type": "color-text"}}
        panel.field_config.overrides.append(_override(value, painted))
    return panel


def words(title: str, question: str, markdown: str) -> grafana.Panel:
    """Text that does not change."""
    options = text.Options(mode=text.TextMode.MARKDOWN, content=markdown)
    return grafana.Panel(type_val="text", title=title, description=question, options=options)


def placed(parts: Sequence[Part]) -> list[grafana.Panel | grafana.RowPanel]:
    """Give every panel and heading its place and its number. What is folded takes no room until it is opened."""
    found: list[grafana.Panel | grafana.RowPanel] = []
    numbers = itertools.count(1)
    y = 0
    for part in parts:
        row = grafana.RowPanel(title=part.heading, collapsed=part.folded)
        if part.heading:
            row.id_val, row.grid_pos = next(numbers), grafana.GridPos(x=0, y=y, w=COLUMNS, h=1)
            found.append(row)
            y += 1
        bottom = _flow(part.panels, y, numbers)
        panels = [panel for _, _, panel in part.panels]
        if part.folded:
            row.panels = panels
        else:
            found += panels
            y = bottom
    return found


def _flow(panels: Sequence[tuple[int, int, grafana.Panel]], y: int, numbers: Iterator[int]) -> int:
    """Place panels line by line from y on; the first free y below them."""
    x = line = 0
    for width, height, panel in panels:
        if x + width > COLUMNS:
            x, y, line = 0, y + line, 0
        panel.grid_pos, panel.id_val = grafana.GridPos(x=x, y=y, w=width, h=height), next(numbers)
        x, line = x + width, max(line, height)
    return y + line


def _field(unit: str, scale: Scale = (), meanings: Meanings | None = None) -> grafana.FieldConfig:
    steps = [grafana.Threshold(color=UNKNOWN), *(grafana.Threshold(value=at, color=colour) for at, colour in scale)]
    said = {
        value: grafana.ValueMappingResult(text=word, color=colour) for value, (word, colour) in (meanings or {}).items()
    }
    return grafana.FieldConfig(
        unit=unit,
        no_value=NO_DATA,
        color=grafana.FieldColor(mode=grafana.FieldColorModeId.THRESHOLDS),
        thresholds=grafana.ThresholdsConfig(mode=grafana.ThresholdsMode.ABSOLUTE, steps=steps),
        mappings=[grafana.ValueMap(options=said)] if said else [],
    )


def _panel(
    kind: str,
    title: str,
    question: str,
    exprs: Mapping[str, str],
    options: object,
    field: grafana.FieldConfig,
    shown: Mapping[str, Shown] | None,
    *,
    now: bool = False,
) -> grafana.Panel:
    asked = [
        prometheus.Dataquery(expr=expr, legend_format=legend, instant=now, range_val=not now, ref_id=name)
        for name, (legend, expr) in zip("ABCD", exprs.items(), strict=False)
    ]
    return grafana.Panel(
        type_val=kind,
        title=title,
        description=question,
        datasource=DATASOURCE,
        targets=[*asked],
        options=options,
        field_config=grafana.FieldConfigSource(
            defaults=field, overrides=[_override(name, _drawn(how)) for name, how in (shown or {}).items()]
        ),
    )


def _drawn(how: Shown) -> dict[str, object]:
    drawn: dict[str, object] = {"color": {"mode": "fixed", "fixedColor": how.colour}}
    if how.name:
        drawn["displayName"] = how.name
    if how.dashed:
        drawn["custom.lineStyle"] = {"fill": "dash", "dash": [10, 10]}
    return drawn


def _override(name: str, properties: Mapping[str, object]) -> grafana.DashboardFieldConfigSourceOverrides:
    return grafana.DashboardFieldConfigSourceOverrides(
        matcher=grafana.MatcherConfig(id_val="byName", options=name),
        properties=[grafana.DynamicConfigValue(id_val=key, value=value) for key, value in properties.items()],
    )
