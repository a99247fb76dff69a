"""A convolution of first spikes and the neurons after it in C on the CPU: the neurons' inputs stay in the cache.

`benchd.kernels.lif.native` describes such neurons. The convolution passes on two lines of an image at all steps at a
time; the resulting spikes equal those of the separate kernels bit for bit.
"""

import ctypes
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.lif.layout import pooled_memory
from benchd.kernels.lif.native import Periods, line_reader
from benchd.kernels.op import op
from benchd.kernels.spike_conv2d.native import BLOCK, ConvProblem, laid_out, listed

_PIXEL = 4 * BLOCK + 2 * 24  # bytes per pixel: its sums, and a corner and a segment in native.c


def convolved(
    first: Tensor,
    packed: Tensor,
    bias: Tensor,
    shape: list[int],
    padding: int,
    *,
    decay: float,
    threshold: float,
    gain: float = 1.0,
) -> Tensor:
    """Return 2x2 means of spikes, (T, B, O, H'//2, W'//2), channels last and in float32.

    first (T, B, C, H, W) are first spikes in float32; `packed` is the weight of this shape (O, C, kh, kw), as returned
    by `benchd.kernels.spike_conv2d.native.pack`; bias (O,). Raises ValueError if O is not a multiple of 64 or the sizes
    do not fit.
    """
    if shape[0] % BLOCK or shape[1] != first.shape[2] or packed.numel() != math.prod(shape):
        raise ValueError(f"spike_conv2d: a weight {tuple(shape)} by period does not fit x {tuple(first.shape)}")
    return _op["native"](first, packed, bias, shape, padding, decay, gain, threshold)


class _Layer(NamedTuple):
    first: Tensor
    packed: Tensor
    bias: Tensor
    shape: list[int]
    padding: int
    decay: float
    gain: float
    threshold: float


@op("spike_conv2d_periods")
def _op(given: _Layer) -> Tensor:
    first, received = given.first, received_shape(given.first, given.shape, given.padding)
    return pooled_memory(received, first.dtype, first.device, channels_last=True)


@_op.computes("native")
def _computed(given: _Layer) -> Tensor:
    first, packed, bias, shape, padding, *neuron = given
    steps, batch, channels, height, width = first.shape
    out_channels, _, *window = shape
    received = received_shape(first, shape, padding)
    pooled = pooled_memory(received, first.dtype, first.device, channels_last=True)
    pictures = first.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    neurons = Periods(received, bias, pooled, *neuron)
    group, numbers = listed(batch, channels, steps * height, width)
    lists = torch.empty(numbers, dtype=torch.int64)
    threads, room = compiler.threads(), steps * 2 * received[-1] * _PIXEL
    scratch = torch.empty(threads * room, dtype=torch.uint8)
    pointers = pictures.data_ptr(), packed.data_ptr(), None, None, lists.data_ptr()
    sizes = batch, channels, height, width, out_channels, *window, 1, padding, *received[-2:], group, threads
    problem = ConvProblem(*pointers, *sizes)
    _library().spike_conv2d_lines(problem, steps, line_reader(), ctypes.byref(neurons), scratch.data_ptr(), room)
    return pooled


def received_shape(first: Tensor, shape: list[int], padding: int) -> tuple[int, ...]:
    """Return the shape (T, B, O, H', W') of the neurons' inputs."""
    steps, batch, *picture = first.shape
    out_channels, _, height, width = shape
    pictures, _ = laid_out((0, *picture), (out_channels, height, width), 1, padding)
    return steps, batch, *pictures[1:]


@cache
def _library() -> ctypes.CDLL:
    pointer, size, problem = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ConvProblem)
    return compiler.functions(
        __file__, compiler.FUSED, spike_conv2d_lines=[problem, size, pointer, pointer, pointer, size]
    )
