"""The equation of `benchd.kernels.exact_conv2d` pixel by pixel in 64-bit integers: the oracle, not meant to be fast."""

import torch
from torch.nn import functional

from benchd.kernels.exact_conv2d.whole import Digits, of_sums
from benchd.kernels.spike_conv2d.reference import sums


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

    def convolve(codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return sums(functional.pad(codes.to(torch.int64), [padding] * 4), numbers.to(torch.int64), stride)

    return of_sums(x, weight, bias, scale, largest, packed.per_weight, convolve)
