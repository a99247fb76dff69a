"""Engines of TensorRT, without it and without a GPU: which are built, for which batch, and which is handed back."""

import os
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import with_multiprocessors

from benchd.daemon.measuring.protocol import ExportRequest
from benchd.daemon.records import Inputs
from benchd.daemon.shipping.manifest import PLAN
from benchd.daemon.worker import backends, exporting
from benchd.daemon.worker.backends import tensorrt as backend
from benchd.daemon.worker.source import Source
from benchd.exporters import artifacts, tensorrt


@pytest.fixture
def source(tmp_path):
    return Source(torch.nn.Identity(), torch.zeros(1, 3), "net", {}, "0" * 64, "outputs", tmp_path / "store")


def test_a_gpu_of_one_name_with_other_multiprocessors_gets_its_own_plan_and_kernel_times(tmp_path, monkeypatch, source):
    """As an Orin does in another power mode, and a board that another module's cache was copied to."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    built = []

    def build(trt, onnx, plan, profile, *, timing_cache, **options):
        plan.write_bytes(b"plan")
        built.append(timing_cache)

    monkeypatch.setattr(tensorrt, "build", build)
    (tmp_path / "model.onnx").write_bytes(b"a model")
    onnx = artifacts.given(tmp_path / "model.onnx")
    for number in (4, 8, 4):
        with_multiprocessors(monkeypatch, number)
        backend._plan(SimpleNamespace(__version__="10.3.0"), source, onnx, "fp16", 1)
    assert len(set(built)) == len(built) == 2


def test_the_engine_that_was_loaded_is_handed_back_whichever_the_clock_says_was_used_last(source):
    for model, used_ns in (("a", 1), ("b", 2)):
        facts = {"format": "plan", "model": model}
        artifact = source.store.put(facts, lambda path: path.write_bytes(b"content"))
        os.utime(artifact.path.with_name("metadata.json"), ns=(used_ns, used_ns))
        source.built.setdefault(PLAN, artifact.path)
    assert exporting._engine(source).metadata.facts == {"format": "plan", "model": "a"}


def test_an_engine_is_built_for_the_batch_asked_for_however_few_images_there_are(tmp_path, monkeypatch):
    """The demo has 359 digits."""
    request = ExportRequest(
        models=["snn_onepass"],
        to="tensorrt",
        precisions=["fp32"],
        batches=[512],
        form=None,
        options={},
        inputs=Inputs(weights="demo"),
        seed=0,
        out=str(tmp_path),
        workspace_bytes=None,
    )
    sizes = []

    def load(variant, source, device, example):
        sizes.append(len(example))
        facts = {"format": "plan"}
        source.built[PLAN] = source.store.put(facts, lambda path: path.write_bytes(b"content")).path

    monkeypatch.setattr(backends, "load", load)
    (file,) = exporting._wanted(request)
    exporting._export(request, file)
    assert sizes == [512]
