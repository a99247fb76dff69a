"""ST-BIF in plain PyTorch: seven in-place operations per step, and one more to keep the membrane for a gradient.

With k within its bounds, the two gated comparisons are one clamp: k[t] = clamp(k[t-1] + clamp(floor(v / s), -1, 1), N,
P). A correctly rounded v / s reaches 1 exactly when v reaches s. Compilers may divide less precisely, so the traced
form uses comparisons.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.stbif.ops import Pool, StBifInputs, max_pool_delta_op, stbif_op


@stbif_op.computes("torch")
def _stbif(given: StBifInputs) -> Tensor:
    current, bias, residual, threshold, pos_max, neg_min, codes = given
    if bias is None and residual is None:
        return _spikes(current, threshold.reshape(()), pos_max, neg_min, codes)
    x = current.to(torch.promote_types(current.dtype, torch.float32))
    if bias is not None:
        x = x + bias.to(x.dtype).reshape(len(bias), 1, -1, *[1] * (x.dim() - 3))
    if residual is not None:
        x = x + residual.to(x.dtype)
    spikes = _spikes(x, threshold.reshape(()), pos_max, neg_min, codes)
    return spikes if codes else spikes.to(current.dtype)


def _spikes(current: Tensor, s: Tensor, pos_max: int, neg_min: int, codes: bool) -> Tensor:
    """Return codes (int8) or values for `current` (T, ...); values are differentiable in current and threshold."""
    if not codes and torch.is_grad_enabled() and (current.requires_grad or s.requires_grad):
        return _StBif.apply(current, s, pos_max, neg_min)[0]
    if torch.compiler.is_compiling():
        q = _traced(current.detach(), s.detach(), pos_max, neg_min)[0]
        return q.to(torch.int8) if codes else (s * q).to(current.dtype)
    return _in_place(current, None, s, pos_max, neg_min, codes)


@max_pool_delta_op.computes("torch")
def _max_pool_delta(given: Pool) -> Tensor:
    values = given.values
    pooled = functional.max_pool2d(running_sums(values).flatten(0, 1), *given[1:])
    steps = pooled.unflatten(0, values.shape[:2])
    return torch.cat([steps[:1], steps.diff(dim=0)]).to(values.dtype)


def running_sums(values: Tensor) -> Tensor:
    """Return the sums of `values` (T, ...) up to each step, summed in float64 and rounded once to at least float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    # cumsum accumulates in float64 on a CPU, but in the type of its result on a GPU
    return values.cumsum(0, dtype=torch.float64).to(dtype) if values.is_cuda else values.cumsum(0, dtype=dtype)


@torch.no_grad()
def _in_place(current: Tensor, membranes: Tensor | None, s: Tensor, pos_max: int, neg_min: int, codes: bool) -> Tensor:
    """Return codes or values; v before each spike is written to `membranes` (T, ...).

    A NaN in v makes values NaN, where a comparison gives 0: replacing it would take another operation per step.
    """
    v = torch.empty_like(current[0], dtype=s.dtype).copy_(s / 2)
    k, previous = torch.empty_like(v), torch.zeros_like(v)
    spikes = torch.empty_like(current, dtype=torch.int8 if codes else current.dtype)
    for t, (x, spike) in enumerate(zip(current, spikes, strict=True)):
        v.add_(x)
        if membranes is not None:
            membranes[t] = v
        torch.div(v, s, out=k).floor_().clamp_(-1, 1).add_(previous).clamp_(neg_min, pos_max)
        q = torch.sub(k, previous, out=previous)
        _ = spike.copy_(q) if codes else torch.mul(q, s, out=spike)
        v.addcmul_(q, s, value=-1)
        k, previous = q, k
    return spikes


def _traced(current: Tensor, s: Tensor, pos_max: int, neg_min: int) -> tuple[Tensor, Tensor]:
    """Return the codes and the membrane v before each spike, both (T, ...), using ops that a compiler can fuse.

    The codes stay in floating point, which every runtime for an exported graph supports.
    """
    x = current.to(s.dtype)
    v = s / 2
    k = torch.zeros_like(x[0])
    codes, membranes = [], []
    for charge in x.unbind():
        v = v + charge
        membranes.append(v)
        q = ((v >= s) & (k < pos_max)).to(x.dtype) - ((v < 0) & (k > neg_min)).to(x.dtype)
        codes.append(q)
        v = v - s * q
        k = k + q
    return torch.stack(codes), torch.stack(membranes)


class _StBif(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, current: Tensor, s: Tensor, pos_max: int, neg_min: int) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling():
            codes, membranes = _traced(current, s, pos_max, neg_min)
            codes = codes.to(torch.int8)
        else:
            membranes = torch.empty_like(current, dtype=s.dtype)
            codes = _in_place(current, membranes, s, pos_max, neg_min, codes=True)
        ctx.save_for_backward(codes, membranes, s)
        ctx.mark_non_differentiable(codes, membranes)
        ctx.bounds = pos_max, neg_min
        return (s * codes).to(current.dtype), codes, membranes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grads[0], *ctx.saved_tensors, *ctx.bounds), None, None


def _backward(
    grad: Tensor, codes: Tensor, membranes: Tensor, s: Tensor, pos_max: int, neg_min: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of current and threshold; `carried` is that of v after the spike, step by step backwards."""
    carried = torch.zeros_like(membranes[0])
    to_s = torch.zeros_like(carried)
    k = codes.sum(0, dtype=torch.int32)
    result = torch.empty_like(grad)
    for t in range(len(codes) - 1, -1, -1):
        q, v = codes[t], membranes[t]
        k.sub_(q)
        fires = _surrogate(v - s, s).mul_(k < pos_max)
        retracts = _surrogate(v, s).mul_(k > neg_min)
        to_value = grad[t] - carried
        to_s.addcmul_(to_value, q.to(v.dtype))
        to_code = to_value.mul_(s)
        to_s.addcmul_(to_code, fires, value=-1)
        carried.addcmul_(to_code, fires.add_(retracts))
        result[t] = carried
    return result, (to_s + carried / 2).sum()


def _surrogate(x: Tensor, s: Tensor) -> Tensor:
    sigmoid = (x * (4 / s)).sigmoid_()
    return sigmoid.addcmul_(sigmoid, sigmoid, value=-1).mul_(4 / s)
