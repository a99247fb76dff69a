"""TensorRT on a real device: engines built, run, kept, rebuilt, and refused with the node's name."""

import onnx
import onnx.parser
import pytest
import torch
from torch import nn
from worker_jobs import changed, job

from benchd.daemon.records import Variant
from benchd.daemon.worker import backends, workload
from benchd.daemon.worker.backends import tensorrt as backend
from benchd.daemon.worker.check import checking as check
from benchd.daemon.worker.source import Source
from benchd.exporters import tensorrt
from benchd.exporters.tensorrt import BuildError, Engine
from benchd.models import catalog

pytestmark = [pytest.mark.gpu, pytest.mark.area("tensorrt")]
CUDA = torch.device("cuda")


def source_of(folder, module, images, judged_by="outputs"):
    """Return a module as the backend gets it, its files kept in `folder`."""
    facts = {"model": "net", "options": {}, "weights_sha256": "0" * 64}
    return Source(module=module, images=images, judged_by=judged_by, folder=folder, **facts)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    try:
        tensorrt.load()
    except tensorrt.TensorRtUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).eval()


def outputs_of(net, images):
    with torch.inference_mode():
        return net(images)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_engine_agrees_is_strongly_typed_and_comes_from_the_store_the_second_time(tmp_path, net, precision):
    batches = torch.randn(6, 4, 3, 8, 8)
    expected = outputs_of(net, batches.flatten(0, 1)).unflatten(0, (6, 4))
    source = source_of(tmp_path, net, batches[0])
    first = backend.load(source, precision, CUDA, batches[0])
    again = backend.load(source, precision, CUDA, batches[0])
    for images, wanted in zip(batches, expected, strict=True):
        for loaded in (first, again):
            output = loaded.run(images.to(CUDA, loaded.dtype)).float().cpu()
            torch.testing.assert_close(output, wanted, rtol=2e-2, atol=1e-4 if precision == "fp32" else 2e-2)
    assert first.runtime.typing == again.runtime.typing == "strong"
    assert first.runtime.cuda_graph
    assert first.runtime.build_s > 0
    assert again.runtime.build_s is None


def test_a_rate_encoded_model_runs_on_the_draws_it_is_given(tmp_path):
    torch.manual_seed(0)
    module = catalog.build("snn_onepass", time_steps=2, encoding="rate", threshold=0.1)
    images = torch.rand(8, 3, 32, 32)
    run = backend.load(source_of(tmp_path, module, images, "codes"), "fp32", CUDA, images[:2]).run
    draws = torch.rand(2, 2, 2, 3, 32, 32)
    answers = [run(images[:2].to(CUDA), uniforms.to(CUDA)).cpu() for uniforms in draws]
    assert not torch.equal(*answers)
    with torch.inference_mode():
        for outputs, uniforms in zip(answers, draws, strict=True):
            # a neuron at its threshold may fire elsewhere
            torch.testing.assert_close(outputs, module(images[:2], uniforms), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("model", "options"), [("vim_tiny", {"depth": 2}), ("snn_stbif_resnet18", {"width": 8, "time_steps": 4})]
)
def test_a_model_agrees_with_float64_and_its_layers_have_times(tmp_path, model, options, precision):
    a_job = job(tmp_path, model=model, variant=Variant("tensorrt", precision), batch_size=2)
    a_job = changed(a_job, options=catalog.entry(model).resolve(options), device="cuda")
    built = workload.build(a_job)
    loaded = backends.load(a_job.case.variant, built.source, CUDA, built.images[:2])
    result = check.check_and_answers(built, loaded, a_job).check
    assert result.passed, result
    first, second = loaded.layer_times(2, built.images[:2].to(CUDA, loaded.dtype))
    assert [name for name, _ in first] == [name for name, _ in second]
    assert all(ms >= 0 for _, ms in first)


def test_two_are_in_flight_without_mixing(tmp_path, net):
    batches = torch.randn(40, 4, 3, 8, 8)
    source = source_of(tmp_path, net, batches[0])
    loaded = backend.load(source, "fp32", CUDA, batches[0])
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for i, images in enumerate(batches.to(CUDA)):
        streams[i % 2].synchronize()
        with torch.cuda.stream(streams[i % 2]):
            outputs.append(loaded.run(images).to("cpu", non_blocking=True))
    torch.cuda.synchronize()
    expected = outputs_of(net, batches.flatten(0, 1)).unflatten(0, (40, 4))
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-3, atol=1e-3)


def test_a_plan_that_is_none_of_this_tensorrt_is_built_again_and_said_so(tmp_path, net):
    images = torch.randn(4, 3, 8, 8)
    source = source_of(tmp_path, net, images)
    backend.load(source, "fp32", CUDA, images)
    (stored,) = (artifact for artifact in source.store.list() if artifact.path.suffix == ".plan")
    source.store.put(stored.metadata.facts, lambda path: path.write_bytes(b"not a plan" * 100))
    loaded = backend.load(source, "fp32", CUDA, images)
    assert "rebuilt" in loaded.runtime.notes[0]
    torch.testing.assert_close(loaded.run(images.to(CUDA)).cpu(), outputs_of(net, images), rtol=1e-3, atol=1e-3)


DYNAMIC = """<ir_version: 9, opset_import: ["" : 18]>
g (float[N,4] x) => (float[N,4] y) { s = Sigmoid(x)  y = Mul(x, s) }"""
UNKNOWN = """<ir_version: 9, opset_import: ["" : 18]>
g (float[2,4] x) => (float[2,4] y) { [first] s = Sigmoid(x)  [second] y = Bernoulli(s) }"""


def built(folder, text):
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    trt, plan = tensorrt.load(), folder / "model.plan"
    arguments = {"workspace_bytes": 2**28, "timing_cache": folder / "times", "precision": "fp32"}
    return trt, plan, tensorrt.build(trt, path, plan, 8, **arguments)


def test_a_dynamic_batch_takes_its_size_and_layers_have_times(tmp_path):
    trt, plan, artifact = built(tmp_path, DYNAMIC)
    assert artifact.recipe == tensorrt.BuildRecipe("strong", 2**28)
    engine, stream = Engine(trt, plan), torch.cuda.Stream()
    context, x = engine.context(), torch.randn(8, 4, device=CUDA)
    y = torch.empty_like(x)
    torch.cuda.synchronize()
    assert context.set_shapes({"x": (8, 4)}) == {"y": (8, 4)}
    context.bind({"x": x.data_ptr(), "y": y.data_ptr()})
    context.run(stream.cuda_stream)
    stream.synchronize()
    torch.testing.assert_close(y, nn.functional.silu(x))
    times = context.layer_times(stream.cuda_stream, runs=3)
    assert len(times) == 3
    assert all(ms > 0 for run in times for _, ms in run)


def test_an_op_that_tensorrt_lacks_is_told_with_its_node(tmp_path):
    with pytest.raises(BuildError, match="Bernoulli"):
        built(tmp_path, UNKNOWN)
