"""The table at the end of `make test-gpu`: what each line says of tests that pass, fail, skip or are not there."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import beside_torch
import gpu_verdict
import pytest
import torch
from _pytest.config import parse_warning_filter

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.area("models")
def test_right(): ...

@pytest.mark.area("models")
def test_left_out(): pytest.skip("it needs two GPUs")

@pytest.mark.area("graphs")
@pytest.mark.parametrize("number", range(3))
def test_wrong(number): assert number == 0

@pytest.fixture
def broken(): raise ValueError

@pytest.mark.area("energy")
def test_of_a_broken_fixture(broken): ...

@pytest.mark.area("nvml")
def test_skipped(): pytest.skip("no driver")

@pytest.mark.area("nvml")
def test_skipped_too(): pytest.skip("no driver")
"""


def table(*arguments, folder):
    """Return the lines of the verdict at the end of a run of pytest: the area, the verdict, and why."""
    paths = os.pathsep.join(map(str, (ROOT / "tests/support", ROOT, *filter(None, sys.path))))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert "= verdict =" in done.stdout, done.stdout + done.stderr
    assert "duration: " in done.stdout
    lines = re.split(r"=+ verdict =+\n", done.stdout)[1].splitlines()[:-1]  # behind it, pytest's own last line
    rows = (re.fullmatch(r"(\S+) +(right|wrong|not tested) +(.+)", line) for line in lines)
    return {row[1]: (row[2], row[3]) for row in rows}


@pytest.mark.parametrize("parallel", [[], pytest.param(["-n", "1"], marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_each_area_is_right_wrong_or_not_tested_and_says_why(tmp_path, parallel):
    (tmp_path / "test_areas.py").write_text(TESTS)
    (tmp_path / "test_unreadable.py").write_text("import nothing_of_this_name")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  area\n")
    by_area = table("-p", "gpu_verdict", "--continue-on-collection-errors", *parallel, folder=tmp_path)
    assert list(by_area) == [*gpu_verdict.AREAS, "test_unreadable.py"]
    assert by_area["test_unreadable.py"] == ("wrong", "it cannot be collected")
    assert by_area["models"] == ("right", "1 tests; 1 not tested because it needs two GPUs")
    assert by_area["graphs"] == ("wrong", "test_areas.py::test_wrong[1] and 1 more")
    assert by_area["energy"] == ("wrong", "test_areas.py::test_of_a_broken_fixture")
    assert by_area["nvml"] == ("not tested", "because no driver")
    assert by_area["kernels"] == ("not tested", "because no test of it was chosen")


def test_on_a_gpu_libraries_may_warn_and_our_own_use_of_old_names_fails(monkeypatch):
    lines = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    beside_torch.pytest_configure(SimpleNamespace(addinivalue_line=lambda _, line: lines.append(line)))
    with warnings.catch_warnings(record=True) as caught:
        for line in ["error", *lines]:
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))
        for category, module in ((UserWarning, "benchd.kernels.lif"), (DeprecationWarning, "tensorrt")):
            warnings.warn_explicit("it is old", category, "file.py", 1, module=module)
        assert len(caught) == 2
        with pytest.raises(DeprecationWarning):
            warnings.warn_explicit("it is old", DeprecationWarning, "file.py", 1, module="benchd.kernels.lif")
