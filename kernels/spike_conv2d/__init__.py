"""Convolution of spikes that skips their zeros on a CPU.

    y[n,o,i,j] = bias[o] + sum over c, k, l of weight[o,c,k,l] x[n,c,i*stride+k-padding,j*stride+l-padding]

N images of C channels and H x W pixels become O channels of H' x W'; x is 0 outside an image. For any x it equals
conv2d, except for the order of its float32 sums. On a CPU the native kernel multiplies only nonzeros, so that its time
depends on the number of spikes. The table gives its time divided by that of oneDNN's dense convolution, both with
packed weights, for several shares of nonzeros in x:

    Zen 4, AVX-512, 2 threads   0 %    5 %   20 %   50 %  100 %
    N 512, 64 -> 128, 16 x 16  0.17   0.28   0.49   0.96    2.3
    N 8, 64 -> 64, 8 x 8       0.44   0.53   0.71    1.1    2.1
    N 8, 256 -> 256, 2 x 2     0.49   0.58   0.66   0.95    1.3

    Zen 4, AVX2, 1 thread       0 %    5 %   20 %   50 %  100 %
    N 512, 64 -> 128, 16 x 16  0.22   0.42   0.54   0.91    1.8
    N 8, 64 -> 64, 8 x 8       0.17   0.28   0.45   0.93    1.9
    N 8, 256 -> 256, 2 x 2     0.16   0.27   0.31   0.56    0.84

Above about half, a dense convolution is faster.
"""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.dispatch import Unavailable, chosen, require_convolution, require_floats
from benchd.kernels.spike_conv2d import native
from benchd.kernels.spike_conv2d.native import pack
from benchd.kernels.spike_conv2d.packed_weights import PackedWeight, skips_zeros_in

__all__ = ["PackedWeight", "pack", "skips_zeros_in", "spike_conv2d"]


def spike_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    packed: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return y (N, O, H', W') in the dtype of x, channels last from "native".

    x (N, C, H, W) is fastest channels last; weight (O, C, kh, kw); bias (O,). `packed` is `pack(weight)`, for callers
    that keep it; without it "native" packs in each call. "native" skips the zeros of x, even those that meet an
    infinite weight; a NaN in x is kept. "torch" is differentiable. Raises TypeError for a tensor that is not floating
    point, ValueError for a wrong shape or a second device, and dispatch.Unavailable if the implementation cannot run
    here: "native" supports neither gradients nor float64, and a GPU only has "torch", because skipping zeros would
    leave its matrix units idle.
    """
    require_floats("spike_conv2d", x=x, weight=weight, bias=bias, packed=packed)
    if stride < 1 or padding < 0:
        raise ValueError(f"spike_conv2d: expected stride >= 1 and padding >= 0, not {stride} and {padding}")
    require_convolution("spike_conv2d", x, weight, bias, padding)
    if packed is not None and (packed.dtype, packed.shape) != (torch.float32, native.packed_shape(weight)):
        raise ValueError(f"spike_conv2d: packed must be pack(weight), not {packed.dtype} {tuple(packed.shape)}")
    which = chosen(implementation, x.device)
    if which == "torch":
        return functional.conv2d(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), stride, padding)
    if which == "triton":
        raise Unavailable("spike_conv2d has no 'triton' implementation: on a GPU use implementation='torch', cuDNN's")
    return native.spike_conv2d(x, weight, bias, stride, padding, packed)
