"""What the child of `benchd export` hands back."""

import os

import torch
from torch import nn

from benchd.daemon.measuring.protocol import ExportRequest
from benchd.daemon.records import Inputs
from benchd.daemon.shipping.manifest import PLAN
from benchd.daemon.worker import backends, exporting
from benchd.daemon.worker.source import Source
from benchd.exporters.artifacts import key_of


def test_the_engine_that_was_loaded_is_handed_back_whichever_the_clock_says_was_used_last(tmp_path):
    source = Source(nn.Identity(), torch.zeros(1), "a", {}, "0" * 64, "outputs", tmp_path)
    for model, used_ns in (("a", 1), ("b", 2)):
        facts = {"format": "plan", "model": model}
        artifact = source.store.put(key_of(facts), facts, lambda path: path.write_bytes(b"content"))
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
        source.built[PLAN] = source.store.put(key_of(facts), facts, lambda path: path.write_bytes(b"content")).path

    monkeypatch.setattr(backends, "load", load)
    (file,) = exporting._wanted(request)
    exporting._export(request, file)
    assert sizes == [512]
