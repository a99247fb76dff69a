"""The equation of `benchd.kernels.stbif` as a loop: the oracle of the other implementations, not meant to be fast."""

import torch
from torch.nn import functional


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
    """Return codes (int8) or values of current + bias + residual (T, B, C, ...), without a gradient."""
    x = current.detach().to(torch.promote_types(current.dtype, torch.float32))
    if bias is not None:
        x = x + bias.detach().to(x.dtype).reshape(len(bias), 1, -1, *[1] * (x.dim() - 3))
    if residual is not None:
        x = x + residual.detach().to(x.dtype)
    spikes = stbif(x, threshold=threshold, pos_max=pos_max, neg_min=neg_min, output=output)
    return spikes if output == "codes" else spikes.to(current.dtype)


def max_pool_delta(values: torch.Tensor, *, kernel_size: int, stride: int, padding: int) -> torch.Tensor:
    """Return the differenced pool of the running sum of `values` (T, B, C, H, W), without a gradient."""
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros_like(values[0], dtype=torch.float64)
    before: torch.Tensor | float = 0.0
    deltas = []
    for step in values.detach():
        total = total + step
        pooled = functional.max_pool2d(total.to(wide), kernel_size, stride, padding)
        deltas.append((pooled - before).to(values.dtype))
        before = pooled
    return torch.stack(deltas)
