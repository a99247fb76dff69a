"""What an installation without torch does: a dashboard's host, a collector, a laptop on which results are compared."""

import http.client
import json
import re
import subprocess
import sys
from pathlib import Path

import absent
import pytest
from broker import HOST, free_port
from waiting import WAIT_S, wait_for

ROOT = Path(__file__).parents[2]
MEASURE = ("torch", "torchvision", "numpy", "safetensors")
LIMIT_MIB = 300
CASE = "square,eager,b1"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The Python of an environment into which only `benchd[dashboard]` was installed, from the index."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = ["-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", f"{ROOT}[dashboard]"]
    subprocess.run([folder / "bin/python", *install], check=True)
    return folder / "bin/python"


@pytest.fixture(params=["refused", pytest.param("fresh", marks=pytest.mark.index)])
def without_torch(request, tmp_path, child_environment):
    """Return the Python and the environment of a child that finds no package of the extra `measure`."""
    if request.param == "fresh":
        return request.getfixturevalue("fresh"), child_environment
    return sys.executable, child_environment | absent.environment(tmp_path, *MEASURE)


@pytest.fixture
def benchd(without_torch, tmp_path):
    """Return a function that runs a command there and returns how it ended."""
    python, environment = without_torch

    def run(*arguments, call="benchd"):
        code = f"import sys; from benchd.daemon import cli; sys.argv[0] = {call!r}; cli.{call}()"
        line = [python, "-c", code, *map(str, arguments)]
        return subprocess.run(
            line, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=WAIT_S
        )

    return run


def test_results_are_compared_recommended_and_reported(benchd, results, tmp_path):
    before, after = results("before"), results("after", scale=1.02)
    compared = benchd("compare", before, after)
    assert (compared.returncode, len(re.findall("SLOWER(?!:)", compared.stdout))) == (3, 2), compared.stderr
    shipped = benchd("recommend", before)
    assert (shipped.returncode, "ship: custom" in shipped.stdout) == (0, True), shipped.stderr
    (tmp_path / "out").mkdir()
    (tmp_path / before).rename(tmp_path / "out/records.jsonl")
    reported = benchd("report", "out", "--format", "md,csv,html", "--output", "page")
    assert reported.returncode == 0, reported.stderr
    assert {path.suffix for path in (tmp_path / "page").iterdir()} >= {".md", ".csv", ".html"}


def test_a_fleet_is_watched_and_shown(benchd, without_torch, mosquitto, tmp_path):
    watched = benchd("watch", "--mqtt", mosquitto.url, "--seconds", "1")
    assert watched.returncode == 0, watched.stderr
    (python, environment), port = without_torch, free_port()
    environment = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    command = [python, "-m", "benchd.daemon.cli", "dashboard", "--mqtt", mosquitto.url, "--port", str(port)]
    command += ["--database", f"sqlite:///{tmp_path}/dashboard.db"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        try:
            wait_for(lambda: status(port) == 200, process)
        finally:
            process.terminate()


def status(port):
    connection = http.client.HTTPConnection(HOST, port, timeout=WAIT_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@pytest.mark.parametrize(
    "words",
    [
        ["bench_once", "--models", "square"],
        ["benchd", "compare", "--live", CASE, CASE],
        ["benchd", "run", "--config", "benchd.toml"],
    ],
    ids=lambda words: words[1].strip("-"),
)
def test_what_measures_says_which_extra_to_add(benchd, tmp_path, words):
    (tmp_path / "benchd.toml").write_text("")
    call, *arguments = words
    done = benchd(*arguments, call=call)
    assert (done.returncode, done.stdout) == (7, "")
    assert re.fullmatch(
        r"error: measuring needs torch, which is not installed: \S+ -m pip install (?:-e )?'\S+\[cpu\]'; "
        r"use \[gpu\] instead for an NVIDIA GPU, or \[jetson\] on a Jetson\n",
        done.stderr,
    )
    assert not (tmp_path / "bench-out").exists()


def test_what_can_be_measured_is_listed(benchd):
    listed = benchd("list", "--json")
    assert "vim_tiny" in json.dumps(json.loads(listed.stdout)), listed.stderr


@pytest.mark.index
def test_the_installation_of_a_dashboard_is_small_and_has_no_torch(fresh):
    folder = fresh.parents[1]
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    assert size <= LIMIT_MIB * 2**20
    assert not [name for name in MEASURE if any(folder.glob(f"lib/python*/site-packages/{name}"))]
