"""The selective scan in Triton: a tile of channels and all their states in registers.

State and sums are float32 for any input dtype. Both forms are exact:

- Serial: one program owns a tile of channels and loops over the tokens. It reads a group of them before it computes and
  stores any, because the compiler does not move a load above a store that might alias it.
- Two levels: an associative scan over the tokens of a chunk, then one step that passes the state on. Two to three times
  the instructions, but a tenth of the sequential operations: for one image on a large GPU, which the serial form
  leaves mostly idle.

`bidirectional_scan` is three launches: the projection of delta for both directions, which also copies B and C to the
best layout for the scan, contiguous float32; both scans; and the gate. Projecting inside the scan would repeat softplus
in every lane that shares a channel, and gating there would serialise the directions.
"""

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchd.kernels import launch, plan
from benchd.kernels.selective_scan.ops import (
    Bidirectional,
    Projection,
    Scan,
    ScanPair,
    bidirectional_op,
    delta_op,
    directions_of,
    pair_op,
    scan_op,
)


@delta_op.computes("triton")
def _delta(given: Projection) -> Tensor:
    delta, _ = _project(*given)
    return delta


@bidirectional_op.computes("triton")
def _bidirectional(given: Bidirectional) -> Tensor:
    u, low, weight, bias, A, B, C, D, z, form = given
    delta, (B, C) = _project(low, weight, bias, B, C)
    return _gated(_pair(ScanPair(u, delta, A, B, C, D, None, False, form)), z)


class _Cut(NamedTuple):
    """The tiling of a launch: channels and tokens per tile, warps, and whether it reads one group ahead."""

    channels: int
    tokens: int
    warps: int
    ahead: bool = False


# The tilings per architecture (0: all others), by the largest batch * directions * channels that they suit. Small
# launches get few channels per program, to have enough programs, and read ahead, using registers that nothing else
# needs; fewer channels mean fewer instructions per token, until every scheduler of a 9.0 is busy. Large launches get
# many channels per warp, because adding up the states costs shuffles per register, not per channel. On 8.7, blocks of
# one warp, or of more than 80 registers per thread, would not fill half of it.
_CUTS: Mapping[str, Mapping[int, tuple[tuple[float, _Cut], ...]]] = {
    "serial": {
        0: ((6144, _Cut(16, 8, 2, ahead=True)), (math.inf, _Cut(64, 2, 2))),
        87: ((1536, _Cut(16, 8, 2)), (math.inf, _Cut(64, 2, 2))),
        90: (
            (1536, _Cut(2, 8, 1, ahead=True)),
            (6144, _Cut(4, 8, 1, ahead=True)),
            (12288, _Cut(8, 8, 1, ahead=True)),
            (math.inf, _Cut(32, 4, 1)),
        ),
    },
    "two_level": {0: ((math.inf, _Cut(8, 16, 4)),), 90: ((math.inf, _Cut(4, 32, 4)),)},
}
_DELTA = _Cut(32, 32, 4)
_GATE = _Cut(128, 8, 4)
# arguments that vary with the input and are not worth a specialisation
_COUNTS = ("length", "rows")


def _cut(form: str, architecture: int, work: int) -> _Cut:
    tables = _CUTS[form]
    return next(cut for most, cut in tables.get(architecture, tables[0]) if work <= most)


@scan_op.computes("triton")
def _scan(given: Scan) -> Tensor:
    return _scanned(given, given.reverse).squeeze(0)


@pair_op.computes("triton")
def _pair(given: ScanPair) -> Tensor:
    return _scanned(given, reverse=False)


