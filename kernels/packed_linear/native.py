"""The product in C on the CPU, in float32, or in bfloat16 with float32 sums."""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.op import op

_WIDEST = 16  # WIDEST of native.c


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = compiler.fields("*x x_group x_row *packed *y y_group y_row groups rows inner outer threads")


class Linear(NamedTuple):
    """x (..., inner); packed (groups, ...) shares its first axis with x if it has more than one group."""

    x: Tensor
    packed: Tensor
    outer: int


@op("packed_linear")
def linear_op(given: Linear) -> Tensor:
    """Allocate y (..., outer)."""
    return given.x.new_empty((*given.x.shape[:-1], given.outer))


@linear_op.computes("native")
def _multiplied(given: Linear) -> Tensor:
    x, packed, outer = given
    y = x.new_empty((*x.shape[:-1], outer))
    if y.numel():
        call(x.contiguous(), packed, y)()
    return y


def call(x: Tensor, packed: Tensor, y: Tensor) -> compiler.Call:
    """Return the call that writes y (..., outer) for x (..., inner), both contiguous and in the dtype of `packed`."""
    groups, inner, outer = len(packed), x.shape[-1], y.shape[-1]
    rows = x.numel() // (groups * inner)
    problem = _Problem(
        x.data_ptr(), rows * inner, inner, packed.data_ptr(), y.data_ptr(), rows * outer, outer,
        groups, rows, inner, outer, compiler.threads(),
    )  # fmt: skip
    return compiler.Call(_library(packed.dtype).packed_linear, problem, (x, packed, y))


def pack(weight: Tensor) -> Tensor:
    """Return weight (groups, outer, inner), float32 or bfloat16, as the kernel reads it: (groups, numbers)."""
    groups, outer, inner = weight.shape
    dense, packed = weight.contiguous(), weight.new_empty(groups, inner * (outer + -outer % _WIDEST))
    _library(weight.dtype).pack(dense.data_ptr(), packed.data_ptr(), groups, outer, inner)
    return packed


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    flags = *compiler.FUSED, *compiler.number(dtype)
    pack_types = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
    return compiler.functions(__file__, flags, packed_linear=[ctypes.POINTER(_Problem)], pack=pack_types)
