"""The short convolution in C on the CPU, with bias and SiLU in one pass over tokens in any strides; inference only.

Sums are float32, half-precision inputs are converted at the border, and a float64 x is refused: rounding it quietly
would answer in a precision that was not asked for.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from benchd.kernels import compiler
from benchd.kernels.dispatch import refuse_float64
from benchd.kernels.op import fake, op


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, reverse: bool
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of x; Unavailable for float64, a gradient or another device."""
    _check(x, weight, bias)
    y: torch.Tensor = _op(x, weight, bias, activation == "silu", reverse)
    return y


def causal_conv1d_pair(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Return y (2, batch, length, channels) in the dtype of x: [0] looks back, [1] ahead; raises the same."""
    _check(x, weight, bias)
    y: torch.Tensor = _op(x, weight, bias, activation == "silu", False)
    return y


def _check(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    compiler.require_inference("causal_conv1d", x, *others)
    refuse_float64("causal_conv1d", "native", x)


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("image", "token")),
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("direction", "channel", "tap")),
        *((name, ctypes.c_void_p) for name in ("bias", "y")),
        *((name, ctypes.c_int64) for name in ("directions", "images", "length", "channels", "width")),
        *((name, ctypes.c_int64) for name in ("reverse", "silu", "threads")),
    )


@op("causal_conv1d", "CPU")
def _op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, reverse: bool) -> torch.Tensor:
    """Return y (batch, length, channels), or (2, batch, length, channels) for the weight of a pair.

    weight (channels, width) and bias (channels,) have a first dimension of 2 for a pair.
    """
    rows, taps = compiler.in_dtype(x), compiler.in_dtype(weight)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    shift = None if bias is None else compiler.dense(bias)
    y = rows.new_empty(_shape(x, weight))
    image, token, _ = rows.stride()
    strides, directions = (taps.stride(), 2) if taps.dim() == 3 else ((0, *taps.stride()), 1)
    problem = _Problem(
        rows.data_ptr(), image, token, taps.data_ptr(), *strides,
        None if shift is None else shift.data_ptr(), y.data_ptr(),
        directions, *x.shape, taps.shape[-1], reverse, silu, compiler.threads(),
    )  # fmt: skip
    _library().causal_conv1d(problem)
    return compiler.in_dtype(y, x.dtype)


@fake(_op)
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, reverse: bool) -> torch.Tensor:
    return x.new_empty(_shape(x, weight))


def _shape(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    return (*weight.shape[:-2], *x.shape)


@cache
def _library() -> ctypes.CDLL:
    # ISO C rounds every product of its own; here a fused multiply-add is both faster and nearer to the equation
    library = compiler.load(Path(__file__).with_name("native.c"), ("-ffp-contract=fast",))
    library.causal_conv1d.argtypes, library.causal_conv1d.restype = [ctypes.POINTER(_Problem)], None
    return library
