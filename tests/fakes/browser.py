"""A real Chromium without a window, driven by selenium: pages opened from files, as a person would."""

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

PROGRAMS = ("chromium", "chromedriver")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
needs_chromium = pytest.mark.skipif(
    bool(MISSING), reason=f"LOUD: pages are not looked at: no {', '.join(MISSING)} here"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
ENDS_S = 10.0


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        """Load a file in a window so wide, by day (light) or by night (dark)."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.get(page.as_uri())

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self._driver.execute_script(f"return {script}")

    def complaints(self) -> Sequence[str]:
        """Warnings and errors on the console since the last time."""
        said = self._driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [one["message"] for one in said if one["level"] in ("WARNING", "SEVERE")]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; none of its processes is left."""
    options = Options()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
        deadline = time.monotonic() + ENDS_S
        while (left := _running(profile)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == [], "Chromium did not end"


def _running(profile: Path) -> list[str]:
    """Pids of processes that name the profile."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(profile).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
