"""CUDA graphs as far as they go without a GPU: slots, what is said when a capture breaks, and the refusals."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchd.daemon.errors import Unsupported
from benchd.daemon.worker.backends import cudagraph, tensorrt
from benchd.daemon.worker.backends.cudagraph import Slot, capture_error, rotating
from benchd.daemon.worker.source import Source
from benchd.daemon.worker.structures import Tensors
from benchd.models.catalog import build

CPU = torch.device("cpu")


def doubling(size):
    """A slot that doubles its input; `launch` works in place, as a graph does."""
    static, output = torch.zeros(size), torch.zeros(size)
    return Slot([static], lambda: torch.mul(static, 2, out=output), output, None)


def test_slots_take_turns_so_that_two_results_stand_at_once():
    run = rotating([doubling(3), doubling(3)])
    first, second = run(torch.ones(3)), run(torch.full((3,), 5.0))
    assert (first.tolist(), second.tolist()) == ([2.0] * 3, [10.0] * 3)
    assert run(torch.zeros(3)) is first


@pytest.mark.parametrize("given", [[torch.ones(1)], [torch.ones(3), torch.ones(3)], []], ids=["shape", "more", "none"])
def test_another_input_than_the_captured_one_is_refused(given):
    with pytest.raises(ValueError, match=r"captured for|argument"):
        doubling(3)(*given)


class Net(nn.Module):
    def forward(self, images):
        if images.sum().item() > 0:
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
        return images


def broken_capture():
    try:
        Net()(torch.ones(2))
    finally:
        raise LookupError("the capture was void")  # as its end says


def test_what_broke_a_capture_is_told_with_the_line_of_the_model():
    with pytest.raises(LookupError) as error:
        broken_capture()
    message = capture_error(error.value)
    assert message.startswith("operation not permitted when stream is capturing (test_cudagraph.py:")
    assert 'raise RuntimeError("operation not permitted' in message
    assert "DSA" not in message.split(" (", 1)[0]


def test_without_a_cuda_device_both_say_so():
    source = SimpleNamespace(module=Net())
    with pytest.raises(Unsupported, match="CUDA graphs need a CUDA device"):
        cudagraph.load(source, "fp32", CPU, torch.zeros(1, 3))
    with pytest.raises(Unsupported, match="TensorRT needs a CUDA device"):
        tensorrt.load(source, "fp32", CPU, torch.zeros(1, 3))


@pytest.mark.parametrize("given", ["rate", "several"])
def test_an_engine_reads_what_its_file_does(given, tmp_path):
    """Behind the encoder of a model that draws random numbers, and each input of a user's own model."""
    torch.manual_seed(0)
    module = build("snn_onepass", time_steps=4, encoding="rate") if given == "rate" else Net()
    images, uniforms = torch.rand(2, 3, 32, 32), torch.rand(4, 2, 3, 32, 32)
    source = Source(
        module=module,
        images=images,
        model=given,
        options={},
        weights_sha256="0" * 64,
        judged_by="outputs",
        folder=tmp_path,
    )
    read = [module.encode(images, uniforms)] if given == "rate" else [images, uniforms]
    static = [torch.zeros_like(value) for value in read]
    slot = Slot(static, lambda: None, torch.zeros(1), None)
    run = tensorrt.of_images(source, rotating([slot]))
    assert run(images, uniforms) is slot.output
    assert all(torch.equal(*pair) for pair in zip(static, read, strict=True))


def test_a_slot_may_write_several_outputs():
    static, output = torch.zeros(3), Tensors({"twice": torch.zeros(3), "total": torch.zeros(())})

    def launch():
        torch.mul(static, 2, out=output.named["twice"])
        output.named["total"].copy_(static.sum())

    run = rotating([Slot([static], launch, output, None)])
    answers = run(torch.ones(3)).cpu().named
    assert (answers["twice"].tolist(), answers["total"].item()) == ([2.0] * 3, 3.0)
