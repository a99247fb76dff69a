"""LIF in C on the CPU: one pass over the currents, with the membranes in the cache; inference only.

Float32 and float64 are computed as they are and half currents as float32, so spikes equal the reference's bit for bit.
A current expanded over T is read as one step, never copied out.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from benchd.kernels import compiler


def lif(current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str) -> torch.Tensor:
    """Return the spikes of `current` (T, ...) on the CPU; raises Unavailable for a gradient or another device."""
    compiler.require_inference("lif", current)
    one, repeats = _one_of_equal_steps(current)
    spikes: torch.Tensor = _lif_op(one, repeats, decay, gain, threshold, reset == "subtract")
    return spikes


def lif_pool(current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str) -> torch.Tensor:
    """Return the pooled spikes (T, B, C, H//2, W//2) of `current` (T, B, C, H, W); channels last stays so."""
    compiler.require_inference("lif", current)
    one, repeats = _one_of_equal_steps(current)
    pooled: torch.Tensor = _lif_pool_op(one, repeats, decay, gain, threshold, reset == "subtract")
    return pooled


def _one_of_equal_steps(current: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return (one step, T) of a current expanded over T, else (current, 0)."""
    if len(current) > 1 and current.stride(0) == 0:
        return current[0], len(current)
    return current, 0


@torch.library.custom_op("benchd::lif", mutates_args=(), device_types="cpu")
def _lif_op(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool
) -> torch.Tensor:
    """Return the spikes (T, ...) of `current`, which is (T, ...) or, with `repeats` = T, one step for all T."""
    wide = current.to(_state_dtype(current))
    spikes, same_layout = _spikes(wide, repeats)
    wide = wide if same_layout else wide.contiguous()
    step = 0 if repeats else spikes[0].numel()
    _library(wide.dtype).lif(
        wide.data_ptr(), spikes.data_ptr(), len(spikes), step, spikes[0].numel(),
        decay, gain, threshold, subtract, compiler.threads(),
    )  # fmt: skip
    return spikes.to(current.dtype)


@_lif_op.register_fake
def _(current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool) -> torch.Tensor:
    return _spikes(current, repeats)[0]


def _spikes(current: torch.Tensor, repeats: int) -> tuple[torch.Tensor, bool]:
    """Return room for the spikes (T, ...), and whether its steps lie in memory as those of `current` do."""
    one = current if repeats else current[0]
    # empty_like repeats the strides of a tensor without gaps and chooses others for one with gaps
    same_layout = torch.empty_like(one).stride() == one.stride() and (repeats > 0 or current.stride(0) == one.numel())
    shape = (repeats or len(current), *one.shape)
    if same_layout:
        return current.new_empty_strided(shape, (one.numel(), *one.stride())), True
    return current.new_empty(shape), False


@torch.library.custom_op("benchd::lif_pool", mutates_args=(), device_types="cpu")
def _lif_pool_op(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool
) -> torch.Tensor:
    """Return (T, B, C, H//2, W//2) for (T, B, C, H, W) or, with `repeats` = T, for one step (B, C, H, W) for all T."""
    frames = _frames(current, repeats).to(_state_dtype(current))
    pooled, channels_last = _pooled(current, frames, repeats)
    frames = frames.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    steps, batch = pooled.shape[:2]
    channels, height, width = frames.shape[1:]
    step = 0 if repeats else batch * channels * height * width
    _library(frames.dtype).lif_pool(
        frames.data_ptr(), pooled.data_ptr(), steps, step, batch, channels, height, width, channels_last,
        decay, gain, threshold, subtract, compiler.threads(),
    )  # fmt: skip
    return pooled.to(current.dtype)


@_lif_pool_op.register_fake
def _(current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool) -> torch.Tensor:
    return _pooled(current, _frames(current, repeats), repeats)[0]


def _frames(current: torch.Tensor, repeats: int) -> torch.Tensor:
    return current if repeats else current.flatten(0, 1)


def _pooled(current: torch.Tensor, frames: torch.Tensor, repeats: int) -> tuple[torch.Tensor, bool]:
    """Return room for the pooled spikes and whether it is, as `frames` (N, C, H, W) are, channels last."""
    channels_last = frames.is_contiguous(memory_format=torch.channels_last) and not frames.is_contiguous()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    steps, batch = (repeats, len(current)) if repeats else current.shape[:2]
    shape = (steps * batch, frames.shape[1], frames.shape[2] // 2, frames.shape[3] // 2)
    flat = torch.empty(shape, dtype=frames.dtype, device=frames.device, memory_format=memory_format)
    return flat.unflatten(0, (steps, batch)), channels_last


def _state_dtype(current: torch.Tensor) -> torch.dtype:
    return torch.promote_types(current.dtype, torch.float32)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels for currents of `dtype`, float32 or float64."""
    real = "double" if dtype == torch.float64 else "float"
    library = compiler.load(Path(__file__).with_name("native.c"), (*compiler.EXACT, f"-DREAL={real}"))
    pointer, size, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
    library.lif.argtypes = [pointer, pointer, *[size] * 3, *[number] * 3, flag, flag]
    library.lif_pool.argtypes = [pointer, pointer, *[size] * 6, flag, *[number] * 3, flag, flag]
    library.lif.restype = library.lif_pool.restype = None
    return library
