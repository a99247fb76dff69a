"""The short depthwise convolution over tokens that precedes a selective scan.

    y[t,d] = act(bias[d] + sum over k < W of weight[d,k] x[t-W+1+k,d])      x is 0 before the first token

Tokens are t < length, channels d, taps k < W = width; the last tap applies to the token itself. act is silu, or the
identity for None. `reverse` looks ahead instead: x[t+W-1-k,d], 0 after the last token. Sums are in float32, or float64
for a float64 x, and y is in the dtype of x. `causal_conv1d_pair` reads x once for both, with separate weights.
"""

from typing import Literal

from torch import Tensor

from benchd.kernels.causal_conv1d.ops import Conv, conv_op, pair_op
from benchd.kernels.dispatch import load_all, require_floats

__all__ = ["causal_conv1d", "causal_conv1d_pair"]

load_all(__name__)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    reverse: bool = False,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Return y (batch, length, channels) in the dtype of x.

    x (batch, length, channels); weight (channels, width); bias (channels,). "torch" is differentiable in every tensor.
    Raises TypeError for a tensor that is not floating point, ValueError for a wrong shape, a second device, an unknown
    activation or implementation, and dispatch.Unavailable if the implementation cannot run here: "native" and "triton"
    support neither gradients nor float64.
    """
    name, given = "causal_conv1d", Conv(x, weight, bias, _is_silu("causal_conv1d", activation), reverse)
    return conv_op(name, implementation, given, lambda: _check(name, (), x, weight, bias))


def causal_conv1d_pair(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    *,
    implementation: str = "auto",
) -> Tensor:
    """Return y for both directions, (2, batch, length, channels) in the dtype of x: [0] looks back and [1] ahead.

    x (batch, length, channels); weight (2, channels, width); bias (2, channels). Gradients and errors are those of
    `causal_conv1d`.
    """
    name, given = "causal_conv1d_pair", Conv(x, weight, bias, _is_silu("causal_conv1d_pair", activation), False)
    return pair_op(name, implementation, given, lambda: _check(name, (2,), x, weight, bias))


def _is_silu(op: str, activation: str | None) -> bool:
    if activation not in {"silu", None}:
        raise ValueError(f"{op}: activation must be 'silu' or None, not {activation!r}")
    return activation == "silu"


def _check(op: str, lead: tuple[int, ...], x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless weight and bias, with leading dimensions `lead`, fit x (batch, length, channels)."""
    require_floats(op, x=x, weight=weight, bias=bias)
    if x.dim() != 3:
        raise ValueError(f"{op}: x must be (batch, length, channels), not {tuple(x.shape)}")
    *channels, width = weight.shape or (0,)
    expected = (*lead, x.shape[2])
    if tuple(channels) != expected or width == 0:
        raise ValueError(f"{op}: weight must be {_text(*expected, 'width')}, not {tuple(weight.shape)}")
    if bias is not None and bias.shape != expected:
        raise ValueError(f"{op}: bias must be {expected}, not {tuple(bias.shape)}")


def _text(*sizes: int | str) -> str:
    return f"({', '.join(map(str, sizes))})"
