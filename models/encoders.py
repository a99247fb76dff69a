"""How an image becomes T time steps of input: the same image, Bernoulli spikes, or its charge over a few steps."""

import torch


def repeat(images: torch.Tensor, time_steps: int) -> torch.Tensor:
    """Return `images` at each of `time_steps` steps, (T, *images.shape), as a view."""
    return images.expand(time_steps, *images.shape)


def rate(images: torch.Tensor, time_steps: int, p_scale: float, uniforms: torch.Tensor | None = None) -> torch.Tensor:
    """Return Bernoulli spikes, (T, *images.shape): 1 where u < clamp(p_scale * image, 0, 1), else 0.

    `uniforms` are the u, shaped like the result; None draws them from torch's global generator. Raises ValueError for
    uniforms of another shape.
    """
    shape = (time_steps, *images.shape)
    if uniforms is None:
        uniforms = torch.rand(shape, dtype=images.dtype, device=images.device)
    elif uniforms.shape != shape:
        raise ValueError(f"rate encoding: uniforms must be (T, B, ...) = {shape}, not {tuple(uniforms.shape)}")
    return (uniforms < (p_scale * images).clamp(0, 1)).to(images.dtype)


def analog(charge: torch.Tensor, time_steps: int, step: int) -> torch.Tensor:
    """Return charge / step for t < step and zeros after, (T, *charge.shape): the input of an ST-BIF net.

    Raises ValueError where time_steps < step, because then part of the charge would never arrive.
    """
    if time_steps < step:
        raise ValueError(f"time_steps {time_steps} is less than step {step}: part of the input would never arrive")
    share = charge / step
    # one after the other, images keep their layout
    steps = torch.cat([share] * step + [torch.zeros_like(share)] * (time_steps - step))
    return steps.view(time_steps, *charge.shape)
