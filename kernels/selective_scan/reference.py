"""The equation of `benchd.kernels.selective_scan` token by token: the oracle of the others, not meant to be fast."""

from typing import Any

import torch
from torch.nn import functional


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    reverse: bool,
    _form: str,
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of u."""
    state_dtype = torch.promote_types(u.dtype, torch.float32)
    x, delta, A, B, C = (tensor.to(state_dtype) for tensor in (u, delta, A, B, C))
    if delta_bias is not None:
        delta = delta + delta_bias.to(state_dtype)
    if delta_softplus:
        delta = functional.softplus(delta)
    h = x.new_zeros(x.shape[0], *A.shape)
    y = [torch.zeros_like(x[:, 0])] * x.shape[1] if x.shape[1] else []
    for t in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        h = (delta[:, t, :, None] * A).exp() * h + (delta[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        y[t] = (h * C[:, t, None, :]).sum(-1)
        if D is not None:
            y[t] = y[t] + D.to(state_dtype) * x[:, t]
        if z is not None:
            y[t] = y[t] * functional.silu(z[:, t].to(state_dtype))
    return (torch.stack(y, 1) if y else x).to(u.dtype)


def selective_scan_pair(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    form: str,
) -> torch.Tensor:
    """Return y (2, batch, length, channels) in the dtype of u: [0] forward, [1] in reverse."""

    def scanned(g: int) -> torch.Tensor:
        given: list[Any] = [None if each is None else each[g] for each in (u, delta, A, B, C, D, None, delta_bias)]
        given += [delta_softplus, g == 1, form]
        return selective_scan(*given)

    return torch.stack((scanned(0), scanned(1)))


def delta_projection(low: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return softplus(low W^T + bias), (2, batch, length, channels) in the dtype of low."""
    return functional.softplus(_projected(low, weight) + _widened(bias)[:, None, None]).to(low.dtype)


def bidirectional_scan(
    u: torch.Tensor,
    low: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    form: str,
) -> torch.Tensor:
    """Return the gated sum of both scans, (batch, length, channels) in the dtype of u."""
    forward, backward = selective_scan_pair(_widened(u), _projected(low, weight), A, B, C, D, bias, True, form)
    return ((forward + backward) * functional.silu(_widened(z))).to(u.dtype)


def _projected(low: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _widened(low) @ _widened(weight).mT.unsqueeze(1)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
