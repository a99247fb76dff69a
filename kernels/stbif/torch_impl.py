"""ST-BIF in plain PyTorch: seven in-place operations per step, and one more to keep the membrane for a gradient.

With k inside its bounds, the two gated comparisons are one clamp: k[t] = clamp(k[t-1] + clamp(floor(v / s), -1, 1), N,
P). A correctly rounded v / s reaches 1 exactly where v reaches s. Compilers may divide less carefully, so what they
trace compares.
"""

from typing import Any

import torch
from torch.nn import functional

from benchd.kernels.stbif.layout import threshold_of


def stbif(
    current: torch.Tensor, *, threshold: torch.Tensor | float, pos_max: int, neg_min: int, output: str
) -> torch.Tensor:
    """Return codes (int8) or values of `current` (T, ...); values are differentiable in current and threshold."""
    s = threshold_of(threshold, current).reshape(())
    if output == "values" and torch.is_grad_enabled() and (current.requires_grad or s.requires_grad):
        return _StBif.apply(current, s, pos_max, neg_min)[0]
    if torch.compiler.is_compiling():
        codes = _traced(current.detach(), s.detach(), pos_max, neg_min)[0]
        return codes.to(torch.int8) if output == "codes" else (s * codes).to(current.dtype)
    return _in_place(current, None, s, pos_max, neg_min, output)


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
    """Return codes or values of current + bias + residual (T, B, C, ...); values are differentiable in all of them."""
    if bias is None and residual is None:
        return stbif(current, threshold=threshold, pos_max=pos_max, neg_min=neg_min, output=output)
    x = current.to(torch.promote_types(current.dtype, torch.float32))
    if bias is not None:
        x = x + bias.to(x.dtype).reshape(len(bias), 1, -1, *[1] * (x.dim() - 3))
    if residual is not None:
        x = x + residual.to(x.dtype)
    spikes = stbif(x, threshold=threshold, pos_max=pos_max, neg_min=neg_min, output=output)
    return spikes if output == "codes" else spikes.to(current.dtype)


def max_pool_delta(values: torch.Tensor, *, kernel_size: int, stride: int, padding: int) -> torch.Tensor:
    """Return the differenced pool of the running sum of `values` (T, B, C, H, W), differentiable."""
    pooled = functional.max_pool2d(running_sums(values).flatten(0, 1), kernel_size, stride, padding)
    steps = pooled.unflatten(0, values.shape[:2])
    return torch.cat([steps[:1], steps.diff(dim=0)]).to(values.dtype)


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of `values` (T, ...) up to each step, summed in float64 and rounded once to at least float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    # a CPU's cumsum carries float64 by itself, a GPU's only the type of its result
    return values.cumsum(0, dtype=torch.float64).to(dtype) if values.is_cuda else values.cumsum(0, dtype=dtype)


@torch.no_grad()
def _in_place(
    current: torch.Tensor, membranes: torch.Tensor | None, s: torch.Tensor, pos_max: int, neg_min: int, output: str
) -> torch.Tensor:
    """Return codes or values; v before each spike goes to `membranes` (T, ...).

    A NaN in v makes values NaN, where a comparison gives 0: to replace it would be one more operation per step.
    """
    v = torch.empty_like(current[0], dtype=s.dtype).copy_(s / 2)
    k, previous = torch.empty_like(v), torch.zeros_like(v)
    spikes = torch.empty_like(current, dtype=torch.int8 if output == "codes" else current.dtype)
    for t, (x, spike) in enumerate(zip(current, spikes, strict=True)):
        v.add_(x)
        if membranes is not None:
            membranes[t] = v
        torch.div(v, s, out=k).floor_().clamp_(-1, 1).add_(previous).clamp_(neg_min, pos_max)
        q = torch.sub(k, previous, out=previous)
        _ = spike.copy_(q) if output == "codes" else torch.mul(q, s, out=spike)
        v.addcmul_(q, s, value=-1)
        k, previous = q, k
    return spikes


def _traced(current: torch.Tensor, s: torch.Tensor, pos_max: int, neg_min: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the membrane v before each spike, both (T, ...), by ops that a compiler can fuse.

    The codes stay in floating point, which every runtime that an exported graph may meet can compute with.
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
    def forward(
        ctx: Any, current: torch.Tensor, s: torch.Tensor, pos_max: int, neg_min: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            codes, membranes = _traced(current, s, pos_max, neg_min)
            codes = codes.to(torch.int8)
        else:
            membranes = torch.empty_like(current, dtype=s.dtype)
            codes = _in_place(current, membranes, s, pos_max, neg_min, "codes")
        ctx.save_for_backward(codes, membranes, s)
        ctx.mark_non_differentiable(codes, membranes)
        ctx.bounds = pos_max, neg_min
        return (s * codes).to(current.dtype), codes, membranes

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_backward(grads[0], *ctx.saved_tensors, *ctx.bounds), None, None


def _backward(
    grad: torch.Tensor, codes: torch.Tensor, membranes: torch.Tensor, s: torch.Tensor, pos_max: int, neg_min: int
) -> tuple[torch.Tensor, torch.Tensor]:
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


def _surrogate(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    sigmoid = (x * (4 / s)).sigmoid_()
    return sigmoid.addcmul_(sigmoid, sigmoid, value=-1).mul_(4 / s)
