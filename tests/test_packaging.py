"""What a user installs: one wheel with all our code, no dependency of its own, useful alone inside a training image."""

import os
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = ("core", "collectors", "detectors", "alerts", "remediation", "dashboards", "rehearsal", "app")


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def bin_folder(make_venv: Callable[[], Path]) -> Path:
    return make_venv()


def run(
    bin_folder: Path, *command: str, cwd: Path, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """In an environment that knows nothing of this checkout."""
    env = {"PATH": f"{bin_folder}:{os.defpath}", "HOME": str(cwd), **(env or {})}
    words = [str(bin_folder / command[0]), *command[1:]]
    return subprocess.run(words, capture_output=True, text=True, env=env, cwd=cwd, check=False, timeout=50)


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_wheel_holds_every_typed_portion(contents: set[str], component: str) -> None:
    assert {f"trainwarden/{component}/__init__.py", f"trainwarden/{component}/py.typed"} <= contents


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(contents: set[str]) -> None:
    """Rules, policies and dashboards are data: without them the code is there and says nothing."""
    source = {
        str(path.relative_to(ROOT / name))
        for name in COMPONENTS
        for path in (ROOT / name / "trainwarden").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in contents if ".dist-info/" not in name} == source


def test_the_namespace_stays_open(contents: set[str]) -> None:
    assert "trainwarden/__init__.py" not in contents


def test_the_wheel_carries_its_licence(contents: set[str], metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert [name for name in contents if name.endswith(".dist-info/licenses/LICENSE")]


def test_nothing_is_required_outside_extras(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist") or []
    assert [line for line in required if "extra ==" not in line] == []
    assert {"agent", "server", "torch", "all", "dev"} <= set(metadata.get_all("Provides-Extra") or [])


TRAINS = """
import sys
from trainwarden.collectors.rank import FORWARD, LOSS, attach
w = attach()
for step in range(3):
    w.begin(step)
    w.mark(FORWARD)
    w.value(LOSS, 1.0)
    w.end()
print("trained on", sorted(name for name in sys.modules if name.split(".")[0] in ("numpy", "torch", "yaml")))
"""


def test_the_rank_collector_works_with_nothing_else_installed(bin_folder: Path, tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm: rings need a tmpfs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rank = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "TRAINWARDEN_JOB": "alone",
            "TRAINWARDEN_DIR": folder,
        }
        done = run(bin_folder, "python", "-c", TRAINS, cwd=tmp_path, env=rank)
        rings = [path.name for path in Path(folder).rglob("*.ring")]
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained on []\n", "")
    assert rings == ["rank-0-0-0.ring"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("trainwarden", "run", "--", "true"), id="the command"),
        pytest.param(("python", "-m", "trainwarden", "run", "--", "true"), id="the module"),
    ],
)
def test_without_extras_the_command_names_the_one_to_install(
    bin_folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = run(bin_folder, *command, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "trainwarden[agent]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_told_without_extras(bin_folder: Path, tmp_path: Path, metadata: Message) -> None:
    done = run(bin_folder, "python", "-m", "trainwarden", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"trainwarden {metadata['Version']}\n")
