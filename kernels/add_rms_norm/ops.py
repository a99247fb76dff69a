"""The sum and its norm as an op of torch for the kernels in C and in Triton; inference only.

Sums are float32, and a float64 sum is refused: rounding it quietly would answer in a precision that was not asked for.
"""

import torch

from benchd.kernels.dispatch import Kernel, Unavailable, refuse_float64, require_inference
from benchd.kernels.op import op

_MAX_TRITON_DIM = 2**13  # 16 numbers a thread; more leave less than half of the warps


@op("add_rms_norm")
def norm_op(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make normed and residual', both (..., dim)."""
    shape = hidden.shape
    return hidden.new_empty(shape, dtype=weight.dtype), hidden.new_empty(shape, dtype=torch.float32)


def add_rms_norm(
    kernel: Kernel, hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed, residual'), both (..., dim); Unavailable for float64, a gradient, a long row, another device."""
    require_inference("add_rms_norm", kernel, hidden, residual, weight)
    refuse_float64("add_rms_norm", kernel, hidden, residual)
    dim = hidden.shape[-1]
    if kernel == "triton" and dim > _MAX_TRITON_DIM:
        raise Unavailable(f"add_rms_norm: the Triton kernel holds rows of at most {_MAX_TRITON_DIM}, not {dim}")
    return norm_op[kernel](hidden, residual, weight, eps)
