"""The equation of `benchd.kernels.spike_conv2d` pixel by pixel: the oracle of the others, not meant to be fast."""

import torch
from torch import Tensor
from torch.nn import functional


def spike_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, packed: Tensor | None
) -> Tensor:
    """Return y (N, O, H', W') in the dtype of x; nothing is read from `packed`."""
    state_dtype = torch.promote_types(x.dtype, torch.float32)
    y = sums(functional.pad(x.to(state_dtype), [padding] * 4), weight.to(state_dtype), stride)
    return (y if bias is None else y + bias.to(state_dtype)[:, None, None]).to(x.dtype)


def sums(padded: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Return the sums of the products of each window of `padded` (N, C, H, W) with `taps` (O, C, kh, kw)."""
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
