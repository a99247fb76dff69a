"""The selective scan in C on the CPU: one pass over tokens in any strides, all states in the cache.

`bidirectional_scan` makes its step sizes where it uses them and adds the directions and the gate as it writes.
Half-precision inputs are converted at the border.
"""

import ctypes
from functools import cache, partial

import torch

from benchd.kernels import compiler
from benchd.kernels.op import computes
from benchd.kernels.selective_scan import ops

selective_scan = partial(ops.selective_scan, "native")
selective_scan_pair = partial(ops.selective_scan_pair, "native")
delta_projection = partial(ops.delta_projection, "native")
bidirectional_scan = partial(ops.bidirectional_scan, "native")


class _Problem(ctypes.Structure):
    """`problem` of native.c, its `tokens` spelled out."""

    _fields_ = (
        *(
            (f"{name}{field}", kind)
            for name in ("u", "steps", "B", "C", "z")
            for field, kind in (
                ("", ctypes.c_void_p),
                ("_direction", ctypes.c_int64),
                ("_image", ctypes.c_int64),
                ("_token", ctypes.c_int64),
            )
        ),
        *((name, ctypes.c_void_p) for name in ("weight", "A", "D", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("directions", "images", "length", "channels", "rank", "states")),
        *((name, ctypes.c_int64) for name in ("softplus", "reverse", "summed", "threads")),
    )


_Numbers = tuple[int | None, ...]
_ABSENT: _Numbers = (None, 0, 0, 0)


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
    rows = [None if tensor is None else _rows(tensor) for tensor in (u, delta, B, C, z)]
    dense = [None if tensor is None else compiler.dense(tensor) for tensor in (A, D, bias)]
    y = u.new_empty(u.shape, dtype=torch.float32)
    starts = [None if tensor is None else tensor.data_ptr() for tensor in (*dense, y)]
    tokens = [number for tensor in rows for number in _tokens(tensor)]
    sizes = *u.shape, 0, A.shape[-1], softplus, reverse, False, compiler.threads()
    _library().selective_scan(_Problem(*tokens, None, *starts, *sizes))
    return compiler.in_dtype(y, u.dtype)


@computes(ops.delta_op, "native")
def _delta_projection(low: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows, weight, bias = _rows(low), compiler.dense(weight), compiler.dense(bias)
    delta = rows.new_empty(*low.shape[:-1], weight.shape[1])
    starts = weight.data_ptr(), None, None, bias.data_ptr(), delta.data_ptr()
    sizes = *delta.shape, low.shape[-1], 0, True, False, False, compiler.threads()
    _library().delta_projection(_Problem(*_ABSENT, *_tokens(rows), *_ABSENT * 3, *starts, *sizes))
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
    dtype = u.dtype
    u, low, B, C, z = _rows(u), _rows(low), _rows(B), _rows(C), _rows(z)
    weight, A, D, bias = compiler.dense(weight), compiler.dense(A), compiler.dense(D), compiler.dense(bias)
    y = torch.empty_like(z, memory_format=torch.contiguous_format)
    image, token, _ = z.stride()
    tokens = *_tokens(u), *_tokens(low), *_tokens(B), *_tokens(C), z.data_ptr(), 0, image, token
    starts = weight.data_ptr(), A.data_ptr(), D.data_ptr(), bias.data_ptr(), y.data_ptr()
    sizes = *u.shape, low.shape[-1], A.shape[-1], True, False, True, compiler.threads()
    _library().selective_scan(_Problem(*tokens, *starts, *sizes))
    return compiler.in_dtype(y, dtype)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32 with its last dimension dense; the others may lie anywhere."""
    tensor = compiler.in_dtype(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tokens(tensor: torch.Tensor | None) -> _Numbers:
    """Return `tokens` of native.c: where a tensor (directions, batch, length, n) starts, and its strides."""
    return _ABSENT if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])


@cache
def _library() -> ctypes.CDLL:
    problem = [ctypes.POINTER(_Problem)]
    return compiler.functions(__file__, compiler.FUSED, selective_scan=problem, delta_projection=problem)
