"""The soak of A/A comparisons: what is kept, that it goes on where it stopped, and what it counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from stub_interpreter import interpreter
from waiting import WAIT_S, wait_for

from benchd.daemon import config, journal
from benchd.daemon.measuring import plan
from tests.soak import soak_aa

ROOT = Path(__file__).parents[2]
CONFIG = '[device]\nid = "test-device"\n'


@pytest.fixture
def soak(tmp_path, child_environment):
    (tmp_path / "config.toml").write_text(CONFIG)
    stub = interpreter(tmp_path / "stub", "5 + turn % 3 / 1000")

    def run(count):
        command = [sys.executable, "-m", "tests.soak.soak_aa", "--case", f"square,size=64={count}"]
        command += ["--output", str(tmp_path / "out")]
        command += ["--arguments", f"--python {stub} --pairs 2 --device cpu --config {tmp_path / 'config.toml'}"]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=ROOT, env=child_environment, timeout=WAIT_S
        )

    return run


def test_it_goes_on_where_it_stopped(soak, tmp_path):
    before = [{"case": "square,size=64", "beside_load": False, "answer": "same", "effect": 0.0}]
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / soak_aa.FILE
    path.write_text("".join(f"{json.dumps(line)}\n" for line in before))
    done = soak(2)
    assert done.returncode == 0, done.stderr
    assert "square,size=64 2 of 2" in done.stdout
    assert "square,size=64 1 of 2" not in done.stdout
    lines = [json.loads(line) for line in journal.read(path)]
    assert lines[:1] == before
    assert [line["beside_load"] for line in lines] == [False, True]
    assert lines[1]["answer"] == "same"
    assert not (tmp_path / "state").exists()


def test_a_comparison_that_cannot_be_made_ends_it(soak, tmp_path):
    (tmp_path / "config.toml").write_text("[nothing]\n")
    done = soak(1)
    assert done.returncode == 2
    assert "unknown configuration key" in done.stderr
    assert not (tmp_path / "out" / soak_aa.FILE).exists()


def test_false_verdicts_are_counted_with_their_bound():
    answers = ["same"] * 97 + ["faster", "slower", "inconclusive"]
    lines = [{"answer": answer, "beside_load": number >= 98} for number, answer in enumerate(answers)]
    assert {half: str(tally) for half, tally in soak_aa.counts(lines).items()} == {
        "all": "2 of 100 false (at most 6.2 % with 95 % confidence), 97 same, 1 inconclusive",
        "alone": "1 of 98 false (at most 4.7 % with 95 % confidence), 97 same, 0 inconclusive",
        "beside another load": "1 of 2 false (at most 97.5 % with 95 % confidence), 0 same, 1 inconclusive",
    }
    assert soak_aa.counts([]) == {}


@pytest.mark.parametrize("entry", soak_aa.DEFAULT)
def test_a_case_of_its_own_choice_can_be_compared(entry):
    suite = plan.suite_of(entry.rpartition("=")[0], "quick")
    assert len(plan.plan([suite], config.LimitsConfig(), plan.Machine("cpu", has_cxx=True))) == 1


@pytest.mark.parametrize(
    ("kept", "half", "left"),
    [
        ([], None, [False, True, False, True]),
        ([True], None, [False, False, True]),
        ([False], "loaded", [True, True]),
        ([True, True], "loaded", []),
        ([True, True, True], None, [False, False]),
    ],
)
def test_what_is_left_of_each_half(kept, half, left):
    assert soak_aa._left([{"beside_load": beside_load} for beside_load in kept], 4, half) == left


def test_the_load_ends_with_the_soak_however_that_ends():
    begin = (
        "line = [sys.executable, '-c', sys.argv[1], str(os.getpid())]; print(subprocess.Popen(line).pid, flush=True)"
    )
    command = [sys.executable, "-c", f"import os, subprocess, sys, time; {begin}; time.sleep(600)", soak_aa._LOAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        load = Path("/proc", parent.stdout.readline().strip(), "stat")
        assert load.exists()
        parent.kill()
    wait_for(lambda: not load.exists() or load.read_text().split()[2] == "Z", why="the load goes on")
