"""Integer convolution of small integers, exact for 22-bit weights.

    y[n,o,i,j] = scale unit[o] (sum over c, k, l of whole[o,c,k,l] code[n,c,i*stride+k-padding,j*stride+l-padding])

x = scale * code: quantiser codes, signed spikes or spike counts. weight = unit * whole, with an error of at most
unit/2, which is less than 2^-22 of the channel's largest weight. An integer weight has three 8-bit digits, codes are
bytes, and 32-bit sums of their products need no rounding, so that y does not depend on their order or on the number of
threads. Only the complete sum is rounded, to a float. A weight with one digit, `pack(weight, 1)`, is an int8 weight:
off by up to 1/254 of the channel's largest, for a third of the work.

On a CPU the native kernel uses AMX, VNNI or Arm's dot product. It multiplies zeros as well, unlike
`benchd.kernels.spike_conv2d`; `SpikeConvolution` chooses between these kernels.
"""

from benchd.kernels.exact_conv2d.whole import PackedDigits, pack

__all__ = ["LARGEST_CODE", "MOST_PRODUCTS", "PackedDigits", "pack"]

LARGEST_CODE = 127
"""The native kernel stores a code, which may be negative, in a byte."""

MOST_PRODUCTS = (2**31 - 1) // (2**15 + 2**7)
"""This many products of a code of 1 with the upper two digits of a weight fit in 32 bits."""
