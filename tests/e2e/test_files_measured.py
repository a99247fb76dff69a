"""`bench-once` on files: those that `benchd export` made, and one of the user's own."""

import json

import pytest
from records_made import written

from benchd.exporters.artifacts import ArtifactStore

onnx = pytest.importorskip("onnx", reason="reads and writes files")
parser = pytest.importorskip("onnx.parser")
pytest.importorskip("onnxscript", reason="exports")
pytest.importorskip("onnxruntime", reason="runs what was exported")

SMALL = ("square", "--option", "size=16")


def state(folder):
    return folder / "state" / "benchd" / "artifacts"


def test_a_folder_of_files_gives_another_machine_its_case(here, once, tmp_path):
    done = here("benchd", "export", *SMALL, "--batch-sizes", "dynamic", "--output", "artifacts", "--json")
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
    assert ArtifactStore(state(tmp_path)).list() == ()


@pytest.mark.slow
def test_the_file_of_shipped_weights_is_the_one_that_a_case_runs(here, once, tmp_path):
    done = here("benchd", "export", "qann_resnet18", "--weights", "demo", "--json")
    assert done.returncode == 0, done.stderr
    (artifact,) = json.loads(done.stdout)
    assert artifact["metadata"]["facts"]["options"] == {"level": 8, "width": 16}
    measured = once("--models", "qann_resnet18", "--option", "width=16", "--variants", "onnxruntime")
    assert measured.returncode == 0, measured.stdout + measured.stderr
    (record,) = written(tmp_path)
    (used,) = record.artifacts
    assert (record.model.weights, used.key, used.reused) == ("demo", artifact["key"], True)


GOOD = """<ir_version: 9, opset_import: ["" : 20]>
g (float[N,4] x, int64[N] rows) => (float[N,4] y) <float[2,4] table = {0,0,0,0, 10,20,30,40}> {
  r = Gather(table, rows)  y = Add(x, r)
}"""


def user_onnx(folder):
    onnx.save(parser.parse_model(GOOD), folder / "own.onnx")
    return folder / "own.onnx"


def test_an_own_file_is_measured_with_the_weights_beside_it(once, tmp_path):
    model = onnx.load(user_onnx(tmp_path))
    (table,) = model.graph.initializer
    table.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(table), table.name))  # as raw bytes
    onnx.save(model, tmp_path / "own.onnx", save_as_external_data=True, location="own.data", size_threshold=0)
    done = once("--onnx", "own.onnx", "--batch-sizes", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = written(tmp_path)
    size = sum((tmp_path / name).stat().st_size for name in ("own.onnx", "own.data"))
    assert (record.check.passed, record.artifacts[0].bytes) == (True, size)


def test_an_own_file_runs_where_files_run(here, tmp_path):
    user_onnx(tmp_path)
    missing = here("bench-once", "--onnx", "nowhere.onnx")
    assert (missing.returncode, missing.stderr) == (2, "error: --onnx nowhere.onnx: no such file\n")
    planned = here("bench-once", "--onnx", "own.onnx", "--variants", "compile,onnxruntime", "--dry-run")
    assert planned.returncode == 0
    assert "an ONNX file runs on onnxruntime, openvino and tensorrt" in planned.stdout
