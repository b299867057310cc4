"""The dashboard "Training job" as it is committed: what Grafana will read, without a Grafana."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from trainwarden.core.kinds import KINDS
from trainwarden.core.signals import ACTIVITIES, METRICS
from trainwarden.dashboards import job, look, queries

BOARD = json.loads(job.FILE.read_text())
PANELS = list(queries.panels_of(BOARD))
ASKING = [panel for panel in PANELS if panel["type"] != "text"]
SEEN_FIRST_UNITS = 22
"""Of 38 pixels: what 1080 lines leave below a browser's and Grafana's own bars (about 240)."""
OPEN_QUERIES_MAX, ALL_QUERIES_MAX = 32, 52
"""At each refresh, with nothing or everything unfolded (performance goal 19: each costs the same at any rank count)."""
NOT_OURS = {"process_cpu_seconds_total"}
"""What prometheus-client exports of the process itself."""


def by_title(panels: Sequence[Mapping[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("panel", [pytest.param(panel, id=panel["title"]) for panel in panels])


def test_the_json_is_what_the_code_writes() -> None:
    assert job.FILE.read_text() == job.text(), "run `make dashboards` and commit what it writes"


def test_another_process_writes_the_same() -> None:
    code = "import sys; from trainwarden.dashboards import job; sys.stdout.write(job.text())"
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=50)
    assert told.stdout == job.FILE.read_text(), told.stderr


@by_title(PANELS)
def test_a_panel_says_which_question_it_answers(panel: Mapping[str, Any]) -> None:
    assert panel["description"].split("?")[0] != panel["description"], "one question"
    assert panel["description"].count("?") == 1
    assert panel["title"].isascii()
    assert panel["description"].isascii()


@by_title(ASKING)
def test_a_panel_has_a_unit_and_a_word_for_no_data(panel: Mapping[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["noValue"] == "no data"
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    base = defaults["thresholds"]["steps"][0]
    assert (base["value"], base["color"]) == (None, look.UNKNOWN), "what has no value has not the colour of health"


@by_title([panel for panel in ASKING if panel["type"] != "timeseries"])
def test_a_single_value_is_as_of_now(panel: Mapping[str, Any]) -> None:
    """The last value of a range would be shown for as long as the range, long after nobody exports it."""
    assert [(query["instant"], query["range"]) for query in panel["targets"]] == [(True, False)]


@by_title([panel for panel in ASKING if panel["type"] == "timeseries"])
def test_a_gap_stays_a_gap(panel: Mapping[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False
    assert all(query["range"] for query in panel["targets"])


def test_titles_and_numbers_are_unique() -> None:
    numbers = [panel["id"] for panel in (*BOARD["panels"], *PANELS) if panel["type"] == "row"]
    numbers += [panel["id"] for panel in PANELS]
    titles = [panel["title"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    assert len(set(titles)) == len(titles)
    assert all(len({query["refId"] for query in panel["targets"]}) == len(panel["targets"]) for panel in ASKING)


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(BOARD["panels"], id="as it opens"),
        *(pytest.param(row["panels"], id=row["title"]) for row in BOARD["panels"] if row.get("collapsed")),
    ],
)
def test_panels_lie_in_the_grid_and_on_no_other(group: Sequence[Mapping[str, Any]]) -> None:
    places = [panel["gridPos"] for panel in group]
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= look.COLUMNS and at["h"] > 0 for at in places)
    for one, other in combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def test_no_line_of_the_grid_has_a_hole() -> None:
    groups = [BOARD["panels"], *(row["panels"] for row in BOARD["panels"] if row.get("collapsed"))]
    for places in ([panel["gridPos"] for panel in group] for group in groups):
        widths: dict[int, int] = {}
        for at in places:
            widths[at["y"]] = widths.get(at["y"], 0) + at["w"]
        assert set(widths.values()) == {look.COLUMNS}


def test_what_is_seen_first_is_whether_it_trains_how_fast_and_what_is_wrong() -> None:
    """Everything above the first heading fits on a screen of 1080 lines."""
    first_row = next(panel["gridPos"]["y"] for panel in BOARD["panels"] if panel["type"] == "row")
    assert first_row <= SEEN_FIRST_UNITS
    seen = {panel["title"] for panel in BOARD["panels"] if panel["gridPos"]["y"] < first_row}
    assert {"Doing now", "Last progress"} <= seen, "is it training"
    assert {"Step time", "Step time / expected", "Tokens/s per GPU", "Effective training, 24 h"} <= seen, "how fast"
    assert {"Worst open incident", "Blind sources", "Slowest ranks by own work", "Incidents"} <= seen, "what is wrong"


def test_what_is_folded_is_not_asked() -> None:
    """Grafana asks the panels of a folded row when it is opened: they lie inside of it."""
    rows = {panel["title"]: panel for panel in BOARD["panels"] if panel["type"] == "row"}
    assert [title for title, row in rows.items() if row["collapsed"]] == ["What was done about it?", "Are we well?"]
    assert all(bool(row["panels"]) == row["collapsed"] for row in rows.values())


def test_a_refresh_asks_a_bounded_number_of_queries() -> None:
    shown = [panel for panel in BOARD["panels"] if panel["type"] not in ("row", "text")]
    annotations = len(BOARD["annotations"]["list"])
    assert sum(len(panel["targets"]) for panel in shown) + annotations <= OPEN_QUERIES_MAX
    assert sum(len(panel["targets"]) for panel in ASKING) + annotations <= ALL_QUERIES_MAX


SELECTOR = re.compile(r"\b([a-z]\w*)\{([^}]*)\}")
BY = re.compile(r"\bby \(([^)]*)\)")


def texts() -> Iterator[tuple[str, str, str]]:
    """(where, PromQL, legend) of everything that names a metric."""
    for panel in ASKING:
        yield from ((panel["title"], query["expr"], query["legendFormat"]) for query in panel["targets"])
    for one in BOARD["annotations"]["list"]:
        yield one["name"], one["expr"], one.get("textFormat", "")


def test_every_metric_and_label_is_one_that_is_exported() -> None:
    for where, expr, legend in texts():
        named = SELECTOR.findall(expr)
        words = set(re.findall(r"\b(?:trainwarden|process|up)\w*\b", expr))
        ours = {name for name, _ in named}
        assert words - ours <= NOT_OURS, where
        known: set[str] = {"job", "instance", "runbook"}
        for name, picked in named:
            metric = METRICS[re.sub("_(sum|count)$", "", name) if name not in METRICS else name]
            labels = {pick.partition("=")[0] for pick in picked.split(",")}
            assert labels <= {"job_id", *metric.labels}, where
            assert 'job_id=~"$job_id"' in picked, f"{where}: of one job only"
            known |= set(metric.labels)
        used = {label.strip() for part in BY.findall(expr) for label in part.split(",")}
        assert used | set(re.findall(r"{{(\w+)}}", legend)) <= known, where
    (variable,) = [one for one in BOARD["templating"]["list"] if one["name"] == "job_id"]
    assert variable["query"] == "label_values(trainwarden_heartbeat_timestamp_seconds, job_id)"


def test_what_is_drawn_by_name_has_every_name() -> None:
    assert set(look.ACTIVITIES) == set(ACTIVITIES)
    (worst,) = [panel for panel in PANELS if panel["title"] == "Worst open incident"]
    (mapping,) = worst["fieldConfig"]["defaults"]["mappings"]
    assert [said["text"] for said in mapping["options"].values()] == ["none", "INFO", "WARN", "ERROR", "CRITICAL"]


def test_every_kind_of_finding_leads_to_its_page() -> None:
    (pages,) = [panel["options"]["content"] for panel in PANELS if panel["type"] == "text"]
    linked = re.findall(r"\$\{runbooks\}/([\w-]+)\.md", pages)
    assert linked == [kind.runbook for kind in KINDS.values() if kind.of == "finding"]
    assert all((job.FILE.parents[4] / job.RUNBOOKS / f"{page}.md").is_file() for page in linked)


def test_no_query_gives_a_series_a_rank_but_for_the_five_slowest() -> None:
    """Whatever the number of ranks (performance goal 19). Sources, too, are many: asked of a real Prometheus."""
    of_ranks = {name for name, metric in METRICS.items() if {"rank", "device"} & set(metric.labels)}
    asked = [expr for _, expr, _ in texts() if of_ranks & {name for name, _ in SELECTOR.findall(expr)}]
    assert asked == [queries.slowest()]
    assert asked[0].startswith("topk(5, ")


OKABE_ITO = {"#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#009E73", look.UNKNOWN}


def test_colours_are_those_that_colour_blind_people_tell_apart() -> None:
    named = set(re.findall(r'"(?:color|fixedColor|iconColor)": "([^"]+)"', job.FILE.read_text()))
    assert named <= OKABE_ITO


NPM = os.environ.get("TRAINWARDEN_NPM") == "1" and shutil.which("npm") is not None
TYPES = """
import type { AnnotationQuery, Dashboard } from "@grafana/schema";
// Their enums have string values, which no JSON can name: an enum counts as the strings that it stands for.
type Written<T> = T extends string ? (string extends T ? T : `${T}`)
  : T extends (infer U)[] ? Written<U>[] : T extends object ? { [K in keyof T]: Written<T[K]> } : T;
