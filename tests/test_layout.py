"""The shape of the repository: where things lie, who may import what, what may stand in a file (ADR 0001).

Read from the syntax trees, so that a forbidden import is found whether or not a test ever runs it.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = ("core", "collectors", "detectors", "alerts", "remediation", "dashboards", "rehearsal", "app")
STDLIB_ONLY = (
    *(f"trainwarden.core.{name}" for name in ("records", "identity", "manifest", "control")),
    "trainwarden.collectors.rank",
)
"""What runs inside the training process: it must work in any training image, beside any version of anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement; `lazy` inside a function, `typing_only` under `if TYPE_CHECKING`."""

    by: str
    of: str
    where: str
    lazy: bool
    typing_only: bool

    @property
    def top(self) -> str:
        return self.of.split(".")[0]

    def __str__(self) -> str:
        return f"{self.where} imports {self.of}"


def product_files() -> list[Path]:
    return sorted(path for name in COMPONENTS for path in (ROOT / name / "trainwarden").rglob("*.py"))


def module_of(path: Path) -> str:
    """core/trainwarden/core/model.py -> trainwarden.core.model."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")


def component_of(module: str) -> str:
    """trainwarden.core.model -> core; trainwarden.__main__ is the app's."""
    part = module.split(".")[1]
    return "app" if part == "__main__" else part


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in product_files()}
MODULES = {module_of(path) for path in TREES}


def imports() -> Iterator[Import]:
    for path, tree in TREES.items():
        yield from _imports_below(tree, path, lazy=False, typing_only=False)


