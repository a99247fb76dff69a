"""The sum and its norm in C on the CPU, in one pass over rows that each fit in the cache.

hidden and normed are float32 or, if the weight is too, bfloat16; other half-precision inputs are converted first. The
sum is float32.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.add_rms_norm.ops import Norm, norm_op


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = (*compiler.fields("*hidden *residual *weight *normed *total rows dim threads"), ("eps", ctypes.c_float))


@norm_op.computes("native")
def _normed(given: Norm) -> tuple[Tensor, Tensor]:
    hidden, residual, weight, eps = given
    dtype = compiler.common(hidden, weight)
    added, scale = compiler.dense(hidden, dtype), compiler.dense(weight)
    stream = None if residual is None else compiler.dense(residual)
    normed, total = torch.empty_like(added), torch.empty_like(added, dtype=torch.float32)
    call(added, stream, scale, normed, total, eps)()
    return compiler.in_dtype(normed, weight.dtype), total


def call(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, total: Tensor, eps: float
) -> compiler.Call:
    """Return the call that writes `normed` and `total`; tensors are contiguous, hidden and normed of one dtype."""
    problem = _Problem(
        hidden.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), normed.data_ptr(),
        total.data_ptr(), hidden.numel() // weight.numel(), weight.numel(), compiler.threads(), eps,
    )  # fmt: skip
    tensors = hidden, residual, weight, normed, total
    return compiler.Call(_library(hidden.dtype).add_rms_norm, problem, tensors)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    flags = *compiler.FUSED, *compiler.number(dtype)
    return compiler.functions(__file__, flags, add_rms_norm=[ctypes.POINTER(_Problem)])
