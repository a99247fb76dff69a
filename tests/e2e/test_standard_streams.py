"""What every command does with standard streams that nobody reads, with Ctrl-C, and with --version and -h."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from records_made import ENERGY, PASSED, made, written
from waiting import WAIT_S, wait_for

from benchd.daemon import records
from benchd.daemon.machine.standard_streams import STDOUT, lasting

BIN = Path(sys.executable).parent


def shell(words, environment):
    """Run a line of bash with pipefail; return the finished process."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", words],
        check=False,
        timeout=WAIT_S,
        cwd=BIN,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("./benchd schema | head -1", 0),
        ("./benchd watch | head -1", 0),
        ("./benchd schema >&-", 0),
        ("./benchd recommend nowhere 2>/dev/full", 2),
        ("./benchd recommend nowhere 2>&-", 2),
    ],
)
def test_a_reader_that_leaves_does_not_change_the_exit_code(child_environment, words, code):
    done = shell(words, child_environment)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


@pytest.fixture
def error_unread(here, monkeypatch):  # once `here` has taken it over
    """Let whoever runs in this process have a standard error that takes nothing."""
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:  # nor what it holds at its end
        monkeypatch.setattr(sys, "stderr", full)
        yield


@pytest.mark.usefixtures("error_unread")
def test_a_standard_error_that_nobody_reads_ends_no_run(once, tmp_path):
    done = once("--models", "square", "--option", "size=16", "--variants", "eager")
    assert done.returncode == 0, done.stdout
    assert [record.status for record in written(tmp_path)] == ["ok"]


@pytest.mark.usefixtures("error_unread")
def test_a_child_that_tells_its_progress_to_nobody_goes_on(here):
    done = here("benchd", "profile", "square", "--option", "size=16", "--method", "memory", "--steps", "1")
    assert done.returncode == 0, done.stdout


def test_a_full_disk_is_one_sentence(child_environment):
    done = shell("./benchd schema > /dev/full", child_environment)
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")


def test_a_full_disk_keeps_the_exit_code_of_the_verdict(child_environment, results, tmp_path):
    """The last line of stdout and the files of the verdicts come after all the work."""
    before, *others = (tmp_path / results(*given) for given in (("before",), ("again",), ("after", 1.02)))
    same, slower = (f"./benchd compare {before} {other}" for other in others)
    for words, code in ((f"{slower} > /dev/full", 3), (f"{slower} --junit /dev/full --markdown /dev/full", 3)):
        done = shell(words, child_environment)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert "No space left on device" in done.stderr
    done = shell(f"{same} --junit /dev/full", child_environment)
    assert (done.returncode, done.stderr.count("warning: not stored: /dev/full: No space left on device")) == (1, 1)
    assert len(re.findall("SAME(?!:)", done.stdout)) == 2


def test_a_character_that_the_encoding_lacks_costs_no_table(child_environment, tmp_path):
    (tmp_path / "records").write_bytes(records.encode(made(energy=ENERGY, check=PASSED)) + b"\n")
    done = shell(f"./benchd recommend {tmp_path}/records", child_environment | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr, r" mJ \u00b15 %" in done.stdout) == (4, "", True), done.stdout


def test_json_stays_json_in_an_encoding_that_lacks_its_characters(tmp_path):
    text = json.dumps("ä \u2588 \U0001f600", ensure_ascii=False)
    with (tmp_path / "out").open("w", encoding="latin-1") as stream:
        out, _ = lasting(stream, STDOUT)
        for each in (out, stream):  # `benchd watch` writes to the latter
            each.write(f"{text}\n")
            each.flush()
    first, second = (tmp_path / "out").read_text(encoding="latin-1").splitlines()
    assert first == second == r'"ä \u2588 \ud83d\ude00"'
    assert json.loads(first) == json.loads(text)


@pytest.mark.parametrize("command", ["benchd", "bench-once"])
def test_each_program_prints_its_version_and_a_short_help(here, command):
    assert here(command, "--version", limits=()).stdout == f"benchd {version('benchd')}\n"
    assert here(command, "-h", limits=()).stdout == here(command, "--help", limits=()).stdout


def test_ctrl_c_before_the_plan_is_quiet(child_environment, tmp_path):
    line = [sys.executable, "-X", "importtime", "-c", "from benchd.daemon.cli import bench_once; bench_once()"]
    with (tmp_path / "imported").open("w") as imported:
        process = subprocess.Popen(line, cwd=tmp_path, env=child_environment, stderr=imported)
        wait_for(lambda: "benchd.daemon.commands.arguments" in (tmp_path / "imported").read_text())
        while process.poll() is None:  # Python drops one that arrives in a destructor
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    assert process.returncode == 130
    assert "Traceback" not in (tmp_path / "imported").read_text()
