"""Real Prometheus and Alertmanager processes on free ports of loopback, for the tests that ask them."""

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

PROMETHEUS, ALERTMANAGER = "prometheus", "prometheus-alertmanager"
READY_S = 20.0


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test, loudly, where a program is not installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    reason = f"NOT TESTED: {', '.join(missing)} not installed (Debian packages; .ci/run installs them)"
    return pytest.mark.skipif(bool(missing), reason=reason)


def free_port() -> int:
    """A port of loopback that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One process that answers HTTP: start(), kill() and start() again, end()."""

    def __init__(self, folder: Path, name: str, line: Callable[[int], list[str]]) -> None:
        """line: its command line, given the port."""
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._line, self._log = line(self.port), folder / f"{name}.log"
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        """Until it is ready."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._line, stdout=log, stderr=log)
        end_s = time.monotonic() + READY_S
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > end_s:
                pytest.fail(f"not ready; {self.story()}")
            time.sleep(0.02)
        return self.process

    def get(self, path: str, **query: str) -> Any:
        """The JSON that it answers."""
        words = f"?{urllib.parse.urlencode(query)}" if query else ""
        with urllib.request.urlopen(f"{self.url}{path}{words}", timeout=10) as reply:
            return json.load(reply)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """In order, and for certain."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def story(self) -> str:
        """Its last words, for failures."""
        return self._log.read_text(errors="replace")[-3000:]

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False


class Prometheus(Server):
    """Prometheus with a configuration file."""

    def __init__(self, folder: Path, config: Path) -> None:
        options = ["--web.enable-lifecycle", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        super().__init__(
            folder, PROMETHEUS, lambda port: [PROMETHEUS, *options, f"--web.listen-address=127.0.0.1:{port}"]
        )

    def query(self, expr: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query, now or as of a moment (Unix time)."""
        moment = {} if at_s is None else {"time": f"{at_s:.3f}"}
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expr, **moment)["data"]["result"]
        return found

    def alerts(self) -> Mapping[str, str]:
        """State of each alert that is pending or firing, by name."""
        return {one["labels"]["alertname"]: one["state"] for one in self.get("/api/v1/alerts")["data"]["alerts"]}


class Alertmanager(Server):
    """Alertmanager with a configuration file; without peers."""

    def __init__(self, folder: Path, config: Path) -> None:
        options = [f"--config.file={config}", f"--storage.path={folder / 'alertmanager'}", "--cluster.listen-address="]
        super().__init__(
            folder, ALERTMANAGER, lambda port: [ALERTMANAGER, *options, f"--web.listen-address=127.0.0.1:{port}"]
        )

    def alerts(self) -> list[dict[str, Any]]:
        """What it holds as firing."""
        found: list[dict[str, Any]] = self.get("/api/v2/alerts")
        return found
