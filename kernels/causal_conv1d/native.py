"""The short convolution in C on the CPU, with bias and SiLU in one pass over tokens with any strides.

It reads and writes float32, and bfloat16 if all taps fit in one pass; anything else is converted to float32.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.causal_conv1d.ops import Conv, conv_op, pair_op

_TAPS = 4  # TAPS of native.c


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = compiler.fields(
        "*x image token *weight direction channel tap *bias *y",
        "directions images length channels width reverse silu threads",
    )


@conv_op.computes("native")
@pair_op.computes("native")
def _convolved(given: Conv) -> Tensor:
    x, weight, bias, silu, reverse = given
    dtype = compiler.common(x) if weight.shape[-1] <= _TAPS else torch.float32
    rows, taps = compiler.in_dtype(x, dtype), compiler.in_dtype(weight)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    shift = None if bias is None else compiler.dense(bias)
    y = rows.new_empty((*weight.shape[:-2], *x.shape))
    call(rows, taps, shift, y, silu, reverse)()
    return compiler.in_dtype(y, x.dtype)


def call(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, silu: bool = True, reverse: bool = False
) -> compiler.Call:
    """Return the call that writes a contiguous y; the channels of x are contiguous, in the dtype of y."""
    image, token, _ = x.stride()
    strides, directions = (weight.stride(), 2) if weight.dim() == 3 else ((0, *weight.stride()), 1)
    problem = _Problem(
        x.data_ptr(), image, token, weight.data_ptr(), *strides,
        None if bias is None else bias.data_ptr(), y.data_ptr(),
        directions, *x.shape, weight.shape[-1], reverse, silu, compiler.threads(),
    )  # fmt: skip
    return compiler.Call(_library(y.dtype).causal_conv1d, problem, (x, weight, bias, y))


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    flags = *compiler.FUSED, *compiler.number(dtype)
    return compiler.functions(__file__, flags, causal_conv1d=[ctypes.POINTER(_Problem)])
