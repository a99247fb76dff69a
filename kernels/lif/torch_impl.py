"""LIF in plain PyTorch: four in-place operations per step, and one more to keep the membrane for a gradient.

The loops keep n = -v. Then `threshold_`, which keeps what lies above a bound, is the reset to zero in one pass, and
`<=` writes the spikes straight into the output; negation is exact, so n rounds as v does.
"""

from typing import Any

import torch
from torch.nn import functional

from benchd.kernels.dispatch import state_dtype
from benchd.kernels.lif.layout import with_bias

_SLOPE = 4.0


def lif(current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str) -> torch.Tensor:
    """Return the spikes of `current` (T, ...), differentiable in it through the sigmoid surrogate."""
    if torch.is_grad_enabled() and current.requires_grad:
        return _Lif.apply(current, decay, gain, threshold, reset)[0]
    if torch.compiler.is_compiling():
        return _traced(current, decay, gain, threshold, reset)[0]
    return _in_place(current, None, decay, gain, threshold, reset)


def lif_pool(
    current: torch.Tensor,
    *,
    decay: float,
    gain: float,
    threshold: float,
    reset: str,
    bias: torch.Tensor | None,
    output: str,
) -> torch.Tensor:
    """Return the spikes of current (T, B, C, H, W) + bias (C,) averaged over 2x2, with `lif`'s gradient, or counted."""
    charged = with_bias(current, bias)
    charged = charged.detach() if output == "counts" else charged
    spikes = lif(charged, decay=decay, gain=gain, threshold=threshold, reset=reset)
    pooled: torch.Tensor = functional.avg_pool2d(spikes.flatten(0, 1), 2).unflatten(0, current.shape[:2])
    return (4 * pooled).to(torch.uint8) if output == "counts" else pooled.to(current.dtype)


@torch.no_grad()
def _in_place(
    current: torch.Tensor, membranes: torch.Tensor | None, decay: float, gain: float, threshold: float, reset: str
) -> torch.Tensor:
    """Return the spikes; n before each reset goes to `membranes` (T, ...)."""
    dtype = state_dtype(current)
    n = torch.zeros_like(current[0], dtype=dtype)
    spikes = torch.empty_like(current)
    for t, (x, spike) in enumerate(zip(current, spikes, strict=True)):
        n.mul_(decay).sub_(x if gain == 1.0 else gain * x.to(dtype))
        if membranes is not None:
            membranes[t] = n
        torch.le(n, -threshold, out=spike)
        if reset == "zero":
            torch.threshold_(n, -threshold, 0.0)
        else:
            n.add_(spike, alpha=threshold)
    return spikes


def _traced(
    current: torch.Tensor, decay: float, gain: float, threshold: float, reset: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the spikes and n before each reset, both (T, ...), by ops that a compiler can fuse."""
    x = current.to(state_dtype(current))
    n = torch.zeros_like(x[0])
    membranes, spikes = [], []
    for charge in x.unbind():
        n = decay * n - (charge if gain == 1.0 else gain * charge)
        fired = n <= -threshold
        membranes.append(n)
        spikes.append(fired.to(current.dtype))  # each here: on a CPU, Inductor stores and loads bools one by one
        n = torch.where(fired, 0.0 if reset == "zero" else n + threshold, n)
    return torch.stack(spikes), torch.stack(membranes)


class _Lif(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, current: torch.Tensor, decay: float, gain: float, threshold: float, reset: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            spikes, membranes = _traced(current, decay, gain, threshold, reset)
        else:
            membranes = torch.empty_like(current, dtype=state_dtype(current))
            spikes = _in_place(current, membranes, decay, gain, threshold, reset)
        ctx.save_for_backward(membranes)
        ctx.mark_non_differentiable(membranes)
        ctx.constants = decay, gain, threshold, reset
        return spikes, membranes

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (membranes,) = ctx.saved_tensors
        return _backward(grads[0], membranes, *ctx.constants), None, None, None, None


def _backward(
    grad: torch.Tensor, membranes: torch.Tensor, decay: float, gain: float, threshold: float, reset: str
) -> torch.Tensor:
    """Return the gradient of the current: back through the reset, then the decay, one step at a time."""
    carried = torch.zeros_like(membranes[0])
    result = torch.empty_like(grad)
    for t in range(len(membranes) - 1, -1, -1):
        n = membranes[t]
        if reset == "zero":
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