// What Prometheus' annotations need stands in the data source's own code, not in the schema.
type OfPrometheus = AnnotationQuery &
  { expr: string; step: string; titleFormat: string; textFormat?: string; tagKeys?: string };
type Board = Omit<Dashboard, "annotations"> & { annotations: { list: OfPrometheus[] } };
export const board: Written<Board> =
"""


@pytest.mark.skipif(not NPM, reason="LOUD: types of @grafana/schema not checked: needs npm and TRAINWARDEN_NPM=1")
@pytest.mark.timeout(600)
def test_the_json_has_the_types_of_grafanas_own_schema(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text("{}")
    npm = ["npm", "install", "--no-audit", "--no-fund", "@grafana/schema@13.2.3", "typescript@5"]
    subprocess.run(npm, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    options = [
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--moduleResolution",
        "bundler",
        "--module",
        "esnext",
        "--target",
        "es2022",
    ]
    told = {}
    for name, text in (("good", job.text()), ("bad", job.text().replace('"gridPos"', '"gridPosition"'))):
        (tmp_path / f"{name}.ts").write_text(f"{TYPES}{text};\n")
        compiler = [str(tmp_path / "node_modules" / ".bin" / "tsc"), *options, f"{name}.ts"]
        told[name] = subprocess.run(compiler, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert told["good"].returncode == 0, told["good"].stdout
    assert told["bad"].returncode != 0, "a wrong name must be noticed, or this checks nothing"
