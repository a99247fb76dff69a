"""The benchmark of the collectors, small, as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest
from broker import program

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_small_backlog_is_stored_whole(child_environment):
    program("mosquitto")
    command = [sys.executable, "-m", "tests.soak.collector", "--records", "300", "--kill"]
    paths = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=child_environment | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "300 published, 300 stored, 0 lost, 0 doubled" in done.stdout
    assert "one killed after" in done.stdout
