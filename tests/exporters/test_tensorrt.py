"""What holds of engines without TensorRT: keys, profiles, the workspace of a board, and the refusal to start."""

import sys

import pytest
import torch
from machines import desktop, orin_nano, write

from benchd.exporters import tensorrt
from benchd.exporters.artifacts import ArtifactStore, key_of

FACTS = {
    "onnx_sha256": "3f2a" * 16,
    "version": "10.3.0",
    "gpu_name": "Orin",
    "compute_capability": (8, 7),
    "flags": tensorrt.FLAGS,
    "batch": 4,
}
OTHERS = {
    "onnx_sha256": "0000" * 16,
    "version": "11.4.0.106",
    "gpu_name": "NVIDIA H200",
    "compute_capability": (9, 0),
    "flags": (*tensorrt.FLAGS, "workspace=1"),
    "batch": 8,
}


def test_a_plan_is_kept_by_everything_it_was_made_of_and_for(tmp_path):
    facts = tensorrt.engine_facts(**FACTS)
    keys = {key_of(tensorrt.engine_facts(**FACTS | {name: other})) for name, other in OTHERS.items()}
    assert len(keys | {key_of(facts)}) == len(OTHERS) + 1
    store = ArtifactStore(tmp_path)
    artifact = store.put(facts, lambda path: path.write_bytes(b"plan"))
    assert artifact.path.name == "model.plan"
    assert store.get(key_of(tensorrt.engine_facts(**FACTS))).metadata.facts == facts


def test_the_order_of_the_flags_does_not_matter():
    backwards = FACTS | {"flags": tuple(reversed(tensorrt.FLAGS))}
    assert tensorrt.engine_facts(**backwards) == tensorrt.engine_facts(**FACTS)


@pytest.mark.parametrize(
    ("available_kb", "expected"),
    [(5_000_000, 2**30), (4 * 2**20, 2**30), (1_000_000, 256_000_000)],
    ids=["much", "four GiB", "little"],
)
def test_the_workspace_of_a_board_leaves_it_memory(tmp_path, available_kb, expected):
    write(orin_nano(tmp_path), {"proc/meminfo": f"MemTotal: 7800000 kB\nMemAvailable:  {available_kb} kB\n"})
    assert tensorrt.default_workspace_bytes(tmp_path) == expected


def test_a_desktop_has_no_limit(tmp_path):
    assert tensorrt.default_workspace_bytes(desktop(tmp_path)) is None


def test_a_board_without_a_figure_for_its_memory_is_an_error(tmp_path):
    write(orin_nano(tmp_path), {"proc/meminfo": "MemTotal: 7800000 kB\n"})
    with pytest.raises(ValueError, match="no MemAvailable"):
        tensorrt.default_workspace_bytes(tmp_path)


def test_times_of_kernels_are_kept_by_version_and_gpu():
    paths = [
        tensorrt.timing_cache_path(*facts) for facts in (("10.3.0", "Orin"), ("11.4.0", "Orin"), ("10.3.0", "A/B"))
    ]
    assert len(set(paths)) == 3
    assert {path.parent for path in paths} == {paths[0].parent}


@pytest.mark.parametrize("version", ["8.6.2", "10.0.1"])
def test_an_older_tensorrt_is_refused(version):
    with pytest.raises(tensorrt.TensorRtUnavailable, match=rf"{version} is too old; benchd needs 10\.3"):
        tensorrt.require_version(version)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_tensorrt_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "tensorrt.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(tensorrt.TensorRtUnavailable, match="TensorRT needs a CUDA device"):
        tensorrt.load()


class NotStarting:
    """TensorRT where CUDA fails it: its bindings say in the log why, and raise TypeError for want of an object."""

    class ILogger:
        INTERNAL_ERROR, ERROR = range(2)

    class BuilderFlag:
        FP16 = 0

    def Builder(self, logger):  # noqa: N802 - TensorRT's name
        logger.log(self.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    Runtime = Builder


def test_a_tensorrt_that_does_not_start_cannot_run_here_and_no_other_build_is_tried(tmp_path):
    build = {"workspace_bytes": None, "timing_cache": tmp_path / "times", "precision": "fp16"}
    message = "TensorRT cannot start: CUDA initialization failure with error: 35$"
    with pytest.raises(tensorrt.TensorRtUnavailable, match=message):
        tensorrt.build(NotStarting(), tmp_path / "model.onnx", tmp_path / "plan", 1, **build)
    with pytest.raises(tensorrt.TensorRtUnavailable, match=message):
        tensorrt.Engine(NotStarting(), tmp_path / "plan")
