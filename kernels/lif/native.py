"""LIF in C on the CPU: one pass over the currents, with the membranes in registers.

Float32 and float64 are computed as they are and half currents as float32, so spikes equal the reference's bit for bit.
A current expanded over T is read as one step, never copied out.
"""

import ctypes
from functools import cache, partial

import torch

from benchd.kernels import compiler
from benchd.kernels.lif import layout, ops
from benchd.kernels.op import computes

lif, lif_pool = partial(ops.lif, "native"), partial(ops.lif_pool, "native")


@computes(ops.lif_op, "native")
def _lif(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool
) -> torch.Tensor:
    wide = compiler.in_dtype(current, _state_dtype(current))
    spikes, same_layout = layout.spikes_buffer(wide, repeats)
    wide = wide if same_layout else wide.contiguous()
    step = 0 if repeats else spikes[0].numel()
    _library(wide.dtype).lif(
        wide.data_ptr(), spikes.data_ptr(), len(spikes), step, spikes[0].numel(),
        decay, gain, threshold, subtract, compiler.threads(),
    )  # fmt: skip
    return compiler.in_dtype(spikes, current.dtype)


@computes(ops.lif_pool_op, "native")
def _lif_pool(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool, counts: bool
) -> torch.Tensor:
    images = compiler.in_dtype(layout.frames(current, repeats), _state_dtype(current))
    pooled, channels_last = layout.pooled_buffer(current, images, repeats, torch.uint8 if counts else images.dtype)
    images = images.contiguous(memory_format=layout.memory_format(channels_last))
    steps, batch = pooled.shape[:2]
    channels, height, width = images.shape[1:]
    step = 0 if repeats else batch * channels * height * width
    _library(images.dtype).lif_pool(
        images.data_ptr(), pooled.data_ptr(), steps, step, batch, channels, height, width, channels_last,
        decay, gain, threshold, subtract, counts, compiler.threads(),
    )  # fmt: skip
    return pooled if counts else compiler.in_dtype(pooled, current.dtype)


def _state_dtype(current: torch.Tensor) -> torch.dtype:
    return torch.promote_types(current.dtype, torch.float32)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels for currents of `dtype`, float32 or float64."""
    pointer, size, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
    return compiler.functions(
        __file__,
        (*compiler.EXACT, compiler.real(dtype)),
        lif=[pointer, pointer, *[size] * 3, *[number] * 3, flag, flag],
        lif_pool=[pointer, pointer, *[size] * 6, flag, *[number] * 3, *[flag] * 3],
    )
