"""The selective scan in C on the CPU: one pass over tokens with any strides, all states in the cache.

`bidirectional_scan` computes step sizes where they are used, and adds the directions and the gate when writing. It
reads and writes float32 and bfloat16; anything else is converted to float32 first.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.selective_scan.ops import (
    Bidirectional,
    Projection,
    Scan,
    ScanPair,
    bidirectional_op,
    delta_op,
    directions_of,
    pair_op,
    scan_op,
)


class _Problem(ctypes.Structure):
    """`problem` in native.c, with its `tokens` and `parameter` members written out."""

    _fields_ = compiler.fields(
        *(f"*{name} {name}_direction {name}_image {name}_token" for name in ("u", "steps", "B", "C", "z")),
        *(f"*{name} {name}_direction {name}_channel {name}_column" for name in ("weight", "A")),
        "*D *bias *y *sums directions images length channels rank states softplus reverse summed threads",
    )


_Numbers = tuple[int | None, ...]
_ABSENT: _Numbers = (None, 0, 0, 0)
_CHANNELS = 64  # per task: BLOCKS CHANNELS in native.c


@scan_op.computes("native")
def _scan(given: Scan) -> Tensor:
    return _scanned(given, given.reverse).squeeze(0)


@pair_op.computes("native")
def _pair(given: ScanPair) -> Tensor:
    return _scanned(given, reverse=False)


def _scanned(given: Scan | ScanPair, reverse: bool) -> Tensor:
    """Return y (directions, batch, length, channels); `reverse` applies to the first direction."""
    u, delta, A, B, C, D, z, bias = directions_of(given)
    dtype = compiler.common(*(tensor for tensor in (u, delta, B, C, z) if tensor is not None))
    rows = [None if tensor is None else _rows(tensor, dtype) for tensor in (u, delta, B, C, z)]
    A = compiler.in_dtype(A)
    dense = [None if tensor is None else compiler.dense(tensor) for tensor in (D, bias)]
    y, threads = u.new_empty(u.shape, dtype=dtype), compiler.threads()
    sums = _sums(y, threads)
    starts = [None if tensor is None else tensor.data_ptr() for tensor in (*dense, y, sums)]
    tokens = [number for tensor in rows for number in _tokens(tensor)]
    sizes = *u.shape, 0, A.shape[-1], given.softplus, reverse, False, threads
    _library(dtype).selective_scan(_Problem(*tokens, *_ABSENT, A.data_ptr(), *A.stride(), *starts, *sizes))
    return compiler.in_dtype(y, u.dtype)


@delta_op.computes("native")
def _delta_projection(given: Projection) -> Tensor:
    low, weight, bias = given
    dtype = compiler.common(low)
    rows, weight, bias = _rows(low, dtype), compiler.in_dtype(weight), compiler.dense(bias)
    delta = rows.new_empty(*low.shape[:-1], weight.shape[1])
    starts = weight.data_ptr(), *weight.stride(), *_ABSENT, None, bias.data_ptr(), delta.data_ptr(), None
    sizes = *delta.shape, low.shape[-1], 0, True, False, False, compiler.threads()
    _library(dtype).delta_projection(_Problem(*_ABSENT, *_tokens(rows), *_ABSENT * 3, *starts, *sizes))
    return compiler.in_dtype(delta, low.dtype)


@bidirectional_op.computes("native")
def _bidirectional_scan(given: Bidirectional) -> Tensor:
    u, low, weight, bias, A, B, C, D, z, form = given
    wanted, dtype = u.dtype, compiler.common(u, low, B, C, z)
    u, low, B, C, z = _rows(u, dtype), _rows(low, dtype), _rows(B, dtype), _rows(C, dtype), _rows(z, dtype)
    weight, A, D, bias = compiler.in_dtype(weight), compiler.in_dtype(A), compiler.dense(D), compiler.dense(bias)
    y = torch.empty_like(z, memory_format=torch.contiguous_format)
    call(Bidirectional(u, low, weight, bias, A, B, C, D, z, form), y)()
    return compiler.in_dtype(y, wanted)


def call(given: Bidirectional, y: Tensor) -> compiler.Call:
    """Return the call of the bidirectional scan that writes a contiguous y.

    Last dimensions are contiguous; u, low, B, C and z are in the dtype of y, the rest in float32.
    """
    u, low, weight, bias, A, B, C, D, z, _ = given
    threads = compiler.threads()
    sums = _sums(y, threads)
    image, token, _ = z.stride()
    tokens = *_tokens(u), *_tokens(low), *_tokens(B), *_tokens(C), z.data_ptr(), 0, image, token
    parameters = weight.data_ptr(), *weight.stride(), A.data_ptr(), *A.stride()
    starts = *parameters, D.data_ptr(), bias.data_ptr(), y.data_ptr()
    sizes = *u.shape, low.shape[-1], A.shape[-1], True, False, True, threads
    problem = _Problem(*tokens, *starts, None if sums is None else sums.data_ptr(), *sizes)
    return compiler.Call(_library(y.dtype).selective_scan, problem, (*given, y, sums))


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `dtype` with a contiguous last dimension; other dimensions may have any strides."""
    tensor = compiler.in_dtype(tensor, dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _sums(y: Tensor, threads: int) -> Tensor | None:
    """Return memory for unfinished sums, which bfloat16 would round; None if y itself can store them."""
    if y.dtype == torch.float32:
        return None
    return y.new_empty(threads * y.shape[-2] * _CHANNELS, dtype=torch.float32)


def _tokens(tensor: Tensor | None) -> _Numbers:
    """Return `tokens` in native.c: where a tensor (directions, batch, length, n) starts, and its strides."""
    return _ABSENT if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    problem, flags = [ctypes.POINTER(_Problem)], (*compiler.FUSED, *compiler.number(dtype))
    return compiler.functions(__file__, flags, selective_scan=problem, delta_projection=problem)
