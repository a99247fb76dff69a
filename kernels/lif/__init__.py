"""Leaky integrate-and-fire neurons over all time steps at once.

    v[t] = decay * v[t-1] + gain * current[t]      v[-1] = 0
    spike[t] = v[t] >= threshold
    v[t] = 0 after a spike (reset "zero"), or v[t] - threshold * spike[t] (reset "subtract")

The first axis has T time steps; the others are independent neurons. The membrane v is kept in float32 for float16 and
bfloat16 currents and in the current's own dtype otherwise. `lif_pool` adds a bias to the current, and averages or
counts the spikes of 2x2 windows.
"""

from typing import Literal

import torch
from torch import Tensor

from benchd.kernels.dispatch import load_all, require_floats
from benchd.kernels.lif import layout
from benchd.kernels.lif.ops import Lif, LifPool, lif_op, lif_pool_op

__all__ = ["lif", "lif_pool"]

Reset = Literal["zero", "subtract"]
Output = Literal["mean", "counts"]

load_all(__name__)


def lif(
    current: Tensor,
    *,
    decay: float,
    gain: float = 1.0,
    threshold: float = 1.0,
    reset: Reset = "zero",
    implementation: str = "auto",
) -> Tensor:
    """Return the spikes, 0 or 1, in the shape and dtype of `current` (T, ...).

    A current that is the same at all steps may be expanded over T, `x.expand(T, *x.shape)`, without being copied.
    "torch" is differentiable in `current`: the derivative of the spike is that of sigmoid(4 (v - threshold)), and it
    also flows through the reset. Raises TypeError for a current that is not floating point, ValueError for one without
    time steps, an unknown reset or implementation, and dispatch.Unavailable if the implementation cannot run here, or
    lacks a gradient that is needed.
    """
    _check_steps("lif", current)
    given = Lif(*layout.one_of_equal_steps(current), decay, gain, threshold, _subtracts("lif", reset))
    return lif_op("lif", implementation, given, lambda: require_floats("lif", current=current))


def lif_pool(
    current: Tensor,
    *,
    decay: float,
    gain: float = 1.0,
    threshold: float = 1.0,
    reset: Reset = "zero",
    bias: Tensor | None = None,
    time_steps: int | None = None,
    output: Output = "mean",
    implementation: str = "auto",
) -> Tensor:
    """Return the spikes for `current` (T, B, C, H, W) averaged over 2x2, (T, B, C, H//2, W//2), in its dtype.

    The averages 0, 1/4 .. 1 are exact in every dtype; `output` "counts" returns the number of spikes instead, 0 .. 4 as
    uint8, without a gradient. An odd last row or column of neurons is not in any window. With `time_steps` = T,
    `current` is one step (B, C, H, W) that all T steps receive. `bias` (C,), one number per channel, is added to the
    current in the membrane's dtype. Gradient and errors are those of `lif`, and bias is differentiable too; also raises
    ValueError for an unknown output, a wrong number of dimensions, a side below 2, or a bias that does not fit.
    """
    if output not in {"mean", "counts"}:
        raise ValueError(f"lif_pool: output must be 'mean' or 'counts', not {output!r}")
    counts = output == "counts"
    if counts and torch.is_grad_enabled():  # counts have no gradient in any implementation
        current, bias = current.detach(), None if bias is None else bias.detach()
    if time_steps is None:
        _check_steps("lif_pool", current)
        step, repeats = layout.one_of_equal_steps(current)
    elif time_steps < 1:
        raise ValueError(f"lif_pool: time_steps must be at least 1, not {time_steps}")
    else:
        step, repeats = current, time_steps
    given = LifPool(step, bias, repeats, decay, gain, threshold, _subtracts("lif_pool", reset), counts)
    return lif_pool_op("lif_pool", implementation, given, lambda: _check_pool(given))


def _check_pool(given: LifPool) -> None:
    current, bias = layout.all_steps(given.current, given.repeats), given.bias
    require_floats("lif_pool", current=current, bias=bias)
    if current.dim() != 5 or min(current.shape[3:]) < 2:
        raise ValueError(f"lif_pool: current must be (T, B, C, H, W), H and W at least 2, not {tuple(current.shape)}")
    if bias is not None and bias.shape != current.shape[2:3]:
        raise ValueError(f"lif_pool: bias must be ({current.shape[2]},), not {tuple(bias.shape)}")


def _check_steps(op: str, current: Tensor) -> None:
    if current.dim() == 0 or current.shape[0] == 0:
        raise ValueError(f"{op}: current must be (T, ...) with T at least 1, not {tuple(current.shape)}")


def _subtracts(op: str, reset: str) -> bool:
    if reset not in {"zero", "subtract"}:
        raise ValueError(f"{op}: reset must be 'zero' or 'subtract', not {reset!r}")
    return reset == "subtract"
