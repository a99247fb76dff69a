"""The convolution of first spikes with its neurons against the two kernels one after the other."""

import pytest
import torch

from benchd.kernels.lif.native import lif_pool_periods
from benchd.kernels.spike_conv2d import native, pack, periods

# steps, images, channels, height, width, out channels, window, padding
SHAPES = [
    (8, 3, 64, 16, 16, 128, 3, 1),
    (5, 2, 8, 7, 9, 64, 3, 1),
    (1, 1, 20, 2, 2, 128, 1, 0),
    (13, 4, 3, 10, 6, 192, 5, 2),
    (64, 1, 16, 4, 6, 64, 3, 1),
    (3, 2, 5, 3, 3, 64, 3, 0),  # pictures of one pixel, which have no window of neurons
    (4, 0, 5, 6, 6, 64, 3, 1),
]
NEURONS = {"decay": 0.9, "threshold": 0.5, "gain": 0.8}


def problem(steps, images, channels, height, width, out_channels, window, padding, density=0.15):
    """Return first spikes (T, B, C, H, W), a weight and a bias."""
    generator = torch.Generator().manual_seed(steps + images)
    shape = (steps, images, channels, height, width)
    first = torch.randint(1, 5, shape, generator=generator) / 4 * (torch.rand(shape, generator=generator) < density)
    weight = torch.randn(out_channels, channels, window, window, generator=generator)
    return first, weight / weight[0].numel() ** 0.5, torch.randn(out_channels, generator=generator)


def one_after_the_other(first, weight, bias, padding):
    current = native.convolved(first.flatten(0, 1), weight.shape, None, 1, padding, pack(weight))
    return lif_pool_periods(current.unflatten(0, first.shape[:2]), bias, **NEURONS)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_spikes_are_those_of_the_two_kernels(shape, layout):
    first, weight, bias = problem(*shape)
    padding = shape[-1]
    want = one_after_the_other(first, weight, bias, padding)
    laid_out = first.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, first.shape[:2])
    spikes = periods.convolved(laid_out, pack(weight), bias, list(weight.shape), padding, **NEURONS)
    assert spikes.shape == want.shape
    assert torch.equal(spikes, want)
    assert want.numel() == 0 or 0 < want.mean() < 1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_images_go_in_groups_on_any_number_of_threads(threads, monkeypatch):
    first, weight, bias = problem(4, 7, 8, 7, 6, 128, 3, 1)
    want = one_after_the_other(first, weight, bias, 1)
    monkeypatch.setattr(native, "PLACES", 3 * 4 * 8 * 7 * 6)  # three images of seven at a time
    monkeypatch.setattr(periods.compiler, "threads", lambda: threads)
    assert torch.equal(periods.convolved(first, pack(weight), bias, list(weight.shape), 1, **NEURONS), want)


def test_the_op_keeps_the_rules_of_custom_ops():
    first, weight, bias = problem(3, 2, 4, 5, 6, 64, 3, 1)
    arguments = (first, pack(weight), bias, list(weight.shape), 1, 0.9, 1.0, 0.5)
    torch.library.opcheck(torch.ops.benchd.spike_conv2d_periods.default, arguments)


def test_what_does_not_fit_is_refused():
    first, weight, bias = problem(3, 2, 4, 5, 6, 64, 3, 1)
    for shape, packed in (([64, 5, 3, 3], weight), ([32, 4, 3, 3], weight[:32]), ([64, 4, 3, 3], weight[:48])):
        with pytest.raises(ValueError, match=r"does not fit x \(3, 2, 4, 5, 6\)"):
            periods.convolved(first, pack(packed), bias, shape, 1, **NEURONS)
