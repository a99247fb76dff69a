"""How kernels read a current and lay out spikes: a step shared by all T is read once, and channels last is kept."""

import torch
from torch import Tensor

from benchd.kernels.dispatch import state_dtype


def with_bias(current: Tensor, bias: Tensor | None) -> Tensor:
    """Return `current` (..., C, H, W) unchanged, or with `bias` (C,) added in the dtype of the membranes."""
    if bias is None:
        return current
    dtype = state_dtype(current)
    return current.to(dtype) + bias.to(dtype)[:, None, None]


def one_of_equal_steps(current: Tensor) -> tuple[Tensor, int]:
    """Return (one step, T) for a current expanded over T, else (current, 0)."""
    if len(current) > 1 and current.stride(0) == 0:
        return current[0], len(current)
    return current, 0


def all_steps(current: Tensor, repeats: int) -> Tensor:
    """Undo `one_of_equal_steps`: return (T, ...)."""
    return current.expand(repeats, *current.shape) if repeats else current


def spikes_buffer(current: Tensor, repeats: int) -> tuple[Tensor, bool]:
    """Return a buffer for the spikes (T, ...), and whether its steps have the memory layout of `current`'s."""
    step = current if repeats else current[0]
    # do not compare with empty_like: for a batch of one, its strides differ between a compiler's tensors and real ones
    dense = step.is_contiguous() or (step.dim() == 4 and step.is_contiguous(memory_format=torch.channels_last))
    same_layout = dense and (repeats > 0 or current.stride(0) == step.numel())
    shape = (repeats or len(current), *step.shape)
    if same_layout:
        return current.new_empty_strided(shape, (step.numel(), *step.stride())), True
    return current.new_empty(shape), False


def frames(current: Tensor, repeats: int) -> Tensor:
    """Return (T, B, C, H, W), or one step (B, C, H, W) for all T, as images (N, C, H, W)."""
    return current if repeats else current.flatten(0, 1)


def pooled_buffer(current: Tensor, images: Tensor, repeats: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return a buffer for (T, B, C, H//2, W//2) and whether it is channels last, as `images` (N, C, H, W) are."""
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    steps, batch = (repeats, len(current)) if repeats else current.shape[:2]
    return pooled_memory((steps, batch, *images.shape[1:]), dtype, images.device, channels_last), channels_last


def pooled_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channels_last: bool) -> Tensor:
    """Return uninitialised memory (T, B, C, H//2, W//2) for pooled spikes of currents of `shape` (T, B, C, H, W)."""
    steps, batch, channels, height, width = shape
    pictures = (steps * batch, channels, height // 2, width // 2)
    flat = torch.empty(pictures, dtype=dtype, device=device, memory_format=memory_format(channels_last))
    return flat.unflatten(0, (steps, batch))


def memory_format(channels_last: bool) -> torch.memory_format:
    """Return torch's name for the layout."""
    return torch.channels_last if channels_last else torch.contiguous_format
