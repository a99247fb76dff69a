"""Convolution of small whole numbers in integers, exact for weights of 22 bits.

    y[n,o,i,j] = scale unit[o] (sum over c, k, l of whole[o,c,k,l] code[n,c,i*stride+k-padding,j*stride+l-padding])

x = scale * code: the codes of quantisers, spikes of either sign, counts of spikes. weight = unit * whole up to unit/2,
which is less than 2^-22 of the channel's largest weight. A whole weight is three digits of 8 bits, codes are bytes, and
sums of their products in 32 bits have no rounding, so that y does not depend on their order or on the number of
threads. Only a whole sum is rounded, to a float. A weight of one digit, `pack(weight, 1)`, is an int8 weight, off by up
to 1/254 of the channel's largest, at a third of the work.

On a CPU the native kernel uses AMX, VNNI or Arm's dot product. It multiplies zeros as well, unlike
`benchd.kernels.spike_conv2d`; `SpikeConvolution` chooses between the two.
"""

import math

import torch
from torch import Tensor

from benchd.kernels.dispatch import Unavailable, chosen, require_convolution
from benchd.kernels.exact_conv2d import native, reference, torch_impl
from benchd.kernels.exact_conv2d.whole import Convolution, PackedDigits, pack

__all__ = ["LARGEST_CODE", "MOST_PRODUCTS", "PackedDigits", "exact_conv2d", "pack"]

LARGEST_CODE = 127
"""The native kernel keeps a code, which may be negative, in a byte."""

MOST_PRODUCTS = (2**31 - 1) // (2**15 + 2**7)
"""So many products of a code of 1 with the upper two digits of a weight fit into 32 bits."""

_FUNCTIONS = {"reference": reference.exact_conv2d, "torch": torch_impl.exact_conv2d, "native": native.exact_conv2d}


def exact_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | float,
    largest: int,
    stride: int = 1,
    padding: int = 0,
    packed: PackedDigits | None = None,
    implementation: str = "auto",
) -> Tensor | None:
    """Return y (N, O, H', W') in float32, channels last from "native", or None.

    x (N, C, H, W) in float32 is fastest channels last, weight is (O, C, kh, kw), bias (O,), scale a positive number or
    a tensor of one element; `packed` is `pack(weight)`, or `pack(weight, 1)` for int8 weights. It is None if a number
    of x is not `scale` times a whole number up to `largest`. Inference only. Raises ValueError for a wrong shape, a
    weight that is not finite or sums that could overflow (see `MOST_PRODUCTS`), TypeError for another dtype, and
    dispatch.Unavailable where the implementation cannot run.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"exact_conv2d: x must be float32, not {x.dtype}")
    if stride < 1 or padding < 0 or not 1 <= largest <= LARGEST_CODE:
        given = f"{stride}, {padding} and {largest}"
        raise ValueError(
            f"exact_conv2d: expected stride >= 1, padding >= 0 and codes up to {LARGEST_CODE}, not {given}"
        )
    require_convolution("exact_conv2d", x, weight, bias, padding)
    if largest * math.prod(weight.shape[1:]) > MOST_PRODUCTS:
        raise ValueError(f"exact_conv2d: sums of codes up to {largest} times {tuple(weight.shape)} could overflow")
    function = _FUNCTIONS.get(chosen(implementation, x.device))
    if function is None:
        raise Unavailable("exact_conv2d has no 'triton' implementation here: this version has none")
    digits = pack(weight) if packed is None else packed
    step = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return function(Convolution(x, weight, bias, digits, step, largest, stride, padding))
