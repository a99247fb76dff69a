"""The benchmark of a fleet's telemetry, small, as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_telemetry_of_a_few_devices_is_stored_aggregated_and_expires(child_environment):
    command = [sys.executable, "-m", "tests.soak.telemetry", "--devices", "20", "--seconds", "3", "--sqlite"]
    paths = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=child_environment | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "360 samples of 20 devices" in done.stdout
    assert "aggregated to 120 minutes" in done.stdout
    assert "; 0 minutes left" in done.stdout
