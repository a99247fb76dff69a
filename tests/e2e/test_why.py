"""The command line of `benchd why`: what it refuses before anything is measured, and layers from files of results."""

import json
import sys
import venv

import pytest
from records_made import PASSED, made, timing

from benchd.daemon.records import Case, LayerTime, ProcessResult, Variant, encode

CASE = "square,eager,b1,size=16"
NET = """
from collections import OrderedDict
from torch import nn

def net(*names):
    return nn.Sequential(OrderedDict((name, nn.Linear(64, 64)) for name in names))

def once():
    return net("first", "second")

def twice():
    return net("first", "second", "third")
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give one case, as in vim_tiny,eager, and what differs between the sides"),
        ((CASE,), "give one case, as in vim_tiny,eager, and what differs between the sides"),
        ((CASE, CASE, CASE), "give one case, as in vim_tiny,eager, and what differs between the sides"),
        ((CASE, "--lock", "empty.txt"), "both sides have the same packages, variables and case"),
        ((CASE, "--module", "net.py:f", "--onnx", "net.onnx"), "--module and --onnx: give only one of them"),
        (("lock.txt", CASE), "lock.txt: a folder or a file of results is compared as it is, without further options"),
        ((CASE, *["--env", "empty.txt"] * 3), "--env: at most once per side"),
        ((CASE, "--python", "absent"), "--python absent: No such file or directory; give the interpreter of"),
        ((CASE, "--python", "/bin/ls", "--python", "/bin/ls"), "--python /bin/ls: it does not run Python code; give"),
        (
            (CASE, "--theirs", "empty.txt", "--env", "empty.txt"),
            "give one case, as in vim_tiny,eager, and what differs",
        ),
        ((CASE, "--lock", "absent.txt"), "absent.txt: No such file or directory"),
        (("square,eager", "square,fp32,threads=0"), "threads"),
        ((CASE, "--lock", "lock.txt", "--wheels", "."), "no-such-package==1.0 cannot be installed: "),
        (("nothing,eager,b1", "--lock", "empty.txt"), "unknown model 'nothing'"),
    ],
)
def test_a_command_line_that_cannot_be_answered_is_refused(arguments, told, here, tmp_path):
    (tmp_path / "lock.txt").write_text("no-such-package==1.0\n")
    (tmp_path / "empty.txt").write_text("# none\n")
    done = here("benchd", "why", *arguments, "--device", "cpu")
    assert done.returncode == 2
    assert told in done.stderr


def test_an_environment_without_benchd_is_refused_before_anything_is_measured(here, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare/bin/python")
    done = here("benchd", "why", CASE, "--python", sys.executable, "--python", python)
    assert (done.returncode, done.stderr) == (2, f"error: --python {python}: benchd is not installed there\n")


def results_of(path, second_ms):
    """Write a record whose processes have the layers conv1 and conv2."""
    layers = [LayerTime(name="conv1", ms=6.0, kind="Conv"), LayerTime(name="conv2", ms=second_ms, kind="Conv")]
    processes = [
        ProcessResult(status="ok", timing=timing(6.0 + second_ms + step / 1000), layers=layers) for step in range(5)
    ]
    case = Case(model="vim_tiny", variant=Variant.parse("eager"))
    record = made(run_id=path.name, case=case, check=PASSED, timing=timing(6.0 + second_ms), processes=processes)
    path.write_bytes(encode(record) + b"\n")
    return path


def test_two_files_of_results_are_divided_by_the_layers_that_they_hold(here, tmp_path):
    before, after = results_of(tmp_path / "before.jsonl", 4.0), results_of(tmp_path / "after.jsonl", 9.0)
    done = here("benchd", "why", str(before), str(after))
    assert done.returncode == 0, done.stderr
    assert "5 ms slower: +5 ms conv2; the rest within noise" in done.stdout
    (comparison,) = json.loads(here("benchd", "why", str(before), str(after), "--json").stdout)
    assert [change["name"] for change in comparison["layers"]["changes"]] == ["conv2"]
    again = results_of(tmp_path / "again.jsonl", 4.0)
    refused = here("benchd", "why", str(before), str(again))
    assert (refused.returncode, refused.stderr.count("no case in both changed beyond noise")) == (2, 1)


@pytest.mark.slow
def test_two_cases_are_measured_here_and_their_layers_compared(here, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    modules = [word for name in ("once", "twice") for word in ("--module", f"net.py:{name}")]
    done = here("benchd", "why", *modules, "--input", "64x64", "--device", "cpu", "--json")
    (comparison,) = json.loads(done.stdout)
    layers = comparison["layers"]
    assert done.returncode == (0 if layers and (layers["changes"] or layers["alike"]) else 4), done.stderr
    records = [json.loads(line) for line in (tmp_path / "why-out" / "records.jsonl").read_text().splitlines()]
    assert [[layer["name"] for layer in record["processes"][0]["layers"]] for record in records] == [
        ["other", "first", "second"],
        ["other", "first", "second", "third"],
    ]
    assert layers is None or "third" in {change["name"] for change in layers["changes"]}
