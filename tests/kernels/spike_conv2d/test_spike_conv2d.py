"""The convolution of spikes against its equation, and the rules for what each implementation takes."""

import copy

import pytest
import torch
from torch.nn import functional

from benchd.kernels.dispatch import Unavailable
from benchd.kernels.spike_conv2d import PackedWeight, native, pack, skips_zeros_in, spike_conv2d

# images, channels, height, width, out channels, window height, window width, stride, padding
SHAPES = [
    (2, 3, 5, 7, 5, 3, 3, 1, 1),
    (3, 17, 6, 5, 64, 3, 3, 1, 0),
    (2, 5, 9, 8, 65, 3, 3, 2, 1),
    (8, 70, 1, 1, 130, 3, 3, 1, 1),
    (5, 16, 2, 2, 48, 3, 3, 2, 1),
    (4, 12, 4, 4, 33, 1, 1, 2, 0),
    (1, 4, 13, 11, 20, 7, 7, 3, 3),
    (2, 6, 4, 9, 100, 4, 2, 2, 2),
    (2, 8, 12, 12, 16, 1, 1, 1, 3),
    (300, 33, 1, 1, 200, 1, 1, 1, 0),  # a linear layer
    (1, 1, 1, 1, 1, 1, 1, 1, 0),
]


def spikes(*shape, density=0.2, generator=None):
    """Return values of which `density` are not zero, of both signs."""
    generator = generator or torch.Generator().manual_seed(len(shape))
    values = torch.randn(shape, generator=generator)
    return values * (torch.rand(shape, generator=generator) < density)


def problem(shape, density=0.2):
    images, channels, height, width, out_channels, window_height, window_width, stride, padding = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = spikes(images, channels, height, width, density=density, generator=generator)
    weight = torch.randn(out_channels, channels, window_height, window_width, generator=generator)
    bias = torch.randn(out_channels, generator=generator)
    return (x, weight, bias), {"stride": stride, "padding": padding}


def error(y, want):
    """Return the largest error as a share of the largest output."""
    return ((y.double() - want).abs().max() / want.abs().max()).item()


def in_double(arguments, sizes):
    return functional.conv2d(*[tensor.double() for tensor in arguments], **sizes)


