"""ST-BIF and the max pool of running sums in C on the CPU: one pass, with the state in the cache, and its gradient.

Float32 and float64 are computed in their own precision and half tensors in float32, so that codes equal the equation's
bit for bit. The forward pass stores nothing for a gradient: the backward pass recomputes a tile of neurons while it is
in the cache.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.dispatch import state_dtype
from benchd.kernels.stbif.layout import channels, frames, laid_out, like, pictures, pooled
from benchd.kernels.stbif.ops import (
    Pool,
    PoolBackward,
    StBifBackward,
    StBifInputs,
    max_pool_delta_backward_op,
    max_pool_delta_op,
    stbif_backward_op,
    stbif_op,
)

_TILE = 64  # TILE of native.c


class _Charge:
    """A step's contribution to the membrane, laid out for native.c; keeps alive the tensors behind `pointers`."""

    def __init__(self, current: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        dtype = state_dtype(current)
        self.current = compiler.in_dtype(laid_out(current, by_channel=bias is not None), dtype)
        self._bias = None if bias is None else compiler.dense(bias, dtype)
        self._residual = None if residual is None else like(self.current, residual, dtype)
        run = (1, 1) if bias is None else channels(self.current)
        self.pointers = [_pointer(tensor) for tensor in (self.current, self._bias, self._residual)]
        steps = current.shape[0]
        self.sizes = steps, current.numel() // steps, *run


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@stbif_op.computes("native")
def _stbif(given: StBifInputs) -> Tensor:
    current, bias, residual, threshold, pos_max, neg_min, codes = given
    charge = _Charge(current, bias, residual)
    dtype = charge.current.dtype
    spikes = torch.empty_like(charge.current, dtype=torch.int8 if codes else dtype)
    outputs = (spikes.data_ptr(), None) if codes else (None, spikes.data_ptr())
    neuron = threshold.data_ptr(), pos_max, neg_min
    _library(dtype).stbif(*charge.pointers, *outputs, *charge.sizes, *neuron, compiler.threads())
    return spikes if codes else compiler.in_dtype(spikes, current.dtype)


def fire(
    current: Tensor,
    steps: int,
    bias: Tensor | None,
    residual: Tensor | None,
    threshold: Tensor,
    pos_max: int,
    neg_min: int,
) -> Tensor:
    """Return the values of `stbif_block` for matching float32 CPU tensors, in inference, unchecked.

    current and residual are (T B, C, ...), current contiguous channels last; bias is (T, ...) with T C numbers.
    """
    residual = None if residual is None else like(current, residual, torch.float32)
    bias, threshold = None if bias is None else compiler.dense(bias), compiler.in_dtype(threshold)
    values = torch.empty_like(current)
    charge = _pointer(current), _pointer(bias), _pointer(residual), None
    sizes = steps, current.numel() // steps, current.shape[1], 1
    neuron = threshold.data_ptr(), pos_max, neg_min
    _library(torch.float32).stbif(*charge, values.data_ptr(), *sizes, *neuron, compiler.threads())
    return values


@stbif_backward_op.computes("native")
def _stbif_backward(given: StBifBackward) -> tuple[Tensor, Tensor]:
    grad, current, bias, residual, threshold, pos_max, neg_min = given
    charge, threads = _Charge(current, bias, residual), compiler.threads()
    to_charge = torch.empty_like(charge.current)
    grad = like(to_charge, grad, to_charge.dtype)
    traces = charge.current.new_empty(threads, len(current), 2, _TILE)
    to_threshold = torch.empty(-(-current[0].numel() // _TILE), dtype=torch.float64)
    results = to_charge.data_ptr(), traces.data_ptr(), to_threshold.data_ptr()
    neuron = threshold.data_ptr(), pos_max, neg_min
    library = _library(to_charge.dtype)
    library.stbif_backward(grad.data_ptr(), *charge.pointers, *results, *charge.sizes, *neuron, threads)
    return to_charge, to_threshold.sum().to(threshold.dtype).reshape(threshold.shape)


@max_pool_delta_op.computes("native")
def _max_pool_delta(given: Pool) -> Tensor:
    values = given.values
    wide = frames(values, state_dtype(values))
    out = pooled(values, wide.dtype, *given[1:])
    sums = torch.zeros(values[0].numel(), dtype=torch.float64)
    previous = torch.zeros(out[0].numel(), dtype=wide.dtype)
    tensors = wide.data_ptr(), out.data_ptr(), sums.data_ptr(), previous.data_ptr()
    _library(wide.dtype).max_pool_delta(*tensors, *_sizes(values, out), *given[1:], compiler.threads())
    return compiler.in_dtype(out, values.dtype)


@max_pool_delta_backward_op.computes("native")
def _max_pool_delta_backward(given: PoolBackward) -> Tensor:
    grad, values = given[:2]
    wide = frames(values, state_dtype(values))
    to_values = pictures(values)
    out = like(pooled(values, wide.dtype, *given[2:]), grad, wide.dtype)
    sums = torch.zeros(values[0].numel(), dtype=torch.float64)
    winners = torch.empty(out.numel(), dtype=torch.int32)
    tensors = out.data_ptr(), wide.data_ptr(), to_values.data_ptr(), sums.data_ptr(), winners.data_ptr()
    library = _library(wide.dtype)
    library.max_pool_delta_backward(*tensors, *_sizes(values, out), *given[2:], compiler.threads())
    return to_values


def _sizes(values: Tensor, out: Tensor) -> tuple[int, ...]:
    steps, batch, width, *size = values.shape
    return steps, batch, *size, width, *out.shape[3:]


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels for tensors of `dtype`, float32 or float64."""
    pointer, size, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
    neuron, windows = (pointer, number, number, threads), (*[size] * 10, threads)
    return compiler.functions(
        __file__,
        (*compiler.EXACT, compiler.real(dtype)),
        stbif=[*[pointer] * 5, *[size] * 4, *neuron],
        stbif_backward=[*[pointer] * 7, *[size] * 4, *neuron],
        max_pool_delta=[*[pointer] * 4, *windows],
        max_pool_delta_backward=[*[pointer] * 5, *windows],
    )
