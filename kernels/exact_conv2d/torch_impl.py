"""The exact convolution in plain PyTorch: conv2d in float64, whose 53 bits hold every sum of the whole numbers."""

from functools import partial

import torch
from torch.nn import functional

from benchd.kernels.exact_conv2d.whole import Digits, of_sums


def exact_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    packed: Digits,
    scale: torch.Tensor,
    largest: int,
    stride: int,
    padding: int,
) -> torch.Tensor | None:
    """Return y (N, O, H', W'), None as the public op; only the digits per weight are read from `packed`."""
    convolve = partial(functional.conv2d, stride=stride, padding=padding)
    return of_sums(x, weight, bias, scale, largest, packed.per_weight, convolve)
