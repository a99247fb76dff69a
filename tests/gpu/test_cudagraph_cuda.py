"""CUDA graphs on a real device: every model replayed on new images, two in flight, and reasons where capture fails."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.measuring import loads
from benchd.daemon.worker import peaks
from benchd.daemon.worker.backends import cudagraph, eager
from benchd.models import catalog

pytestmark = [pytest.mark.gpu, pytest.mark.area("graphs")]
CUDA = torch.device("cuda")


def images_of(model, count, batch=2):
    entry = catalog.entry(model)
    draw = torch.rand if entry.inputs == "unit" else torch.randn
    return [draw(batch, *entry.image_shape({})) for _ in range(count)]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "amp"])
@pytest.mark.parametrize("model", catalog.MODELS)
def test_replays_agree_with_eager_on_new_images(model, precision):
    source = SimpleNamespace(module=catalog.build(model))
    example, *fresh = images_of(model, 5)
    plain = eager.load(source, precision, CUDA, example)
    graphs = cudagraph.load(source, precision, CUDA, example)
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    for images in (drawn.to(CUDA, graphs.dtype) for drawn in fresh):
        with torch.inference_mode():
            expected = plain.run(images)
        torch.testing.assert_close(graphs.run(images), expected, rtol=tolerance, atol=tolerance)


def test_torch_has_as_many_cuda_streams_as_the_plan_counts():
    handles = [torch.cuda.Stream().cuda_stream for _ in range(loads.CUDA_STREAMS + 1)]
    assert len(set(handles)) == loads.CUDA_STREAMS


def test_two_are_in_flight_without_mixing():
    module = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
    graphs = cudagraph.load(SimpleNamespace(module=module), "fp32", CUDA, torch.zeros(64, 2048))
    batches = torch.randn(50, 64, 2048, device=CUDA)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for i, batch in enumerate(batches):
        streams[i % 2].synchronize()
        with torch.cuda.stream(streams[i % 2]):
            outputs.append(graphs.run(batch).to("cpu", non_blocking=True))
    torch.cuda.synchronize()
    with torch.inference_mode():
        expected = module.cuda()(batches)
    torch.testing.assert_close(torch.stack(outputs), expected.cpu(), rtol=1e-3, atol=1e-3)


def test_a_rate_encoded_model_replays_given_numbers_and_draws_new_ones_otherwise():
    source = SimpleNamespace(module=catalog.build("snn_onepass", encoding="rate"))
    images = torch.rand(2, 3, 32, 32)
    graphs = cudagraph.load(source, "fp32", CUDA, images)
    uniforms = torch.rand(source.module.time_steps, 2, 3, 32, 32)
    with torch.inference_mode():
        expected = source.module.cuda()(images.cuda(), uniforms.cuda())
    torch.testing.assert_close(graphs.run(images.cuda(), uniforms.cuda()), expected, rtol=1e-4, atol=1e-4)
    drawn = [graphs.run(images.cuda()).clone() for _ in range(4)]
    assert len({tuple(logits.flatten().tolist()) for logits in drawn}) > 1


class Synchronising(nn.Module):
    def forward(self, images):
        return images * images.max().item()


class OnTheCpu(nn.Module):
    def forward(self, images):
        return images + torch.ones(images.shape).to(images.device)


def refusal(module):
    """Return why the module cannot be captured; the device is then still good for what a fallback does."""
    try:
        cudagraph.load(SimpleNamespace(module=module), "fp32", CUDA, torch.ones(2, 3))
    except Unsupported as error:
        assert torch.ones(3, device=CUDA).sum().item() == 3
        peaks.forget(CUDA)
        return str(error)
    return "it was captured"


@pytest.mark.parametrize(
    ("module", "line"),
    [(Synchronising(), "images.max().item()"), (OnTheCpu(), "torch.ones(images.shape).to(images.device)")],
    ids=["synchronises", "copies from the CPU"],
)
def test_what_cannot_be_captured_is_told_with_its_line_and_the_device_stays_usable(module, line):
    # in a process of its own: up to 2.12 torch takes no further capture after one that failed
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        reason = other.submit(refusal, module).result()
    assert "cannot be captured as a CUDA graph" in reason
    assert line in reason
