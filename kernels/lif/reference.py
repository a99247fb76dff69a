"""The equation of `benchd.kernels.lif` as a loop: the oracle of the other implementations, not meant to be fast."""

import torch


def lif(current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str) -> torch.Tensor:
    """Return the spikes of `current` (T, ...), without a gradient."""
    x = current.detach().to(torch.promote_types(current.dtype, torch.float32))
    v = torch.zeros_like(x[0])
    spikes = []
    for t in range(x.shape[0]):
        v = decay * v + gain * x[t]
        fired = v >= threshold
        v = torch.where(fired, 0.0 if reset == "zero" else v - threshold, v)
        spikes.append(fired.to(current.dtype))
    return torch.stack(spikes)
