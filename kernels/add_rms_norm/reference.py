"""The equation of `benchd.kernels.add_rms_norm` row by row: the oracle of the others, not meant to be fast."""

import itertools

import torch
from torch import Tensor

from benchd.kernels.add_rms_norm.ops import Norm, norm_op


@norm_op.computes("reference")
def _normed(given: Norm) -> tuple[Tensor, Tensor]:
    hidden, residual, weight, eps = given
    total = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if residual is not None:
        total = residual + total  # in the wider dtype of the two
    scale = weight.to(total.dtype)
    normed = torch.empty_like(total)
    for row in itertools.product(*map(range, total.shape[:-1])):
        mean = total[row].square().sum() / len(scale)
        normed[row] = total[row] / (mean + eps).sqrt() * scale
    return normed.to(weight.dtype), total
