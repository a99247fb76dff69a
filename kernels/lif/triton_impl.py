"""LIF in Triton: a program keeps the membranes of its neurons in registers over all T steps.

The membrane is float32 and multiply-adds are not fused, so that spikes equal the equation's bit for bit. Loops over T
are unrolled, with one compilation per T, and read step t + 1 before they store step t, because no load may move above a
store that might alias it. A current expanded over T is read once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchd.kernels import launch
from benchd.kernels.lif import layout
from benchd.kernels.lif.ops import Lif, LifPool, lif_op, lif_pool_op


@lif_op.computes("triton")
def _lif(given: Lif) -> Tensor:
    current, repeats, *neuron, subtract = given
    spikes, same_layout = layout.spikes_buffer(current, repeats)
    current = current if same_layout else current.contiguous()
    neurons = spikes[0].numel()
    if neurons:
        cut = _cut(current.device, neurons)
        launch.run(
            _lif_kernel, (triton.cdiv(neurons, cut.block),),
            (current, spikes), (neurons, *neuron),
            T=len(spikes), REPEAT=repeats > 0, SUBTRACT=subtract, BLOCK=cut.block,
            num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return spikes


@lif_pool_op.computes("triton")
def _lif_pool(given: LifPool) -> Tensor:
    current, bias, repeats, *neuron, subtract, counts = given
    images = layout.frames(current, repeats)
    pooled, channels_last = layout.pooled_buffer(current, images, repeats, torch.uint8 if counts else current.dtype)
    images = images.contiguous(memory_format=layout.memory_format(channels_last))
    steps, batch = pooled.shape[:2]
    bias = None if bias is None else bias.contiguous()
    if pooled.numel():
        cut = _cut(images.device, pooled[0].numel())
        launch.run(
            _pool_kernel, (batch * triton.cdiv(pooled[0, 0].numel(), cut.block),),
            (images, bias, pooled), (batch * images[0].numel(), pooled[0].numel(), *neuron),
            **_pool_constants(steps, images.shape[1:], channels_last, cut), REPEAT=repeats > 0, SUBTRACT=subtract,
            num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return pooled


class _Cut(NamedTuple):
    """The number of neurons or windows, and of warps, in a program: four per thread, which one instruction reads."""

    block: int
    warps: int


# By architecture (0: all others), for fewer than _FEW neurons or windows, which need more programs, and for more.
_CUTS: Mapping[int, tuple[_Cut, _Cut]] = {0: (_Cut(256, 2), _Cut(512, 4))}
_FEW = 2**16


def _cut(device: torch.device, work: int) -> _Cut:
    return _CUTS.get(launch.architecture(device), _CUTS[0])[work >= _FEW]


def _pool_constants(steps: int, image: tuple[int, ...], channels_last: bool, cut: _Cut) -> dict[str, Any]:
    C, H, W = image
    return {"T": steps, "C": C, "H": H, "W": W, "CHANNELS_LAST": channels_last, "BLOCK": cut.block}


@triton.jit
def _fire(v, current, bias, decay, gain, threshold, SUBTRACT: tl.constexpr):
    """Return the membrane after one step and its spike, 0 or 1."""
    x = current.to(tl.float32)
    if bias is not None:
        x += bias
    charged = decay * v + gain * x
    fired = charged >= threshold
    reset = charged - threshold if SUBTRACT else 0.0
    return tl.where(fired, reset, charged), tl.where(fired, 1.0, 0.0)


@triton.jit
def _lif_kernel(
    current, spikes, neurons, decay, gain, threshold,
    T: tl.constexpr, REPEAT: tl.constexpr, SUBTRACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loop over T for a block of neurons, in any memory order that all steps share."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < neurons
    x = tl.load(current + i, mask=inside, other=0.0)
    v = tl.zeros([BLOCK], tl.float32)
    for t in tl.static_range(T):
        v, spike = _fire(v, x, None, decay, gain, threshold, SUBTRACT)
        if t + 1 < T and not REPEAT:
            current += neurons
            x = tl.load(current + i, mask=inside, other=0.0)
        tl.store(spikes + i, spike.to(spikes.dtype.element_ty), mask=inside)
        spikes += neurons


@triton.jit
def _pool_kernel(
    current, bias, pooled, step, pooled_step, decay, gain, threshold,
    T: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    REPEAT: tl.constexpr, SUBTRACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loop over T for a block of windows of one image, in memory order; uint8 `pooled` receives counts."""
    WINDOWS: tl.constexpr = C * (H // 2) * (W // 2)
    BLOCKS: tl.constexpr = (WINDOWS + BLOCK - 1) // BLOCK
    RIGHT: tl.constexpr = C if CHANNELS_LAST else 1
    COUNTS: tl.constexpr = pooled.dtype.element_ty == tl.uint8
    # an image has fewer than 2^31 neurons, a batch may have more
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = i < WINDOWS
    current += image * (C * H * W)
    pooled += image * WINDOWS
    corner = _corner(i, C, H, W, CHANNELS_LAST)
    if bias is not None:
        channel = i % C if CHANNELS_LAST else i // (W // 2 * (H // 2))
        bias = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)

    x0, x1, x2, x3 = _window(current + corner, inside, RIGHT, W * RIGHT)
    rest = tl.zeros([BLOCK], tl.float32)
    v0, v1, v2, v3 = rest, rest, rest, rest
    for t in tl.static_range(T):
        v0, spike0 = _fire(v0, x0, bias, decay, gain, threshold, SUBTRACT)
        v1, spike1 = _fire(v1, x1, bias, decay, gain, threshold, SUBTRACT)
        v2, spike2 = _fire(v2, x2, bias, decay, gain, threshold, SUBTRACT)
        v3, spike3 = _fire(v3, x3, bias, decay, gain, threshold, SUBTRACT)
        if t + 1 < T and not REPEAT:
            current += step
            x0, x1, x2, x3 = _window(current + corner, inside, RIGHT, W * RIGHT)
        count = spike0 + spike1 + spike2 + spike3
        value = count if COUNTS else count * 0.25
        tl.store(pooled + i, value.to(pooled.dtype.element_ty), mask=inside)
        pooled += pooled_step


@triton.jit
def _corner(i, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Return the position of the upper left neuron of window `i` in its image."""
    if CHANNELS_LAST:
        pixel = i // C
        return (pixel // (W // 2) * (2 * W) + pixel % (W // 2) * 2) * C + i % C
    line = i // (W // 2)
    return (line // (H // 2) * H + line % (H // 2) * 2) * W + i % (W // 2) * 2


@triton.jit
def _window(corner, inside, RIGHT: tl.constexpr, BELOW: tl.constexpr):
    return (
        tl.load(corner, mask=inside, other=0.0),
        tl.load(corner + RIGHT, mask=inside, other=0.0),
        tl.load(corner + BELOW, mask=inside, other=0.0),
        tl.load(corner + BELOW + RIGHT, mask=inside, other=0.0),
    )
