"""The command `benchd profile`: what it refuses, its exit code, and the Record that it publishes."""

import subprocess
import sys

import pytest
from profile_shown import shown, shown_on_cpu
from records_made import ENVIRONMENT, PASSED, made, timing

from benchd.daemon import cli
from benchd.daemon.commands import profile
from benchd.daemon.errors import UsageError
from benchd.daemon.measuring.recording import RunHeader, RunId
from benchd.daemon.profiling.output.published import record
from benchd.daemon.records import Occupancy, ProcessResult, decode, encode
from benchd.daemon.verdicts import results

RUN = RunHeader(device_id="d", boot_id="b", suite_id="s", tool_version="0", environment=ENVIRONMENT)
RUN_ID = RunId("r1", "2026-01-01T00:00:00.000Z", 1)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "name a model"),
        (["snn_onepas"], 2, "did you mean 'snn_onepass'"),
        (["snn_onepass", "--variants", "custm"], 2, "did you mean 'custom'"),
        (["snn_onepass", "--option", "time_step=4"], 2, "time_step"),
        (["vim_tiny", "--option", "level=8"], 2, "level"),
        (["snn_onepass", "--option", "time_steps=4", "--option", "time_steps=8"], 2, "give each option one value"),
        (["snn_onepass", "--method", "torhc"], 2, "did you mean 'torch'"),
        (["snn_onepass", "--workload", "evil"], 2, "did you mean 'eval'"),
        (["snn_onepass", "--sort", "self_cpu"], 2, "did you mean 'self_cpu_ns'"),
        (["snn_onepass", "--preset", "quik"], 2, "did you mean 'quick'"),
        (["snn_onepass", "--variants", "eager,amp"], 2, "a profile covers one case"),
        (["snn_onepass", "--kernel-regex", "x", "--snn-kernels"], 2, "only one of them"),
        (["snn_onepass", "--input", "3x4x4"], 2, "--input is for --module"),
        (["snn_onepass", "--module", "net.py:build"], 2, "MODEL with --module: your own model runs alone"),
        (["--module", "net.py:build", "--nir", "net.nir"], 2, "--module and --nir: give only one of them"),
        (["--nir", "net.nir"], 2, "net.nir: no such file"),
        (["--module", "net.py:build"], 2, "net.py: no such file"),
        (["--module", "net.py"], 2, "expected FILE.py:FUNCTION or package.module:FUNCTION"),
        (["snn_onepass", "--steps", "0"], 2, "greater than or equal to 1"),
        (["snn_onepass", "--weights", "absent.pth"], 2, "no such file"),
        (["snn_onepass", "--data", "cifar10:x", "--verify"], 2, "--verify"),
        (["snn_onepass", "--mqtt", "http://x"], 2, "expected mqtt://"),
        (["snn_onepass", "--mqtt", "mqtt://x", "--ca-file", "ca.pem"], 2, "mqtt.ca_file: needs TLS"),
        (["vim_tiny", "--variants", "custom", "--workload", "train"], 7, "training"),
        (["vim_tiny", "--method", "break-even"], 7, "a spiking net with its ANN, and the catalog has none of vim_tiny"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(arguments, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchd", "profile", *arguments, "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        cli.benchd()
    assert end.value.code == code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("profiles/*/*"))


def test_a_refusal_leaves_no_empty_folder(tmp_path, child_environment):
    script = "import sys; from benchd.daemon.machine.lock import MachineLock\n"
    script += "with MachineLock():\n    print(flush=True)\n    sys.stdin.read()"
    line = [sys.executable, "-m", "benchd.daemon.cli", "profile", "square", "--device", "cpu"]
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        done = subprocess.run(line, cwd=tmp_path, env=child_environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert list(tmp_path.iterdir()) == []


def found(missing=(), failed=()):
    return {"missing": dict.fromkeys(missing, "why"), "failed": list(failed)}


@pytest.mark.parametrize(
    ("fields", "by_name", "code"),
    [
        (found(), True, 0),
        (found(["nsys", "ncu"]), False, 0),
        (found(["nsys"]), True, 7),
        (found(["layers"]), True, 7),
        (found(["layers"]), False, 0),
        (found(["snapshot"]), True, 0),
        (found(["layers"], ["layers"]), True, 1),
        (found(["torch"], ["torch"]) | {"torch": None}, True, 6),
        (found(["torch"]) | {"torch": None}, True, 7),
        (found(["torch"]) | {"torch": None}, False, 6),
    ],
)
def test_the_exit_code_says_what_came_of_it(fields, by_name, code):
    made_profile = shown_on_cpu(**fields) if "torch" in fields else shown(**fields)
    assert profile.exit_code(made_profile, by_name) == code


def test_the_record_holds_the_benchmark_s_times_and_is_flagged():
    occupancy = Occupancy(theoretical=0.5, estimated=0.4, measured=None, utilization=0.9, kernels=3)
    result = record(shown(occupancy=occupancy), RUN, RUN_ID)
    assert decode(encode(result)) == result
    assert (result.status, result.flags, result.occupancy) == ("ok", ["profiled"], occupancy)
    assert (result.timing.median_ms, result.timing.runs, result.throughput_per_s) == (1200.0, 10, 3.33)
    assert result.parts["backward"].median_ms == 700.0
    assert result.missing["energy"] == "no_sensor"


def test_a_profile_is_never_ranked_or_compared(tmp_path):
    """Not even where it is the newest of its case, the fastest, and claims a passed check and a process of its own."""
    measured = made(run_id="r0", check=PASSED)
    faster = ProcessResult(status="ok", timing=timing(0.1))
    flags = ["busy_machine", "profiled"]
    profiled = made(run_id="r1", check=PASSED, timing=timing(0.1), processes=[faster], flags=flags)
    path = tmp_path / "records.jsonl"
    path.write_bytes(encode(measured) + b"\n" + encode(profiled) + b"\n")
    assert results.read(path) == [measured]
    path.write_bytes(encode(profiled) + b"\n")
    with pytest.raises(UsageError, match="contains no record"):
        results.read(tmp_path)
