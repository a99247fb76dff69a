"""The selective scan in C on the CPU: one pass over tokens in any strides, all states in the cache; inference only.

State and sums are float32, half-precision inputs are converted at the border, and a float64 u is refused: rounding it
quietly would answer in a precision that was not asked for.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from benchd.kernels import compiler
from benchd.kernels.dispatch import Unavailable


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
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of u; Unavailable for float64, a gradient or another device."""
    _check(u, delta, A, B, C, D, z, delta_bias)
    u, delta, A, B, C = (tensor.unsqueeze(0) for tensor in (u, delta, A, B, C))
    D, z, delta_bias = (None if tensor is None else tensor.unsqueeze(0) for tensor in (D, z, delta_bias))
    y: torch.Tensor = _op(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse)
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
) -> torch.Tensor:
    """Return y (2, batch, length, channels) in the dtype of u: [0] forward, [1] in reverse; raises the same."""
    _check(u, delta, A, B, C, D, delta_bias)
    y: torch.Tensor = _op(u, delta, A, B, C, D, None, delta_bias, delta_softplus, False)
    return y


def _check(u: torch.Tensor, *others: torch.Tensor | None) -> None:
    compiler.require_inference("selective_scan", u, *others)
    if u.dtype == torch.float64:
        raise Unavailable(
            "selective_scan: the native kernel computes in float32; use implementation='torch' for float64"
        )


class _Tokens(ctypes.Structure):
    """`tokens` of native.c: where a tensor (directions, batch, length, n) starts, and its strides in elements."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("direction", ctypes.c_int64),
        ("image", ctypes.c_int64),
        ("token", ctypes.c_int64),
    )


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = (
        *((name, _Tokens) for name in ("u", "delta", "B", "C", "z")),
        *((name, ctypes.c_void_p) for name in ("A", "D", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("directions", "images", "length", "channels", "states")),
        *((name, ctypes.c_int64) for name in ("softplus", "reverse", "threads")),
    )


@torch.library.custom_op("benchd::selective_scan", mutates_args=(), device_types="cpu")
def _op(
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
    dense = [None if tensor is None else tensor.float().contiguous() for tensor in (A, D, bias)]
    y = u.new_empty(u.shape, dtype=torch.float32)
    problem = _Problem(
        *(_Tokens() if tensor is None else _Tokens(tensor.data_ptr(), *tensor.stride()[:3]) for tensor in rows),
        *(None if tensor is None else tensor.data_ptr() for tensor in (*dense, y)),
        *(*u.shape, A.shape[-1], softplus, reverse, compiler.threads()),
    )
    _library().selective_scan(problem)
    return y.to(u.dtype)


@_op.register_fake
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


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32 with its last dimension dense; the others may lie anywhere."""
    tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@cache
def _library() -> ctypes.CDLL:
    # ISO C rounds every product of its own; here a fused multiply-add is both faster and nearer to the equation
    library = compiler.load(Path(__file__).with_name("native.c"), ("-ffp-contract=fast",))
    library.selective_scan.argtypes, library.selective_scan.restype = [ctypes.POINTER(_Problem)], None
    return library
