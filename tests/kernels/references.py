"""The equation of each op, which its implementations are compared with: implementation "reference" in these tests.

They compute in the dtype of the state, one step after the other, and are not meant to be fast. Those of spikes have no
gradient.
"""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.add_rms_norm.ops import Norm, norm_op
from benchd.kernels.causal_conv1d import ops as convolutions
from benchd.kernels.causal_conv1d.ops import Conv
from benchd.kernels.dispatch import state_dtype
from benchd.kernels.lif.layout import all_steps, with_bias
from benchd.kernels.lif.ops import Lif, LifPool, lif_op, lif_pool_op
from benchd.kernels.selective_scan import ops as scans
from benchd.kernels.selective_scan.ops import Bidirectional, Projection, Scan, ScanPair
from benchd.kernels.stbif.ops import Pool, StBifInputs, max_pool_delta_op, stbif_op


@norm_op.computes("reference")
def _normed(given: Norm) -> tuple[Tensor, Tensor]:
    hidden, residual, weight, eps = given
    total = _widened(hidden)
    if residual is not None:
        total = residual + total  # in the wider dtype of the two
    normed = total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(total.dtype)
    return normed.to(weight.dtype), total


@convolutions.conv_op.computes("reference")
def _conv(given: Conv) -> Tensor:
    x, weight, bias, silu, reverse = given
    tokens = _widened(x).flip(1) if reverse else _widened(x)
    padded = functional.pad(tokens.mT, (weight.shape[1] - 1, 0))
    shift = None if bias is None else bias.to(padded.dtype)
    y = functional.conv1d(padded, weight.to(padded.dtype)[:, None], shift, groups=len(weight)).mT
    y = y.flip(1) if reverse else y
    return (functional.silu(y) if silu else y).to(x.dtype)


@convolutions.pair_op.computes("reference")
def _conv_pair(given: Conv) -> Tensor:
    x, weight, bias, silu, _ = given
    return torch.stack([_conv(Conv(x, weight[g], None if bias is None else bias[g], silu, g == 1)) for g in (0, 1)])


@lif_op.computes("reference")
def _lif(given: Lif) -> Tensor:
    return _spikes(all_steps(given.current, given.repeats), *given[2:])


def _spikes(current: Tensor, decay: float, gain: float, threshold: float, subtract: bool) -> Tensor:
    x = _widened(current.detach())
    v = torch.zeros_like(x[0])
    spikes = []
    for each in x:
        v = decay * v + gain * each
        fired = v >= threshold
        v = torch.where(fired, v - threshold if subtract else 0.0, v)
        spikes.append(fired.to(current.dtype))
    return torch.stack(spikes)


@lif_pool_op.computes("reference")
def _lif_pool(given: LifPool) -> Tensor:
    current = all_steps(given.current, given.repeats)
    spikes = _spikes(with_bias(current, given.bias), *given[3:7])
    pooled: Tensor = functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, current.shape[:2])
    return (4 * pooled).to(torch.uint8) if given.counts else pooled.to(current.dtype)


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
    for each in x:
        v = v + each
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
    totals = values.double().cumsum(0).to(state_dtype(values))
    pooled = functional.max_pool2d(totals.flatten(0, 1), *given[1:]).unflatten(0, values.shape[:2])
    return pooled.diff(dim=0, prepend=torch.zeros_like(pooled[:1])).to(values.dtype)


@scans.scan_op.computes("reference")
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


@scans.pair_op.computes("reference")
def _scan_pair(given: ScanPair) -> Tensor:
    *tensors, softplus, form = given
    results = []
    for g in (0, 1):
        *of_one, bias = (None if tensor is None else tensor[g] for tensor in tensors)
        results.append(_scan(Scan._make((*of_one, None, bias, softplus, g == 1, form))))
    return torch.stack(results)


@scans.delta_op.computes("reference")
def _delta_projection(given: Projection) -> Tensor:
    low, weight, bias = given
    return functional.softplus(_projected(low, weight) + _widened(bias)[:, None, None]).to(low.dtype)


@scans.bidirectional_op.computes("reference")
def _bidirectional_scan(given: Bidirectional) -> Tensor:
    u, low, weight, bias, A, B, C, D, z, form = given
    forward, backward = _scan_pair(ScanPair(_widened(u), _projected(low, weight), A, B, C, D, bias, True, form))
    return ((forward + backward) * functional.silu(_widened(z))).to(u.dtype)


def _projected(low: Tensor, weight: Tensor) -> Tensor:
    return _widened(low) @ _widened(weight).mT.unsqueeze(1)


def _widened(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    return tensor.to(state_dtype(tensor if like is None else like))
