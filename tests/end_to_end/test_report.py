"""The report as a person sees it: `trainwarden report` on a run, its page in a real Chromium."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.browser import Browser, chromium, needs_chromium
from tests.fakes.ran import JOB, ran

SECTIONS = [
    *("summary", "incidents", "loss", "step-time", "own-work", "time", "decisions", "checkpoints", "unseen", "made"),
]
FIGURES = ["timeline", "loss", "step_time", "own_work", "where_time", "costs"]
EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\"> and words"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by the command."""
    state = tmp_path_factory.mktemp("state")
    folder = ran(state, reason=EVIL)
    command = [sys.executable, "-m", "trainwarden", "report", JOB, "--state", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder.path}/report.html\n", "")
    return folder.path / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_page_is_whole_in_every_width_by_day_and_by_night(
    page: Path, browser: Browser, width: int, scheme: str
) -> None:
    browser.open(page, width, scheme)
    assert browser.complaints() == []
    assert browser.ask("performance.getEntriesByType('resource').map(one => one.name)") == [], "nothing is fetched"
    assert browser.ask("document.documentElement.scrollWidth") == width, "nobody scrolls sideways"
    assert browser.ask("[...document.querySelectorAll('section')].map(one => one.id)") == SECTIONS
    sizes = browser.ask(
        "[...document.querySelectorAll('figure')].map(one => {const box = one.querySelector('svg')"
        ".getBoundingClientRect(); return [one.id, box.width > 300, box.height > 30, one.checkVisibility()]})"
    )
    assert sizes == [[f"figure-{name}", True, True, True] for name in FIGURES]
    boxes, cut = "document.querySelectorAll('.tile, h1, h2, h3, .card')", "one => one.scrollWidth > one.clientWidth + 1"
    assert browser.ask(f"[...{boxes}].filter({cut}).map(one => one.textContent)") == [], "nothing is cut off"


@needs_chromium
def test_night_is_dark_and_day_is_light_and_figures_follow(page: Path, browser: Browser) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme)
        texts = "getComputedStyle(document.querySelector('#figure-loss svg text')).fill"
        seen[scheme] = (browser.ask("getComputedStyle(document.body).backgroundColor"), browser.ask(texts))
    assert seen["light"][0] == "rgb(246, 247, 249)"
    assert seen["dark"][0] == "rgb(16, 20, 24)"
    assert seen["light"][1] != seen["dark"][1]


@needs_chromium
def test_what_a_tenant_wrote_is_read_and_not_run(page: Path, browser: Browser) -> None:
    browser.open(page)
    assert browser.ask("document.title") == f"{JOB}: report of a run"
    assert browser.ask("document.querySelectorAll('script, img').length") == 0
    assert EVIL in browser.ask("document.querySelector('#incidents').textContent")


@needs_chromium
def test_the_page_could_not_run_a_script_if_one_got_in_and_the_console_would_say_so(
    page: Path, browser: Browser, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.html"
    script = "<script>document.title = 'owned'</script><img src='https://127.0.0.1:9/x.png'></main>"
    broken.write_text(page.read_text().replace("</main>", script))
    browser.open(broken)
    assert browser.ask("document.title") == f"{JOB}: report of a run"
    blocked = [one for one in browser.complaints() if "Content Security Policy" in one]
    assert len(blocked) == 2
