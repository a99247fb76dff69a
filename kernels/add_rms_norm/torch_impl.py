"""The sum and its norm in plain PyTorch: an addition and the library's own norm."""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.add_rms_norm.ops import Norm, norm_op


@norm_op.computes("torch")
def _normed(given: Norm) -> tuple[Tensor, Tensor]:
    hidden, residual, weight, eps = given
    if residual is None:
        total = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    else:
        total = residual.to(torch.promote_types(residual.dtype, torch.float32)) + hidden
    normed = functional.rms_norm(total, total.shape[-1:], weight.to(total.dtype), eps)
    return normed.to(weight.dtype), total
