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

from benchd.kernels.exact_conv2d.whole import PackedDigits, pack

__all__ = ["LARGEST_CODE", "MOST_PRODUCTS", "PackedDigits", "pack"]

LARGEST_CODE = 127
"""The native kernel keeps a code, which may be negative, in a byte."""

MOST_PRODUCTS = (2**31 - 1) // (2**15 + 2**7)
"""So many products of a code of 1 with the upper two digits of a weight fit into 32 bits."""
