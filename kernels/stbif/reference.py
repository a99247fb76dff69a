"""The equation of `benchd.kernels.stbif` as a loop: the oracle of the other implementations, not meant to be fast."""

import torch


def stbif(
    current: torch.Tensor, *, threshold: torch.Tensor | float, pos_max: int, neg_min: int, output: str
) -> torch.Tensor:
    """Return codes (int8) or values of `current` (T, ...), without a gradient."""
    x = current.detach().to(torch.promote_types(current.dtype, torch.float32))
    s = torch.as_tensor(threshold, dtype=x.dtype, device=x.device).detach().reshape(())
    v = torch.zeros_like(x[0]) + s / 2
    k = torch.zeros_like(x[0])
    codes = []
    for t in range(x.shape[0]):
        v = v + x[t]
        q = torch.zeros_like(v)
        q[(v >= s) & (k < pos_max)] = 1.0
        q[(v < 0) & (k > neg_min)] = -1.0
        v = v - s * q
        k = k + q
        codes.append(q)
    q = torch.stack(codes)
    return q.to(torch.int8) if output == "codes" else (s * q).to(current.dtype)
