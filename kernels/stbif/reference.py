"""The equation of `benchd.kernels.stbif` as a loop: the oracle of the other implementations, not meant to be fast."""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.stbif.ops import Pool, StBifInputs, max_pool_delta_op, stbif_op


@stbif_op.computes("reference")
@torch.no_grad()
def _stbif(given: StBifInputs) -> Tensor:
    current, bias, residual, threshold, pos_max, neg_min, codes = given
    s = threshold.reshape(())
    x = current.to(s.dtype)
    if bias is not None:
        x = x + bias.to(s.dtype).reshape(len(bias), 1, -1, *[1] * (x.dim() - 3))
    if residual is not None:
        x = x + residual.to(s.dtype)
    v = torch.zeros_like(x[0]) + s / 2
    k = torch.zeros_like(x[0])
    spikes = []
    for t in range(x.shape[0]):
        v = v + x[t]
        q = torch.zeros_like(v)
        q[(v >= s) & (k < pos_max)] = 1.0
        q[(v < 0) & (k > neg_min)] = -1.0
        v = v - s * q
        k = k + q
        spikes.append(q)
    q = torch.stack(spikes)
    return q.to(torch.int8) if codes else (s * q).to(current.dtype)


@max_pool_delta_op.computes("reference")
@torch.no_grad()
def _max_pool_delta(given: Pool) -> Tensor:
    values = given.values
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros_like(values[0], dtype=torch.float64)
    before: Tensor | float = 0.0
    deltas = []
    for step in values:
        total = total + step
        pooled = functional.max_pool2d(total.to(wide), *given[1:])
        deltas.append((pooled - before).to(values.dtype))
        before = pooled
    return torch.stack(deltas)
