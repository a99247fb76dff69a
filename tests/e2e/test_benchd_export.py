"""The real `benchd export`, and `bench-once` on what it made or on a file of the user's own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchd.daemon import records
from benchd.daemon.delivery import jsonl
from benchd.exporters import sessions
from benchd.exporters.artifacts import Store

onnx = pytest.importorskip("onnx", reason="reads and writes files")
parser = pytest.importorskip("onnx.parser")
pytest.importorskip("onnxscript", reason="exports")
pytest.importorskip("onnxruntime", reason="runs what was exported")

SMALL = ("snn_onepass", "--option", "time_steps=2")
DEADLINE_S = 120


def written(folder):
    return [records.decode(line) for line in jsonl.read(folder / "out" / "records.jsonl")]


def state(folder):
    return folder / "state" / "benchd" / "artifacts"


def test_a_file_is_written_where_it_was_asked_for_and_comes_from_the_store_the_next_time(command, tmp_path):
    done = command("benchd", "export", *SMALL, "--out", "net.onnx")
    assert done.returncode == 0, done.stderr
    assert "[1/1] snn_onepass fp32 batch 1" in done.stderr
    assert "made" in done.stdout
    assert "in net.onnx" in done.stdout
    onnx.checker.check_model(tmp_path / "net.onnx", full_check=True)
    assert (tmp_path / "net.onnx").stat().st_mode & 0o777 == 0o644
    sessions.open_session(tmp_path / "net.onnx")

    again = command("benchd", "export", *SMALL, "--out", "deeper/net.onnx", "--json")
    assert again.returncode == 0, again.stderr
    (told,) = json.loads(again.stdout)
    assert told["reused"]
    assert told["metadata"]["measured"]["findings"] == {"10.3": 0, "11": 0}
    assert (tmp_path / "deeper" / "net.onnx").read_bytes() == (tmp_path / "net.onnx").read_bytes()

    listed = command("benchd", "export", "--list")
    assert told["key"] in listed.stdout
    assert re.search(rf"1 files, [89]\.\d MB in {state(tmp_path)}\n", listed.stdout)
    assert command("benchd", "export", "--prune", "1MiB").stdout == f"removed {told['key']}\n"
    assert command("benchd", "export", "--list").stdout == f"0 files, 0.0 MB in {state(tmp_path)}\n"


def test_a_folder_of_files_gives_another_machine_its_case(command, once, tmp_path):
    done = command("benchd", "export", *SMALL, "--batch-sizes", "dynamic", "--out", "artifacts", "--json")
    assert done.returncode == 0, done.stderr
    (artifact,) = json.loads(done.stdout)
    assert not state(tmp_path).exists()
    arguments = ("--models", *SMALL, "--variants", "onnxruntime", "--artifacts", "artifacts", "--batch-sizes", "3")
    measured = once(*arguments)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    (record,) = written(tmp_path)
    assert (record.status, record.check.passed) == ("ok", True)
    assert record.runtime.provider == "CPUExecutionProvider"
    (used,) = record.artifacts
    assert (used.key, used.sha256, used.reused) == (artifact["key"], artifact["metadata"]["sha256"], True)
    assert used.made_on == artifact["metadata"]["made_on"]
    with Store(state(tmp_path)) as store:
        assert store.list() == ()


def test_the_file_of_shipped_weights_is_the_one_that_a_case_runs(command, once, tmp_path):
    done = command("benchd", "export", "qann_resnet18", "--weights", "demo", "--json")
    assert done.returncode == 0, done.stderr
    (artifact,) = json.loads(done.stdout)
    assert artifact["metadata"]["facts"]["options"] == {"level": 8, "width": 16}
    measured = once("--models", "qann_resnet18", "--option", "width=16", "--variants", "onnxruntime")
    assert measured.returncode == 0, measured.stdout + measured.stderr
    (record,) = written(tmp_path)
    (used,) = record.artifacts
    assert (record.model.weights, used.key, used.reused) == ("demo", artifact["key"], True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("vim_tni",), 2, "unknown model 'vim_tni'; did you mean 'vim_tiny'?"),
        ((), 2, "name a model, as in `benchd export vim_tiny`"),
        (("square", "--precision", "bf16"), 2, "unknown precision 'bf16'"),
        (("square", "--to", "tflite"), 2, "unknown target 'tflite'"),
        (("square", "--batch-sizes", "0"), 2, "--batch-sizes 0: at least 1"),
        (("--prune", "much"), 2, "--prune much: expected a size such as 512MiB or 2GiB"),
        (("snn_onepass", "--option", "time_steps=0"), 2, "time_steps=0: must be at least 1"),
        (("square", "--weights", "demo"), 2, "--weights demo: square has none; choose one of vim_tiny"),
        (("square", "--to", "tensorrt"), 7, "an engine is built for one batch size, on the GPU that will run it"),
        (("square", "--option", "size=16", "--out", "taken/net.onnx"), 2, "--out taken/net.onnx: "),
    ],
)
def test_what_does_not_work_ends_with_its_code_and_its_reason(command, tmp_path, arguments, code, words):
    (tmp_path / "taken").write_text("a file")
    done = command("benchd", "export", *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not {path.name for path in tmp_path.iterdir()} - {"taken", "tiny.toml", "state", "cache"}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte in the place of the state folder."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=False, capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_and_leaves_nothing_and_the_other_files_go_on(command, small_disk):
    done = command("benchd", "export", "snn_onepass,square", "--out", str(small_disk))
    assert done.returncode == 1
    assert "error: snn_onepass fp32 batch 1: artifact store" in done.stderr
    assert "disk full, and this artifact takes more than 1.0 MB" in done.stderr
    with Store(small_disk) as store:
        assert [artifact.metadata.facts["model"] for artifact in store.list()] == ["square"]
    assert len(list(small_disk.rglob("*.onnx"))) == 1


def test_killed_in_the_middle_it_leaves_no_half_file_and_the_next_run_succeeds(command, tmp_path, child_environment):
    line = [Path(sys.executable).parent / "benchd", "export", *SMALL, "--out", "artifacts"]
    with subprocess.Popen(line, cwd=tmp_path, env=child_environment, start_new_session=True) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob("artifacts/.making/*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    with Store(tmp_path / "artifacts") as store:
        assert store.list() == ()
    again = command("benchd", "export", *SMALL, "--out", "artifacts")
    assert again.returncode == 0, again.stderr
    with Store(tmp_path / "artifacts") as store:
        (whole,) = store.list()
        assert store.get(whole.key) is not None
    assert not list(tmp_path.glob("artifacts/.making/*"))


GOOD = """<ir_version: 9, opset_import: ["" : 20]>
g (float[N,4] x, int64[N] rows) => (float[N,4] y) <float[2,4] table = {0,0,0,0, 10,20,30,40}> {
  r = Gather(table, rows)  y = Add(x, r)
}"""


def own_file(folder):
    onnx.save(parser.parse_model(GOOD), folder / "own.onnx")
    return folder / "own.onnx"


def test_an_own_file_is_measured(once, tmp_path):
    own_file(tmp_path)
    done = once("--onnx", "own.onnx", "--batch-sizes", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = written(tmp_path)
    assert (record.case.model, record.case.variant.name, record.case.batch_size) == ("own.own", "onnxruntime", 3)
    assert (record.status, record.check.passed, record.check.max_abs_error) == ("ok", True, 0.0)
    assert record.artifacts[0].key == "own.onnx"


def test_a_damaged_file_of_ones_own_is_told_before_anything_is_measured(once, tmp_path):
    os.truncate(own_file(tmp_path), 50)
    done = once("--onnx", "own.onnx")
    assert done.returncode == 2
    assert "truncated, or no valid ONNX file" in done.stderr


def test_an_own_file_runs_where_files_run(once, tmp_path):
    own_file(tmp_path)
    missing = once("--onnx", "nowhere.onnx")
    assert (missing.returncode, missing.stderr) == (2, "error: --onnx nowhere.onnx: no such file\n")
    planned = once("--onnx", "own.onnx", "--variants", "compile,onnxruntime", "--dry-run")
    assert planned.returncode == 0
    assert "an ONNX file runs on onnxruntime and tensorrt" in planned.stdout
