"""ST-BIF and the max pool of running sums in C on the CPU: one pass, with the state in the cache; inference only.

Float32 and float64 are computed as they are and half tensors as float32, so codes equal the reference's bit for bit.
"""

import ctypes
import math
from functools import cache
from pathlib import Path

import torch

from benchd.kernels import compiler


def stbif(
    current: torch.Tensor, *, threshold: torch.Tensor | float, pos_max: int, neg_min: int, output: str
) -> torch.Tensor:
    """Return codes (int8) or values of `current` (T, ...); raises Unavailable for a gradient or another device."""
    return stbif_block(
        current, bias=None, residual=None, threshold=threshold, pos_max=pos_max, neg_min=neg_min, output=output
    )


def stbif_block(
    current: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    threshold: torch.Tensor | float,
    pos_max: int,
    neg_min: int,
    output: str,
) -> torch.Tensor:
    """Return codes (int8) or values of current + bias + residual (T, B, C, ...); channels last stays channels last."""
    s = torch.as_tensor(threshold, dtype=_state_dtype(current), device=current.device)
    tensors = [current, s, *(tensor for tensor in (bias, residual) if tensor is not None)]
    if output == "codes":  # these have no gradient in any implementation
        current, s = current.detach(), s.detach()
        tensors = [current]
    compiler.require_inference("stbif", *tensors)
    result: torch.Tensor = _stbif_op(current, bias, residual, s, pos_max, neg_min, output == "codes")
    return result


def max_pool_delta(values: torch.Tensor, *, kernel_size: int, stride: int, padding: int) -> torch.Tensor:
    """Return the pooled running sum of `values` (T, B, C, H, W), differenced over T; the result lies channels last."""
    compiler.require_inference("max_pool_delta", values)
    result: torch.Tensor = _max_pool_delta_op(values, kernel_size, stride, padding)
    return result


@torch.library.custom_op("benchd::stbif", mutates_args=(), device_types="cpu")
def _stbif_op(
    current: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    threshold: torch.Tensor,
    pos_max: int,
    neg_min: int,
    codes: bool,
) -> torch.Tensor:
    """Return codes (int8) or values in the dtype of `current` (T, B, C, ...); bias (T, C), threshold one element."""
    dtype = _state_dtype(current)
    wide = _laid_out(current.to(dtype), bias is not None)
    other = None if residual is None else torch.empty_like(wide).copy_(residual)
    schedule = None if bias is None else bias.to(dtype).contiguous()
    spikes = torch.empty_like(wide, dtype=torch.int8 if codes else dtype)
    channels, run = _channels(wide) if bias is not None else (1, 1)
    _library(dtype).stbif(
        wide.data_ptr(), _pointer(schedule), _pointer(other), *_outputs(spikes), len(wide), wide[0].numel(),
        channels, run, threshold.data_ptr(), pos_max, neg_min, compiler.threads(),
    )  # fmt: skip
    return spikes if codes else spikes.to(current.dtype)


@_stbif_op.register_fake
def _(
    current: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    threshold: torch.Tensor,
    pos_max: int,
    neg_min: int,
    codes: bool,
) -> torch.Tensor:
    wide = _laid_out(current, bias is not None)
    return torch.empty_like(wide, dtype=torch.int8 if codes else current.dtype)


def _laid_out(current: torch.Tensor, by_channel: bool) -> torch.Tensor:
    """Return `current` with T outermost and no gaps; `by_channel`, channels last or contiguous inside a step."""
    one = current[0]
    # empty_like repeats the strides of a tensor without gaps and chooses others for one with gaps
    dense = torch.empty_like(current).stride() == current.stride() and current.stride(0) == one.numel()
    known = not by_channel or one.is_contiguous() or _channels_last(one)
    return current if dense and known else current.contiguous()


def _channels_last(one: torch.Tensor) -> bool:
    return one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last)


def _channels(current: torch.Tensor) -> tuple[int, int]:
    """Return the number of channels and how many neighbours share one."""
    one = current[0]
    return one.shape[1], 1 if _channels_last(one) else math.prod(one.shape[2:])


def _outputs(spikes: torch.Tensor) -> tuple[int | None, int | None]:
    """Return pointers for codes and for values, one of them null."""
    return (spikes.data_ptr(), None) if spikes.dtype == torch.int8 else (None, spikes.data_ptr())


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@torch.library.custom_op("benchd::max_pool_delta", mutates_args=(), device_types="cpu")
def _max_pool_delta_op(values: torch.Tensor, kernel_size: int, stride: int, padding: int) -> torch.Tensor:
    dtype = _state_dtype(values)
    steps, batch, channels, height, width = values.shape
    frames = values.flatten(0, 1).to(dtype).contiguous(memory_format=torch.channels_last)
    out = _pooled(values, dtype, kernel_size, stride, padding)
    sums = torch.zeros(batch * channels * height * width, dtype=torch.float64)
    previous = torch.zeros(out[0].numel(), dtype=dtype)
    _library(dtype).max_pool_delta(
        frames.data_ptr(), out.data_ptr(), sums.data_ptr(), previous.data_ptr(), steps, batch, height, width, channels,
        kernel_size, stride, padding, *out.shape[3:], compiler.threads(),
    )  # fmt: skip
    return out.to(values.dtype)


@_max_pool_delta_op.register_fake
def _(values: torch.Tensor, kernel_size: int, stride: int, padding: int) -> torch.Tensor:
    return _pooled(values, values.dtype, kernel_size, stride, padding)


def _pooled(values: torch.Tensor, dtype: torch.dtype, kernel_size: int, stride: int, padding: int) -> torch.Tensor:
    steps, batch, channels, *size = values.shape
    height, width = ((side + 2 * padding - kernel_size) // stride + 1 for side in size)
    shape = (steps * batch, channels, height, width)
    flat = torch.empty(shape, dtype=dtype, device=values.device, memory_format=torch.channels_last)
    out: torch.Tensor = flat.unflatten(0, (steps, batch))
    return out


def _state_dtype(current: torch.Tensor) -> torch.dtype:
    return torch.promote_types(current.dtype, torch.float32)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels for tensors of `dtype`, float32 or float64."""
    real = "double" if dtype == torch.float64 else "float"
    library = compiler.load(Path(__file__).with_name("native.c"), (*compiler.EXACT, f"-DREAL={real}"))
    pointer, size, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
    library.stbif.argtypes = [*[pointer] * 5, *[size] * 4, pointer, number, number, threads]
    library.max_pool_delta.argtypes = [*[pointer] * 4, *[size] * 10, threads]
    library.stbif.restype = library.max_pool_delta.restype = None
    return library
