"""How the kernels lay out their tensors: T outermost, then each step contiguous, with channels last or first."""

import math

import torch
from torch import Tensor

from benchd.kernels.dispatch import state_dtype


def threshold_of(threshold: Tensor | float, current: Tensor) -> Tensor:
    """Return the threshold in the dtype of the membranes and on the device of `current`.

    A number is filled in on the device: a copy from the host would synchronise, which a CUDA graph must not contain.
    """
    if isinstance(threshold, Tensor):
        dtype = state_dtype(current)
        as_it_is = threshold.dtype == dtype and threshold.device == current.device
        return threshold if as_it_is else threshold.to(current.device, dtype)
    return torch.full((), threshold, dtype=state_dtype(current), device=current.device)


def laid_out(current: Tensor, *, by_channel: bool) -> Tensor:
    """Return `current` with T outermost, contiguous; with `by_channel`, steps are channels last or contiguous."""
    if current.is_contiguous() or _is_channels_last(current):
        return current
    step = current[0]
    # empty_like repeats the strides of a dense tensor and chooses others for one with gaps
    dense = torch.empty_like(current).stride() == current.stride() and current.stride(0) == step.numel()
    channels_last = step.dim() == 4 and step.is_contiguous(memory_format=torch.channels_last)
    known = not by_channel or channels_last or step.is_contiguous()
    return current if dense and known else current.contiguous()


def like(dense: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype` and with the strides of `dense`, which must be contiguous in some order."""
    if tensor.dtype == dtype and tensor.stride() == dense.stride():
        return tensor
    return torch.empty_like(dense, dtype=dtype).copy_(tensor)


def channels(current: Tensor) -> tuple[int, int]:
    """Return the number of channels in the result of `laid_out`, and how many neighbours share a channel."""
    width, *size = current.shape[2:]
    return width, 1 if current.stride(2) == 1 else math.prod(size)


def _is_channels_last(current: Tensor) -> bool:
    """Decide by the strides alone: for (T, B, C, H, W) with H or W of 1, whose strides are arbitrary, it is unknown."""
    if current.dim() != 5:
        return False
    _, batch, width, *size = current.shape
    image = width * math.prod(size)
    step, of_image, *pixels = current.stride()
    rows_and_pixels = [1, size[1] * width, width]
    return step == batch * image and (batch == 1 or of_image == image) and pixels == rows_and_pixels


def frames(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` (T, B, C, H, W) as (T B, C, H, W), contiguous channels last."""
    return values.flatten(0, 1).to(dtype).contiguous(memory_format=torch.channels_last)


def pictures(values: Tensor) -> Tensor:
    """Return a buffer for the gradient of `values` (T, B, C, H, W), in the state's dtype, each step channels last."""
    return torch.empty_like(frames(values, state_dtype(values))).unflatten(0, values.shape[:2])


def pooled(values: Tensor, dtype: torch.dtype, kernel_size: int, stride: int, padding: int) -> Tensor:
    """Return a buffer for the windows of `values` (T, B, C, H, W), each step channels last."""
    steps, batch, width, *size = values.shape
    sides = ((side + 2 * padding - kernel_size) // stride + 1 for side in size)
    shape = (steps * batch, width, *sides)
    flat = torch.empty(shape, dtype=dtype, device=values.device, memory_format=torch.channels_last)
    return flat.unflatten(0, (steps, batch))
