"""The exact convolution in plain PyTorch: conv2d in float64, whose 53 bits hold every sum of the whole numbers."""

import torch
from torch.nn import functional

from benchd.kernels.exact_conv2d.whole import Digits, codes_of, lowest, number, whole


def exact_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    packed: Digits,
    scale: torch.Tensor,
    largest: int,
    stride: int,
    padding: int,
    least_density: float,
) -> torch.Tensor | None:
    """Return y (N, O, H', W'), None as the public op; nothing is read from `packed`."""
    codes = codes_of(x, scale, largest, least_density)
    if codes is None:
        return None
    numbers, unit = whole(weight)
    sums, low = (functional.conv2d(codes, part, None, stride, padding) for part in (numbers, lowest(numbers)))
    y = number(sums, low, unit * scale)
    return y if bias is None else y + bias[:, None, None]
