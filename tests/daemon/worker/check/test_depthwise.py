"""Depthwise convolutions of the reference: torch's own sums, and its own convolution wherever they are not meant."""

import pytest
import torch
from torch import nn

from benchd.daemon.worker.check.depthwise import Depthwise
from benchd.daemon.worker.check.rounding import Rounding

SHAPES = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 5, "stride": 2, "padding": 2},
    {"kernel_size": (3, 1), "stride": (2, 1), "padding": (1, 0), "dilation": (2, 1), "bias": False},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 4, "dilation": 3, "padding": 7},
]


def images(dtype=torch.float64, channels=6):
    return torch.randn(2, channels, 17, 12, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sums_are_torchs(shape):
    torch.manual_seed(0)
    net = nn.Conv2d(6, 6, groups=6, **shape).double()
    with torch.inference_mode():
        expected = net(images())
        with Depthwise():
            answer = net(images())
    assert answer.shape == expected.shape
    torch.testing.assert_close(answer, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.float64), (3, torch.float64), (6, torch.float32)])
def test_other_convolutions_are_torchs_own(groups, dtype):
    net = nn.Conv2d(6, 6, 3, groups=groups).to(dtype)
    with torch.inference_mode():
        expected = net(images(dtype))
        with Depthwise():
            assert torch.equal(net(images(dtype)), expected)


def test_a_convolution_is_rounded_once():
    """In bfloat16 each of nine products that were rounded would leave a sum that no single rounding explains."""
    net = nn.Conv2d(6, 6, 3, groups=6, bias=False).double()
    rounding, given = Rounding(8, 2.0**-133, 0, torch.device("cpu")), images()
    with torch.inference_mode():
        exact = net(given)
        with Depthwise(), rounding:
            noisy = net(given)
    assert not torch.equal(noisy, exact)
    assert ((noisy - exact).abs() <= exact.abs() * 2.0**-7).all()
