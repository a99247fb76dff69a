"""The short convolution on a GPU: a program reads a few tokens and their neighbours once, for one direction or both.

All its reads come first, because the compiler does not move a read above a write; then every output is summed from
registers.
"""

from typing import NamedTuple

import triton
from torch import Tensor
from triton import language as tl

from benchd.kernels import launch
from benchd.kernels.causal_conv1d.ops import Conv, conv_op, pair_op

_COUNTS = ("length", "blocks")  # arguments not worth a specialisation
_FP_FUSION = True  # one rounding fewer per tap; bitwise results are not guaranteed


class _Tile(NamedTuple):
    """A program's tile of tokens by channels, and its number of warps."""

    tokens: int
    channels: int
    warps: int


# two channels per thread; more tokens share more reads, until registers leave less than half of the warps
_TILE = _Tile(8, 128, 2)
_SMALL_TILES = {90: _Tile(4, 128, 2)}
_SMALL_NUMBERS = 2**17  # up to this size of x, one image for Vim tiny, a large GPU is not full and gets small tiles


@conv_op.computes("triton")
@pair_op.computes("triton")
def _convolved(given: Conv) -> Tensor:
    x, weight, bias, silu, reverse = given
    y = x.new_empty((*weight.shape[:-2], *x.shape))
    if not y.numel():
        return y
    rows = x if x.stride(-1) == 1 else x.contiguous()
    taps, pair = weight.contiguous(), weight.dim() == 3
    batch, length, channels = x.shape
    tile = _tile(launch.architecture(x.device), x.numel())
    blocks = triton.cdiv(length, tile.tokens)
    launch.run(
        _kernel, (batch * blocks, triton.cdiv(channels, tile.channels)),
        (rows, taps, taps if bias is None else bias.contiguous(), y),
        (*rows.stride()[:2], x.numel(), channels, length, blocks),
        BACK=pair or not reverse, AHEAD=pair or reverse, BIAS=bias is not None, SILU=silu,
        WIDTH=weight.shape[-1], TOKENS=tile.tokens, CHANNELS=tile.channels,
        num_warps=tile.warps, enable_fp_fusion=_FP_FUSION,
    )  # fmt: skip
    return y


def _tile(architecture: int, numbers: int) -> _Tile:
    return _SMALL_TILES.get(architecture, _TILE) if numbers <= _SMALL_NUMBERS else _TILE


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))  # -log2(e)


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    x, weight, bias, y, image_stride, token_stride, direction_stride, channels, length, blocks,
    BACK: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # x (batch, length, channels) with strides; weight (directions, channels, WIDTH), bias (directions, channels) and y
    # (directions, batch, length, channels) contiguous; blocks = cdiv(length, TOKENS)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * TOKENS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    seen_back: tl.constexpr = WIDTH - 1 if BACK else 0
    seen_ahead: tl.constexpr = WIDTH - 1 if AHEAD else 0

    rows = ()
    row = x + image * image_stride + (first - seen_back).to(tl.int64) * token_stride + channel
    for i in tl.static_range(seen_back + TOKENS + seen_ahead):
        token = first - seen_back + i
        loaded = tl.load(row, mask=inside & (token >= 0) & (token < length), other=0.0)
        rows += (loaded.to(tl.float32),)  # type: ignore[assignment]  # unrolled: each is a tuple of its own
        row += token_stride

    out = y + (image * length + first) * channels + channel
    for g in tl.static_range(BACK + AHEAD):
        taps = ()
        for k in tl.static_range(WIDTH):
            loaded = tl.load(weight + (g * channels + channel) * WIDTH + k, mask=inside, other=0.0)
            taps += (loaded.to(tl.float32),)  # type: ignore[assignment]
        start = tl.zeros((CHANNELS,), tl.float32)
        if BIAS:
            start = tl.load(bias + g * channels + channel, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(TOKENS):
            total = start
            for k in tl.static_range(WIDTH):
                if BACK and g == 0:
                    total += taps[k] * rows[i + k]
                else:
                    total += taps[k] * rows[seen_back + i + WIDTH - 1 - k]
            total = _silu(total) if SILU else total
            stored = inside & (first + i < length)
            tl.store(out + g * direction_stride + i * channels, total.to(y.dtype.element_ty), mask=stored)
