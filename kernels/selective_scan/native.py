"""The selective scan in C on the CPU: one pass over tokens in any strides, all states in the cache.

`bidirectional_scan` makes its step sizes where it uses them and adds the directions and the gate as it writes.
It reads and writes float32 and bfloat16; anything else is converted to float32 at the border.
"""

import ctypes
from functools import cache, partial

import torch

from benchd.kernels import compiler
from benchd.kernels.op import computes, infer
from benchd.kernels.selective_scan import ops

selective_scan = partial(ops.selective_scan, "native")
selective_scan_pair = partial(ops.selective_scan_pair, "native")
delta_projection = partial(infer, "delta_projection", ops.delta_op, "native")
bidirectional_scan = partial(infer, "bidirectional_scan", ops.bidirectional_op, "native")


class _Problem(ctypes.Structure):
    """`problem` of native.c, its `tokens` and `parameter` spelled out."""

    _fields_ = compiler.fields(
        *(f"*{name} {name}_direction {name}_image {name}_token" for name in ("u", "steps", "B", "C", "z")),
        *(f"*{name} {name}_direction {name}_channel {name}_column" for name in ("weight", "A")),
        "*D *bias *y *sums directions images length channels rank states softplus reverse summed threads",
    )


_Numbers = tuple[int | None, ...]
_ABSENT: _Numbers = (None, 0, 0, 0)
_CHANNELS = 64  # of a task: BLOCKS CHANNELS of native.c


@computes(ops.scan_op, "native")
def _selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    reverse: bool,
    _form: str,
) -> torch.Tensor:
    dtype = compiler.common(*(tensor for tensor in (u, delta, B, C, z) if tensor is not None))
    rows = [None if tensor is None else _rows(tensor, dtype) for tensor in (u, delta, B, C, z)]
    A = compiler.in_dtype(A)
    dense = [None if tensor is None else compiler.dense(tensor) for tensor in (D, bias)]
    y, threads = u.new_empty(u.shape, dtype=dtype), compiler.threads()
    sums = _sums(y, threads)
    starts = [None if tensor is None else tensor.data_ptr() for tensor in (*dense, y, sums)]
    tokens = [number for tensor in rows for number in _tokens(tensor)]
    sizes = *u.shape, 0, A.shape[-1], softplus, reverse, False, threads
    _library(dtype).selective_scan(_Problem(*tokens, *_ABSENT, A.data_ptr(), *A.stride(), *starts, *sizes))
    return compiler.in_dtype(y, u.dtype)


@computes(ops.delta_op, "native")
def _delta_projection(low: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    dtype = compiler.common(low)
    rows, weight, bias = _rows(low, dtype), compiler.in_dtype(weight), compiler.dense(bias)
    delta = rows.new_empty(*low.shape[:-1], weight.shape[1])
    starts = weight.data_ptr(), *weight.stride(), *_ABSENT, None, bias.data_ptr(), delta.data_ptr(), None
    sizes = *delta.shape, low.shape[-1], 0, True, False, False, compiler.threads()
    _library(dtype).delta_projection(_Problem(*_ABSENT, *_tokens(rows), *_ABSENT * 3, *starts, *sizes))
    return compiler.in_dtype(delta, low.dtype)


@computes(ops.bidirectional_op, "native")
def _bidirectional_scan(
    u: torch.Tensor,
    low: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    _form: str,
) -> torch.Tensor:
    wanted, dtype = u.dtype, compiler.common(u, low, B, C, z)
    u, low, B, C, z = _rows(u, dtype), _rows(low, dtype), _rows(B, dtype), _rows(C, dtype), _rows(z, dtype)
    weight, A, D, bias = compiler.in_dtype(weight), compiler.in_dtype(A), compiler.dense(D), compiler.dense(bias)
    y = torch.empty_like(z, memory_format=torch.contiguous_format)
    call(u, low, weight, bias, A, B, C, D, z, y)()
    return compiler.in_dtype(y, wanted)


def call(
    u: torch.Tensor,
    low: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    y: torch.Tensor,
) -> compiler.Call:
    """Return the call of the bidirectional scan that writes y without gaps.

    Last dimensions are dense; u, low, B, C and z are in the dtype of y, the rest float32.
    """
    threads = compiler.threads()
    sums = _sums(y, threads)
    image, token, _ = z.stride()
    tokens = *_tokens(u), *_tokens(low), *_tokens(B), *_tokens(C), z.data_ptr(), 0, image, token
    parameters = weight.data_ptr(), *weight.stride(), A.data_ptr(), *A.stride()
    starts = *parameters, D.data_ptr(), bias.data_ptr(), y.data_ptr()
    sizes = *u.shape, low.shape[-1], A.shape[-1], True, False, True, threads
    problem = _Problem(*tokens, *starts, None if sums is None else sums.data_ptr(), *sizes)
    held = u, low, weight, bias, A, B, C, D, z, y, sums
    return compiler.Call(_library(y.dtype).selective_scan, problem, held)


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in `dtype` with its last dimension dense; the others may lie anywhere."""
    tensor = compiler.in_dtype(tensor, dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _sums(y: torch.Tensor, threads: int) -> torch.Tensor | None:
    """Return memory for unfinished sums, which bfloat16 would round; None if y itself can hold them."""
    if y.dtype == torch.float32:
        return None
    return y.new_empty(threads * y.shape[-2] * _CHANNELS, dtype=torch.float32)


def _tokens(tensor: torch.Tensor | None) -> _Numbers:
    """Return `tokens` of native.c: where a tensor (directions, batch, length, n) starts, and its strides."""
    return _ABSENT if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    problem, flags = [ctypes.POINTER(_Problem)], (*compiler.FUSED, *compiler.number(dtype))
    return compiler.functions(__file__, flags, selective_scan=problem, delta_projection=problem)
