"""The nets whose layers read whole numbers, on kernels with int8 weights."""

from functools import cache

import pytest
import torch

from benchd.kernels.dispatch import Unavailable
from benchd.kernels.exact_conv2d import layer, native
from benchd.models import catalog, data, weights
from benchd.models.demo import CHECKPOINTS

INT8 = [name for name, model in catalog.MODELS.items() if model.custom_int8]
needs_instructions = pytest.mark.skipif(
    not native.paths(), reason="needs a CPU with AMX, VNNI or a dot product of bytes"
)


def built(model, kernels):
    checkpoint = CHECKPOINTS[model]
    return weights.build(model, weights.read(checkpoint.path), checkpoint.options, kernels=kernels)


@cache
def images(model):
    entry = catalog.entry(model)
    shape = entry.image_shape(CHECKPOINTS[model].options)
    return data.open_set("demo", shape, dataset=entry.dataset, inputs=entry.inputs).taken(64).images


@needs_instructions
@pytest.mark.parametrize(("model", "layers"), [("snn_onepass", 2), ("qann_resnet18", 19), ("snn_stbif_resnet18", 19)])
@torch.inference_mode()
def test_each_layer_of_whole_numbers_has_int8_weights_and_the_classes_stay(model, layers, monkeypatch):
    packed = {}  # by layer: a batch may run in groups
    convolved = native.convolved

    def seen(*given):
        packed[id(given[2].digits)] = given[2]
        return convolved(*given)

    monkeypatch.setitem(layer.LEAST_DENSITY[1], native.paths()[0], (0.0, 0.0))
    monkeypatch.setattr(native, "convolved", seen)
    logits = built(model, "custom-int8")(images(model))
    assert [digits.per_weight for digits in packed.values()] == [1] * layers
    want = built(model, "torch")(images(model))
    assert (logits.argmax(1) == want.argmax(1)).sum() >= 63
    assert not torch.allclose(logits, want, rtol=1e-4, atol=1e-4), "these would be float32 weights"


@needs_instructions
@torch.inference_mode()
def test_sparse_spikes_meet_the_same_weights_as_dense_ones(monkeypatch):
    path, answers = native.paths()[0], []
    for least in (0.0, 1.1):
        monkeypatch.setitem(layer.LEAST_DENSITY[1], path, (least, least))
        answers.append(built("snn_onepass", "custom-int8")(images("snn_onepass")[:16]))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


@needs_instructions
@pytest.mark.parametrize("model", INT8)
def test_no_float32_weights_compute_in_their_place(model):
    net = built(model, "custom-int8")
    with torch.no_grad(), pytest.raises(Unavailable, match="int8 weights are for inference in float32 on a CPU"):
        net.double()(images(model)[:1].double())


@needs_instructions
def test_compiled_code_has_no_float32_weights_in_their_place_either():
    net, image = built("snn_onepass", "custom-int8"), images("snn_onepass")[:1]
    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.equal(torch.compile(net, backend="eager")(image), net(image))


def test_int8_is_refused_by_name(monkeypatch):
    with pytest.raises(Unavailable, match="vim_tiny has no int8 kernels: our kernels convolve only the integers"):
        catalog.build("vim_tiny", kernels="custom-int8")
    for model in INT8:
        with torch.device("meta"), pytest.raises(Unavailable, match=f"{model} has custom-int8 kernels for CPUs only"):
            catalog.build(model, kernels="custom-int8")
    monkeypatch.setattr(native, "paths", tuple)
    for model in INT8:
        with pytest.raises(Unavailable, match=f"{model}: the custom-int8 kernels need a CPU with AMX, VNNI or Arm"):
            catalog.build(model, kernels="custom-int8")
