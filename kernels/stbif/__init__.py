"""Signed ternary integrate-and-fire neurons with a tracer (ST-BIF) over all time steps at once.

    v[-1] = s / 2    k[-1] = 0                      s the threshold, k the tracer: the net count of spikes so far
    v[t] = v[t-1] + current[t]
    q[t] = +1 where v[t] >= s and k[t-1] < P,  -1 where v[t] < 0 and k[t-1] > N,  else 0
    v[t] = v[t] - s * q[t]    k[t] = k[t-1] + q[t]

T time steps lead; the other dimensions are neurons and never mix. P = pos_max and N = neg_min bound the tracer. Once
the input is quiet, s * k moves to s * clamp(floor(sum(current) / s + 1/2), N, P), which is what the quantiser computes
(SpikeZIP-TF, ICML 2024). v is kept in float32 for float16 and bfloat16 currents and in the current's own dtype else.
"""

from typing import Literal

import torch

from benchd.kernels.dispatch import implementation_module
from benchd.kernels.stbif import reference, torch_impl

__all__ = ["stbif"]

# imported above rather than looked up by name, so that torch.compile can trace the call
_PLAIN = {"reference": reference.stbif, "torch": torch_impl.stbif}


def stbif(
    current: torch.Tensor,
    *,
    threshold: torch.Tensor | float,
    pos_max: int,
    neg_min: int,
    output: Literal["codes", "values"] = "codes",
    implementation: str = "auto",
) -> torch.Tensor:
    """Return q as int8 ("codes", no gradient) or s * q in the dtype of `current` ("values"), shaped (T, ...).

    `threshold` is a positive float or a tensor of one element on the device of `current`. "torch" with "values" is
    differentiable in both: the comparisons v >= s and v < 0 take the derivative of sigmoid(4 x / s), which is
    (4 / s) sig (1 - sig); the bounds on the tracer are constants. Raises TypeError for a current that is not floating
    point, ValueError for one without time steps, a threshold that is not one positive number, bounds that do not hold
    0, or an unknown output or implementation, and dispatch.Unavailable where the implementation cannot run here.
    """
    _check(current, threshold, pos_max, neg_min, output)
    run = _PLAIN.get(implementation)
    if run is None:
        run = implementation_module(__name__, implementation, current.device).stbif
    return run(current, threshold=threshold, pos_max=pos_max, neg_min=neg_min, output=output)


def _check(current: torch.Tensor, threshold: torch.Tensor | float, pos_max: int, neg_min: int, output: str) -> None:
    if not current.is_floating_point():
        raise TypeError(f"stbif: current must be floating point, not {current.dtype}")
    if current.dim() == 0 or current.shape[0] == 0:
        raise ValueError(f"stbif: current must be (T, ...) with T at least 1, not {tuple(current.shape)}")
    if isinstance(threshold, torch.Tensor):
        # its value is not read: on a GPU that would wait for the device
        if threshold.numel() != 1:
            raise ValueError(f"stbif: threshold must have one element, not shape {tuple(threshold.shape)}")
    elif not threshold > 0:
        raise ValueError(f"stbif: threshold must be positive, not {threshold}")
    if not neg_min <= 0 < pos_max:
        raise ValueError(f"stbif: expected neg_min <= 0 < pos_max, not {neg_min} and {pos_max}")
    if output not in {"codes", "values"}:
        raise ValueError(f"stbif: output must be 'codes' or 'values', not {output!r}")
