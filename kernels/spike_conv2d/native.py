"""The convolution of spikes in C on the CPU: float32 sums over nonzeros; inference only.

Half-precision inputs are converted first, and float64 is rejected, because quietly rounding it would return a result in
a precision that was not requested.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels import compiler
from benchd.kernels.dispatch import refuse_float64, require_device, require_inference
from benchd.kernels.op import is_watched, op

# BLOCK and LANES of native.c
BLOCK, _LANES = 64, 16
# maximum number of listed nonzeros, which fit in the second-level cache; a single image may need more
PLACES = 2**18


def pack(weight: Tensor) -> Tensor:
    """Return `weight` (O, C, kh, kw) or (O, C) in float32 as the native kernel reads it.

    Output channels are zero-padded to a multiple of 16 and innermost, in blocks of 64 or the remainder: (block, kh, kw,
    C, 64), flattened.
    """
    wide = weight.detach().float().reshape(len(weight), weight.shape[1], -1).permute(2, 1, 0)
    padded = functional.pad(wide, (0, -len(weight) % _LANES))
    return torch.cat([block.flatten() for block in padded.split(BLOCK, dim=-1)])


def packed_shape(weight: Tensor) -> tuple[int]:
    """Return the shape of `pack(weight)`."""
    return (-(-len(weight) // _LANES) * _LANES * math.prod(weight.shape[1:]),)


def spike_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, packed: Tensor | None
) -> Tensor:
    """Return y (N, O, H', W') in the dtype of x, channels last; raise Unavailable for float64, a gradient or a GPU."""
    require_device("spike_conv2d", "native", x)
    require_inference("spike_conv2d", "native", x, weight, bias)
    refuse_float64("spike_conv2d", "native", x)
    return _op["native"](x, pack(weight) if packed is None else packed, bias, list(weight.shape), stride, padding)


def convolved(
    x: Tensor, shape: Sequence[int], bias: Tensor | None, stride: int, padding: int, packed: Tensor
) -> Tensor:
    """Return the result of `spike_conv2d`, which must be known to run here; `shape` is the packed weight's."""
    given = _Conv(x, packed, bias, list(shape), stride, padding)
    return _op["native"](*given) if is_watched() else _convolved(given)


class ConvProblem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = compiler.fields(
        "*x *weight *bias *y *lists images channels height width out_channels window_height window_width",
        "stride padding out_height out_width group threads",
    )


class _Plan(NamedTuple):
    """Shared by calls of the same sizes: the sizes in `problem`, the layout of y, and the size of scratch memory."""

    problem: bytes
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    scratch: int


def laid_out(
    shape: tuple[int, ...], window: Sequence[int], stride: int, padding: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Return the shape (N, O, H', W') and the channels-last strides of y, for x of this shape."""
    out_channels, *taps = window
    height, width = ((side + 2 * padding - reach) // stride + 1 for side, reach in zip(shape[2:], taps, strict=True))
    strides = height * width * out_channels, 1, width * out_channels, out_channels
    return (shape[0], out_channels, height, width), strides


@lru_cache(maxsize=1024)
def _plan(x: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int) -> _Plan:
    images, channels, height, width = x
    out_channels, weight_channels, window_height, window_width = weight
    shape, strides = laid_out(x, (out_channels, window_height, window_width), stride, padding)
    if channels != weight_channels or min(shape[2:]) < 1:
        raise ValueError(f"spike_conv2d: a weight {weight} does not fit x {x}")
    group, scratch = listed(images, channels, height, width)
    window = out_channels, window_height, window_width, stride, padding, *shape[2:]
    problem = bytes(ConvProblem(*[None] * 5, *x, *window, group))
    return _Plan(problem, shape, strides, scratch)


def listed(images: int, channels: int, height: int, width: int) -> tuple[int, int]:
    """Return how many images' nonzeros are listed at once, and how many numbers of scratch memory the lists take."""
    group = max(1, min(images, PLACES // (channels * height * width)))
    return group, group * height * (width * (channels + 1) + 1)


class _Conv(NamedTuple):
    x: Tensor
    packed: Tensor
    bias: Tensor | None
    weight_shape: list[int]
    stride: int
    padding: int


@op("spike_conv2d")
def _op(given: _Conv) -> Tensor:
    x, (out_channels, _, *window) = given.x, given.weight_shape
    sizes, strides = laid_out(x.shape, (out_channels, *window), given.stride, given.padding)
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)


@_op.computes("native")
def _convolved(given: _Conv) -> Tensor:
    x, packed, bias, weight_shape, stride, padding = given
    images = compiler.in_dtype(x).contiguous(memory_format=torch.channels_last)
    weight, shift = packed.contiguous(), None if bias is None else compiler.dense(bias)
    plan = _plan(x.shape, tuple(weight_shape), stride, padding)
    y = torch.empty_strided(plan.shape, plan.strides, dtype=torch.float32)
    lists = torch.empty(plan.scratch, dtype=torch.int64)
    problem = ConvProblem.from_buffer_copy(plan.problem)
    problem.x, problem.weight, problem.y, problem.lists = (t.data_ptr() for t in (images, weight, y, lists))
    problem.bias, problem.threads = None if shift is None else shift.data_ptr(), compiler.threads()
    _library().spike_conv2d(problem)
    return compiler.in_dtype(y, x.dtype)


@cache
def _library() -> ctypes.CDLL:
    return compiler.functions(__file__, compiler.FUSED, spike_conv2d=[ctypes.POINTER(ConvProblem)])