def _scanned(given: Scan | ScanPair, reverse: bool) -> Tensor:
    """Return y (directions, batch, length, channels); `reverse` applies to the first direction."""
    u, delta, A, B, C, D, z, bias = directions_of(given)
    y = plan.workspace(u.new_empty(u.shape))
    if y.numel() == 0:
        return y
    rows = [None if tensor is None else _rows(tensor) for tensor in (u, delta, B, C, z)]
    by_tensor = [(0, 0, 0) if tensor is None else tensor.stride()[:3] for tensor in rows]
    strides = [*chain.from_iterable(stride[:2] for stride in by_tensor), *(stride[2] for stride in by_tensor)]
    dense = [None if tensor is None else tensor.contiguous() for tensor in (A, D, bias)]
    directions, batch, length, channels = y.shape
    cut = _cut(given.form, launch.architecture(y.device), directions * batch * channels)
    launch.run(
        _scan_kernel, (batch * triton.cdiv(channels, cut.channels), directions),
        (*rows, *dense, y), (length, *strides), SOFTPLUS=given.softplus, REVERSE=reverse, BOTH=directions == 2,
        **_scan_constants(given.form, cut, channels, A.shape[-1]), num_warps=cut.warps, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension; other dimensions may have any strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scan_constants(form: str, cut: _Cut, channels: int, states: int) -> dict[str, Any]:
    return {
        "CHANNELS": channels,
        "STATES": states,
        "CHANNEL_TILE": cut.channels,
        "STATE_TILE": triton.next_power_of_2(max(states, 1)),
        "TOKENS": cut.tokens,
        "AHEAD": cut.ahead,
        "TWO_LEVEL": form == "two_level",
    }


def _project(low: Tensor, weight: Tensor, bias: Tensor, *copied: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return delta in the dtype of low, and B and C, if `copied` contains them, in contiguous float32."""
    delta = plan.workspace(low.new_empty(*low.shape[:-1], weight.shape[1]))
    copies = [plan.workspace(tensor.new_empty(tensor.shape, dtype=torch.float32)) for tensor in copied]
    if delta.numel() == 0:
        return delta, copies
    # flattening images and tokens copies a tensor whose images are not contiguous, which is a narrow one
    rows = [_rows(tensor).flatten(1, 2) for tensor in (low, *copied)]
    missing = [None] * (2 - len(copied))
    directions = [tensor.stride(0) for tensor in rows] + [0] * len(missing)
    steps = [tensor.stride(1) for tensor in rows] + [0] * len(missing)
    channels, rank = weight.shape[1:]
    constants = _delta_constants(channels, rank, copied[0].shape[-1] if copied else 0)
    tiles = triton.cdiv(channels, _DELTA.channels) + bool(copied)
    launch.run(
        _delta_kernel, (triton.cdiv(rows[0].shape[1], _DELTA.tokens) * tiles, 2),
        (*rows, *missing, weight.contiguous(), bias.contiguous(), delta, *copies, *missing),
        (rows[0].shape[1], *directions, *steps), **constants, num_warps=_DELTA.warps, enable_fp_fusion=True,
    )  # fmt: skip
    return delta, copies


def _delta_constants(channels: int, rank: int, states: int) -> dict[str, int]:
    return {
        "CHANNELS": channels,
        "RANK": rank,
        "STATES": states,
        "CHANNEL_TILE": _DELTA.channels,
        "ROW_TILE": _DELTA.tokens,
        "RANK_TILE": max(16, triton.next_power_of_2(rank)),  # minimum for a matrix product
        "STATE_TILE": triton.next_power_of_2(max(states, 1)),
    }


def _gated(y: Tensor, z: Tensor) -> Tensor:
    """Return (y[0] + y[1]) silu(z) in the dtype of y (2, batch, length, channels), which must be contiguous."""
    gated = y.new_empty(y.shape[1:])
    if gated.numel() == 0:
        return gated
    z = _rows(z).flatten(0, 1)
    rows, channels = z.shape
    grid = (triton.cdiv(rows, _GATE.tokens) * triton.cdiv(channels, _GATE.channels),)
    launch.run(
        _gate_kernel, grid,
        (y, z, gated), (rows, z.stride(0)), **_gate_constants(channels), num_warps=_GATE.warps, enable_fp_fusion=True
    )  # fmt: skip
    return gated


def _gate_constants(channels: int) -> dict[str, int]:
    return {"CHANNELS": channels, "CHANNEL_TILE": _GATE.channels, "ROW_TILE": _GATE.tokens}


_LOG2_E: tl.constexpr = tl.constexpr(1 / math.log(2))


@triton.jit(do_not_specialize=_COUNTS)
@no_type_check
def _scan_kernel(
    u, delta, B, C, z, A, D, bias, y, length, u_direction, u_image, delta_direction, delta_image, B_direction,
    B_image, C_direction, C_image, z_direction, z_image,
    u_token: tl.constexpr, delta_token: tl.constexpr, B_token: tl.constexpr, C_token: tl.constexpr,
    z_token: tl.constexpr, SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, BOTH: tl.constexpr,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, CHANNEL_TILE: tl.constexpr, STATE_TILE: tl.constexpr,
    TOKENS: tl.constexpr, AHEAD: tl.constexpr, TWO_LEVEL: tl.constexpr,
):  # fmt: skip
    """Scan a tile of channels of one image in one direction; REVERSE applies to the first direction."""
    TILES: tl.constexpr = (CHANNELS + CHANNEL_TILE - 1) // CHANNEL_TILE
    g = tl.program_id(1).to(tl.int64)
    image = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.program_id(0) % TILES * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    n = tl.arange(0, STATE_TILE)
    # a mask that is always true costs nothing: only ragged tiles pay for it
    of_channels = tl.full([CHANNEL_TILE], True, tl.int1) if CHANNELS % CHANNEL_TILE == 0 else d < CHANNELS
    of_states = tl.full([STATE_TILE], True, tl.int1) if STATES == STATE_TILE else n < STATES

    of_both = of_channels[:, None] & of_states[None, :]
    a = tl.load(A + (g * CHANNELS + d[:, None]) * STATES + n[None, :], mask=of_both, other=0.0)
    rates = a.to(tl.float32) * _LOG2_E
    skip = None
    if D is not None:
        skip = tl.load(D + g * CHANNELS + d, mask=of_channels, other=0.0).to(tl.float32)
    offset = None
    if bias is not None:
        offset = tl.load(bias + g * CHANNELS + d, mask=of_channels, other=0.0).to(tl.float32)

    # start of the rows of token 0, beginning with y; the gate comes last because it may be absent
    images = tl.num_programs(0) // TILES
    rows = (
        y + (g * images + image) * length * CHANNELS + d,
        u + g * u_direction + image * u_image + d,
        delta + g * delta_direction + image * delta_image + d,
        B + g * B_direction + image * B_image + n,
        C + g * C_direction + image * C_image + n,
    )
    steps: tl.constexpr = (CHANNELS, u_token, delta_token, B_token, C_token, z_token)
    masks = (of_channels, of_channels, of_channels, of_states, of_states)
    if z is not None:
        rows += (z + g * z_direction + image * z_image + d,)
        masks += (of_channels,)

    # with a direction known at compile time, all strides of the loop are constants
    if BOTH:
        if g == 0:
            _directed(rows, masks, length, rates, skip, offset, steps, SOFTPLUS, REVERSE, TOKENS, AHEAD, TWO_LEVEL)
        else:
            _directed(rows, masks, length, rates, skip, offset, steps, SOFTPLUS, not REVERSE, TOKENS, AHEAD, TWO_LEVEL)
    else:
        _directed(rows, masks, length, rates, skip, offset, steps, SOFTPLUS, REVERSE, TOKENS, AHEAD, TWO_LEVEL)


@triton.jit
def _directed(
    rows, masks, length, rates, skip, offset,
    steps: tl.constexpr, SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
):  # fmt: skip
    """Point every row to its first token in time, and each step to the next, then scan."""
    if REVERSE:
        rows = _after(rows, steps, (length - 1).to(tl.int64))
    SIGN: tl.constexpr = -1 if REVERSE else 1
    if TWO_LEVEL:
        _in_chunks(rows, masks, length, rates, skip, offset, steps, SIGN, SOFTPLUS, TOKENS)
    else:
        _in_groups(rows, masks, length, rates, skip, offset, steps, SIGN, SOFTPLUS, TOKENS, AHEAD)


@triton.jit
@no_type_check
def _after(rows, steps: tl.constexpr, tokens):
    """Return the rows moved on by `tokens` tokens."""
    after = ()
    for k in tl.static_range(len(rows)):
        after += (rows[k] + tokens * steps[k],)
    return after


@triton.jit
def _in_groups(
    rows, masks, length, rates, skip, offset,
    steps: tl.constexpr, SIGN: tl.constexpr, SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Scan TOKENS tokens at once, then the rest; a masked last group would take far more registers.

    AHEAD reads a group while the previous one is computed: a program that has a scheduler to itself would otherwise
    wait for every read. The remaining tokens are then scanned one by one, because pairs cost registers while a group is
    in flight.
    """
    h = tl.zeros_like(rates)
    groups = length // TOKENS
    if AHEAD:
        if groups > 0:
            read = _read(rows, masks, steps, SIGN, TOKENS)
            for _ in range(groups - 1):
                following = _after(rows, steps, SIGN * TOKENS)
                coming = _read(following, masks, steps, SIGN, TOKENS)
                h = _scan_group(read, rows, masks, h, rates, skip, offset, steps, SIGN, SOFTPLUS)
                read, rows = coming, following
            h = _scan_group(read, rows, masks, h, rates, skip, offset, steps, SIGN, SOFTPLUS)
            rows = _after(rows, steps, SIGN * TOKENS)
        for _ in range(length % TOKENS):
            h, rows = _next_group(rows, masks, h, rates, skip, offset, steps, SIGN, SOFTPLUS, 1)
    else:
        for _ in range(groups):
            h, rows = _next_group(rows, masks, h, rates, skip, offset, steps, SIGN, SOFTPLUS, TOKENS)
        for _ in range(length % TOKENS // 2):
            h, rows = _next_group(rows, masks, h, rates, skip, offset, steps, SIGN, SOFTPLUS, 2)
        if length % 2 != 0:
            _next_group(rows, masks, h, rates, skip, offset, steps, SIGN, SOFTPLUS, 1)


@triton.jit
@no_type_check
def _next_group(
    rows, masks, h, rates, skip, offset,
    steps: tl.constexpr, SIGN: tl.constexpr, SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    read = _read(rows, masks, steps, SIGN, TOKENS)
    h = _scan_group(read, rows, masks, h, rates, skip, offset, steps, SIGN, SOFTPLUS)
    return h, _after(rows, steps, SIGN * TOKENS)


@triton.jit
@no_type_check
def _read(rows, masks, steps: tl.constexpr, SIGN: tl.constexpr, TOKENS: tl.constexpr):
    """Return u, delta, B, C and, if present, z for each token of a group."""
    read = ()
    for k in tl.static_range(TOKENS):
        now = _after(rows, steps, SIGN * k)
        token = ()
        for i in tl.static_range(1, len(rows)):
            token += (tl.load(now[i], mask=masks[i], other=0.0),)
        read += (token,)
    return read


@triton.jit
@no_type_check
def _scan_group(
    read, rows, masks, h, rates, skip, offset, steps: tl.constexpr, SIGN: tl.constexpr, SOFTPLUS: tl.constexpr
):
    """Store y for each token that was read, after computing them all, and return the state."""
    ys = ()
    for k in tl.static_range(len(read)):
        x = read[k][0].to(tl.float32)
        dt = _step_size(read[k][1], offset, SOFTPLUS)
        B, C = read[k][2].to(tl.float32), read[k][3].to(tl.float32)
        h = tl.exp2(dt[:, None] * rates) * h + (dt * x)[:, None] * B[None, :]
        y = tl.sum(h * C[None, :], 1)
        if skip is not None:
            y += skip * x
        if len(rows) == 6:
            y *= silu(read[k][4].to(tl.float32))
        ys += (y,)
    for k in tl.static_range(len(ys)):
        tl.store(rows[0] + SIGN * k * steps[0], ys[k].to(rows[0].dtype.element_ty), mask=masks[0])
    return h


@triton.jit
@no_type_check
def _in_chunks(
    rows, masks, length, rates, skip, offset,
    steps: tl.constexpr, SIGN: tl.constexpr, SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Scan TOKENS tokens at once; only the last chunk can be ragged, and the state after it is not used."""
    h = tl.zeros_like(rates)
    k = tl.arange(0, TOKENS)
    later = SIGN * k[:, None].to(tl.int64)
    for start in range(0, length, TOKENS):
        exists = start + k < length
        read = ()
        for i in tl.static_range(1, len(rows)):
            tile = rows[i][None, :] + later * steps[i]
            read += (tl.load(tile, mask=exists[:, None] & masks[i][None, :], other=0.0).to(tl.float32),)
        x = read[0]
        dt = _step_size(read[1], offset, SOFTPLUS)
        decays = tl.exp2(dt[:, :, None] * rates[None, :, :])
        inputs = (dt * x)[:, :, None] * read[2][:, None, :]
        decays, states = tl.associative_scan((decays, inputs), 0, _then)
        states += decays * h[None, :, :]
        h = tl.sum(tl.where((k == TOKENS - 1)[:, None, None], states, 0.0), 0)
        y = tl.sum(states * read[3][:, None, :], 2)
        if skip is not None:
            y += skip[None, :] * x
        if len(rows) == 6:
            y *= silu(read[4])
        tile = rows[0][None, :] + later * steps[0]
        tl.store(tile, y.to(rows[0].dtype.element_ty), mask=exists[:, None] & masks[0][None, :])
        rows = _after(rows, steps, SIGN * TOKENS)


@triton.jit
def _then(decay, state, next_decay, next_state):
    """Return the decay and the state after two successive spans of tokens, the second from a state of 0."""
    return decay * next_decay, next_decay * state + next_state


@triton.jit
def _step_size(delta, offset, SOFTPLUS: tl.constexpr):
    delta = delta.to(tl.float32)
    if offset is not None:
        delta += offset
    if SOFTPLUS:
        delta = softplus(delta)
    return delta


@triton.jit
def softplus(x):
    """Return max(x, 0) + log(1 + t) for t = exp(-|x|), with the logarithm as t times a polynomial in t.

    The polynomial has the smallest relative error over [0, 1], 1.5e-7 in float32, with the highest power first. It
    takes half the instructions of a logarithm, and does not lose digits for small t.
    """
    t = tl.exp2(tl.abs(x) * -_LOG2_E)
    p = -0.003243980696424842
    p = p * t + 0.019851261749863625
    p = p * t - 0.056959159672260284
    p = p * t + 0.10603617131710052
    p = p * t - 0.15305569767951965
    p = p * t + 0.19675931334495544
    p = p * t - 0.24954132735729218
    p = p * t + 0.3332996368408203
    p = p * t - 0.4999990165233612
    p = p * t + 1.0
    return tl.maximum(x, 0.0) + p * t


@triton.jit
def silu(z):
    """Return z / (1 + exp(-z))."""
    return z / (1.0 + tl.exp2(z * -_LOG2_E))


@triton.jit(do_not_specialize=_COUNTS)
def _delta_kernel(
    low, B, C, weight, bias, delta, B_copy, C_copy, rows, low_direction, B_direction, C_direction,
    low_row: tl.constexpr, B_row: tl.constexpr, C_row: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr,
    STATES: tl.constexpr, CHANNEL_TILE: tl.constexpr, ROW_TILE: tl.constexpr, RANK_TILE: tl.constexpr,
    STATE_TILE: tl.constexpr,
):  # fmt: skip
    """Project a tile of rows and channels of one direction; the programs after the last channel copy B and C."""
    TILES: tl.constexpr = (CHANNELS + CHANNEL_TILE - 1) // CHANNEL_TILE
    COLUMNS: tl.constexpr = TILES if B is None else TILES + 1
    g = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // COLUMNS).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    tile = tl.program_id(0) % COLUMNS
    if tile < TILES:
        d = tile * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
        low_tile = _tile(low + g * low_direction, row, rows, low_row, RANK, RANK_TILE)
        r = tl.arange(0, RANK_TILE)
        weight_tile = tl.load(
            weight + (g * CHANNELS + d[None, :]) * RANK + r[:, None],
            mask=(d < CHANNELS)[None, :] & (r < RANK)[:, None],
            other=0.0,
        )
        # float16 rows are multiplied in float16 with float32 sums, even with amp's float32 weights, as in autocast
        PRODUCT: tl.constexpr = tl.float16 if low.dtype.element_ty == tl.float16 else tl.float32
        low_tile = low_tile.to(PRODUCT)
        weight_tile = weight_tile.to(PRODUCT)
        offset = tl.load(bias + g * CHANNELS + d, mask=d < CHANNELS, other=0.0).to(tl.float32)
        projected = tl.dot(low_tile, weight_tile, input_precision="ieee") + offset[None, :]
        tl.store(
            delta + (g * rows + row[:, None]) * CHANNELS + d[None, :],
            softplus(projected).to(delta.dtype.element_ty),
            mask=(row < rows)[:, None] & (d < CHANNELS)[None, :],
        )
    elif B is not None:
        _copy(B + g * B_direction, B_copy + g * rows * STATES, row, rows, B_row, STATES, STATE_TILE)
        _copy(C + g * C_direction, C_copy + g * rows * STATES, row, rows, C_row, STATES, STATE_TILE)


@triton.jit
def _tile(matrix, row, rows, step: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    column = tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    return tl.load(matrix + row[:, None] * step + column[None, :], mask=mask, other=0.0)


@triton.jit
def _copy(matrix, copy, row, rows, step: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    column = tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    tile = _tile(matrix, row, rows, step, WIDTH, TILE)
    tl.store(copy + row[:, None] * WIDTH + column[None, :], tile.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def _gate_kernel(
    y, z, gated, rows, z_row: tl.constexpr, CHANNELS: tl.constexpr, CHANNEL_TILE: tl.constexpr, ROW_TILE: tl.constexpr
):
    TILES: tl.constexpr = (CHANNELS + CHANNEL_TILE - 1) // CHANNEL_TILE
    row = (tl.program_id(0) // TILES).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    d = tl.program_id(0) % TILES * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    mask = (row < rows)[:, None] & (d < CHANNELS)[None, :]
    at = row[:, None] * CHANNELS + d[None, :]
    forward = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    backward = tl.load(y + rows.to(tl.int64) * CHANNELS + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + row[:, None] * z_row + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(gated + at, ((forward + backward) * silu(gate)).to(gated.dtype.element_ty), mask=mask)
