"""Leaky integrate-and-fire neurons over all time steps at once.

    v[t] = decay * v[t-1] + gain * current[t]      v[-1] = 0
    spike[t] = v[t] >= threshold
    v[t] = 0 where spiked (reset "zero"), or v[t] - threshold * spike[t] (reset "subtract")

T time steps lead; the other dimensions are neurons and never mix. The membrane v is kept in float32 for float16 and
bfloat16 currents and in the current's own dtype otherwise.
"""

from typing import Literal

import torch

from benchd.kernels.dispatch import implementation_module
from benchd.kernels.lif import reference, torch_impl

__all__ = ["lif"]

# imported above rather than looked up by name, so that torch.compile can trace the call
_PLAIN = {"reference": reference.lif, "torch": torch_impl.lif}


def lif(
    current: torch.Tensor,
    *,
    decay: float,
    gain: float = 1.0,
    threshold: float = 1.0,
    reset: Literal["zero", "subtract"] = "zero",
    implementation: str = "auto",
) -> torch.Tensor:
    """Return the spikes, 0 or 1, in the shape and dtype of `current` (T, ...).

    "torch" is differentiable in `current`: the derivative of the spike is that of sigmoid(4 (v - threshold)), and it
    flows through the reset as well. Raises TypeError for a current that is not floating point, ValueError for one
    without time steps, an unknown reset or implementation, and dispatch.Unavailable where the implementation cannot
    run here.
    """
    _check(current, reset)
    run = _PLAIN.get(implementation)
    if run is None:
        run = implementation_module(__name__, implementation, current.device).lif
    return run(current, decay=decay, gain=gain, threshold=threshold, reset=reset)


def _check(current: torch.Tensor, reset: str) -> None:
    if not current.is_floating_point():
        raise TypeError(f"lif: current must be floating point, not {current.dtype}")
    if current.dim() == 0 or current.shape[0] == 0:
        raise ValueError(f"lif: current must be (T, ...) with T at least 1, not {tuple(current.shape)}")
    if reset not in {"zero", "subtract"}:
        raise ValueError(f"lif: reset must be 'zero' or 'subtract', not {reset!r}")
