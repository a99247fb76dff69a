"""The convolution of spikes in C on the CPU: float32 sums over what is not zero; inference only.

Half-precision inputs are converted at the border, and a float64 x is refused: rounding it quietly would answer in a
precision that was not asked for.
"""

import ctypes
import math
from functools import cache

import torch
from torch.nn import functional

from benchd.kernels import compiler
from benchd.kernels.dispatch import refuse_float64, require_inference
from benchd.kernels.op import computes, op

# BLOCK and LANES of native.c
_BLOCK, _LANES = 64, 16
# so many places for nonzeros, where an image does not need more: they stay in the second-level cache
_PLACES = 2**18


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` (O, C, kh, kw) or (O, C) in float32 as the native kernel reads it.

    Output channels are filled up with zeros to a multiple of 16 and lie innermost, in blocks of 64 or what is left:
    (block, kh, kw, C, 64), flattened.
    """
    wide = weight.detach().float().reshape(len(weight), weight.shape[1], -1).permute(2, 1, 0)
    padded = functional.pad(wide, (0, -len(weight) % _LANES))
    return torch.cat([block.flatten() for block in padded.split(_BLOCK, dim=-1)])


def packed_shape(weight: torch.Tensor) -> tuple[int]:
    """Return the shape of `pack(weight)`."""
    return (-(-len(weight) // _LANES) * _LANES * math.prod(weight.shape[1:]),)


def spike_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: int,
    packed: torch.Tensor | None,
) -> torch.Tensor:
    """Return y (N, O, H', W') in the dtype of x, channels last; Unavailable for float64, a gradient or a GPU."""
    require_inference("spike_conv2d", "native", x, weight, bias)
    refuse_float64("spike_conv2d", "native", x)
    y: torch.Tensor = _op["native"](
        x, pack(weight) if packed is None else packed, bias, list(weight.shape), stride, padding
    )
    return y


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y", "lists")),
        *((name, ctypes.c_int64) for name in ("images", "channels", "height", "width")),
        *((name, ctypes.c_int64) for name in ("out_channels", "window_height", "window_width", "stride", "padding")),
        *((name, ctypes.c_int64) for name in ("out_height", "out_width", "group", "threads")),
    )


@op("spike_conv2d")
def _op(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, weight_shape: list[int], stride: int, padding: int
) -> torch.Tensor:
    return _output(x, weight_shape, stride, padding)


@computes(_op, "native")
def _convolved(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, weight_shape: list[int], stride: int, padding: int
) -> torch.Tensor:
    images = compiler.in_dtype(x).contiguous(memory_format=torch.channels_last)
    shift = None if bias is None else compiler.dense(bias)
    y = _output(images, weight_shape, stride, padding)
    _, channels, height, width = x.shape
    group = max(1, min(len(x), _PLACES // (channels * height * width)))
    lists = torch.empty(group * height * (width * (channels + 1) + 1), dtype=torch.int64)
    given = images.data_ptr(), packed.contiguous().data_ptr(), None if shift is None else shift.data_ptr()
    window = weight_shape[0], *weight_shape[2:], stride, padding, *y.shape[2:]
    _library().spike_conv2d(
        _Problem(*given, y.data_ptr(), lists.data_ptr(), *x.shape, *window, group, compiler.threads())
    )
    return compiler.in_dtype(y, x.dtype)


def _output(x: torch.Tensor, weight_shape: list[int], stride: int, padding: int) -> torch.Tensor:
    out_channels, _, window_height, window_width = weight_shape
    height = (x.shape[2] + 2 * padding - window_height) // stride + 1
    width = (x.shape[3] + 2 * padding - window_width) // stride + 1
    shape = (len(x), out_channels, height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@cache
def _library() -> ctypes.CDLL:
    return compiler.functions(__file__, compiler.FUSED, spike_conv2d=[ctypes.POINTER(_Problem)])
