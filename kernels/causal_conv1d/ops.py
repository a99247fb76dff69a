"""The short convolution as torch ops; the kernels' ops are for inference, with sums in float32."""

from typing import NamedTuple

from torch import Tensor

from benchd.kernels.op import op


class Conv(NamedTuple):
    """x (batch, length, channels), weight (channels, width), bias (channels,); a first dimension of 2 for a pair."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    silu: bool
    reverse: bool


@op("causal_conv1d", float32=("native", "triton"))
def conv_op(given: Conv) -> Tensor:
    """Allocate y (batch, length, channels)."""
    return given.x.new_empty(given.x.shape)


@op("causal_conv1d_pair", float32=("native", "triton"))
def pair_op(given: Conv) -> Tensor:
    """Allocate y (2, batch, length, channels): [0] looks back, [1] ahead."""
    return given.x.new_empty((2, *given.x.shape))
