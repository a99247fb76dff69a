"""The sum and its norm as a torch op; the kernels' op is for inference, with sums in float32."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels.op import op


class Norm(NamedTuple):
    """hidden and residual (..., dim), weight (dim,)."""

    hidden: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float


@op("add_rms_norm", float32=("native", "triton"), summed=2)
def norm_op(given: Norm) -> tuple[Tensor, Tensor]:
    """Allocate normed and residual', both (..., dim)."""
    new = given.hidden.new_empty
    return new(given.hidden.shape, dtype=given.weight.dtype), new(given.hidden.shape, dtype=torch.float32)
