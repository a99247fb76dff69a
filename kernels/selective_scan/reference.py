"""The equation of `benchd.kernels.selective_scan` token by token: the oracle of the others, not meant to be fast."""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.dispatch import state_dtype
from benchd.kernels.selective_scan.ops import (
    Bidirectional,
    Projection,
    Scan,
    ScanPair,
    bidirectional_op,
    delta_op,
    pair_op,
    scan_op,
)


@scan_op.computes("reference")
def _scan(given: Scan) -> Tensor:
    u, delta, A, B, C = (_widened(tensor, given.u) for tensor in given[:5])
    if given.bias is not None:
        delta = delta + _widened(given.bias, u)
    if given.softplus:
        delta = functional.softplus(delta)
    h = u.new_zeros(u.shape[0], *A.shape)
    y = [torch.zeros_like(u[:, 0])] * u.shape[1] if u.shape[1] else []
    for t in reversed(range(u.shape[1])) if given.reverse else range(u.shape[1]):
        h = (delta[:, t, :, None] * A).exp() * h + (delta[:, t] * u[:, t])[..., None] * B[:, t, None, :]
        y[t] = (h * C[:, t, None, :]).sum(-1)
        if given.D is not None:
            y[t] = y[t] + _widened(given.D, u) * u[:, t]
        if given.z is not None:
            y[t] = y[t] * functional.silu(_widened(given.z[:, t], u))
    return (torch.stack(y, 1) if y else u).to(given.u.dtype)


@pair_op.computes("reference")
def _pair(given: ScanPair) -> Tensor:
    *tensors, softplus, form = given
    scans = []
    for g in (0, 1):
        *of_one, bias = (None if tensor is None else tensor[g] for tensor in tensors)
        scans.append(_scan(Scan._make((*of_one, None, bias, softplus, g == 1, form))))
    return torch.stack(scans)


@delta_op.computes("reference")
def _delta_projection(given: Projection) -> Tensor:
    low, weight, bias = given
    return functional.softplus(_projected(low, weight) + _widened(bias)[:, None, None]).to(low.dtype)


@bidirectional_op.computes("reference")
def _bidirectional_scan(given: Bidirectional) -> Tensor:
    u, low, weight, bias, A, B, C, D, z, form = given
    forward, backward = _pair(ScanPair(_widened(u), _projected(low, weight), A, B, C, D, bias, True, form))
    return ((forward + backward) * functional.silu(_widened(z))).to(u.dtype)


def _projected(low: Tensor, weight: Tensor) -> Tensor:
    return _widened(low) @ _widened(weight).mT.unsqueeze(1)


def _widened(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    return tensor.to(state_dtype(tensor if like is None else like))
