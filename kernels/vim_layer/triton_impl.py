"""The fused parts of a Vim layer on a GPU: a program computes a tile of products and its epilogue in registers.

Tiles are multiplied in half precision with float32 sums. Loops over the inner dimension are not pipelined: reads are
few, or hidden by many other programs. Tiles have at most 32 rows, which every architecture multiplies with the same
instruction.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchd.kernels import launch
from benchd.kernels.dispatch import Unavailable
from benchd.kernels.selective_scan.triton_impl import silu, softplus
from benchd.kernels.vim_layer import DTYPES, MOST_DIM
from benchd.kernels.vim_layer.ops import InConv, OutNorm, Steps, in_conv_op, out_norm_op, steps_op

_HALO: tl.constexpr = tl.constexpr(3)  # tokens that a convolution of width 4 reads on one side
_COUNTS = ("length", "rows", "blocks")  # arguments not worth a specialisation
_ROWS, _MANY_ROWS = 16, 32  # rows per tile, for few tokens and for many
_MANY = 2**11  # number of tokens from which every multiprocessor of a large GPU has a tile of 32
# how many parts delta's channels are split into if there are few tokens; each part recomputes the low-rank numbers
_SPLITS = 3
_DEPTH = 64  # numbers of the inner dimension multiplied at once


def _rows(count: int) -> int:
    return _MANY_ROWS if count >= _MANY else _ROWS


def _require(op: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in DTYPES or tensor.dtype != tensors[0].dtype:
            raise Unavailable(f"{op}: the Triton kernel supports float16 or bfloat16, not {tensor.dtype}")
    if tensors[0].dtype == torch.bfloat16 and 0 < launch.architecture(tensors[0].device) < 80:
        raise Unavailable(f"{op}: products of bfloat16 need a GPU of compute capability 8.0")


@in_conv_op.computes("triton")
def _in_conv(given: InConv) -> tuple[Tensor, Tensor]:
    normed, weight, taps, shift = given
    _require("in_conv", normed, weight)
    (batch, length, dim), inner = normed.shape, weight.shape[0] // 2
    u, z = normed.new_empty(2, batch, length, inner), normed.new_empty(batch, length, inner)
    if u.numel():
        blocks = triton.cdiv(length, _MANY_ROWS - 2 * 3)
        launch.run(
            _in_conv_kernel, (batch * blocks, 2 * triton.cdiv(inner, 64)),
            (normed.contiguous(), weight.contiguous(), taps.contiguous(), shift.contiguous(), u, z),
            (length, blocks), DIM=dim, INNER=inner, ROWS=_MANY_ROWS, CHANNELS=64, DEPTH=_DEPTH,
            num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return u, z


@steps_op.computes("triton")
def _steps(given: Steps) -> tuple[Tensor, Tensor, Tensor]:
    u, weight, dt_weight, dt_bias, states = given
    _require("steps", u, weight, dt_weight)
    inner, rank, rows = u.shape[-1], dt_weight.shape[-1], u[0, ..., 0].numel()
    delta = u.new_empty(u.shape)
    B, C = (u.new_empty((*u.shape[:-1], states), dtype=torch.float32) for _ in range(2))
    if delta.numel():
        tile = _rows(rows)
        launch.run(
            _steps_kernel, (triton.cdiv(rows, tile), 2, 1 if rows >= _MANY else _SPLITS),
            (u.contiguous(), weight.contiguous(), dt_weight.contiguous(), dt_bias.contiguous(), delta, B, C),
            (rows,), INNER=inner, COLUMNS=weight.shape[-1], STATES=states, RANK=rank, ROWS=tile,
            STATE_TILE=max(16, triton.next_power_of_2(states)), RANK_TILE=max(16, triton.next_power_of_2(rank)),
            DEPTH=_DEPTH, num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return delta, B, C


@out_norm_op.computes("triton")
def _out_norm(given: OutNorm) -> tuple[Tensor, Tensor]:
    y, z, weight, residual, norm, eps = given
    _require("out_norm", y, z, weight)
    (batch, length, inner), dim = z.shape, len(norm)
    if dim > MOST_DIM:
        raise Unavailable(f"out_norm: the Triton kernel takes at most {MOST_DIM} numbers per token, not {dim}")
    normed, total = norm.new_empty(residual.shape), residual.new_empty(residual.shape, dtype=torch.float32)
    if total.numel():
        y, z, stream = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (y, z, residual))
        rows = batch * length
        dim_tile = max(16, triton.next_power_of_2(dim))
        tile = _rows(rows) if dim_tile <= 512 else _ROWS
        launch.run(
            _out_norm_kernel, (triton.cdiv(rows, tile),),
            (y, z, weight.contiguous(), stream, norm.contiguous(), normed, total),
            (rows, length, y.stride(0), *y.stride()[1:3], *z.stride()[:2], *stream.stride()[:2], eps), DIM=dim,
            INNER=inner, ROWS=tile, DIM_TILE=dim_tile, DEPTH=min(_DEPTH, 2**14 // dim_tile),
            num_warps=4 if dim_tile <= 256 and rows >= _MANY else 8,
            num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return normed, total


@triton.jit
def _loaded(matrix, row, rows, column, columns, step):
    """Return a tile of a matrix, 0 outside it."""
    inside = ((row >= 0) & (row < rows))[:, None] & (column < columns)[None, :]
    return tl.load(matrix + row[:, None] * step + column[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=_COUNTS)
@no_type_check
def _in_conv_kernel(
    normed, weight, taps, shift, u, z, length, blocks,
    DIM: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute x or z for a tile of channels and ROWS tokens; the tokens at its border belong to other tiles.

    x is rounded, as a separate tensor would be, and shifted along the tokens by products with matrices of ones.
    """
    image = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, ROWS)
    token = tl.program_id(0) % blocks * (ROWS - 2 * _HALO) + i - _HALO
    c = tl.program_id(1) // 2 * CHANNELS + tl.arange(0, CHANNELS)
    of_z = tl.program_id(1) % 2
    products = tl.zeros([ROWS, CHANNELS], tl.float32)
    for first in range(0, DIM, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = _loaded(normed + image * length * DIM, token, length, k, DIM, DIM)
        right = _loaded(weight + of_z * INNER * DIM, c, INNER, k, DIM, DIM)
        products = tl.dot(left, tl.trans(right), products)
    own = (i >= _HALO) & (i < ROWS - _HALO) & (token < length)
    mask = own[:, None] & (c < INNER)[None, :]
    at = (image * length + token)[:, None] * INNER + c[None, :]
    if of_z == 1:
        tl.store(z + at, products.to(z.dtype.element_ty), mask=mask)
    else:
        x = products.to(normed.dtype.element_ty)
        images = (tl.num_programs(0) // blocks).to(tl.int64)
        for g in tl.static_range(2):
            channel = g * INNER + c
            total = tl.zeros([ROWS, CHANNELS], tl.float32)
            total += tl.load(shift + channel, mask=c < INNER, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(4):
                by = tl.load(taps + channel * 4 + tap, mask=c < INNER, other=0.0).to(tl.float32)
                source = i + (tap - 3 if g == 0 else 3 - tap)
                moves = (tl.arange(0, ROWS)[None, :] == source[:, None]).to(x.dtype)
                total += by[None, :] * tl.dot(moves, x)
            y = silu(total)
            tl.store(u + g * (images * length * INNER) + at, y.to(u.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
@no_type_check
def _steps_kernel(
    u, weight, dt_weight, dt_bias, delta, B, C, rows,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    STATE_TILE: tl.constexpr, RANK_TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute B, C and delta for a tile of tokens in one direction."""
    g = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, r = tl.arange(0, STATE_TILE), tl.arange(0, RANK_TILE)
    weight += g * INNER * COLUMNS
    to_B = tl.zeros([ROWS, STATE_TILE], tl.float32)
    to_C = tl.zeros([ROWS, STATE_TILE], tl.float32)
    to_low = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for first in range(0, INNER, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = _loaded(u + g * rows * INNER, row, rows, k, INNER, INNER)
        to_B = tl.dot(left, _loaded(weight, k, INNER, n, STATES, COLUMNS), to_B)
        to_C = tl.dot(left, _loaded(weight + STATES, k, INNER, n, STATES, COLUMNS), to_C)
        to_low = tl.dot(left, _loaded(weight + 2 * STATES, k, INNER, r, RANK, COLUMNS), to_low)
    at = (g * rows + row)[:, None] * STATES + n[None, :]
    inside = (row < rows)[:, None] & (n < STATES)[None, :] & (tl.program_id(2) == 0)
    tl.store(B + at, to_B, mask=inside)
    tl.store(C + at, to_C, mask=inside)
    low = to_low.to(u.dtype.element_ty)
    for first in range(tl.program_id(2) * DEPTH, INNER, tl.num_programs(2) * DEPTH):
        d = first + tl.arange(0, DEPTH)
        right = _loaded(dt_weight + g * INNER * RANK, d, INNER, r, RANK, RANK)
        offset = tl.load(dt_bias + g * INNER + d, mask=d < INNER, other=0.0).to(tl.float32)
        raw = tl.dot(low, tl.trans(right)) + offset[None, :]
        tl.store(
            delta + (g * rows + row)[:, None] * INNER + d[None, :],
            softplus(raw).to(delta.dtype.element_ty),
            mask=(row < rows)[:, None] & (d < INNER)[None, :],
        )


@triton.jit(do_not_specialize=_COUNTS)
@no_type_check
def _out_norm_kernel(
    y, z, weight, residual, norm, normed, total, rows, length, y_direction, y_image, y_token, z_image, z_token,
    stream_image, stream_token, eps,
    DIM: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, DIM_TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Gate a tile of tokens, project it, add the residual and normalise the sum; the tile contains whole tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    image, token = row // length, row % length
    inside = row < rows
    y += (image * y_image + token * y_token)[:, None]
    z += (image * z_image + token * z_token)[:, None]
    d = tl.arange(0, DIM_TILE)
    products = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for first in range(0, INNER, DEPTH):
        k = first + tl.arange(0, DEPTH)
        mask = inside[:, None] & (k < INNER)[None, :]
        both = tl.load(y + k[None, :], mask=mask, other=0.0).to(tl.float32)
        both += tl.load(y + y_direction + k[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(z + k[None, :], mask=mask, other=0.0).to(tl.float32)
        gated = (both * silu(gate)).to(weight.dtype.element_ty)
        products = tl.dot(gated, tl.trans(_loaded(weight, d, DIM, k, INNER, INNER)), products)
    mask = inside[:, None] & (d < DIM)[None, :]
    before = tl.load(
        residual + (image * stream_image + token * stream_token)[:, None] + d[None, :], mask=mask, other=0.0
    )
    x = products + before.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    scale = tl.load(norm + d, mask=d < DIM, other=0.0).to(tl.float32)
    at = row[:, None] * DIM + d[None, :]
    tl.store(total + at, x, mask=mask)
    tl.store(normed + at, (x * inverse[:, None] * scale[None, :]).to(normed.dtype.element_ty), mask=mask)
