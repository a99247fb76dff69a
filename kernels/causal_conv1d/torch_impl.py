"""The short convolution in plain PyTorch: one shifted multiply-add per tap, channels last, as required by the scan.

On a CPU at batch 1 it takes a third of the time of conv1d, which requires channels first. In place, nothing is padded
or copied; the padded form is for gradients, which in-place writes to slices make slow, and for compilers.
"""

import torch
from torch import Tensor
from torch.nn import functional

from benchd.kernels.causal_conv1d.ops import Conv, conv_op, pair_op


@conv_op.computes("torch")
def _conv(given: Conv) -> Tensor:
    x, weight, bias, silu, reverse = given
    inputs, taps, shift = _widened(x, weight, bias)
    if _traced_or_learning(inputs, taps, shift):
        return _activated(_padded(inputs, taps, shift, reverse), silu).to(x.dtype)
    y = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    _in_place(y, inputs, taps, shift, reverse)
    return _activated(y, silu, inplace=True).to(x.dtype)


@pair_op.computes("torch")
def _pair(given: Conv) -> Tensor:
    x, weight, bias, silu, _ = given
    inputs, taps, shift = _widened(x, weight, bias)
    if _traced_or_learning(inputs, taps, shift):
        y = torch.stack([_padded(inputs, taps[g], shift[g], reverse=g == 1) for g in (0, 1)])
        return _activated(y, silu).to(x.dtype)
    y = inputs.new_empty(2, *x.shape)
    for g in (0, 1):
        _in_place(y[g], inputs, taps[g], shift[g], reverse=g == 1)
    return _activated(y, silu, inplace=True).to(x.dtype)


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the taps (..., width, channels) and the shift (..., channels) in the dtype of the sums."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(dtype).mT.contiguous()
    return x.to(dtype), taps, torch.zeros_like(taps[..., 0, :]) if bias is None else bias.to(dtype)


def _traced_or_learning(*tensors: Tensor) -> bool:
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return learns or torch.compiler.is_compiling()


def _in_place(y: Tensor, x: Tensor, taps: Tensor, shift: Tensor, reverse: bool) -> None:
    """Write shift (channels,) plus the convolution of x with taps (width, channels) to y, shaped like x."""
    length, width = x.shape[1], len(taps)
    torch.addcmul(shift, x, taps[-1], out=y)
    for distance in range(1, min(width, length)):
        earlier, later = x[:, : length - distance], x[:, distance:]
        target = y[:, : length - distance] if reverse else y[:, distance:]
        target.addcmul_(later if reverse else earlier, taps[-1 - distance])


def _padded(x: Tensor, taps: Tensor, shift: Tensor, reverse: bool) -> Tensor:
    """Return the result of `_in_place`, summed in the same order."""
    length, width = x.shape[1], len(taps)
    padded = functional.pad(x, (0, 0, 0, width - 1) if reverse else (0, 0, width - 1, 0))
    y = shift
    for k in reversed(range(width)):
        start = width - 1 - k if reverse else k
        y = torch.addcmul(y, padded[:, start : start + length], taps[k])
    return y


def _activated(y: Tensor, silu: bool, *, inplace: bool = False) -> Tensor:
    return functional.silu(y, inplace=inplace) if silu else y
