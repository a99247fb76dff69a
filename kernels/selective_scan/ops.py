"""The selective scan as ops of torch for the kernels in C and in Triton; inference only.

State and sums are float32, and a float64 u is refused: rounding it quietly would answer in a precision that was not
asked for.
"""

from typing import Any

import torch

from benchd.kernels.dispatch import Kernel
from benchd.kernels.op import infer, op


@op("selective_scan")
def scan_op(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    reverse: bool,
    form: str,
) -> torch.Tensor:
    """Make y (G, batch, length, channels) of G = 1 or 2 scans that lead every tensor; the second runs the other way.

    `reverse` is the direction of the first. Only Triton has more than one `form`.
    """
    return u.new_empty(u.shape)


@op("delta_projection")
def delta_op(low: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Make delta (2, batch, length, channels)."""
    return low.new_empty(*low.shape[:-1], weight.shape[1])


@op("bidirectional_scan")
def bidirectional_op(
    u: torch.Tensor,
    low: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    form: str,
) -> torch.Tensor:
    """Make the gated sum of both directions (batch, length, channels)."""
    return u.new_empty(u.shape[1:])


def selective_scan(
    kernel: Kernel,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    reverse: bool,
    form: str,
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of u; Unavailable for float64, a gradient or another device."""
    given = u, delta, A, B, C, D, z, delta_bias
    tensors: list[Any] = [None if tensor is None else tensor.unsqueeze(0) for tensor in given]
    return infer("selective_scan", scan_op, kernel, *tensors, delta_softplus, reverse, form).squeeze(0)


def selective_scan_pair(
    kernel: Kernel,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    form: str,
) -> torch.Tensor:
    """Return y (2, batch, length, channels) in the dtype of u: [0] forward, [1] in reverse; raises the same."""
    tensors = u, delta, A, B, C, D, None, delta_bias
    return infer("selective_scan_pair", scan_op, kernel, *tensors, delta_softplus, False, form)
