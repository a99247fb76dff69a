"""The fused parts of a Vim layer in plain PyTorch and the ops that they combine."""

from torch import Tensor
from torch.nn import functional

from benchd.kernels.add_rms_norm import add_rms_norm
from benchd.kernels.causal_conv1d import causal_conv1d_pair
from benchd.kernels.selective_scan import delta_projection
from benchd.kernels.vim_layer.ops import InConv, OutNorm, Steps, in_conv_op, out_norm_op, steps_op


@in_conv_op.computes("torch")
def _in_conv(given: InConv) -> tuple[Tensor, Tensor]:
    normed, weight, taps, shift = given
    x, z = functional.linear(normed, weight).chunk(2, dim=-1)
    return causal_conv1d_pair(x, taps, shift, implementation="torch"), z.contiguous()


@steps_op.computes("torch")
def _steps(given: Steps) -> tuple[Tensor, Tensor, Tensor]:
    u, weight, dt_weight, dt_bias, states = given
    sizes = [states, states, dt_weight.shape[-1], weight.shape[-1] - 2 * states - dt_weight.shape[-1]]
    B, C, low, _ = (u @ weight[:, None]).split(sizes, dim=-1)
    return delta_projection(low, dt_weight, dt_bias, implementation="torch"), B.float(), C.float()


@out_norm_op.computes("torch")
def _out_norm(given: OutNorm) -> tuple[Tensor, Tensor]:
    y, z, weight, residual, norm, eps = given
    hidden = functional.linear((y[0] + y[1]) * functional.silu(z), weight)
    return add_rms_norm(hidden, residual, norm, eps=eps, implementation="torch")
