"""The fused parts of a Vim layer as torch ops; the kernels' ops are for inference, with sums in float32."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels.op import op


class InConv(NamedTuple):
    """normed (B, L, dim), weight (2 E, dim), taps (2, E, 4), shift (2, E)."""

    normed: Tensor
    weight: Tensor
    taps: Tensor
    shift: Tensor


class Steps(NamedTuple):
    """u (2, B, L, E), weight (2, E, 2 N + R or more), dt_weight (2, E, R), dt_bias (2, E); N = states."""

    u: Tensor
    weight: Tensor
    dt_weight: Tensor
    dt_bias: Tensor
    states: int


class OutNorm(NamedTuple):
    """y (2, B, L, E), z (B, L, E), weight (dim, E), residual (B, L, dim), norm (dim,)."""

    y: Tensor
    z: Tensor
    weight: Tensor
    residual: Tensor
    norm: Tensor
    eps: float


@op("vim_in_conv")
def in_conv_op(given: InConv) -> tuple[Tensor, Tensor]:
    """Allocate u (2, B, L, E) and z (B, L, E)."""
    rows, inner = given.normed.shape[:-1], given.weight.shape[0] // 2
    return given.normed.new_empty((2, *rows, inner)), given.normed.new_empty((*rows, inner))


@op("vim_steps")
def steps_op(given: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate delta (2, B, L, E), B and C (2, B, L, N)."""
    u, shape = given.u, (*given.u.shape[:-1], given.states)
    return u.new_empty(u.shape), u.new_empty(shape, dtype=torch.float32), u.new_empty(shape, dtype=torch.float32)


@op("vim_out_norm")
def out_norm_op(given: OutNorm) -> tuple[Tensor, Tensor]:
    """Allocate normed and residual', both (B, L, dim)."""
    shape = given.residual.shape
    return given.norm.new_empty(shape), given.residual.new_empty(shape, dtype=torch.float32)
