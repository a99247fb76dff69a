"""The selective scan in C on the CPU: one pass over tokens in any strides, all states in the cache; inference only.

`bidirectional_scan` makes its step sizes where it uses them and adds the directions and the gate as it writes.

State and sums are float32, half-precision inputs are converted at the border, and a float64 u is refused: rounding it
quietly would answer in a precision that was not asked for.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from benchd.kernels import compiler
from benchd.kernels.dispatch import refuse_float64
from benchd.kernels.op import fake, op


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    reverse: bool,
    _form: str,
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of u; Unavailable for float64, a gradient or another device."""
    _check("selective_scan", u, delta, A, B, C, D, z, delta_bias)
    u, delta, A, B, C = (tensor.unsqueeze(0) for tensor in (u, delta, A, B, C))
    D, z, delta_bias = (None if tensor is None else tensor.unsqueeze(0) for tensor in (D, z, delta_bias))
    y: torch.Tensor = torch.ops.benchd.selective_scan.default(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse
    )
    return y.squeeze(0)


def selective_scan_pair(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    _form: str,
) -> torch.Tensor:
    """Return y (2, batch, length, channels) in the dtype of u: [0] forward, [1] in reverse; raises the same."""
    _check("selective_scan_pair", u, delta, A, B, C, D, delta_bias)
    y: torch.Tensor = torch.ops.benchd.selective_scan.default(
        u, delta, A, B, C, D, None, delta_bias, delta_softplus, False
    )
    return y


def delta_projection(low: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return softplus(low W^T + bias), (2, batch, length, channels) in the dtype of low; raises the same."""
    _check("delta_projection", low, weight, bias)
    delta: torch.Tensor = torch.ops.benchd.delta_projection.default(low, weight, bias)
    return delta


def bidirectional_scan(
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
    """Return the gated sum of both scans, (batch, length, channels) in the dtype of u; raises the same."""
    _check("bidirectional_scan", u, low, weight, bias, A, B, C, D, z)
    y: torch.Tensor = torch.ops.benchd.bidirectional_scan.default(u, low, weight, bias, A, B, C, D, z)
    return y


def _check(op: str, first: torch.Tensor, *others: torch.Tensor | None) -> None:
    compiler.require_inference(op, first, *others)
    refuse_float64(op, "native", first)


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


@op("selective_scan", "CPU")
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
) -> torch.Tensor:
    """Return y (G, batch, length, channels) of G = 1 or 2 scans that lead every tensor; the second runs the other way.

    `reverse` is the direction of the first.
    """
    rows = [None if tensor is None else _rows(tensor) for tensor in (u, delta, B, C, z)]
    dense = [None if tensor is None else compiler.dense(tensor) for tensor in (A, D, bias)]
    y = u.new_empty(u.shape, dtype=torch.float32)
    starts = [None if tensor is None else tensor.data_ptr() for tensor in (*dense, y)]
    tokens = [number for tensor in rows for number in _tokens(tensor)]
    sizes = *u.shape, 0, A.shape[-1], softplus, reverse, False, compiler.threads()
    _library().selective_scan(_Problem(*tokens, None, *starts, *sizes))
    return compiler.in_dtype(y, u.dtype)


@fake(_selective_scan)
def _(
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
) -> torch.Tensor:
    return u.new_empty(u.shape)


@op("delta_projection", "CPU")
def _delta_projection(low: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows, weight, bias = _rows(low), compiler.dense(weight), compiler.dense(bias)
    delta = rows.new_empty(*low.shape[:-1], weight.shape[1])
    starts = weight.data_ptr(), None, None, bias.data_ptr(), delta.data_ptr()
    sizes = *delta.shape, low.shape[-1], 0, True, False, False, compiler.threads()
    _library().delta_projection(_Problem(*_ABSENT, *_tokens(rows), *_ABSENT * 3, *starts, *sizes))
    return compiler.in_dtype(delta, low.dtype)


@fake(_delta_projection)
def _(low: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return low.new_empty(*low.shape[:-1], weight.shape[1])


@op("bidirectional_scan", "CPU")
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


@fake(_bidirectional_scan)
def _(
    u: torch.Tensor,
    low: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
) -> torch.Tensor:
    return u.new_empty(z.shape)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32 with its last dimension dense; the others may lie anywhere."""
    tensor = compiler.in_dtype(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tokens(tensor: torch.Tensor | None) -> _Numbers:
    """Return `tokens` of native.c: where a tensor (directions, batch, length, n) starts, and its strides."""
    return _ABSENT if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])


@cache
def _library() -> ctypes.CDLL:
    # ISO C rounds every product of its own; here a fused multiply-add is both faster and nearer to the equation
    library = compiler.load(Path(__file__).with_name("native.c"), ("-ffp-contract=fast",))
    for function in (library.selective_scan, library.delta_projection):
        function.argtypes, function.restype = [ctypes.POINTER(_Problem)], None
    return library
