"""LIF in C on the CPU: one pass over the currents, with the membranes in registers; inference only.

Float32 and float64 are computed as they are and half currents as float32, so spikes equal the reference's bit for bit.
A current expanded over T is read as one step, never copied out.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from benchd.kernels import compiler
from benchd.kernels.lif import layout
from benchd.kernels.op import fake, op


def lif(current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str) -> torch.Tensor:
    """Return the spikes of `current` (T, ...) on the CPU; raises Unavailable for a gradient or another device."""
    compiler.require_inference("lif", current)
    one, repeats = layout.one_of_equal_steps(current)
    spikes: torch.Tensor = _lif_op(one, repeats, decay, gain, threshold, reset == "subtract")
    return spikes


def lif_pool(
    current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str, output: str
) -> torch.Tensor:
    """Return pooled spikes or counts (T, B, C, H//2, W//2) of `current` (T, B, C, H, W); channels last stays so."""
    if output == "counts":  # these have no gradient in any implementation
        current = current.detach()
    compiler.require_inference("lif", current)
    one, repeats = layout.one_of_equal_steps(current)
    subtract, counts = reset == "subtract", output == "counts"
    pooled: torch.Tensor = _lif_pool_op(one, repeats, decay, gain, threshold, subtract, counts)
    return pooled


@op("lif", "CPU")
def _lif_op(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool
) -> torch.Tensor:
    """Return the spikes (T, ...) of `current`, which is (T, ...) or, with `repeats` = T, one step for all T."""
    wide = compiler.in_dtype(current, _state_dtype(current))
    spikes, same_layout = layout.spikes_room(wide, repeats)
    wide = wide if same_layout else wide.contiguous()
    step = 0 if repeats else spikes[0].numel()
    _library(wide.dtype).lif(
        wide.data_ptr(), spikes.data_ptr(), len(spikes), step, spikes[0].numel(),
        decay, gain, threshold, subtract, compiler.threads(),
    )  # fmt: skip
    return compiler.in_dtype(spikes, current.dtype)


@fake(_lif_op)
def _(current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool) -> torch.Tensor:
    return layout.spikes_room(current, repeats)[0]


@op("lif_pool", "CPU")
def _lif_pool_op(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool, counts: bool
) -> torch.Tensor:
    """Return (T, B, C, H//2, W//2) for (T, B, C, H, W) or, with `repeats` = T, for one step (B, C, H, W) for all T."""
    images = compiler.in_dtype(layout.frames(current, repeats), _state_dtype(current))
    pooled, channels_last = layout.pooled_room(current, images, repeats, torch.uint8 if counts else images.dtype)
    images = images.contiguous(memory_format=layout.memory_format(channels_last))
    steps, batch = pooled.shape[:2]
    channels, height, width = images.shape[1:]
    step = 0 if repeats else batch * channels * height * width
    _library(images.dtype).lif_pool(
        images.data_ptr(), pooled.data_ptr(), steps, step, batch, channels, height, width, channels_last,
        decay, gain, threshold, subtract, counts, compiler.threads(),
    )  # fmt: skip
    return pooled if counts else compiler.in_dtype(pooled, current.dtype)


@fake(_lif_pool_op)
def _(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool, counts: bool
) -> torch.Tensor:
    dtype = torch.uint8 if counts else current.dtype
    return layout.pooled_room(current, layout.frames(current, repeats), repeats, dtype)[0]


def _state_dtype(current: torch.Tensor) -> torch.dtype:
    return torch.promote_types(current.dtype, torch.float32)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels for currents of `dtype`, float32 or float64."""
    real = "double" if dtype == torch.float64 else "float"
    library = compiler.load(Path(__file__).with_name("native.c"), (*compiler.EXACT, f"-DREAL={real}"))
    pointer, size, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
    library.lif.argtypes = [pointer, pointer, *[size] * 3, *[number] * 3, flag, flag]
    library.lif_pool.argtypes = [pointer, pointer, *[size] * 6, flag, *[number] * 3, *[flag] * 3]
    library.lif.restype = library.lif_pool.restype = None
    return library
