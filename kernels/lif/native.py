"""LIF in C on the CPU: one pass over the currents, with the membranes in registers.

Float32 and float64 are computed in their own precision and half-precision currents in float32, so that spikes equal the
equation's bit for bit. A current expanded over T is read as one step and never copied.

A neuron that receives the same current at all steps and is reset to 0 then starts over: if d is the step of its first
spike, counted from 1, it fires at the multiples of d. Spikes of such neurons at step t are the sum, over the divisors d
of t, of the neurons that first fire at d, and so is anything linear in them. `lif_pool_first` and `lif_pool_periods`
are the neurons before and after a layer that convolves only those first spikes.
"""

import ctypes
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.dispatch import state_dtype
from benchd.kernels.lif import layout
from benchd.kernels.lif.ops import Lif, LifPool, lif_op, lif_pool_op
from benchd.kernels.op import op

_SILENCED = 2  # same as in native.c


@lif_op.computes("native")
def _lif(given: Lif) -> Tensor:
    current, repeats, *neuron = given
    wide = compiler.in_dtype(current, state_dtype(current))
    spikes, same_layout = layout.spikes_buffer(wide, repeats)
    wide = wide if same_layout else wide.contiguous()
    step = 0 if repeats else spikes[0].numel()
    _library(wide.dtype).lif(
        wide.data_ptr(), spikes.data_ptr(), len(spikes), step, spikes[0].numel(), *neuron, compiler.threads(),
    )  # fmt: skip
    return compiler.in_dtype(spikes, current.dtype)


@lif_pool_op.computes("native")
def _lif_pool(given: LifPool) -> Tensor:
    current, bias, repeats, *neuron, counts = given
    images = layout.with_bias(layout.frames(current, repeats), bias)
    images = compiler.in_dtype(images, state_dtype(current))
    pooled, channels_last = layout.pooled_buffer(current, images, repeats, torch.uint8 if counts else images.dtype)
    images = images.contiguous(memory_format=layout.memory_format(channels_last))
    steps, batch = pooled.shape[:2]
    channels, height, width = images.shape[1:]
    step = 0 if repeats else batch * channels * height * width
    _library(images.dtype).lif_pool(
        images.data_ptr(), pooled.data_ptr(), steps, step, batch, channels, height, width, channels_last,
        *neuron, counts, compiler.threads(),
    )  # fmt: skip
    return pooled if counts else compiler.in_dtype(pooled, current.dtype)


class _First(NamedTuple):
    current: Tensor
    steps: int
    decay: float
    gain: float
    threshold: float


@op("lif_pool_first")
def _first_op(given: _First) -> Tensor:
    return layout.pooled_buffer(given.current, given.current, given.steps, given.current.dtype)[0]


class Periods(ctypes.Structure):
    """`periods` in native.c; keeps alive the tensors that it points to."""

    _fields_ = (
        *compiler.fields("*bias *pooled *divisors steps batch height width channels"),
        *((name, ctypes.c_double) for name in ("decay", "gain", "threshold")),
    )

    def __init__(self, shape: tuple[int, ...], bias: Tensor, pooled: Tensor, *neuron: float) -> None:
        steps, batch, channels, height, width = shape
        self.tensors = compiler.dense(bias, pooled.dtype), pooled, _divisors(steps)
        pointers = (tensor.data_ptr() for tensor in self.tensors)
        super().__init__(*pointers, steps, batch, height, width, channels, *neuron)


@lru_cache(maxsize=64)
def _divisors(steps: int) -> Tensor:
    """Return the divisors of each step from 1 on, each list followed by a 0."""
    divisors = [[d for d in range(1, t + 1) if t % d == 0] + [0] for t in range(1, steps + 1)]
    return torch.tensor(list(chain.from_iterable(divisors)))


def line_reader() -> int:
    """Return the address of the function that reads the output of `spike_conv2d_lines`, for `Periods` in float32."""
    return ctypes.cast(_library(torch.float32).lif_pool_line, ctypes.c_void_p).value or 0


class _PeriodsInput(NamedTuple):
    current: Tensor
    bias: Tensor
    decay: float
    gain: float
    threshold: float


@op("lif_pool_periods")
def _periods_op(given: _PeriodsInput) -> Tensor:
    images = given.current.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    return layout.pooled_buffer(given.current, images, 0, given.current.dtype)[0]


def lif_pool_first(current: Tensor, steps: int, *, decay: float, threshold: float, gain: float = 1.0) -> Tensor:
    """Return 2x2 means of first spikes, (T, B, C, H//2, W//2), for neurons that receive `current` T times.

    current (B, C, H, W), in float32 or float64.
    """
    return _first_op["native"](current, steps, decay, gain, threshold)


def lif_pool_periods(current: Tensor, bias: Tensor, *, decay: float, threshold: float, gain: float = 1.0) -> Tensor:
    """Return 2x2 means of spikes, (T, B, C, H//2, W//2), for neurons that are reset to 0, channels last.

    At step t they receive bias (C,) plus current[d - 1] for each divisor d of t. current (T, B, C, H, W) is float32 or
    float64 and has at least 16 channels.
    """
    return _periods_op["native"](current, bias, decay, gain, threshold)


@_first_op.computes("native")
def _first(given: _First) -> Tensor:
    current, steps, *neuron = given
    pooled, channels_last = layout.pooled_buffer(current, current, steps, current.dtype)
    images = current.contiguous(memory_format=layout.memory_format(channels_last))
    _library(images.dtype).lif_pool(
        images.data_ptr(), pooled.data_ptr(), steps, 0, *images.shape, channels_last,
        *neuron, _SILENCED, False, compiler.threads(),
    )  # fmt: skip
    return pooled


@_periods_op.computes("native")
def _periods(given: _PeriodsInput) -> Tensor:
    current, bias, *neuron = given
    images = current.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    pooled = layout.pooled_buffer(current, images, 0, current.dtype)[0]
    neurons = Periods(current.shape, bias, pooled, *neuron)
    _library(images.dtype).lif_pool_periods(neurons, images.data_ptr(), compiler.threads())
    return pooled


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels for currents of `dtype`, float32 or float64."""
    pointer, size, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
    return compiler.functions(
        __file__,
        (*compiler.EXACT, compiler.real(dtype)),
        lif=[pointer, pointer, *[size] * 3, *[number] * 3, flag, flag],
        lif_pool=[pointer, pointer, *[size] * 6, flag, *[number] * 3, *[flag] * 3],
        lif_pool_periods=[ctypes.POINTER(Periods), pointer, flag],
    )
