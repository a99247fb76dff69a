"""The sum and its norm in plain PyTorch: an addition and the library's own norm."""

import torch
from torch.nn import functional


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed, residual'), both (..., dim)."""
    if residual is None:
        total = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    else:
        total = residual.to(torch.promote_types(residual.dtype, torch.float32)) + hidden
    normed = functional.rms_norm(total, total.shape[-1:], weight.to(total.dtype), eps)
    return normed.to(weight.dtype), total
