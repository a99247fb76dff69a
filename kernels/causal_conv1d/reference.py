"""The equation of `benchd.kernels.causal_conv1d` token by token: the oracle of the others, not meant to be fast."""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.causal_conv1d.ops import Conv, conv_op, pair_op
from benchd.kernels.dispatch import state_dtype


@conv_op.computes("reference")
def _conv(given: Conv) -> Tensor:
    x, weight, bias, silu, reverse = given
    inputs, taps = x.to(state_dtype(x)), weight.to(state_dtype(x))
    length, width = x.shape[1], weight.shape[1]
    tokens = []
    for t in range(length):
        y = torch.zeros_like(inputs[:, t])
        for k in range(width):
            source = t + width - 1 - k if reverse else t - width + 1 + k
            if 0 <= source < length:
                y = y + taps[:, k] * inputs[:, source]
        if bias is not None:
            y = y + bias.to(y.dtype)
        tokens.append(functional.silu(y) if silu else y)
    return (torch.stack(tokens, 1) if tokens else inputs).to(x.dtype)


@pair_op.computes("reference")
def _pair(given: Conv) -> Tensor:
    x, weight, bias, silu, _ = given
    return torch.stack([_conv(Conv(x, weight[g], None if bias is None else bias[g], silu, g == 1)) for g in (0, 1)])
