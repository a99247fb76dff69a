"""The sum of a residual stream and a layer's output, and its root mean square norm, from a single read.

    residual'[d] = residual[d] + hidden[d]
    normed[d] = residual'[d] / sqrt(sum over d < dim of residual'[d]^2 / dim + eps) * weight[d]

Rows of dim numbers are independent. residual' and all sums are in float32, or float64 if hidden or the residual is, and
normed is in the dtype of the weight (Zhang and Sennrich, 2019, without their bias).
"""

from torch import Tensor

from benchd.kernels.add_rms_norm.ops import Norm, norm_op
from benchd.kernels.dispatch import load_all, require_floats

__all__ = ["add_rms_norm"]

load_all(__name__)


def add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float = 1e-5, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (normed, residual'), both (..., dim).

    hidden and residual (..., dim); without a residual, residual' is hidden, widened; weight (dim,). "torch" is
    differentiable in every tensor, and with nothing to add or widen it returns hidden itself as residual'. Raises
    TypeError for a tensor that is not floating point, ValueError for a wrong shape, a second device or an unknown
    implementation, and dispatch.Unavailable if the implementation cannot run here: "native" and "triton" support
    neither gradients nor float64, and "triton" has a limit of 8192 numbers per row.
    """
    given = Norm(hidden, residual, weight, eps)
    return norm_op("add_rms_norm", implementation, given, lambda: _check(hidden, residual, weight))


def _check(hidden: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    require_floats("add_rms_norm", hidden=hidden, residual=residual, weight=weight)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"add_rms_norm: hidden must be (..., dim), dim at least 1, not {tuple(hidden.shape)}")
    if residual is not None and residual.shape != hidden.shape:
        raise ValueError(f"add_rms_norm: residual must be {tuple(hidden.shape)}, not {tuple(residual.shape)}")
    if weight.shape != hidden.shape[-1:]:
        raise ValueError(f"add_rms_norm: weight must be ({hidden.shape[-1]},), not {tuple(weight.shape)}")
