"""The benchmarks of the collectors, of a fleet's telemetry and of the idle client, small, as a user starts them."""

import subprocess
import sys
from pathlib import Path

import pytest
from broker import program

pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, of the extra dashboard")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "said"),
    [
        ("collector --records 300 --kill", ["300 published, 300 stored, 0 lost, 0 doubled", "one killed after"]),
        (
            "telemetry --devices 20 --seconds 3 --sqlite",
            ["60 messages of 20 devices", "; 20 messages left", "; 0 messages left"],
        ),
        ("link --pairs 2", ["wall time with the client over without", "% of one core"]),
    ],
)
def test_a_small_one_loses_nothing(bench, said, child_environment):
    if not bench.startswith("telemetry"):
        program("mosquitto")
    name, *options = bench.split()
    command = [sys.executable, "-m", f"tests.soak.{name}", *options]
    paths = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=child_environment | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [words for words in said if words not in done.stdout] == []