@pytest.mark.parametrize("density", [0.02, 0.2, 1.0])
def test_the_sums_are_those_of_conv2d(density):
    for shape in SHAPES:
        (x, weight, bias), sizes = problem(shape, density)
        want = in_double((x, weight, bias), sizes)
        assert error(spike_conv2d(x, weight, bias, **sizes), want) < 2e-6
        assert error(spike_conv2d(x, weight, bias, **sizes, implementation="torch"), want) < 2e-6
        y = spike_conv2d(x, weight, **sizes, packed=pack(weight)).double()
        torch.testing.assert_close(y, in_double((x, weight), sizes), rtol=2e-6, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_images_in_groups_and_tiles_on_any_number_of_threads(threads, monkeypatch):
    monkeypatch.setattr(native, "PLACES", 3 * 8 * 7 * 6)  # three images of seven at a time
    monkeypatch.setattr(native.compiler, "threads", lambda: threads)
    (x, weight, bias), sizes = problem((7, 8, 7, 6, 150, 3, 3, 1, 1))
    assert error(spike_conv2d(x, weight, bias, **sizes), in_double((x, weight, bias), sizes)) < 2e-6


def test_any_layout_in_and_channels_last_out():
    (x, weight, bias), sizes = problem((3, 6, 7, 8, 20, 3, 3, 1, 1))
    want = spike_conv2d(x, weight, bias, **sizes)
    assert want.is_contiguous(memory_format=torch.channels_last)
    wide = torch.full((3, 9, 7, 16), torch.nan)
    wide[:, 1:7, :, ::2] = x
    inputs = (x.contiguous(memory_format=torch.channels_last), wide[:, 1:7, :, ::2], x.mT.contiguous().mT)
    for same in inputs:
        assert torch.equal(spike_conv2d(same, weight, bias, **sizes), want)
    last = weight.contiguous(memory_format=torch.channels_last)
    assert torch.equal(spike_conv2d(x, last, bias.repeat_interleave(2)[::2], **sizes), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_converted_at_the_border(dtype):
    (x, weight, bias), sizes = problem((3, 6, 7, 8, 20, 3, 3, 1, 1))
    half = [tensor.to(dtype) for tensor in (x, weight, bias)]
    y = spike_conv2d(*half, **sizes)
    assert y.dtype == dtype
    assert torch.equal(y, spike_conv2d(*[tensor.float() for tensor in half], **sizes).to(dtype))
    assert torch.equal(spike_conv2d(x, weight, half[2], **sizes), spike_conv2d(x, weight, half[2].float(), **sizes))


def test_spikes_on_a_grid_are_summed_exactly():
    x, weight = spikes(4, 32, 6, 6).sign() / 4, torch.randint(-64, 64, (40, 32, 3, 3)) / 8
    assert torch.equal(spike_conv2d(x, weight, padding=1), functional.conv2d(x, weight, padding=1))


def test_tiny_values_nan_and_infinity_are_not_zero():
    weight = torch.ones(3, 1, 3, 3)
    for value in (1e-42, -torch.inf, torch.nan):
        x = torch.zeros(1, 1, 5, 5)
        x[0, 0, 0, 0] = value
        y = spike_conv2d(x, weight, padding=1)
        torch.testing.assert_close(y, functional.conv2d(x, weight, padding=1), rtol=0, atol=0, equal_nan=True)
        assert (y != 0).sum() == 3 * 4


def test_zeros_give_the_bias_even_of_infinite_weights():
    bias = torch.randn(70)
    y = spike_conv2d(torch.zeros(2, 4, 3, 3), torch.full((70, 4, 3, 3), torch.inf), bias, padding=1)
    assert torch.equal(y, bias[:, None, None].expand(2, 70, 3, 3))
    assert not spike_conv2d(-torch.zeros(2, 4, 3, 3), torch.ones(70, 4, 3, 3)).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_only_the_plain_implementations_run():
    (x, weight, bias), sizes = problem((2, 3, 5, 4, 18, 3, 3, 2, 1))
    on_gpu = [tensor.cuda() for tensor in (x, weight, bias)]
    with pytest.raises(Unavailable, match="on a GPU use implementation='torch'"):
        spike_conv2d(*on_gpu, **sizes)
    y = spike_conv2d(*on_gpu, **sizes, implementation="torch")
    assert error(y.cpu(), in_double((x, weight, bias), sizes)) < 1e-3


@torch.no_grad()
def test_a_kept_packing_follows_its_weight():
    packed, weight = PackedWeight(pack), torch.nn.Parameter(torch.randn(5, 3, 2, 2))
    first = packed(weight)
    assert torch.equal(first, pack(weight))
    assert packed(weight) is first
    weight.mul_(2)
    assert torch.equal(packed(weight), pack(weight))
    weight.data = torch.randn(5, 3, 2, 2)
    assert torch.equal(packed(weight), pack(weight))
    weight.data = weight.data.half()
    weight.data = weight.data.float()
    assert torch.equal(packed(weight), pack(weight))
    other = torch.randn(5, 3, 2, 2)
    assert torch.equal(packed(other), pack(other))
    assert torch.equal(copy.deepcopy(packed)(weight), pack(weight))
    pictures = torch.randn(5, 12)
    assert torch.equal(PackedWeight(pack, (5, 3, 2, 2))(pictures), pack(pictures.view(5, 3, 2, 2)))


def test_a_packing_made_in_inference_mode_outlives_it():
    weight = torch.nn.Parameter(torch.randn(5, 3, 1, 1))
    packed = PackedWeight(pack)
    with torch.inference_mode():
        assert not packed(weight).is_inference()
        assert packed(torch.randn(2, 3)).shape == (16 * 3,)


def test_zeros_are_skipped_in_float32_and_half_precision_in_inference_on_a_cpu_only():
    x = torch.zeros(1)
    assert not skips_zeros_in(x)
    with torch.no_grad():
        assert skips_zeros_in(x)
        assert skips_zeros_in(x.half())
        assert not skips_zeros_in(x.double())
        assert not skips_zeros_in(x.to("meta"))
        with torch.autocast("cpu", torch.bfloat16):
            assert not skips_zeros_in(x)
