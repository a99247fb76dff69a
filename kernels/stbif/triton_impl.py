"""ST-BIF and the max pool of running sums in Triton, with gradients: programs loop over T with state in registers.

State is float32, or float64 for float64 tensors, and multiply-adds are not fused, so that codes equal the equation's
bit for bit. The forward pass stores nothing for a gradient: the backward pass recomputes a block of neurons, writing
membranes where their gradients will be, and codes to a separate buffer. Loops over a neuron's T are unrolled, with one
compilation per T, and read step t + 1 before they store step t: the compiler does not move a load above a store that
might alias it.

The pool sums each pixel once, in a separate launch, because float64 is slow on a GPU (1/64 of float32 on Orin): summing
per window, with 3x3 windows and stride 2, would add every pixel 2.25 times.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchd.kernels import launch, plan
from benchd.kernels.dispatch import state_dtype
from benchd.kernels.stbif import layout
from benchd.kernels.stbif.layout import frames, laid_out, like, pictures, pooled
from benchd.kernels.stbif.ops import (
    Pool,
    PoolBackward,
    StBifBackward,
    StBifInputs,
    max_pool_delta_backward_op,
    max_pool_delta_op,
    stbif_backward_op,
    stbif_op,
)


class _Cut(NamedTuple):
    """The number of neurons, pixels or windows, and of warps, in a program: four per thread if there are enough."""

    block: int
    warps: int


# by architecture (0: all others): how many neurons fill the device, then the tilings for fewer and for more
_CUTS: Mapping[int, tuple[int, _Cut, _Cut]] = {
    0: (2**16, _Cut(128, 4), _Cut(512, 4)),
    87: (2**13, _Cut(128, 4), _Cut(512, 4)),
}


# gradients need more registers: four neurons per thread would leave a third of the occupancy or less
_LEARNING = _Cut(128, 4)


def _cut(device: torch.device, work: int) -> _Cut:
    full, few, many = _CUTS.get(launch.architecture(device), _CUTS[0])
    return many if work >= full else few


@stbif_op.computes("triton")
def _stbif(given: StBifInputs) -> Tensor:
    current, bias, residual, threshold, pos_max, neg_min, codes = given
    current, bias, residual, width, run = _terms(current, bias, residual)
    spikes = torch.empty_like(current, dtype=torch.int8 if codes else current.dtype)
    n = current[0].numel()
    cut = _cut(current.device, n)
    if n:
        launch.run(
            _stbif_kernel, (triton.cdiv(n, cut.block),),
            (current, bias, residual, threshold, spikes), (n, width, run, pos_max, neg_min), CHANNELS_LAST=run == 1,
            **_constants(len(current), n, cut), num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return spikes


@stbif_backward_op.computes("triton")
def _stbif_backward(given: StBifBackward) -> tuple[Tensor, Tensor]:
    grad, current, bias, residual, threshold, pos_max, neg_min = given
    current, bias, residual, width, run = _terms(current, bias, residual)
    to_charge = torch.empty_like(current, dtype=threshold.dtype)
    codes = torch.empty_like(current, dtype=torch.int8)
    grad = like(current, grad, grad.dtype)
    n, cut = current[0].numel(), _LEARNING
    blocks = triton.cdiv(n, cut.block)
    to_threshold = torch.empty(blocks, dtype=threshold.dtype, device=current.device)
    if n:
        launch.run(
            _stbif_backward_kernel, (blocks,),
            (grad, current, bias, residual, threshold, codes, to_charge, to_threshold),
            (n, width, run, pos_max, neg_min), CHANNELS_LAST=run == 1,
            **_constants(len(current), n, cut), num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return to_charge, to_threshold.sum(dtype=torch.float64).to(threshold.dtype).reshape(threshold.shape)


def _terms(
    current: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, int, int]:
    """Return the terms laid out for the kernels, the number of channels and how many neighbours share a channel."""
    current = laid_out(current, by_channel=bias is not None)
    width, run = (1, 1) if bias is None else layout.channels(current)
    schedule = None if bias is None else bias.contiguous()
    return current, schedule, None if residual is None else like(current, residual, residual.dtype), width, run


def _constants(steps: int, n: int, cut: _Cut) -> dict[str, Any]:
    return {"T": steps, "WIDE": n > 2**30, "BLOCK": cut.block}


@triton.jit
def _index(n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the indices of this program's elements, and a mask of those that exist."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    return i, i < n


@triton.jit
def _charge(current, bias, residual, i, channel, inside, STATE: tl.constexpr):
    x = tl.load(current + i, mask=inside, other=0.0).to(STATE)
    if bias is not None:
        x += tl.load(bias + channel, mask=inside, other=0.0).to(STATE)
    if residual is not None:
        x += tl.load(residual + i, mask=inside, other=0.0).to(STATE)
    return x


@triton.jit
def _code(v, k, s, pos_max, neg_min):
    up = (v >= s) & (k < pos_max)
    down = (v < 0) & (k > neg_min)
    return up.to(tl.int32) - down.to(tl.int32)


@triton.jit(do_not_specialize=["run", "pos_max", "neg_min"])
def _stbif_kernel(
    current, bias, residual, threshold, spikes, n, channels, run, pos_max, neg_min,
    CHANNELS_LAST: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loop over T for a block of neurons, in any memory order that all steps share."""
    STATE: tl.constexpr = threshold.dtype.element_ty
    CODES: tl.constexpr = spikes.dtype.element_ty == tl.int8
    i, inside = _index(n, WIDE, BLOCK)
    channel = (i if CHANNELS_LAST else i // run) % channels
    s = tl.load(threshold)
    x = _charge(current, bias, residual, i, channel, inside, STATE)
    v = tl.zeros([BLOCK], STATE) + s / 2
    k = tl.zeros([BLOCK], tl.int32)
    for t in tl.static_range(T):
        v += x
        q = _code(v, k, s, pos_max, neg_min)
        v -= s * q.to(STATE)
        k += q
        if t + 1 < T:
            current += n
            if bias is not None:
                bias += channels
            if residual is not None:
                residual += n
            x = _charge(current, bias, residual, i, channel, inside, STATE)
        spike = q if CODES else s * q.to(STATE)
        tl.store(spikes + i, spike.to(spikes.dtype.element_ty), mask=inside)
        spikes += n


@triton.jit
def _surrogate(x, s):
    """Return the derivative of sigmoid(4 x / s), which is even: no exponential overflows."""
    slope = 4.0 / s
    e = tl.exp(-tl.abs(slope * x))
    return slope * e / ((1.0 + e) * (1.0 + e))


@triton.jit(do_not_specialize=["run", "pos_max", "neg_min"])
def _stbif_backward_kernel(
    grad, current, bias, residual, threshold, codes, to_charge, to_threshold, n, channels, run, pos_max, neg_min,
    CHANNELS_LAST: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Recompute T steps, storing membranes in `to_charge`, then go backwards; to_threshold has one sum per program."""
    STATE: tl.constexpr = threshold.dtype.element_ty
    i, inside = _index(n, WIDE, BLOCK)
    channel = (i if CHANNELS_LAST else i // run) % channels
    s = tl.load(threshold)
    v = tl.zeros([BLOCK], STATE) + s / 2
    k = tl.zeros([BLOCK], tl.int32)
    for _ in tl.static_range(T):
        v += _charge(current, bias, residual, i, channel, inside, STATE)
        q = _code(v, k, s, pos_max, neg_min)
        tl.store(to_charge + i, v, mask=inside)
        tl.store(codes + i, q.to(tl.int8), mask=inside)
        v -= s * q.to(STATE)
        k += q
        current += n
        if bias is not None:
            bias += channels
        if residual is not None:
            residual += n
        codes += n
        grad += n
        to_charge += n
    # another thread may read what this one wrote
    tl.debug_barrier()
    carried = tl.zeros([BLOCK], STATE)
    to_s = tl.zeros([BLOCK], STATE)
    for _ in tl.static_range(T):
        codes -= n
        grad -= n
        to_charge -= n
        v = tl.load(to_charge + i, mask=inside, other=0.0)
        q = tl.load(codes + i, mask=inside, other=0).to(tl.int32)
        k -= q
        fires = tl.where(k < pos_max, _surrogate(v - s, s), 0.0)
        retracts = tl.where(k > neg_min, _surrogate(v, s), 0.0)
        to_value = tl.load(grad + i, mask=inside, other=0.0).to(STATE) - carried
        to_code = to_value * s
        to_s += to_value * q.to(STATE) - to_code * fires
        carried += to_code * (fires + retracts)
        tl.store(to_charge + i, carried, mask=inside)
    tl.store(to_threshold + tl.program_id(0), tl.sum(tl.where(inside, to_s + carried / 2, 0.0)))


@max_pool_delta_op.computes("triton")
def _max_pool_delta(given: Pool) -> Tensor:
    values, kernel_size, stride, padding = given
    out = pooled(values, values.dtype, kernel_size, stride, padding)
    if out.numel():
        _pool(_running_sums(values), out, kernel_size, stride, padding)
    return out


@max_pool_delta_backward_op.computes("triton")
def _max_pool_delta_backward(given: PoolBackward) -> Tensor:
    grad, values, kernel_size, stride, padding = given
    winners = pooled(values, torch.int32, kernel_size, stride, padding)
    grad = like(winners, grad, grad.dtype)
    to_values = pictures(values)
    n = values[0].numel()
    if n:
        _pool(_running_sums(values), winners, kernel_size, stride, padding)
        cut = _LEARNING
        launch.run(
            _unpool_kernel, (triton.cdiv(n, cut.block),),
            (grad, winners, to_values), (n, winners[0].numel(), *_sizes(values, winners)),
            KERNEL=kernel_size, STRIDE=stride, PADDING=padding, **_constants(len(values), n, cut),
            num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return to_values


def _running_sums(values: Tensor) -> Tensor:
    """Return the running sums over T of `values` (T, B, C, H, W), channels last, in the state's dtype."""
    dense = frames(values, values.dtype).unflatten(0, values.shape[:2])
    sums = plan.workspace(torch.empty_like(dense, dtype=state_dtype(values)))
    n = dense[0].numel()
    cut = _cut(values.device, n)
    launch.run(
        _sum_kernel, (triton.cdiv(n, cut.block),),
        (dense, sums), (n,), **_constants(len(values), n, cut), num_warps=cut.warps, enable_fp_fusion=False
    )  # fmt: skip
    return sums


def _pool(sums: Tensor, out: Tensor, kernel_size: int, stride: int, padding: int) -> None:
    """Write to `out` the pools of `sums`, differenced over T or, if it is int32, the winning tap of each window."""
    n = out[0].numel()
    cut = _cut(sums.device, n)
    launch.run(
        _pool_kernel, (triton.cdiv(n, cut.block),),
        (sums, out), (sums[0].numel(), n, *_sizes(sums, out)),
        KERNEL=kernel_size, STRIDE=stride, PADDING=padding, **_constants(len(sums), sums[0].numel(), cut),
        num_warps=cut.warps, enable_fp_fusion=False,
    )  # fmt: skip


def _sizes(values: Tensor, out: Tensor) -> tuple[int, ...]:
    """Return channels, height and width of the images, and height and width of the pooled output."""
    return *values.shape[2:], *out.shape[3:]


@triton.jit
def _sum_kernel(values, sums, n, T: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    i, inside = _index(n, WIDE, BLOCK)
    x = tl.load(values + i, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float64)
    for t in tl.static_range(T):
        total += x.to(tl.float64)
        if t + 1 < T:
            values += n
            x = tl.load(values + i, mask=inside, other=0.0)
        tl.store(sums + i, total.to(sums.dtype.element_ty), mask=inside)
        sums += n


_SIDES = ["height", "width", "out_height", "out_width"]


@triton.jit(do_not_specialize=_SIDES)
def _pool_kernel(
    sums, out, step, out_step, channels, height, width, out_height, out_width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Loop over T for a block of windows; the first maximum wins, as in torch."""
    STATE: tl.constexpr = sums.dtype.element_ty
    WINNERS: tl.constexpr = out.dtype.element_ty == tl.int32
    i, inside = _index(out_step, WIDE, BLOCK)
    window = i // channels
    top = window // out_width % out_height * STRIDE - PADDING
    left = window % out_width * STRIDE - PADDING
    image = window // out_width // out_height
    corner = ((image * height + top) * width + left) * channels + i % channels
    before = tl.zeros([BLOCK], STATE)
    lowest = tl.where(inside, float("-inf"), before)
    for _ in range(T):
        best = lowest
        winner = tl.zeros([BLOCK], tl.int32)
        for tap in tl.static_range(KERNEL * KERNEL):
            y = top + tap // KERNEL
            x = left + tap % KERNEL
            mask = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            at = corner + (tap // KERNEL * width + tap % KERNEL) * channels
            candidate = tl.load(sums + at, mask=mask, other=float("-inf"))
            winner = tl.where(candidate > best, tap, winner)
            best = tl.maximum(best, candidate)
        result = winner if WINNERS else best - before
        tl.store(out + i, result.to(out.dtype.element_ty), mask=inside)
        before = best
        sums += step
        out += out_step


@triton.jit(do_not_specialize=_SIDES)
def _unpool_kernel(
    grad, winners, to_values, step, out_step, channels, height, width, out_height, out_width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Loop backwards over T for a block of pixels, each of which collects from the windows that it won."""
    STATE: tl.constexpr = to_values.dtype.element_ty
    i, inside = _index(step, WIDE, BLOCK)
    pixel = i // channels
    bottom = pixel // width % height + PADDING
    right = pixel % width + PADDING
    image = pixel // width // height
    carried = tl.zeros([BLOCK], STATE)
    for _ in range(T - 1):
        grad += out_step
        winners += out_step
        to_values += step
    for back in range(T):
        for tap in tl.static_range(KERNEL * KERNEL):
            y = bottom - tap // KERNEL
            x = right - tap % KERNEL
            meets = (y >= 0) & (y % STRIDE == 0) & (x >= 0) & (x % STRIDE == 0)
            meets = inside & meets & (y // STRIDE < out_height) & (x // STRIDE < out_width)
            at = ((image * out_height + y // STRIDE) * out_width + x // STRIDE) * channels + i % channels
            won = meets & (tl.load(winners + at, mask=meets, other=-1) == tap)
            carried += tl.load(grad + at, mask=won, other=0.0).to(STATE)
            # the next step subtracts the pool again
            carried -= tl.load(grad + out_step + at, mask=won & (back > 0), other=0.0).to(STATE)
        tl.store(to_values + i, carried, mask=inside)
        grad -= out_step
        winners -= out_step
        to_values -= step
