"""The weights of Vision Mamba's layers, and the layers on a CPU as calls of our C kernels.

The calls are prepared once per token shape, each with its memory, which all layers share. A forward pass then skips
dispatching, checking and allocating, which would take a tenth of its time at batch 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

from benchd.kernels.add_rms_norm.native import call as normed_by
from benchd.kernels.causal_conv1d.native import call as convolved_by
from benchd.kernels.packed_linear import PackedLinear
from benchd.kernels.selective_scan.native import call as scanned_by
from benchd.kernels.selective_scan.ops import Bidirectional

EPS = 1e-5
STATES = 16
_Product = Callable[[torch.Tensor], torch.Tensor]


class Weights(NamedTuple):
    """A layer's weights, derived from its parameters; the first axis is the direction, forward first."""

    in_proj: _Product
    conv: torch.Tensor  # (2, E, W)
    conv_bias: torch.Tensor  # (2, E)
    x_proj: _Product  # (2, ..., E) to 2 N + R columns and up to 15 zeros: those of B, of C (halved) and of the low rank
    dt_proj: torch.Tensor  # (2, E, R)
    dt_bias: torch.Tensor  # (2, E)
    A: torch.Tensor  # (2, E, N) = -exp(A_log), at least float32
    D: torch.Tensor  # (2, E), halved
    out_proj: _Product


def split_columns(columns: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return low (..., R), B and C (..., N) from the output of `x_proj`."""
    B, C, low, _ = columns.split_with_sizes([STATES, STATES, rank, -rank % 16], dim=-1)
    return low, B, C


class Layers:
    """Norms and mixers on tokens with the shape and dtype of `tokens` (B, L, dim); not safe for concurrent calls.

    There is one norm (dim,) per layer; the weights are packed, for products in the dtype, float32 or bfloat16.
    """

    def __init__(self, norms: Sequence[torch.Tensor], weights: Sequence[Weights], tokens: torch.Tensor) -> None:
        B, L, dim = tokens.shape
        new, rank = tokens.new_empty, weights[0].dt_proj.shape[-1]
        channels, columns = weights[0].dt_proj.shape[1], 2 * STATES + rank + -rank % 16
        self._hidden, normed, y = new(B, L, dim), new(B, L, dim), new(B, L, channels)
        self._residuals = [new(B, L, dim, dtype=torch.float32) for _ in range(2)]
        uz, u, projected = new(B, L, 2 * channels), new(2, B, L, channels), new(2, B, L, columns)
        from_in, z = uz.chunk(2, dim=-1)
        low, b, c = split_columns(projected, rank)
        self._calls: list[Callable[[], object]] = []
        residual = None
        for norm, its in zip(norms, weights, strict=True):
            total = self._residuals[0]
            self._residuals.reverse()
            self._calls += [
                normed_by(self._hidden, residual, norm.float(), normed, total, EPS),
                cast("PackedLinear", its.in_proj).call(normed, uz),
                convolved_by(from_in, its.conv, its.conv_bias, u),
                cast("PackedLinear", its.x_proj).call(u, projected),
                scanned_by(Bidirectional(u, low, its.dt_proj, its.dt_bias, its.A, b, c, its.D, z, "serial"), y),
                cast("PackedLinear", its.out_proj).call(y, self._hidden),
            ]
            residual = total

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden tokens and residual (B, L, dim) after the layers, valid until the next call."""
        self._hidden.copy_(tokens)
        for call in self._calls:
            call()
        return self._hidden, self._residuals[1]
