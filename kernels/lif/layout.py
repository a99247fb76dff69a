"""How the kernels read a current and lay out their spikes: one step for all T is read once, channels last stays so."""

import torch

from benchd.kernels.dispatch import state_dtype


def with_bias(current: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `current` (..., C, H, W) as it is, or with `bias` (C,) added in the dtype of the membranes."""
    if bias is None:
        return current
    dtype = state_dtype(current)
    return current.to(dtype) + bias.to(dtype)[:, None, None]


def one_of_equal_steps(current: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return (one step, T) of a current expanded over T, else (current, 0)."""
    if len(current) > 1 and current.stride(0) == 0:
        return current[0], len(current)
    return current, 0


def spikes_buffer(current: torch.Tensor, repeats: int) -> tuple[torch.Tensor, bool]:
    """Return a buffer for the spikes (T, ...), and whether its steps lie in memory as those of `current` do."""
    one = current if repeats else current[0]
    # empty_like repeats the strides of a tensor without gaps and chooses others for one with gaps
    same_layout = torch.empty_like(one).stride() == one.stride() and (repeats > 0 or current.stride(0) == one.numel())
    shape = (repeats or len(current), *one.shape)
    if same_layout:
        return current.new_empty_strided(shape, (one.numel(), *one.stride())), True
    return current.new_empty(shape), False


def frames(current: torch.Tensor, repeats: int) -> torch.Tensor:
    """Return (T, B, C, H, W), or one step (B, C, H, W) for all T, as images (N, C, H, W)."""
    return current if repeats else current.flatten(0, 1)


def pooled_buffer(
    current: torch.Tensor, images: torch.Tensor, repeats: int, dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    """Return a buffer for (T, B, C, H//2, W//2) and whether it is, as `images` (N, C, H, W) are, channels last."""
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    steps, batch = (repeats, len(current)) if repeats else current.shape[:2]
    return pooled_memory((steps, batch, *images.shape[1:]), dtype, images.device, channels_last), channels_last


def pooled_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channels_last: bool
) -> torch.Tensor:
    """Return unwritten memory (T, B, C, H//2, W//2) for the pooled spikes of currents of `shape` (T, B, C, H, W)."""
    steps, batch, channels, height, width = shape
    pictures = (steps * batch, channels, height // 2, width // 2)
    flat = torch.empty(pictures, dtype=dtype, device=device, memory_format=memory_format(channels_last))
    return flat.unflatten(0, (steps, batch))


def memory_format(channels_last: bool) -> torch.memory_format:
    """Return torch's name of the layout."""
    return torch.channels_last if channels_last else torch.contiguous_format
