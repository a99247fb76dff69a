"""The soak of the gate: both kinds of trial are run by the command itself, kept, counted, and not repeated."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

from stub_interpreter import interpreter
from waiting import WAIT_S

from benchd.daemon import journal
from tests.soak import soak_gate

ROOT = Path(__file__).parents[2]


def test_trials_are_kept_counted_and_not_repeated(tmp_path, child_environment):
    def run():
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=ROOT, env=child_environment, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    stub = interpreter(tmp_path / "stub", "5 + turn % 3 / 1000")
    command = [sys.executable, "-m", "tests.soak.soak_gate", "--trials", "1", "--output", str(tmp_path / "out")]
    command += ["--arguments", f"--python {stub} --pairs 3 --device cpu"]
    *_, planted, identical = run()
    lines = [json.loads(line) for line in journal.read(tmp_path / "out" / soak_gate.FILE)]
    assert [(line["planted"], line["answer"], line["pairs"]) for line in lines] == [
        (True, "same", 3),
        (False, "same", 3),
    ]
    assert planted.startswith("5 % planted, 1 trials: 0 slower, 1 same, 0 inconclusive, 0 faster; median ")
    assert identical.startswith("identical, 1 trials: 0 slower, 1 same")
    assert run() == [planted, identical]


def test_what_is_left_of_each_kind():
    trials = [{"planted": True}, {"planted": True}, {"planted": False}]
    assert list(soak_gate._left(trials, 3)) == [False, True, False]
    assert list(soak_gate._left([], 2)) == [True, False, True, False]


def test_the_page_on_ci_counts_the_trials_that_are_kept():
    trials = [json.loads(line) for line in journal.read(ROOT / "results/amd-epyc-2-threads" / soak_gate.FILE)]
    page = re.sub(r" \(by .*?\)", "", (ROOT / "docs/ci.md").read_text())
    for is_planted in (True, False):
        lines = [line for line in trials if line["planted"] is is_planted]
        answers, seconds = Counter(line["answer"] for line in lines), [line["seconds"] for line in lines]
        counts = [len(lines), *(answers[answer] for answer in ("slower", "same", "inconclusive"))]
        assert f"| {' | '.join(map(str, counts))} | {median(seconds):.0f} s, {max(seconds):.0f} s |" in page
