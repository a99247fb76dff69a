"""The equation of `benchd.kernels.causal_conv1d` token by token: the oracle of the others, not meant to be fast."""

import torch
from torch.nn import functional


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, reverse: bool
) -> torch.Tensor:
    """Return y (batch, length, channels) in the dtype of x."""
    state_dtype = torch.promote_types(x.dtype, torch.float32)
    inputs, taps = x.to(state_dtype), weight.to(state_dtype)
    length, width = x.shape[1], weight.shape[1]
    tokens = []
    for t in range(length):
        y = torch.zeros_like(inputs[:, t])
        for k in range(width):
            source = t + width - 1 - k if reverse else t - width + 1 + k
            if 0 <= source < length:
                y = y + taps[:, k] * inputs[:, source]
        if bias is not None:
            y = y + bias.to(state_dtype)
        tokens.append(functional.silu(y) if activation == "silu" else y)
    return (torch.stack(tokens, 1) if tokens else inputs).to(x.dtype)


def causal_conv1d_pair(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Return y (2, batch, length, channels) in the dtype of x: [0] looks back and [1] ahead."""
    back, ahead = (
        causal_conv1d(x, weight[g], None if bias is None else bias[g], activation, reverse=g == 1) for g in (0, 1)
    )
    return torch.stack((back, ahead))
