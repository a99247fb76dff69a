"""The equation of `benchd.kernels.lif` as a loop: the oracle of the other implementations, not meant to be fast."""

import torch
from torch.nn import functional

from benchd.kernels.dispatch import state_dtype
from benchd.kernels.lif import layout


def lif(current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str) -> torch.Tensor:
    """Return the spikes of `current` (T, ...), without a gradient."""
    x = current.detach().to(state_dtype(current))
    v = torch.zeros_like(x[0])
    spikes = []
    for t in range(x.shape[0]):
        v = decay * v + gain * x[t]
        fired = v >= threshold
        v = torch.where(fired, 0.0 if reset == "zero" else v - threshold, v)
        spikes.append(fired.to(current.dtype))
    return torch.stack(spikes)


def lif_pool(
    current: torch.Tensor,
    *,
    decay: float,
    gain: float,
    threshold: float,
    reset: str,
    bias: torch.Tensor | None,
    output: str,
) -> torch.Tensor:
    """Return the spikes of current (T, B, C, H, W) + bias (C,) averaged, or counted, over 2x2, without a gradient."""
    spikes = lif(layout.with_bias(current, bias), decay=decay, gain=gain, threshold=threshold, reset=reset)
    pooled: torch.Tensor = functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, current.shape[:2])
    return (4 * pooled).to(torch.uint8) if output == "counts" else pooled.to(current.dtype)
