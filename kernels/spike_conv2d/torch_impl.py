"""The convolution of spikes in plain PyTorch: conv2d, which multiplies the zeros as well."""

import torch
from torch.nn import functional


def spike_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: int,
    packed: torch.Tensor | None,
) -> torch.Tensor:
    """Return y (N, O, H', W') in the dtype of x; nothing is read from `packed`."""
    return functional.conv2d(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), stride, padding)
