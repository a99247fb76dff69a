"""The equation of `benchd.kernels.exact_conv2d` pixel by pixel in 64-bit integers: the oracle, not meant to be fast."""

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

    def convolve(codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return _sums(functional.pad(codes.to(torch.int64), [padding] * 4), numbers.to(torch.int64), stride)

    return of_sums(x, weight, bias, scale, largest, packed.per_weight, convolve)


def _sums(padded: torch.Tensor, taps: torch.Tensor, stride: int) -> torch.Tensor:
    height, width = ((padded.shape[2 + d] - taps.shape[2 + d]) // stride + 1 for d in range(2))
    rows = []
    for i in range(height):
        row = []
        for j in range(width):
            top, left = i * stride, j * stride
            window = padded[:, :, top : top + taps.shape[2], left : left + taps.shape[3]]
            row.append((window[:, None] * taps).sum((2, 3, 4)))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)
