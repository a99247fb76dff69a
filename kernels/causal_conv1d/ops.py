"""The short convolution as an op of torch for the kernels in C and in Triton; inference only.

Sums are float32, and a float64 x is refused: rounding it quietly would answer in a precision that was not asked for.
"""

import torch

from benchd.kernels.dispatch import Kernel
from benchd.kernels.op import infer, op


@op("causal_conv1d")
def conv_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, reverse: bool
) -> torch.Tensor:
    """Make y (batch, length, channels), or (2, batch, length, channels) for the weight of a pair.

    weight (channels, width) and bias (channels,) have a first dimension of 2 for a pair.
    """
    return x.new_empty((*weight.shape[:-2], *x.shape))


def causal_conv1d(
    kernel: Kernel,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    reverse: bool,
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of x; Unavailable for float64, a gradient or another device."""
    return infer("causal_conv1d", conv_op, kernel, x, weight, bias, activation == "silu", reverse)


def causal_conv1d_pair(
    kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Return y (2, batch, length, channels) in the dtype of x: [0] looks back, [1] ahead; raises the same."""
    return causal_conv1d(kernel, x, weight, bias, activation, False)
