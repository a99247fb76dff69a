"""Weights as whole numbers of a unit, one per output channel, and as the digits that the native kernel reads."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

# DEPTH and LANES of native.c
_DEPTH, _LANES = 64, 16
_LARGEST = 127 * (2**16 + 2**8 + 1)  # with each of its digits at most 127
_SHIFTS = (16, 8, 0)  # of the digits, from the highest
_SMALLEST = 2.0**-126  # normal float32


class Digits(NamedTuple):
    """A weight as the kernel reads it.

    `digits` are int8, (O / 16, K / 64, 3, 16, 16, 4): blocks of output channels, blocks of the window's
    K codes in the order (kh, kw, C), digits from the highest, fours of codes, channels, a code of four. `unit` has a
    float32 for each output channel. Both are filled up to whole blocks with weights of 0. `window` is (O, kh, kw) and
    `depth` is K.
    """

    digits: torch.Tensor
    unit: torch.Tensor
    window: tuple[int, int, int]
    depth: int


def whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `weight` (O, ...) as whole numbers in float64, and the unit (O,) in float32 that each is times.

    The unit is a power of two, so that sums of powers of two stay what they are, and half of it, which a weight may be
    off by, is less than 2^-22 of the channel's largest. Raises ValueError for a weight that is not finite.
    """
    wide = weight.detach().double()
    if not wide.isfinite().all():
        raise ValueError("exact_conv2d: a weight that is not finite is no whole number of any unit")
    by_channel = wide.flatten(1)
    unit = (by_channel.abs().amax(1) / _LARGEST).clamp(min=_SMALLEST).log2().ceil().exp2().float()
    numbers = (by_channel / unit.double()[:, None]).round()
    return numbers.view_as(wide), unit


def pack(weight: torch.Tensor) -> Digits:
    """Return `weight` (O, C, kh, kw) as the native kernel reads it; raise ValueError if it is not finite."""
    numbers, unit = whole(weight)
    out_channels, depth = len(weight), math.prod(weight.shape[1:])
    by_code = numbers.permute(2, 3, 1, 0).reshape(depth, out_channels).to(torch.int64)
    by_code = functional.pad(by_code, (0, -out_channels % _LANES, 0, -depth % _DEPTH))
    unsigned = by_code + sum(128 << shift for shift in _SHIFTS)
    bytes_ = torch.stack([(unsigned >> shift & 255) - 128 for shift in _SHIFTS]).to(torch.int8)
    blocks = bytes_.view(len(_SHIFTS), -1, _DEPTH // 4, 4, by_code.shape[1] // _LANES, _LANES)
    digits = blocks.permute(4, 1, 0, 2, 5, 3).contiguous()
    unit = functional.pad(unit, (0, -out_channels % _LANES))
    return Digits(digits, unit, (out_channels, *weight.shape[2:]), depth)


def number(sums: torch.Tensor, lower: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return what the native kernel makes of exact sums (..., O, H, W): `lower` are those of the lowest digit."""
    upper = ((sums - lower) / 256).float()
    return (upper * 256 + lower.float()) * factor[:, None, None]


def lowest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the lowest digit of whole weights, -128 to 127."""
    return (numbers + 128).remainder(256) - 128


def of_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    largest: int,
    least_density: float,
    convolve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """Return y by exact sums, which `convolve` makes of codes and whole weights in float64; None without codes."""
    codes = codes_of(x, scale, largest, least_density)
    if codes is None:
        return None
    numbers, unit = whole(weight)
    y = number(convolve(codes, numbers), convolve(codes, lowest(numbers)), unit * scale)
    return y if bias is None else y + bias[:, None, None]


def codes_of(x: torch.Tensor, scale: torch.Tensor, largest: int, least_density: float) -> torch.Tensor | None:
    """Return x / scale in float64 if all of them are whole up to `largest` and enough are not 0, else None."""
    ratio = x * (1 / scale)
    codes = ratio.round()
    right = ((ratio - codes).abs() <= 2.0**-10) & (codes.abs() <= largest)
    if not right.all() or int(codes.count_nonzero()) < least_density * codes.numel():
        return None
    return codes.double()
