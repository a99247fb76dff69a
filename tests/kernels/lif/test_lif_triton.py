"""The Triton kernels of LIF against the reference, bit for bit: on a GPU where there is one, else interpreted."""

import pytest
import torch
from pairs import pairs
from test_lif import channels_last

from benchd.kernels.lif import lif, lif_pool

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESETS = ("zero", "subtract")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NEURON = {"decay": 0.95, "gain": 1.7, "threshold": 0.83}
EXACT = {"decay": 0.5, "gain": 1.0, "threshold": 1.0}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def quarters(*shape, dtype):
    """Return currents whose membranes under EXACT are not rounded, so that many meet the threshold itself."""
    return (4 * randn(*shape, seed=3)).round().div(4).to(dtype)


@pairs(reset=RESETS, dtype=DTYPES, shape=[(1, 257), (3, 255), (8, 2, 7, 37), (4, 0, 3)])
def test_spikes_are_those_of_the_reference(reset, dtype, shape):
    current = randn(*shape, dtype=dtype)
    few = current.flatten(1)[:, :3]  # of less memory than a block that reads without its mask
    for each, neuron in ((quarters(*shape, dtype=dtype), EXACT), (few, NEURON), (current, NEURON)):
        want = lif(each, **neuron, reset=reset, implementation="reference")
        spikes = lif(each, **neuron, reset=reset, implementation="triton")
        assert spikes.dtype == dtype
        assert torch.equal(spikes, want)
    if current.numel():
        assert want.any()
        assert not want.all()


@pairs(reset=RESETS, dtype=DTYPES, shape=[(1, 2, 70, 4, 4), (3, 2, 5, 7, 9), (2, 1, 70, 6, 8)])
def test_pooled_spikes_are_those_of_the_reference(reset, dtype, shape):
    current = randn(*shape, dtype=dtype, seed=1)
    for each, neuron in ((quarters(*shape, dtype=dtype), EXACT), (current[:, :1], NEURON), (current, NEURON)):
        want = lif_pool(each, **neuron, reset=reset, implementation="reference")
        for layout in (each, channels_last(each)):
            assert torch.equal(lif_pool(layout, **neuron, reset=reset, implementation="triton"), want)
    counts = lif_pool(current, **NEURON, reset=reset, output="counts", implementation="triton")
    assert counts.dtype == torch.uint8
    assert torch.equal(counts, (4 * want).to(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 5, 7, 9), (2, 1, 70, 6, 8)], ids=str)
def test_a_bias_is_added_in_float32(dtype, shape):
    current, bias = randn(*shape, dtype=dtype, seed=1), randn(shape[2], seed=4)
    for each in (bias, bias.to(dtype), bias.double(), bias.repeat_interleave(2)[::2]):
        want = lif_pool(current, **NEURON, bias=each, implementation="reference")
        for layout in (current, channels_last(current)):
            assert torch.equal(lif_pool(layout, **NEURON, bias=each, implementation="triton"), want)
    counts = lif_pool(current, **NEURON, bias=each, output="counts", implementation="triton")
    assert torch.equal(counts, (4 * want).to(torch.uint8))


def test_a_product_and_a_sum_round_twice():
    x = torch.rand(1000, generator=torch.Generator().manual_seed(2))
    decay = torch.tensor(0.95)
    twice, once = decay * x + x, (decay.double() * x.double() + x.double()).float()
    (neuron, *_) = (twice > once).nonzero().flatten()
    current = x[neuron].to(DEVICE).repeat(2, 1)
    # a fused multiply-add would stay below this threshold
    spikes = lif(current, decay=0.95, threshold=twice[neuron].item(), implementation="triton")
    assert spikes.flatten().tolist() == [0, 1]


def test_the_membrane_of_a_half_current_is_kept_in_float32():
    # 2048 + 1 is 2048 in float16: a half membrane would never reach 2050
    current = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16, device=DEVICE)
    assert lif(current, decay=1.0, threshold=2050.0, implementation="triton").tolist() == [0, 0, 1]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_step_may_stand_for_all(memory_format):
    one = randn(2, 5, 6, 4, dtype=torch.float16).contiguous(memory_format=memory_format)
    for bias in (None, randn(5, seed=4)):
        want = lif_pool(one, **NEURON, bias=bias, time_steps=7, implementation="reference")
        pooled = lif_pool(one, **NEURON, bias=bias, time_steps=7, implementation="triton")
        assert torch.equal(pooled, want)
        assert pooled.flatten(0, 1).is_contiguous(memory_format=memory_format)
    current = one.expand(7, *one.shape)
    want = lif(current, **NEURON, implementation="reference")
    assert torch.equal(lif(current, **NEURON, implementation="triton"), want)
