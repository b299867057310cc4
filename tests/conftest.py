"""What every test gets: hypothesis profiles, a leak check, a limit on torchrun launches, the wheel, shared data."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from trainwarden.core.identity import choose_root

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN_LAUNCHES = 14
"""Real launches that the whole suite may make: each costs 5 to 15 s on two cores."""
WHOLE_RUNS = "tests/end_to_end/"
GRACE_S = 2.0
"""What is ending when a test returns (a reaped child, a joining thread) has this long to be gone."""
FUZZ_EXAMPLES = 10_000
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""Python's own helper process: one a process that uses shared memory, gone when that process ends."""

# No deadline: a loaded machine is no bug of ours. Derandomised: CI must not fail by luck; `make fuzz` looks for luck.
settings.register_profile("default", max_examples=100, deadline=None, derandomize=True, database=None)
settings.register_profile("fuzz", max_examples=FUZZ_EXAMPLES, deadline=None, derandomize=False, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)

_passed = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = [mark for item in items for mark in item.iter_markers("torchrun")]
    launches = sum(mark.kwargs.get("launches", 1) for mark in marks)
    if launches > TORCHRUN_LAUNCHES:
        raise pytest.UsageError(f"{launches} real torchrun launches, the suite has time for {TORCHRUN_LAUNCHES}")
    if PROFILE == "fuzz":
        for item in items:
            _ask_for_more_examples(item)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.nodeid.startswith(WHOLE_RUNS))


def pytest_collection_finish() -> None:
    """What was imported by now (torch and its like: a million objects) is here to stay: nobody need look for garbage in
    it, which took the leak check up to a second a time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One process takes what starts whole runs (it mostly waits, and two trainings at once would be too many for two
    cores), first of all; the others take the rest, a file at a time."""
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda nodeid: WHOLE_RUNS if nodeid.startswith(WHOLE_RUNS) else nodeid.partition("::")[0]
    return scheduler


def _ask_for_more_examples(item: pytest.Item) -> None:
    """A number in a test's own @settings is meant for the default suite; hypothesis has no public way to lift it."""
    test = getattr(item, "function", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None:
        more = settings(own, max_examples=FUZZ_EXAMPLES, derandomize=False)
        setattr(test, "_hypothesis_internal_use_settings", more)  # noqa: B010 (the name is not ours)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No child process, thread or open file of a test outlives it. Not asked of a test that failed already: the
    traceback keeps its frames, and what they hold, alive."""
    before = _held()
    yield
    if not request.node.stash.get(_passed, False):
        return
    deadline = time.monotonic() + GRACE_S
    while (left := _new_since(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    if left:
        pytest.fail("left behind by the test: " + "; ".join(sorted(left)), pytrace=False)


def _held() -> dict[str, str]:
    """What this process holds: what tells it apart -> words that name it."""
    threads = {f"thread {thread.ident}": f"thread {thread.name!r}" for thread in threading.enumerate()}
    return _children() | _open_files() | threads


def _new_since(before: dict[str, str]) -> list[str]:
    return [words for key, words in _held().items() if key not in before]


def _children() -> dict[str, str]:
    listings = Path("/proc/self/task").glob("*/children")
    commands = {pid: _command(pid) for listing in listings for pid in _text(listing).split()}
    return {f"child {pid}": f"child {pid} {words}" for pid, words in commands.items() if RESOURCE_TRACKER not in words}


def _command(pid: str) -> str:
    words = _text(Path("/proc") / pid / "cmdline").replace("\0", " ").strip()
    return words or "(ended, not waited for)"


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, closed by now
            target = os.readlink(f"/proc/self/fd/{fd}")
            found[f"file {fd} {target}"] = f"open file {fd} {target}"
    return {key: words for key, words in found.items() if not key.startswith(f"file {_tracker_fd()} ")}


def _tracker_fd() -> int | None:
    tracker = sys.modules.get(RESOURCE_TRACKER)
    fd: int | None = getattr(getattr(tracker, "_resource_tracker", None), "_fd", None)
    return fd


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_suite() -> Iterator[None]:
    """Keepers and launchers run in sessions of their own, so they are no children of ours when they are left over.
    They carry this run's mark in their environment: whatever carries it after the last test is ended and told."""
    mark = f"TRAINWARDEN_SUITE={os.getpid()}"
    name, value = mark.split("=")
    os.environ[name] = value
    yield
    del os.environ[name]
    deadline = time.monotonic() + GRACE_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    assert not left, f"still running after the last test (ended now): {left}"


def _marked(mark: str) -> dict[str, str]:
    processes = [path for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())]
    marked = [path.name for path in processes if mark in _text(path / "environ").split("\0")]
    return {pid: words for pid in marked if RESOURCE_TRACKER not in (words := _command(pid))}


@pytest.fixture
def ring_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of this test's own for rings, on a tmpfs, named to every rank; skipped where there is no tmpfs."""
    root, why = choose_root()
    if root is None:
        pytest.skip(f"LOUD: no tmpfs for rings here: {why}")
    path = root / f"{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv("TRAINWARDEN_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Public data with ground truth that lies beside the repository on some machines; never part of it."""
    path = ROOT.parent / "shared"
    if not (path / "data").is_dir():
        pytest.skip("no ../shared/data beside the repository: tests on public data are not run")
    return path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built once."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def make_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes fresh venvs that hold our wheel and nothing else (no pip either); gives the path of their bin folder."""

    def make() -> Path:
        venv = tmp_path_factory.mktemp("venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=50)
        pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q"]
        done = subprocess.run(
            [*pip, "--no-deps", "--no-index", str(wheel)], capture_output=True, text=True, check=False, timeout=50
        )
        assert done.returncode == 0, done.stderr
        return venv / "bin"

    return make
