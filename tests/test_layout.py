"""The shape of the repository: what is packaged, who imports whom, what lies where."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchd.daemon import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("daemon", "models", "kernels", "exporters", "dashboard")
REQUIRED = {*FOLDERS, "systemd", "tests", "docs", ".ci", ".gitignore", "pyproject.toml", "Makefile", "constraints.txt"}
REQUIRED |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"}
ALLOWED = REQUIRED | {
    "benchmarks",
    "results",
    "constraints-jetson62.txt",
    "constraints-jetson72.txt",
    "Containerfile",
    "compose.yaml",
}
RANKS = {
    "benchd.daemon.machine.folders": 0,  # what the kernels keep too
    "benchd.daemon.machine.installed": 0,  # what an error names
    "benchd.daemon": 1,  # its loose files: records, errors, config and what else belongs to all
    "benchd.kernels": 1,
    "benchd.daemon.machine": 2,
    "benchd.exporters": 2,
    "benchd.models": 2,
    "benchd.daemon.verdicts": 3,
    "benchd.daemon.sampling": 4,
    "benchd.daemon.measuring": 5,
    "benchd.daemon.delivery": 6,
    "benchd.daemon.reporting": 6,
    "benchd.daemon.shipping": 6,
    "benchd.daemon.profiling": 7,
    "benchd.daemon.service": 7,
    "benchd.dashboard": 7,
    "benchd.daemon.why": 8,
    "benchd.daemon.commands": 9,
    "benchd.daemon.worker": 9,
}
WITH_TORCH = ("benchd.daemon.worker", "benchd.models", "benchd.kernels", "benchd.exporters")
MOST_LOOSE, MOST_PAIRS = 7, 115


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("benchd", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_name(path): path for path in sources()}


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: no bodies of functions, nothing for the type checker only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import(child)


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Return the modules of ours that import statements among `nodes` name."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & MODULES.keys()) or {str(node.module)}
    return {name for name in names if name.split(".")[0] == "benchd"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    return imported(ast.walk(parsed(path)))


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def repository_files() -> list[Path]:
    """Return what a commit would hold: files that git tracks or does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = {ROOT / name for name in listed.split("\0") if name}
    return sorted(path for path in paths if path.is_file())


def test_every_mapped_folder_is_under_benchd():
    assert pyproject()["tool"]["setuptools"]["package-dir"] == {f"benchd.{folder}": folder for folder in FOLDERS}


def test_packages_are_the_folders_on_disk():
    inner = {module_name(path) for path in sources() if path.name == "__init__.py"}
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == inner | {f"benchd.{folder}" for folder in FOLDERS}


def test_mapped_folders_have_no_init_and_their_folders_of_code_do():
    with_code = {path.parent for path in sources()} - {ROOT / folder for folder in FOLDERS}
    assert not [folder for folder in FOLDERS if (ROOT / folder / "__init__.py").exists()]
    assert not [folder for folder in with_code if not (folder / "__init__.py").exists()]


def test_the_wheel_holds_our_code_and_nothing_else(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    code = {
        f"benchd/{path.relative_to(tree)}"
        for folder in FOLDERS
        for path in (tree / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".c", ".h", ".css", ".html", ".js", ".txt", ".safetensors"}
        or path.name == "py.typed"
    }
    assert {f"benchd/{folder}/py.typed" for folder in FOLDERS} <= code
    assert {name for name in files if ".dist-info/" not in name} == code


def test_no_verb_loads_torch(tmp_path, child_environment):
    look = "import sys; from benchd.daemon import cli; [cli.command(verb) for verb in ('once', *cli.VERBS)]"
    look += "; print('torch' in sys.modules)"
    command = [sys.executable, "-c", look]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=child_environment)
    assert done.stdout.strip() == "False"


def test_a_measured_process_imports_nothing_that_takes_a_second():
    look = "import sys, benchd.daemon.worker.recipes; print({'torchvision', 'torch._dynamo'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@cache
def room(name: str) -> str:
    """Return the room of a module: the deepest of RANKS that it lies in."""
    return max((prefix for prefix in RANKS if f"{name}.".startswith(f"{prefix}.")), key=len)


@cache
def arrows() -> set[tuple[str, str]]:
    """Return each import from one room to another; a command's table may name any part, and is left out."""
    return {
        (name, other)
        for name, path in MODULES.items()
        if name != "benchd.daemon.cli"
        for other in imports_of(path)
        if room(name) != room(other)
    }


def test_imports_go_to_a_lower_rank_only():
    assert [(name, other) for name, other in sorted(arrows()) if RANKS[room(other)] >= RANKS[room(name)]] == []
    assert len({(room(name), room(other)) for name, other in arrows()}) <= MOST_PAIRS


def test_no_verb_imports_another():
    verbs = {f"benchd.daemon.commands.{verb.replace('-', '_')}" for verb in ("once", *cli.VERBS)}
    assert verbs <= set(MODULES)
    assert [(verb, other) for verb in sorted(verbs) for other in imports_of(MODULES[verb]) if other in verbs] == []


def test_few_files_lie_loose_in_the_daemon():
    assert len(list((ROOT / "daemon").glob("*.py"))) <= MOST_LOOSE


def test_only_rooms_with_torch_import_it_at_import():
    for name, path in MODULES.items():
        if not name.startswith(WITH_TORCH):
            nodes = list(at_import(parsed(path)))
            outside = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            outside |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
            assert not [other for other in outside if other.split(".")[0] in {"torch", "torchvision"}], name


def test_one_module_speaks_mqtt():
    speaking = [name for name, path in MODULES.items() if re.search(r"^\s*(from|import) paho", path.read_text(), re.M)]
    assert speaking == ["benchd.daemon.delivery.connection"]


def test_no_import_cycle():
    graph = {name: imported(at_import(parsed(path))) - {name} for name, path in MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    assert set(order) >= set(MODULES)


def test_imports_are_absolute():
    relative = re.compile(r"^\s*from \.", re.MULTILINE)
    assert not [path for path in [*sources(), *(ROOT / "tests").rglob("*.py")] if relative.search(path.read_text())]


def test_top_level_entries():
    present = {path.relative_to(ROOT).parts[0] for path in repository_files()}
    assert present >= REQUIRED, f"missing: {REQUIRED - present}"
    assert present <= ALLOWED, f"unexpected: {present - ALLOWED}"


def test_no_file_names_a_place_of_one_machine():
    place = re.compile(r"(?<![\w.:/}])/(?:home|root|Users|work)/\w+")
    places = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in repository_files()
        for match in place.finditer(path.read_bytes().decode("utf-8", "ignore"))
    ]
    assert not places
