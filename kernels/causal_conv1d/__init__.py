"""The short depthwise convolution over tokens that precedes a selective scan.

    y[t,d] = act(bias[d] + sum over k < W of weight[d,k] x[t-W+1+k,d])      x is 0 before the first token

Tokens are t < length, channels d, taps k < W = width; the last tap meets the token itself. act is silu, or nothing for
None. `reverse` looks ahead instead: x[t+W-1-k,d], 0 after the last token. Sums are in float32, in float64 for a float64
x, and y is in the dtype of x.
"""

from typing import Literal

import torch

from benchd.kernels.causal_conv1d import native, reference, torch_impl
from benchd.kernels.dispatch import Implementations

__all__ = ["causal_conv1d"]

_implementation = Implementations(__name__, reference=reference, torch=torch_impl, native=native)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    reverse: bool = False,
    *,
    implementation: str = "auto",
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of x.

    x (batch, length, channels); weight (channels, width); bias (channels,). "reference" and "torch" are differentiable
    in every tensor. Raises TypeError for a tensor that is not floating point, ValueError for a wrong shape, a second
    device, an unknown activation or implementation, and dispatch.Unavailable where the implementation cannot run here:
    "native" neither learns nor computes in float64.
    """
    _check(x, weight, bias, activation)
    run = _implementation(implementation, x.device).causal_conv1d
    y: torch.Tensor = run(x, weight, bias, activation, reverse)
    return y


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
    tensors = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"causal_conv1d: {name} must be floating point, not {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"causal_conv1d: {name} must be on {x.device} as x is, not on {tensor.device}")
    if x.dim() != 3:
        raise ValueError(f"causal_conv1d: x must be (batch, length, channels), not {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1] or weight.shape[1] == 0:
        raise ValueError(f"causal_conv1d: weight must be ({x.shape[-1]}, width), not {tuple(weight.shape)}")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"causal_conv1d: bias must be ({x.shape[-1]},), not {tuple(bias.shape)}")
    if activation not in {"silu", None}:
        raise ValueError(f"causal_conv1d: activation must be 'silu' or None, not {activation!r}")
