"""Items that differ in length: run, checked and timed as they come, and exported with that axis open."""

import onnx
import pytest
import torch
from worker_jobs import LONGER, changed, job, run_here

from benchd.daemon.records import UserModule, Variant
from benchd.daemon.reporting.scenario_note import scenario_note

LINES = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        words = self.embedding(ids) * mask[..., None]
        return {"logits": self.head(words.sum(1) / mask.sum(1, keepdim=True)), "words": words * 2}


def items():
    draw = torch.Generator().manual_seed(0)
    for length in (3, 20, 40, 9, 33, 17):
        yield {"ids": torch.randint(0, 50, (length,), generator=draw), "mask": torch.ones(length)}


def plain():
    for length in (3, 20, 40, 9, 33, 17):
        yield torch.rand(length)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True)
"""


@pytest.fixture
def measured(tmp_path):
    """Return a function that measures a net on items and returns the outcome."""
    (tmp_path / "net.py").write_text(LINES)

    def run(variant, batch_size=1, net="Net", items="items"):
        a_job = job(tmp_path, limits=LONGER, variant=Variant.parse(variant), batch_size=batch_size, model="own.net.Net")
        own = UserModule(f"{tmp_path}/net.py:{net}")
        outcome = run_here(changed(a_job, own=own, samples=f"{tmp_path}/net.py:{items}"))
        if torch.__version__.startswith("2.9.") and "name 'L' is not defined" in (outcome.process.reason or ""):
            pytest.skip("torch 2.9 exports no open length of these, which the variant says")
        return outcome

    return run


@pytest.mark.parametrize(
    ("variant", "batch_size", "classes"),
    [("eager", 3, [64]), *((variant, 1, [16, 32, 64]) for variant in ("eager", "compile", "onnxruntime"))],
)
def test_they_are_checked_and_timed_as_they_come(measured, variant, batch_size, classes):
    torch._dynamo.reset()  # what other tests have compiled here counts towards its limit
    outcome = measured(variant, batch_size)
    assert outcome.check, outcome.process.reason
    assert (outcome.process.status, outcome.check.verdict) == ("ok", "passed"), outcome.process.reason
    assert outcome.model.data.endswith("of lengths 3 to 40")
    parts = outcome.process.parts
    assert list(parts) == [f"length_{name}" for name in classes]  # of both batches of 3 the longest have 40 and 33
    assert sum(part.runs for part in parts.values()) == outcome.process.timing.runs


def test_their_file_has_the_length_open_and_no_other_axis(measured, tmp_path):
    assert measured("onnxruntime").process.status == "ok"
    (path,) = (tmp_path / "artifacts").glob("*/model.onnx")
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in onnx.load(path).graph.input
    }
    assert shapes == {"ids": [1, "length0"], "mask": [1, "length0"]}


def test_an_only_input_may_differ_in_length_too(measured):
    for variant in ("eager", "onnxruntime"):
        outcome = measured(variant, net="Mean", items="plain")
        assert (outcome.process.status, outcome.check.verdict) == ("ok", "passed"), outcome.process.reason


@pytest.mark.parametrize("variant", ["openvino", "int8", "aoti"])
def test_what_runs_one_size_says_so(measured, variant):
    outcome = measured(variant)
    assert outcome.process.status == "unsupported"
    assert "pad the items to one length, or use eager, compile, onnxruntime" in outcome.process.reason


def test_the_note_below_the_table_has_the_percentiles_of_each_class():
    from records_made import made, timing

    record = made(parts={"length_64": timing(2.0), "length_16": timing(1.0)}, timing=timing(1.5))
    assert "length up to 16 p50 1 ms, length up to 64 p50 2 ms" in scenario_note(record)
