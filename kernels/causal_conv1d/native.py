"""The short convolution in C on the CPU, with bias and SiLU in one pass over tokens in any strides; inference only.

Sums are float32, half-precision inputs are converted at the border, and a float64 x is refused: rounding it quietly
would answer in a precision that was not asked for.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from benchd.kernels import compiler
from benchd.kernels.dispatch import Unavailable


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, reverse: bool
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of x; Unavailable for float64, a gradient or another device."""
    _check(x, weight, bias)
    y: torch.Tensor = _op(x, weight, bias, activation == "silu", reverse)
    return y


def _check(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    compiler.require_inference("causal_conv1d", x, *others)
    if x.dtype == torch.float64:
        raise Unavailable(
            "causal_conv1d: the native kernel computes in float32; use implementation='torch' for float64"
        )


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("image", ctypes.c_int64),
        ("token", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("taps", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("images", "length", "channels", "width", "silu", "reverse", "threads")),
    )


@torch.library.custom_op("benchd::causal_conv1d", mutates_args=(), device_types="cpu")
def _op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, reverse: bool) -> torch.Tensor:
    rows = x.float()
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    taps = weight.float().T.contiguous()
    shift = rows.new_zeros(x.shape[2]) if bias is None else bias.float().contiguous()
    y = x.new_empty(x.shape, dtype=torch.float32)
    image, token, _ = rows.stride()
    pointers = taps.data_ptr(), shift.data_ptr(), y.data_ptr()
    sizes = *x.shape, weight.shape[1], silu, reverse, compiler.threads()
    _library().causal_conv1d(_Problem(rows.data_ptr(), image, token, *pointers, *sizes))
    return y.to(x.dtype)


@_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, reverse: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


@cache
def _library() -> ctypes.CDLL:
    # ISO C rounds every product of its own; here a fused multiply-add is both faster and nearer to the equation
    library = compiler.load(Path(__file__).with_name("native.c"), ("-ffp-contract=fast",))
    library.causal_conv1d.argtypes, library.causal_conv1d.restype = [ctypes.POINTER(_Problem)], None
    return library
