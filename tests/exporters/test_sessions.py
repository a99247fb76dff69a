"""Sessions of the real ONNX Runtime: where they run, how many threads, and what is refused with which words."""

import os
import re
import subprocess
import sys

import absent
import numpy as np
import pytest

from benchd.exporters import sessions
from benchd.exporters.sessions import OnnxRuntimeUnavailable, SessionError, open_session

ort = pytest.importorskip("onnxruntime", reason="tests its sessions")
onnx = pytest.importorskip("onnx", reason="writes the files")
parser = pytest.importorskip("onnx.parser")

RELU = "g (float[N,4] x) => (float[N,4] y) { a = Relu(x) b = Neg(a) y = Neg(b) }"
UNOPTIMISABLE = """g (float[N,4] x, float[N,4] s) => (float[N,4] y) <float[1] one = {1}, float[1] same = {1}> {
  a = Mul(x, one)  b = Cast<to = 1>(a)  c = Div(same, s)  y = Mul(c, b)
}"""
FOREIGN = "g (float[4] x) => (float[4] y) { y = here.Lif(x) }"


def written(folder, graph, opset=20):
    domains = f'"" : {opset}, "here" : 1'
    path = folder / "model.onnx"
    onnx.save(parser.parse_model(f"<ir_version: 9, opset_import: [{domains}]> {graph}"), path)
    return path


def test_a_file_runs_on_the_provider_asked_for_with_the_threads_asked_for(tmp_path):
    session = open_session(written(tmp_path, RELU), threads=1)
    assert session.get_providers()[0] == "CPUExecutionProvider"
    settings = session.get_session_options()
    assert (settings.intra_op_num_threads, settings.inter_op_num_threads) == (1, 1)
    (y,) = session.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})
    assert y.tolist() == [[0, 0, 1, 2]]


def test_the_threads_are_those_this_process_may_run_on(tmp_path):
    settings = open_session(written(tmp_path, RELU)).get_session_options()
    assert settings.intra_op_num_threads == len(os.sched_getaffinity(0))


def test_a_file_that_the_optimiser_breaks_is_refused_with_the_level_that_loads_it(tmp_path):
    path = written(tmp_path, UNOPTIMISABLE)
    assert open_session(path, level="ORT_DISABLE_ALL")
    try:
        open_session(path)
    except SessionError as error:
        assert str(error).endswith(  # noqa: PT017 - another version may load it
            "; its graph optimiser breaks the file, which loads with graph_optimization_level ORT_DISABLE_ALL"
        )
    else:
        pytest.skip(f"ONNX Runtime {ort.__version__} optimises it")


def test_every_node_of_a_cpu_session_runs_there(tmp_path):
    feeds = {"x": np.ones((1, 4), np.float32)}
    nodes = sessions.profiled(written(tmp_path, RELU), "cpu", feeds, {})
    assert {node.provider for node in nodes} == {"CPUExecutionProvider"}
    assert "Relu" in [node.operator for node in nodes]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_provider_that_this_build_lacks_is_refused(provider, tmp_path):
    name = sessions.PROVIDERS[provider]
    if name in ort.get_available_providers():
        pytest.skip(f"this build has {name}")
    with pytest.raises(OnnxRuntimeUnavailable, match=f"has no {name}: {re.escape(sessions.cuda_build())}"):
        open_session(written(tmp_path, RELU), provider)


def test_a_truncated_file_is_refused_by_its_name(tmp_path):
    path = written(tmp_path, RELU)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SessionError, match=r"model\.onnx: ONNX Runtime .* cannot load it: "):
        open_session(path)


@pytest.mark.parametrize(
    ("graph", "opset", "words"), [(FOREIGN, 20, "Lif"), (RELU, 99, "[Oo]pset")], ids=["operator", "opset"]
)
def test_what_it_does_not_know_is_refused_with_its_words(graph, opset, words, tmp_path):
    with pytest.raises(SessionError, match=f"cannot load it: .*{words}") as refused:
        open_session(written(tmp_path, graph, opset))
    assert "optimiser" not in str(refused.value)


OPEN = """
import sys
from pathlib import Path
from benchd.exporters import sessions
print(sessions.why_not())
try:
    sessions.open_session(Path(sys.argv[1]))
except sessions.OnnxRuntimeUnavailable as error:
    print(error)
"""


def opened_in_a_child(environment, path):
    command = [sys.executable, "-c", OPEN, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()


def test_both_distributions_are_refused_with_the_fix(tmp_path, child_environment):
    paths = absent.environment(tmp_path)
    for name in sessions.DISTRIBUTIONS:
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    why_not, refusal = opened_in_a_child(child_environment | paths, tmp_path / "model.onnx")
    assert why_not == refusal
    assert refusal == (
        "onnxruntime onnxruntime-gpu overwrite each other's files: pip uninstall -y onnxruntime onnxruntime-gpu, then "
        "pip install the one you want"
    )


def test_without_onnx_runtime_it_says_what_to_type(tmp_path, child_environment):
    paths = absent.environment(tmp_path, "onnxruntime")
    why_not, refusal = opened_in_a_child(child_environment | paths, tmp_path / "model.onnx")
    assert why_not == refusal
    assert why_not.startswith("ONNX Runtime is not installed: pip install onnxruntime; for CUDA ")


def test_one_that_cannot_be_imported_is_unavailable_and_says_why(tmp_path, child_environment):
    paths = absent.environment(tmp_path)
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libcublas.so.13: cannot open')")
    why_not, refusal = opened_in_a_child(child_environment | paths, tmp_path / "model.onnx")
    assert why_not == "None"
    assert refusal == "onnxruntime cannot be imported: libcublas.so.13: cannot open"
