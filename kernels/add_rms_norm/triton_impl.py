"""The sum and its norm on a GPU: each program keeps one row in registers, so that nothing is read twice.

A thread can move four neighbours at once, on every architecture; with more rows or more numbers per thread, values
would be exchanged through shared memory.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from benchd.kernels import launch
from benchd.kernels.add_rms_norm.ops import Norm, norm_op
from benchd.kernels.dispatch import Unavailable

_MAX_DIM = 2**13  # 16 numbers per thread; more would leave less than half of the warps
_FP_FUSION = True  # one rounding fewer per square; bitwise results are not guaranteed


@norm_op.computes("triton")
def _normed(given: Norm) -> tuple[Tensor, Tensor]:
    hidden, residual, weight, eps = given
    if weight.numel() > _MAX_DIM:
        raise Unavailable(f"add_rms_norm: the Triton kernel takes at most {_MAX_DIM} per row, not {weight.numel()}")
    normed = hidden.new_empty(hidden.shape, dtype=weight.dtype)
    total = hidden.new_empty(hidden.shape, dtype=torch.float32)
    dim = weight.numel()
    block, warps = _tile(dim)
    added, scale = hidden.contiguous(), weight.contiguous()
    stream = added if residual is None else residual.contiguous()
    if hidden.numel():
        launch.run(
            _kernel, (hidden.numel() // dim,),
            (added, stream, scale, normed, total), (dim, eps), RESIDUAL=residual is not None, BLOCK=block,
            num_warps=warps, enable_fp_fusion=_FP_FUSION,
        )  # fmt: skip
    return normed, total


def _tile(dim: int) -> tuple[int, int]:
    """Return how many numbers, at least dim, and how many warps a program has: four per thread if 16 warps suffice."""
    block = triton.next_power_of_2(dim)
    return block, min(max(block // 128, 1), 16)


@triton.jit
def _kernel(hidden, residual, weight, normed, total, dim, eps, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    # all except weight (dim,) are (rows, dim), contiguous; one program per row
    column = tl.arange(0, BLOCK)
    inside = column < dim
    at = tl.program_id(0).to(tl.int64) * dim + column
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    tl.store(total + at, x, mask=inside)
    tl.store(normed + at, (x * inverse * scale).to(normed.dtype.element_ty), mask=inside)
