"""LIF in plain PyTorch: four in-place operations per step, and one more to keep the membrane for a gradient.

The loops keep n = -v. Then `threshold_`, which keeps values above a bound, is the reset to zero in one pass, and `<=`
writes the spikes directly to the output; negation is exact, so n rounds like v.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.dispatch import state_dtype
from benchd.kernels.lif.layout import all_steps, with_bias
from benchd.kernels.lif.ops import Lif, LifPool, lif_op, lif_pool_op

_SLOPE = 4.0


@lif_op.computes("torch")
def _lif(given: Lif) -> Tensor:
    current = all_steps(given.current, given.repeats)
    return _spikes(current, given.decay, given.gain, given.threshold, given.subtract)


def _spikes(current: Tensor, decay: float, gain: float, threshold: float, subtract: bool) -> Tensor:
    """Return the spikes for `current` (T, ...), differentiable through the sigmoid surrogate."""
    if torch.is_grad_enabled() and current.requires_grad:
        return _Lif.apply(current, decay, gain, threshold, subtract)[0]
    if torch.compiler.is_compiling():
        return _traced(current, decay, gain, threshold, subtract)[0]
    return _in_place(current, None, decay, gain, threshold, subtract)


@lif_pool_op.computes("torch")
def _lif_pool(given: LifPool) -> Tensor:
    current = all_steps(given.current, given.repeats)
    charged = with_bias(current, given.bias)
    spikes = _spikes(charged, given.decay, given.gain, given.threshold, given.subtract)
    pooled: Tensor = functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, current.shape[:2])
    return (4 * pooled).to(torch.uint8) if given.counts else pooled.to(current.dtype)


@torch.no_grad()
def _in_place(
    current: Tensor, membranes: Tensor | None, decay: float, gain: float, threshold: float, subtract: bool
) -> Tensor:
    """Return the spikes; n before each reset is written to `membranes` (T, ...)."""
    dtype = state_dtype(current)
    n = torch.zeros_like(current[0], dtype=dtype)
    spikes = torch.empty_like(current)
    for t, (x, spike) in enumerate(zip(current, spikes, strict=True)):
        n.mul_(decay).sub_(x if gain == 1.0 else gain * x.to(dtype))
        if membranes is not None:
            membranes[t] = n
        torch.le(n, -threshold, out=spike)
        if not subtract:
            torch.threshold_(n, -threshold, 0.0)
        else:
            n.add_(spike, alpha=threshold)
    return spikes


def _traced(current: Tensor, decay: float, gain: float, threshold: float, subtract: bool) -> tuple[Tensor, Tensor]:
    """Return the spikes and n before each reset, both (T, ...), using ops that a compiler can fuse."""
    x = current.to(state_dtype(current))
    n = torch.zeros_like(x[0])
    membranes, spikes = [], []
    for charge in x.unbind():
        n = decay * n - (charge if gain == 1.0 else gain * charge)
        fired = n <= -threshold
        membranes.append(n)
        # converted inside the loop, because on a CPU Inductor stores and loads bools one by one
        spikes.append(fired.to(current.dtype))
        n = torch.where(fired, n + threshold if subtract else 0.0, n)
    return torch.stack(spikes), torch.stack(membranes)


class _Lif(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, current: Tensor, decay: float, gain: float, threshold: float, subtract: bool
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            spikes, membranes = _traced(current, decay, gain, threshold, subtract)
        else:
            membranes = torch.empty_like(current, dtype=state_dtype(current))
            spikes = _in_place(current, membranes, decay, gain, threshold, subtract)
        ctx.save_for_backward(membranes)
        ctx.mark_non_differentiable(membranes)
        ctx.constants = decay, gain, threshold, subtract
        return spikes, membranes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (membranes,) = ctx.saved_tensors
        return _backward(grads[0], membranes, *ctx.constants), None, None, None, None


def _backward(grad: Tensor, membranes: Tensor, decay: float, gain: float, threshold: float, subtract: bool) -> Tensor:
    """Return the gradient of the current: back through the reset, then the decay, step by step."""
    carried = torch.zeros_like(membranes[0])
    result = torch.empty_like(grad)
    for t in range(len(membranes) - 1, -1, -1):
        n = membranes[t]
        if not subtract:
            to_spike = torch.addcmul(grad[t].to(n.dtype), carried, n)
            carried.masked_fill_(n <= -threshold, 0.0)
        else:
            to_spike = torch.sub(grad[t], carried, alpha=threshold)
        # the derivative of a sigmoid is even, so the sign of n does not matter
        sigmoid = (n + threshold).mul_(_SLOPE).sigmoid_()
        carried.addcmul_(to_spike, sigmoid.addcmul_(sigmoid, sigmoid, value=-1), value=_SLOPE)
        result[t] = carried if gain == 1.0 else gain * carried
        carried.mul_(decay)
    return result
