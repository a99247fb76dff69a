"""Set-up by make: what is done again, what stops with which message. Nothing is downloaded here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jetson_trees
import pytest

ROOT = Path(__file__).resolve().parents[1]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def make(tmp_path, child_environment):
    """A function that runs make on the repository with an environment folder of the test's own."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    environment = {name: value for name, value in child_environment.items() if name not in outer}
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
    }  # no index but the named one

    def run(*arguments, venv=tmp_path / "venv", python=sys.executable):
        command = ["make", "-C", str(ROOT), f"VENV={venv}", f"PYTHON={python}", *map(str, arguments)]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)

    return run


@pytest.fixture
def board(tmp_path):
    """The root of a board with JetPack 6.2."""
    return jetson_trees.build(tmp_path / "board", jetson_trees.ORIN_NANO)


def stamped(venv, *names):
    venv.mkdir()
    for name in names:
        (venv / name).touch()
    return venv


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_help_names_every_target(make):
    output = make("help").stdout
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE).group(1).split()
    for target in set(targets) - {"programs"}:
        assert f"\n{target} " in f"\n{output}"


def test_a_finished_install_is_not_done_again(make, tmp_path):
    venv = stamped(tmp_path / "venv", f".installed-cpu-{VERSION}")
    assert ".ci/setup" not in make("-n", "once", "PLATFORM=cpu", venv=venv).stdout


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_input_is_installed(make, tmp_path, changed):
    venv = stamped(tmp_path / "venv", f".installed-cpu-{VERSION}")
    assert ".ci/setup" in make("-n", "-W", changed, "once", "PLATFORM=cpu", venv=venv).stdout


@pytest.mark.parametrize(
    ("target", "platform", "stamp"),
    [("once", "gpu", f"cpu-{VERSION}"), ("once", "cpu", "cpu-3.9"), ("test", "cpu", f"cpu-{VERSION}")],
    ids=["other platform", "other Python", "without the test extras"],
)
def test_an_install_for_something_else_does_not_count(make, tmp_path, target, platform, stamp):
    venv = stamped(tmp_path / "venv", f".installed-{stamp}")
    assert ".ci/setup" in make("-n", target, f"PLATFORM={platform}", venv=venv).stdout


def test_an_old_python_is_named(make, tmp_path):
    old = script(tmp_path / "python3.8", 'case "$2" in *exit*) exit 1 ;; *) echo 3.8 ;; esac')
    ended = make("once", "PLATFORM=cpu", python=old)
    assert ended.returncode != 0
    assert f"{old} is Python 3.8, but benchd needs 3.10 or newer" in ended.stderr


def test_a_python_without_venv_is_named(make, tmp_path):
    bare = script(tmp_path / "python3", f'case "$2" in *ensurepip*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac')
    ended = make("once", "PLATFORM=cpu", python=bare)
    assert ended.returncode != 0
    assert f"sudo apt install python{VERSION}-venv" in ended.stderr


def test_a_folder_that_is_no_environment_is_left_alone(make, tmp_path):
    letter = tmp_path / "venv" / "letter.txt"
    letter.parent.mkdir()
    letter.write_text("mine")
    ended = make("once", "PLATFORM=cpu")
    assert "is not a virtual environment" in ended.stderr
    assert letter.read_text() == "mine"


OTHER_TARGET = ("jetpack62", "3.10") if sys.version_info[:2] != (3, 10) else ("jetpack72", "3.12")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("toaster", "no TARGET 'toaster'; there is jetpack62, jetpack72"),
        (OTHER_TARGET[0], "{} needs Python {} here too: install it with pyenv or apt".format(*OTHER_TARGET)),
    ],
)
def test_a_bundle_that_cannot_be_made_is_refused_before_anything_is_built(make, tmp_path, target, why):
    build = 'case "$*" in *" pip "*) echo built >&2; exit 9 ;; esac'
    python = script(tmp_path / "python3", f'{build}; exec {sys.executable} "$@"')
    for name in ("python3.10", "python3.12", "pyenv"):  # as a version manager's shim for what is not installed
        script(tmp_path / name, "exit 127")
    ended = make("bundle", f"TARGET={target}", f"PATH={tmp_path}:{os.environ['PATH']}", python=python)
    assert [line for line in ended.stderr.splitlines() if "make" not in line] == [f"benchd: {why}"]


