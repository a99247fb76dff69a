"""A small soak: the real processes are killed a few times, and a backlog drains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from broker import program

from tests.soak import delivery_site, soak

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

ROOT = Path(__file__).parents[2]
NEVER = {"lost", "stored twice", "said to be on the disk and not there"}


def test_no_result_is_lost_or_stored_twice_despite_kills_and_an_outage(tmp_path, child_environment):
    program("mosquitto")
    command = [sys.executable, "-m", "tests.soak.soak", "--kills", "2", "--written", "40", "--records", "100"]
    command += ["--half-open", "0", "--output", str(tmp_path)]
    paths = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # where the code under test lies beside the installed one
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=child_environment | paths)
    assert done.returncode in (0, 1), done.stderr  # 1 is also a rate that a busy machine does not reach
    figures = [figure for part in soak.read(tmp_path / soak.FILE).values() for figure in part]
    assert [figure.value for figure in figures if figure.name in NEVER] == [0] * 5
    assert {figure.name: figure.value for figure in figures}["results written"] > 0
    assert [path.name for path in tmp_path.iterdir()] == [soak.FILE]


def test_a_made_up_result_is_as_large_as_a_measured_one():
    assert len(delivery_site.Result().body) == delivery_site.RECORD_BYTES
