"""The page: what it says first, that it needs nothing and lets nothing in, and that it is honest about gaps."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.dashboards.made import STEPS, made, trouble

from trainwarden.dashboards.facts import Grid, Report
from trainwarden.dashboards.report import LISTED, attempt_rows, render, shares, tiles

VOID = ("meta", "link", "br", "img", "hr")
SECTIONS = [
    "summary",
    "incidents",
    "loss",
    "step-time",
    "own-work",
    "time",
    "decisions",
    "checkpoints",
    "unseen",
    "made",
]


@pytest.fixture(scope="module", autouse=True)
def page() -> str:
    """Rendered before the first test: matplotlib opens its fonts once a process and keeps them, else a leak."""
    return render(made())


def bare(**more: Any) -> Report:
    """Without what takes time to draw; more: fields that differ."""
    return made(**{"steps": STEPS.head(0), "grid": Grid(), "activity_s": {}, "troubles": (), **more})


class Reader(HTMLParser):
    """Tags with their attributes; fails where one is closed that is not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == [], "never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def text(page: str) -> str:
    """Without tags and runs of space."""
    return re.sub(r"\s+", " ", re.sub(r"<(style|svg).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL))


def test_the_page_needs_nothing_and_forbids_everything_else(page: str) -> None:
    tags = Reader(page).tags
    assert not {"script", "link", "iframe", "img", "object", "form", "base"} & {tag for tag, _ in tags}
    links = [value for _, attrs in tags for key, value in attrs.items() if key.endswith(("href", "src"))]
    assert [link for link in links if not (link or "").startswith(("#", "data:image/png;base64,"))] == []
    assert [key for _, attrs in tags for key in attrs if key.startswith("on")] == []
    policy = next(attrs["content"] for tag, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not re.search(r"url\((?!#)|@import", page)
    assert len(page) < 300_000


def test_every_section_is_there_and_can_be_reached(page: str) -> None:
    tags = Reader(page).tags
    assert [attrs["id"] for tag, attrs in tags if tag == "section"] == SECTIONS
    assert [attrs["href"] for tag, attrs in tags if tag == "a" and attrs["href"]][: len(SECTIONS)] == [
        f"#{name}" for name in SECTIONS
    ]


def test_what_a_tenant_writes_is_only_text() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}\u202e\x00\n"
    page = render(
        bare(
            job=evil,
            command=evil,
            node=evil,
            ended=evil,
            said=(evil,),
            unseen=((evil, evil),),
            troubles=(trouble(evil, reason=evil, culprit=evil, kind=evil),),
        )
    )
    tags = Reader(page).tags
    assert not {"script", "img"} & {tag for tag, _ in tags}
    assert [key for _, attrs in tags for key in attrs if key.startswith("on")] == []
    assert "{{ 7*7 }}" in page
    assert "\u202e" not in page
    assert "\x00" not in page
    assert "\\u202e\\x00\\n" in page


def test_the_first_numbers_answer_what_one_asks_first() -> None:
    told = {tile.name: (tile.value, tile.note) for tile in tiles(made())}
    assert told == {
        "wall time": ("60.0 s", "2 attempts"),
        "closed steps": ("120", "20 of them done again, newest 100"),
        "effective training": ("67%", "of the wall time"),
        "incidents": ("1", "all resolved, CRITICAL"),
        "lost to recoveries": ("9.00 s", "1 recovery, 4 ranks: 36 rank-seconds"),
        "last checkpoint": ("step 40", "43.0 s before the end, good"),
    }


def test_what_is_open_comes_first_and_in_its_colour() -> None:
    report = bare(troubles=(trouble("a"), trouble("b", tier="WARN", state="confirmed", lost_s={})))
    told = next(tile for tile in tiles(report) if tile.name == "incidents")
    assert (told.note, told.tone) == ("1 open, WARN", "warn")
    said = text(render(report))
    assert "WARN loss.nonfinite of rank:1: confirmed CRITICAL" in said
    assert "What to do: restart" in said


def test_nothing_known_is_never_shown_as_good() -> None:
    report = made(
        steps=STEPS.head(0), grid=Grid(), activity_s={}, decided=False, troubles=(), plans=(), ended="",
        checkpoints=made().checkpoints.head(0), ranks=None,
    )  # fmt: skip
    told = {tile.name: tile.value for tile in tiles(report)}
    assert {name for name, value in told.items() if value == "no data"} == {
        *("closed steps", "effective training", "incidents", "lost to recoveries"),
    }
    assert told["last checkpoint"] == "none"
    said = text(render(report))
    assert "No end was recorded" in said
    assert "Decisions were not recorded, so incidents are not known here." in said
    assert "No incident" not in said


def test_attempts_have_what_their_steps_were() -> None:
    (first, told), (_, second) = attempt_rows(made())
    assert first.number == 1
    assert (told["first"], told["last"], told["closed"], told["again"]) == (1, 60, 60, 20)
    assert told["median_s"] == pytest.approx(0.41)
    assert (second["first"], second["last"], second["again"]) == (41, 100, 0)
    assert told["loss"] == pytest.approx(1 + 3 / 56), "the last that was finite"
    assert attempt_rows(made(steps=STEPS.head(0)))[0][1] == {}


def test_shares_have_a_sum() -> None:
    table = shares(made().activity_s)
    assert table.seconds["all of it"] == 60.0
    assert table.share.drop("all of it").sum() == pytest.approx(1.0)


def test_a_plan_shows_each_rung_why_it_failed_and_what_people_said(page: str) -> None:
    said = text(page)
    assert "loss.nonfinite of rank:1 ACT failed decided at 11.0 s" in said
    assert "verified: loss fails" in said
    assert "9 (expected: at most 3)" in said
    assert "<details open>" in page, "a check that did not hold is not hidden"
    assert "12.0 s: ann: deny t1/plan-1" in said


def test_of_many_things_some_are_listed_and_the_rest_is_counted() -> None:
    report = made()
    one, many = report.checkpoints, LISTED + 7
    page = render(
        bare(
            checkpoints=one.loc[one.index.repeat(many)],
            troubles=(trouble("quiet", tier="INFO"), *(trouble(f"t{number}") for number in range(many))),
            plans=report.plans * many,
            said=("a word",) * many,
        )
    )
    assert page.count("<code>step-40-1</code>") == page.count("a word</li>") == LISTED
    assert "8 quieter ones are not listed" in text(page)
    assert "<code>quiet</code>" not in page
    assert text(page).count("7 older ones are not listed") == 2
    assert len(page) < 1_000_000


def test_the_page_follows_the_readers_choice_of_day_or_night_and_prints() -> None:
    style = (Path(render.__code__.co_filename).parent / "report.html.j2").read_text()
    assert "@media (prefers-color-scheme: dark)" in style
    assert "@media print" in style
