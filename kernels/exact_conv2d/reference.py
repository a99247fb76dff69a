"""The equation of `benchd.kernels.exact_conv2d` pixel by pixel in 64-bit integers: the oracle, not meant to be fast."""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.exact_conv2d.whole import Convolution, of_sums
from benchd.kernels.spike_conv2d.reference import sums


def exact_conv2d(given: Convolution) -> Tensor | None:
    """Return y (N, O, H', W'), None as the public op."""

    def convolve(codes: Tensor, numbers: Tensor) -> Tensor:
        padded = functional.pad(codes.to(torch.int64), [given.padding] * 4)
        return sums(padded, numbers.to(torch.int64), given.stride)

    return of_sums(given, convolve)
