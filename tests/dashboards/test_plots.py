"""Figures: what they say, that they stay small, and that they are the same each time."""

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from tests.dashboards.made import STEPS, made, steps_of, trouble

from trainwarden.core.signals import ACTIVITIES
from trainwarden.dashboards import plots
from trainwarden.dashboards.facts import GRID_COLUMNS, GRID_ROWS, POINTS, Grid, Report, Rollback, thinned
from trainwarden.dashboards.plots import Drawing

DRAW: dict[str, Callable[[Report], Drawing | None]] = {
    "timeline": plots.timeline,
    "loss": plots.loss,
    "step_time": plots.step_time,
    "own_work": plots.own_work,
    "where_time": plots.where_time,
    "costs": plots.costs,
}


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """matplotlib opens its fonts once a process and keeps them: before the first test, else it would be a leak."""
    plots.costs(made())


def drawn(name: str, report: Report) -> Drawing:
    drawing = DRAW[name](report)
    assert drawing is not None
    return drawing


def words(drawing: Drawing) -> list[str]:
    """Texts of the picture."""
    root = ElementTree.fromstring(drawing.svg)
    return ["".join(node.itertext()) for node in root.iter("text")]


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_is_one_well_formed_svg_with_words_for_those_who_do_not_see_it(name: str) -> None:
    drawing = drawn(name, made())
    root = ElementTree.fromstring(drawing.svg)
    assert root.tag.endswith("svg")
    assert (root.get("role"), root.get("aria-label")) == ("img", drawing.caption)
    assert len(drawing.caption.split()) >= 10, "says what one sees"
    assert drawing.svg == drawn(name, made()).svg, "the same facts give the same bytes"


@pytest.mark.parametrize("name", DRAW)
def test_every_colour_is_a_variable_of_the_page(name: str) -> None:
    svg = drawn(name, made()).svg
    assert "#fe01" not in svg
    assert set(re.findall(r"var\(--(\w+)\)", svg)) <= set(plots.COLOURS)
    page = (Path(plots.__file__).parent / "report.html.j2").read_text()
    assert [colour for colour in plots.COLOURS if f"--{colour}:" not in page] == []


@pytest.mark.parametrize("name", DRAW)
def test_nothing_to_draw_draws_nothing(name: str) -> None:
    empty = made(steps=STEPS.head(0), grid=Grid(), activity_s={}, troubles=(), attempts=())
    assert DRAW[name](empty) is None


def test_the_loss_shows_the_rollback_the_skipped_batch_and_what_is_not_finite() -> None:
    shown = drawn("loss", made(rollbacks=(Rollback(last=60, kept=40, origin="step-40-1"),), skipped=((55, 57),)))
    assert {"back to step 40", "batches 55-57 skipped", "not finite", "attempt 1", "attempt 2"} <= set(words(shown))
    assert "Crosses: 4 steps with a value that is not finite" in shown.caption


def test_of_many_rollbacks_and_incidents_the_caption_says_how_many_are_not_drawn() -> None:
    many = made(
        rollbacks=tuple(Rollback(last=60 + n, kept=40, origin="") for n in range(9)),
        troubles=tuple(trouble(f"t{n}") for n in range(45)),
    )
    assert "Of 9 rollbacks the last 6 have an arrow." in drawn("loss", many).caption
    assert "5 quieter ones are not drawn." in drawn("timeline", many).caption
    assert "Dots, from above: first sign, detected" in drawn("timeline", many).caption


def test_a_lane_has_each_moment_in_words() -> None:
    said = words(drawn("timeline", made()))
    assert [one for one in said if one.startswith(("first", "detected", "runs"))] == [
        "first sign at 10.0 s",
        "detected +0.50 s",
        "runs again +9.00 s",
    ]


def test_text_of_a_tenant_is_text_and_signs_that_mislead_are_spelt_out() -> None:
    report = made(troubles=(trouble("t", culprit="<b>$x^2$\u202e\n&", kind="rank.\u4e2d"),))
    said = words(drawn("timeline", report))
    assert "<b>$x^2$\\u202e\\n&" in said
    assert "rank.\u4e2d" in said, "letters of the world stay"


