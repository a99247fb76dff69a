"""Whole models on a CUDA device: every variant of a record checked, CUDA graphs, and what training learns."""

import pytest
import torch
from torch import nn
from worker_jobs import changed, job

from benchd.daemon.records import Variant
from benchd.daemon.worker import backends, workload
from benchd.daemon.worker.backends import cudagraph
from benchd.daemon.worker.check import checking as check
from benchd.models import catalog

pytestmark = [pytest.mark.gpu, pytest.mark.area("models")]
CUSTOM = [name for name, entry in catalog.MODELS.items() if entry.custom_kernels]


def cuda_job(folder, model, variant, **fields):
    options = catalog.entry(model).resolve({})
    a_job = job(folder, model=model, variant=Variant.parse(variant), **fields)
    return changed(a_job, options=options, device="cuda")


@pytest.mark.parametrize("variant", ["eager", "fp16", "amp", "custom", "custom-fp16", "custom-amp"])
@pytest.mark.parametrize("model", CUSTOM)
def test_every_variant_agrees_with_float64(tmp_path, model, variant):
    a_job = cuda_job(tmp_path, model, variant, batch_size=2)
    built = workload.build(a_job)
    loaded = backends.load(a_job.case.variant, built.source, torch.device("cuda"), built.images[:2])
    result = check.check_and_answers(built, loaded, a_job).check
    assert result.passed, result


@pytest.mark.parametrize("model", CUSTOM)
def test_a_custom_forward_can_be_captured_and_replayed_on_new_images(model):
    entry = catalog.entry(model)
    module = catalog.build(model, kernels="custom").cuda()
    draw = torch.rand if entry.inputs == "unit" else torch.randn
    static, fresh = (draw(2, *entry.image_shape({}), device="cuda") for _ in range(2))
    graph, outputs = cudagraph.capture(lambda: module(static))
    with torch.inference_mode():
        expected = module(fresh).clone()
        static.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("encoding", ["repeat", "rate"])
def test_layers_of_onepass_that_are_seen_add_their_biases_and_change_no_answer(encoding, precision):
    torch.manual_seed(0)
    module = catalog.build("snn_onepass", kernels="custom", encoding=encoding, p_scale=3.0).to("cuda", precision)
    inputs = [torch.rand(32, 3, 32, 32, device="cuda", dtype=precision)]
    if encoding == "rate":
        inputs += [torch.rand(8, 32, 3, 32, 32, device="cuda", dtype=precision)]
    with torch.inference_mode():
        actual, outputs = module(*inputs), []
        for layer in (module.conv1, module.conv2):
            layer.register_forward_hook(lambda layer, given, output: outputs.append((layer, *given, output)))
        expected = module(*inputs)
        for layer, given, output in outputs:
            torch.testing.assert_close(output, layer._conv_forward(given, layer.weight, layer.bias))
    assert [layer for layer, *_ in outputs] == [module.conv1, module.conv2]
    # half currents are rounded once more where a layer adds its bias, and a neuron at the edge then flips many
    assert (actual - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("pictures", [4, 300])
def test_fc1_of_onepass_answers_as_a_plain_layer_whatever_is_copied(pictures):
    layer = catalog.build("snn_onepass", kernels="custom").cuda().fc1
    x = torch.rand(pictures, 128, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x), nn.functional.linear(x.flatten(1), layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice
@pytest.mark.parametrize("model", CUSTOM)
def test_a_custom_forward_compiles(model):
    torch.manual_seed(0)
    entry = catalog.entry(model)
    module = catalog.build(model, kernels="custom").cuda()
    images = torch.rand(32, *entry.image_shape({}), device="cuda")
    with torch.inference_mode():
        expected = module(images)
        actual = torch.compile(module)(images)
    if entry.judged_by == "outputs":
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    else:  # a convolution may sum in another order, and a neuron at the edge then flips many: in one image of 32 or so
        same = torch.isclose(actual, expected, rtol=1e-3, atol=1e-3).all(1)
        assert float(same.float().mean()) >= 0.75
