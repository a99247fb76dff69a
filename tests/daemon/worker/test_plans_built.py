"""Which TensorRT plans are built and which are taken from the store, without TensorRT and without a GPU."""

from types import SimpleNamespace

import torch

from benchd.daemon.worker.backends import tensorrt as backend
from benchd.daemon.worker.source import Source
from benchd.exporters import artifacts, tensorrt


def test_a_gpu_of_one_name_with_other_multiprocessors_gets_its_own_plan_and_kernel_times(tmp_path, monkeypatch):
    """As an Orin does in another power mode, and a board that another module's cache was copied to."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Orin")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 7))
    built = []

    def build(trt, onnx, plan, profile, *, timing_cache, **options):
        plan.write_bytes(b"plan")
        built.append(timing_cache)

    monkeypatch.setattr(tensorrt, "build", build)
    (tmp_path / "model.onnx").write_bytes(b"a model")
    onnx = artifacts.given(tmp_path / "model.onnx")
    source = Source(torch.nn.Identity(), torch.zeros(1, 3), "net", {}, "", "outputs", tmp_path / "store")
    for number in (4, 8, 4):
        properties = SimpleNamespace(multi_processor_count=number)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        backend._plan(SimpleNamespace(__version__="10.3.0"), source, onnx, "fp16", 1)
    assert len(set(built)) == len(built) == 2