def test_series_keep_their_extremes_and_no_more_points_than_a_screen_has() -> None:
    values = np.sin(np.arange(50_000) / 100)
    values[31_234], values[7], values[44_444] = 99.0, -99.0, np.inf
    table = pd.DataFrame({"step": np.arange(50_000), "loss": values})
    few = thinned(table, "loss")
    assert len(few) <= POINTS
    assert (few.loss.max(), few.loss.min()) == (99.0, -99.0)
    assert few.step.is_monotonic_increasing
    assert len(thinned(table.head(100), "loss")) == 100


def test_a_long_series_is_a_small_picture_and_says_that_it_was_thinned() -> None:
    shown = drawn("step_time", made(steps=steps_of(30_000)))
    assert len(shown.svg) < 200_000
    assert "Of 30000 steps the lowest and highest of each stretch are drawn." in shown.caption


def test_the_grid_never_outgrows_its_size_and_keeps_the_largest() -> None:
    grid, ratio_R = Grid(), np.ones(1000)
    for step in range(1500):
        ratio_R[777] = 1.9 if step == 1234 else 1.0
        grid.add("attempt 1", step, ratio_R)
    assert grid.ratio_RC.shape == (250, 375)
    assert (grid.ranks_per_row, grid.steps_per_column) == (4, 4)
    assert np.argwhere(grid.ratio_RC > 1.5).tolist() == [[777 // 4, 1234 // 4]]
    assert grid.starts[1234 // 4] == ("attempt 1", 1232)
    assert not grid.blind_RC.any()
    assert grid.ratio_RC.shape[0] <= GRID_ROWS
    assert grid.ratio_RC.shape[1] <= GRID_COLUMNS


def test_more_ranks_later_are_joined_with_those_before() -> None:
    grid = Grid()
    grid.add("attempt 1", 1, np.array([1.0, 1.7, np.nan]))
    grid.add("attempt 2", 2, np.full(500, 1.1))
    assert grid.ranks_per_row == 2
    assert grid.ratio_RC.shape == (250, 2)
    assert grid.ratio_RC[0].tolist() == pytest.approx([1.7, 1.1])
    assert grid.blind_RC[:2, 0].tolist() == [False, True]
    assert np.isnan(grid.ratio_RC[2:, 0]).all(), "ranks that were not there are nothing, not blind"
    assert not grid.blind_RC[2:].any()


def test_a_cell_with_a_blind_rank_is_hatched_unless_another_rank_in_it_is_slow() -> None:
    grid = Grid()
    for _ in range(GRID_ROWS * 2):
        grid.add("attempt 1", 1, np.array([1.0, 1.0]))
    assert "hatched" not in drawn("own_work", made(grid=grid)).caption
    grid.add("attempt 1", 2, np.array([1.0, np.nan]))
    assert "Grey and hatched: not to be told, so not known to be healthy" in drawn("own_work", made(grid=grid)).caption
    slow = Grid()
    slow.add("attempt 1", 1, np.array([np.nan, *np.ones(GRID_ROWS * 2 - 1)]))
    slow.add("attempt 1", 2, np.array([np.nan, 1.8, *np.ones(GRID_ROWS * 2 - 2)]))
    caption = drawn("own_work", made(grid=slow)).caption
    assert "Highest: 1.80 on the ranks from 0, step 2." in caption
    assert "(0% of the cells)" in caption, "one blind cell of 512: that of step 1"


def test_shares_of_the_time_add_up_and_what_nobody_saw_is_said() -> None:
    shown = drawn("where_time", made(wall_s=100.0, activity_s=dict.fromkeys(ACTIVITIES, 10.0)))
    assert "What 70.0 s of wall time were spent on" in shown.caption
    assert "Of 30.0 s nobody knows" in shown.caption
