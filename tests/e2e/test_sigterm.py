"""SIGTERM at any moment of a pass: the service ends within seconds, with its worker, and the case stays in the pass."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from waiting import WAIT_S, wait_for

from benchd.daemon import records
from benchd.daemon.config import Suite
from benchd.daemon.measuring.session import INTERRUPTED
from benchd.daemon.service.facts import STATE, Facts
from benchd.daemon.service.schedule import Schedule, begin

CONFIG = """
[device]
id = "board"
[mqtt]
url = "{url}"
[limits]
warm_up_cap_s = 0.2
measure_cap_s = 0.5
check_images = 1
"""
VARIANTS = ["eager", "onnxruntime", "compile"]
SUITE = Suite(models=["square"], variants=VARIANTS, options={"size": [16]}, preset="quick")
CASES = [f"square,{variant},b1,size=16" for variant in VARIANTS]
PASS_S = 16.0  # of these cases with empty caches, on two cores
WITHIN_S = 5.0


def stopped_s(folder, environment, cases, moment_s):
    """Run the service on a pass of these cases, stop it this long after a case began; return how long its exit took."""
    shutil.rmtree(environment["XDG_CACHE_HOME"], ignore_errors=True)
    path = folder / "state/benchd" / STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(Facts(schedule=begin(Schedule(), SUITE, cases, by_command=True))))
    command = [Path(sys.executable).parent / "benchd", "run", "--config", "benchd.toml"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log)
    with process:
        wait_for(lambda: running(folder), process)
        time.sleep(moment_s)
        begun_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, (folder / "log").read_text()
    return time.monotonic() - begun_s


def running(folder):
    return msgspec.json.decode((folder / "state/benchd" / STATE).read_bytes(), type=Facts).running


def left_of(folder):
    """Return the processes that were started for this folder and run on."""
    processes = [process for process in psutil.process_iter(["environ"]) if process.info["environ"]]
    return [process for process in processes if process.info["environ"].get("XDG_STATE_HOME") == str(folder / "state")]


def stopped_often(folder, url, environment, count):
    """Stop as many runs, each with nothing left behind; return how long each took to exit.

    The first one is stopped as its first case begins, the others at moments of their own.
    """
    (folder / "benchd.toml").write_text(CONFIG.format(url=url))
    chance, seconds = random.Random(count), []
    for number in range(count):
        cases = chance.sample(CASES, len(CASES))
        seconds.append(stopped_s(folder, environment, cases, chance.uniform(0, PASS_S) if number else 0.0))
        assert left_of(folder) == []
        assert running(folder) is None
    journal = (folder / "state/benchd/records.jsonl").read_bytes().splitlines()
    ended = {(record.status, record.reason) for record in map(records.decode, journal)}
    assert ("aborted", INTERRUPTED) in ended
    assert ended <= {("ok", None), ("aborted", INTERRUPTED)}
    return seconds


def test_a_signal_ends_the_service_and_its_worker_at_any_moment(tmp_path, mosquitto, child_environment):
    stopped_often(tmp_path, mosquitto.url, child_environment, 2)


@pytest.mark.slow
def test_on_an_idle_machine_a_signal_ends_the_service_within_seconds(tmp_path, mosquitto, child_environment):
    seconds = sorted(stopped_often(tmp_path, mosquitto.url, child_environment, 200))
    sys.stdout.write(
        f"\nSIGTERM to exit, {len(seconds)} times: median {seconds[100]:.2f} s, longest {seconds[-1]:.2f} s\n"
    )
    assert seconds[-1] <= WITHIN_S
