"""LIF in Triton: a program keeps the membranes of its neurons in registers over all T steps.

The membrane is float32 and nothing is fused into a multiply-add, so spikes equal the
reference's bit for bit. Loops over T are unrolled, one compilation per T, and read step t + 1 before they store step t:
no load may move above a store to memory that might be its own. A current expanded over T is read once.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from benchd.kernels import launch
from benchd.kernels.lif import layout, ops
from benchd.kernels.op import computes

lif, lif_pool = partial(ops.lif, "triton"), partial(ops.lif_pool, "triton")


@computes(ops.lif_op, "triton")
def _lif(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool
) -> torch.Tensor:
    spikes, same_layout = layout.spikes_buffer(current, repeats)
    current = current if same_layout else current.contiguous()
    neurons = spikes[0].numel()
    if neurons:
        cut = _cut(current.device, neurons)
        launch.run(
            _lif_kernel, (triton.cdiv(neurons, cut.block),),
            (current, spikes), (neurons, decay, gain, threshold),
            T=len(spikes), REPEAT=repeats > 0, SUBTRACT=subtract, BLOCK=cut.block,
            num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return spikes


@computes(ops.lif_pool_op, "triton")
def _lif_pool(
    current: torch.Tensor,
    bias: torch.Tensor | None,
    repeats: int,
    decay: float,
    gain: float,
    threshold: float,
    subtract: bool,
    counts: bool,
) -> torch.Tensor:
    images = layout.frames(current, repeats)
    pooled, channels_last = layout.pooled_buffer(current, images, repeats, torch.uint8 if counts else current.dtype)
    images = images.contiguous(memory_format=layout.memory_format(channels_last))
    steps, batch = pooled.shape[:2]
    bias = None if bias is None else bias.contiguous()
    if pooled.numel():
        cut = _cut(images.device, pooled[0].numel())
        launch.run(
            _pool_kernel, (batch * triton.cdiv(pooled[0, 0].numel(), cut.block),),
            (images, bias, pooled), (batch * images[0].numel(), pooled[0].numel(), decay, gain, threshold),
            **_pool_constants(steps, images.shape[1:], channels_last, cut), REPEAT=repeats > 0, SUBTRACT=subtract,
            num_warps=cut.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return pooled


class _Cut(NamedTuple):
    """The neurons or windows of a program, and its warps: four a thread, which are read in one instruction."""

    block: int
    warps: int


# By architecture, 0 being any other: for less than _FEW neurons or windows, to have more programs, and for more
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
    current,
    spikes,
    neurons,
    decay,
    gain,
    threshold,
    T: tl.constexpr,
    REPEAT: tl.constexpr,
    SUBTRACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk over T with a block of neurons, which lie in memory in any order that all steps share."""
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
    current,
    bias,
    pooled,
    step,
    pooled_step,
    decay,
    gain,
    threshold,
    T: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    REPEAT: tl.constexpr,
    SUBTRACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk over T with a block of windows of one image, counted as they lie in memory; uint8 `pooled` takes counts."""
    WINDOWS: tl.constexpr = C * (H // 2) * (W // 2)
    BLOCKS: tl.constexpr = (WINDOWS + BLOCK - 1) // BLOCK
    RIGHT: tl.constexpr = C if CHANNELS_LAST else 1
    COUNTS: tl.constexpr = pooled.dtype.element_ty == tl.uint8
    # an image has less than 2^31 neurons, a batch may have more
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
    """Return where the upper left neuron of window `i` lies in its image."""
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


def _shipped() -> Iterator[launch.Shipped]:
    """Yield what OnePass without batch norm launches at 8 steps, half and full: its first layer by both encodings."""
    layers = {"lif1 repeat": ((64, 32, 32), True), "lif1 rate": ((64, 32, 32), False), "lif2": ((128, 16, 16), False)}
    numbers = dict.fromkeys(("decay", "gain", "threshold"), "fp32")
    for precision in ("fp16", "fp32"):
        for layer, (image, repeat) in layers.items():
            for cut, architectures in launch.by_architecture(lambda which: _CUTS.get(which, _CUTS[0])):
                yield launch.shipped(
                    f"lif_pool {layer} {cut.block} {precision}",
                    _pool_kernel,
                    dict.fromkeys(("current", "bias", "pooled"), f"*{precision}") | numbers,
                    _pool_constants(8, image, True, cut) | {"REPEAT": repeat, "SUBTRACT": False},
                    cut.warps,
                    fp_fusion=False,
                    architectures=architectures,
                )


SHIPPED = tuple(_shipped())