def base_python_has_torch():
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    python = Path(sys.base_prefix) / "bin" / f"python{VERSION}"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(base_python_has_torch(), reason="the Python below this environment has torch")
def test_a_jetson_whose_index_does_not_answer_stops_with_the_cure(make, board):
    index = "http://127.0.0.1:1/"
    ended = make("once", f"BOARD={board}", f"JETSON_INDEX={index}")
    assert ended.returncode != 0
    assert "benchd: JetPack 6.1 to 6.2.1\n" in ended.stderr
    assert f"{index} has no torch torchvision for this board, or did not respond" in ended.stderr
    assert "make once JETSON_INDEX=URL" in ended.stderr
    assert "bench-once" not in ended.stdout


@pytest.mark.parametrize(("name", "constraints"), [("orin_nano", "jetson62"), ("orin_nano_7", "jetson72")])
def test_a_jetson_gets_the_versions_of_its_jetpack(make, tmp_path, name, constraints):
    board = jetson_trees.build(tmp_path / "board", jetson_trees.BOARDS[name])
    assert f"constraints-{constraints}.txt" in make("-n", "once", f"BOARD={board}").stdout


def test_a_board_whose_python_cannot_read_its_release_is_told_in_one_sentence(make, tmp_path, board):
    old = script(tmp_path / "python3", '[ -z "$2" ] || { echo SyntaxError >&2; exit 1; }')
    assert [line for line in make("once", f"BOARD={board}", python=old).stderr.splitlines() if "make:" not in line] == [
        f"benchd: {old} is as old as JetPack 4's, but benchd needs JetPack 6.1 or newer, on an Orin or a Thor"
    ]


@pytest.mark.parametrize("hidden", ["etc/nv_tegra_release", "proc/device-tree/compatible"])
def test_a_container_on_a_board_is_set_up_as_the_board(make, tmp_path, hidden):
    board = jetson_trees.build(tmp_path / "board", jetson_trees.ORIN_NANO_7)
    (board / hidden).unlink()
    assert "constraints-jetson72.txt" in make("-n", "once", f"BOARD={board}").stdout


def board_check(path=None):
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    command = [sys.executable, str(ROOT / ".ci" / "jetson_board.py"), str(ROOT / "constraints-jetson62.txt")]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def installed(folder, cuda, version="2.8.0"):
    """Write distributions of torch and torchvision of that version into `folder`; `cuda` is what torch says of it."""
    modules = {
        "torch": f"class version:\n    cuda = {cuda!r}\nclass cuda:\n    is_available = staticmethod(lambda: True)\n",
        "torchvision": "",
    }
    for name, text in modules.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"__version__ = {version!r}\n{text}")
        (folder / f"{name}-{version}.dist-info").mkdir()
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return folder


def test_a_cpu_build_of_torch_is_named_with_its_place(tmp_path):
    ended = board_check(installed(tmp_path / "site", None))
    assert ended.returncode == 1
    assert f"torch 2.8.0 in {tmp_path}/site/torch is a CPU-only build" in ended.stderr


@pytest.mark.parametrize(("library", "package"), [("libcudss.so.0", "cudss"), ("libcusparseLt.so.0", "libcusparselt0")])
def test_a_torch_without_a_library_of_nvidia_s_names_its_package(tmp_path, library, package):
    site = installed(tmp_path / "site", "12.6")
    (site / "torch" / "__init__.py").write_text(f"raise ImportError('{library}: cannot open shared object file')")
    assert f"sudo apt install {package}" in board_check(site).stderr


@pytest.mark.parametrize("version", ["2.5.0a0+872d972e41.nv24.8", "2.8.0a0+5228986c39.nv25.5"])
def test_a_torch_that_pip_would_refuse_is_named_with_the_cure(tmp_path, version):
    ended = board_check(installed(tmp_path / "site", "12.6", version))
    (oldest,) = re.findall('"torch>=(.+?)"', (ROOT / "pyproject.toml").read_text())
    assert ended.returncode == 1
    assert f"torch {version} in {tmp_path}/site/torch is too old: benchd needs {oldest}." in ended.stderr
    assert "JETSON_INDEX=URL" in ended.stderr
