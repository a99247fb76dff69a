"""Weights as integer multiples of a unit per output channel, and as the digits that the native kernel reads."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# DEPTH and LANES of native.c
_DEPTH, _LANES = 64, 16
_TILES = 3  # same as in native.c
_LARGEST = {1: 127, 3: 127 * (2**16 + 2**8 + 1)}  # largest integer by number of digits, each at most 127
_SHIFTS = {1: (0,), 3: (16, 8, 0)}  # shifts of the digits, highest first
_SMALLEST = 2.0**-126  # smallest normal float32


class PackedDigits(NamedTuple):
    """A weight as the kernel reads it.

    `digits` are int8, (panels, K / 64, 3, 16, 16, 4): panels of output channels, blocks of the window's K codes in the
    order (kh, kw, C), tiles, groups of four codes, channels of a tile, codes of a group. With 3 digits `per_weight`,
    the tiles are the digits of 16 channels, highest first; with 1 they are 48 channels. `unit` has a float32 per output
    channel. Both are padded to whole blocks with weights of 0. `window` is (O, kh, kw) and `depth` is K.
    """

    digits: Tensor
    unit: Tensor
    window: tuple[int, int, int]
    depth: int
    per_weight: int


def whole(weight: Tensor, per_weight: int = 3) -> tuple[Tensor, Tensor]:
    """Return `weight` (O, ...) as integers in float64, and the unit (O,) in float32 that they multiply.

    A weight may be off by half the unit. With three digits the unit is a power of two, so that sums of powers of two
    are unchanged, and half of it is less than 2^-22 of the channel's largest weight; with one digit it is 1/127 of the
    largest. Raises ValueError for a weight that is not finite.
    """
    wide = weight.detach().double()
    if not wide.isfinite().all():
        raise ValueError("exact_conv2d: weights must be finite")
    by_channel = wide.flatten(1)
    unit = (by_channel.abs().amax(1) / _LARGEST[per_weight]).clamp(min=_SMALLEST)
    unit = (unit if per_weight == 1 else unit.log2().ceil().exp2()).float()
    numbers = (by_channel / unit.double()[:, None]).round()
    return numbers.view_as(wide), unit


def pack(weight: Tensor, per_weight: int = 3) -> PackedDigits:
    """Return `weight` (O, C, kh, kw) as the native kernel reads it; raise ValueError if it is not finite."""
    numbers, unit = whole(weight, per_weight)
    groups = _TILES // per_weight  # groups of 16 channels in a panel
    out_channels, depth = len(weight), math.prod(weight.shape[1:])
    by_code = numbers.permute(2, 3, 1, 0).reshape(depth, out_channels).to(torch.int64)
    by_code = functional.pad(by_code, (0, -out_channels % (groups * _LANES), 0, -depth % _DEPTH))
    shifts = _SHIFTS[per_weight]
    unsigned = by_code + sum(128 << shift for shift in shifts)
    bytes_ = torch.stack([(unsigned >> shift & 255) - 128 for shift in shifts]).to(torch.int8)
    blocks = bytes_.view(per_weight, len(by_code) // _DEPTH, _DEPTH // 4, 4, -1, groups, _LANES)
    digits = blocks.permute(4, 1, 0, 5, 2, 6, 3).flatten(2, 3).contiguous()
    unit = functional.pad(unit, (0, by_code.shape[1] - out_channels))
    return PackedDigits(digits, unit, (out_channels, *weight.shape[2:]), depth, per_weight)
