"""CONTRIBUTING.md's table, followed in a copy of the tree: what it names is all that a new thing touches."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WAIT_S

ROOT = Path(__file__).parents[2]
RUN = "import sys; from benchd.daemon import cli; sys.argv[0] = {0!r}; cli.{0}()"
FIELD = {  # file of the table: (what stands there, what follows it now)
    "daemon/records.py": ("    timeline: list[TimeSlice] = []\n", "    answer: int | None = None\n"),
    "daemon/worker/building.py": (
        "    outcome.versions = versions()\n",
        "    outcome.process.answer = job.inputs.answer\n",
    ),
    "daemon/verdicts/rows.py": (
        '        "x_of_floor": record.x_of_floor,\n',
        '        "answer": next(process.answer for process in record.processes),\n',
    ),
}
OF_CASE = {
    "daemon/records.py": (
        "class Inputs(Struct, frozen=True, kw_only=True):\n"
        '    """A model\'s weights, its inputs and the criterion for its answers; '
        'null means random, or the model\'s own."""\n\n',
        '    answer: Annotated[int | None, Option("The answer.")] = None\n',
    ),
}
OPTION = {
    "daemon/commands/schema.py": ("def schema(\n", "    answer: int = 0,\n"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree with all changes, for both tests: neither's files are among the other's."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("daemon", "models", "kernels", "exporters", "dashboard"):
        shutil.copytree(ROOT / name, folder / "benchd" / name)  # with what is compiled: most files stay as they are
    for name, (where, added) in [*FIELD.items(), *OF_CASE.items(), *OPTION.items()]:
        path = folder / "benchd" / name
        text = path.read_text()
        assert text.count(where) == 1, name
        path.write_text(text.replace(where, where + added))
    return folder


@pytest.fixture
def command(copy, tmp_path, child_environment):
    """Return a function that runs a command of the copy and returns what it printed."""

    def run(function, *arguments):
        line = [sys.executable, "-c", RUN.format(function), *arguments]
        paths = os.pathsep.join([str(copy), child_environment.get("PYTHONPATH", "")])
        done = subprocess.run(
            line,
            cwd=tmp_path,
            env=child_environment | {"PYTHONPATH": paths},
            timeout=WAIT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_record_field_and_an_option_of_a_case_touch_the_files_that_are_named(command, tmp_path):
    (tmp_path / "tiny.toml").write_text("[limits]\nwarm_up_cap_s = 0.1\nmeasure_cap_s = 0.1\ncheck_images = 1\n")
    case = ("--models", "square", "--option", "size=16", "--variants", "eager", "--device", "cpu", "--preset", "quick")
    command("bench_once", *case, "--config", "tiny.toml", "--wait", "--answer", "42")
    command("benchd", "report", "bench-out", "--format", "csv")
    (row,) = csv.DictReader((tmp_path / "bench-out" / "report.csv").read_text().splitlines())
    assert row["answer"] == "42"
    assert '"answer"' in command("benchd", "schema")
    named = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in FIELD if f"`{name}`" not in named] == []


def test_an_option_touches_the_command_alone(command):
    command("benchd", "schema", "--answer", "42")