def _imports_below(node: ast.AST, path: Path, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        where = f"{path.relative_to(ROOT)}:{getattr(child, 'lineno', 0)}"
        for name in _imported(child):
            yield Import(by=module_of(path), of=name, where=where, lazy=lazy, typing_only=typing_only)
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports_below(ast.Module(child.body, []), path, lazy=inside, typing_only=True)
            yield from _imports_below(ast.Module(child.orelse, []), path, lazy=inside, typing_only=typing_only)
        else:
            yield from _imports_below(child, path, lazy=inside, typing_only=typing_only)


def _imported(node: ast.AST) -> Iterable[str]:
    """`from a import b` names a.b where that is a module of ours, else a."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.module, "relative import: say the whole name"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return sorted({name if name in MODULES else node.module for name in names})
    return []


IMPORTS = list(imports())


def test_the_namespace_has_no_init() -> None:
    assert [str(path) for name in COMPONENTS for path in (ROOT / name / "trainwarden").glob("__init__.py*")] == []


def test_nothing_importable_lies_beside_the_namespace() -> None:
    """Each component folder is an entry of sys.path in development: a stray module there would be importable."""
    stray = [
        path.relative_to(ROOT)
        for name in COMPONENTS
        for path in (ROOT / name).iterdir()
        if path.name != "trainwarden" and (path.suffix in (".py", ".so", ".pyd") or list(path.glob("*.py")))
    ]
    assert stray == []


def test_every_tool_knows_every_component() -> None:
    """A component that is missing from one of these lists would silently be not shipped, typed, measured or sorted."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tool["hatch"]["build"]["dev-mode-dirs"] == list(COMPONENTS)
    assert tool["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"{name}/trainwarden" for name in COMPONENTS]
    assert tool["mypy"]["mypy_path"].split(":") == list(COMPONENTS)
    for listed in (tool["mypy"]["files"], tool["coverage"]["run"]["source"], tool["ruff"]["src"]):
        assert set(COMPONENTS) <= set(listed)


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_portion_is_one_typed_package(component: str) -> None:
    portion = ROOT / component / "trainwarden"
    assert (portion / component / "__init__.py").is_file()
    assert (portion / component / "py.typed").is_file()
    folders = {path.name for path in portion.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {component}, "a portion holds its own component only"


def test_packages_import_nothing() -> None:
    """Importing one module costs that module. The rank collector re-exports its names, app.cli is the entry point."""
    packages = {module_of(path) for path in TREES if path.name == "__init__.py"}
    packages -= {"trainwarden.collectors.rank", "trainwarden.app.cli"}
    assert [str(one) for one in IMPORTS if one.by in packages and not one.lazy] == []


def test_components_import_only_themselves_and_core() -> None:
    """app wires them together, so it alone may import all; core imports core."""
    ours = [one for one in IMPORTS if one.of.startswith("trainwarden.")]
    crossed = [one for one in ours if component_of(one.of) not in ("core", component_of(one.by))]
    assert [str(one) for one in crossed if component_of(one.by) != "app"] == []


def inside_training(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in STDLIB_ONLY)


def test_code_inside_the_training_needs_the_standard_library_only() -> None:
    """Followed through our own modules too. One exception: hooks touch torch, lazily, in jobs that have it loaded."""
    reached, todo, foreign = set[str](), [name for name in MODULES if inside_training(name)], []
    while todo:
        module = todo.pop()
        reached.add(module)
        for one in (one for one in IMPORTS if one.by == module and not one.typing_only):
            if one.top == "trainwarden":
                todo += [one.of] if one.of not in reached else []
            elif one.top not in sys.stdlib_module_names and not _lazy_torch_in_a_hook(one):
                foreign.append(str(one))
    assert foreign == []


def _lazy_torch_in_a_hook(one: Import) -> bool:
    return one.lazy and one.top == "torch" and one.by.startswith("trainwarden.collectors.rank.hooks")


@pytest.mark.parametrize(
    ("modules", "homes"),
    [
        pytest.param({"subprocess", "pty", "commands"}, {"trainwarden.core.child"}, id="child processes"),
        pytest.param(
            {"httpx", "requests", "urllib.request", "urllib3", "http.client", "aiohttp"},
            {"trainwarden.core.net"},
            id="HTTP clients",
        ),
        pytest.param({"dbos"}, {"trainwarden.app.durable"}, id="the durable engine"),
        pytest.param(
            {"pickle", "cloudpickle", "dill", "shelve", "marshal"},
            {"trainwarden.collectors.nccl.restricted"},
            id="unpickling",
        ),
    ],
)
def test_one_home(modules: set[str], homes: set[str]) -> None:
    guests = [one for one in IMPORTS if not one.typing_only and one.by not in homes]
    assert [str(one) for one in guests if one.of in modules or one.top in modules] == []


STARTS_A_PROCESS = re.compile(r"(os\.(system|popen|spawn\w+|posix_spawn\w*|exec\w+)|asyncio\.create_subprocess_\w+)")


def test_processes_are_started_in_one_place() -> None:
    found = [one for one in calls() if STARTS_A_PROCESS.fullmatch(one.of) and one.by != "trainwarden.core.child"]
    assert [str(one) for one in found] == []


STATISTIC = re.compile(r"(np|numpy|statistics|stats|scipy\.stats|pd|pandas)\.(nan)?(median|percentile|quantile)s?\w*")


def test_detectors_take_medians_in_one_place() -> None:
    """detectors/robust.py is the home of medians, quantiles and CUSUMs: one definition, one test, one speed."""
    used = [(one.by, str(one)) for one in calls() if STATISTIC.fullmatch(one.of)]
    used += [(one.by, str(one)) for one in IMPORTS if one.top in ("statistics", "scipy")]
    guests = [(by, what) for by, what in used if by != "trainwarden.detectors.robust"]
    assert [what for by, what in guests if component_of(by) == "detectors"] == []


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call; `of` as it is written."""

    by: str
    of: str
    where: str

    def __str__(self) -> str:
        return f"{self.where} calls {self.of}"


def calls() -> Iterator[Call]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Call(by=module_of(path), of=ast.unparse(node.func), where=where)


def test_sizes_stay_within_the_house_style() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "size.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# As patterns, which do not match themselves.
_FOLDERS = ("work", "root", r"opt/py\w+", re.escape(str(Path.home()).strip("/") or "root"))
_HOSTS = (r"pypi\.(?:org|io)", r"pythonhosted\.", r"registry\.npm", r"download\.pytorch", r"(?:deb|ftp)\.debian")
MACHINE_PATHS = re.compile(rf"(?<![\w.<>{{}}$-])/(?:{'|'.join(_FOLDERS)})/")
REGISTRY_HOSTS = re.compile(rf"\b(?:{'|'.join(_HOSTS)})", re.IGNORECASE)


def tracked_texts() -> Iterator[tuple[Path, str]]:
    """Every file that is, or is about to be, under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: what belongs to the repository is not known")
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    for path in (ROOT / name for name in names if name):
        if path.is_file():
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize(
    "pattern", [pytest.param(MACHINE_PATHS, id="machine paths"), pytest.param(REGISTRY_HOSTS, id="registry hosts")]
)
def test_files_name_no_machine(pattern: re.Pattern[str]) -> None:
    """Paths of one machine and package hosts belong to its settings, not to the repository."""
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def test_links_in_documents_lead_somewhere() -> None:
    dead = [
        f"{path}: {target}"
        for path, text in tracked_texts()
        if path.suffix == ".md"
        for target in LINK.findall(text)
        if not (ROOT / path.parent / target).exists()
    ]
    assert dead == []
