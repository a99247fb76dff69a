"""LIF as torch ops."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels.lif import layout
from benchd.kernels.op import op


class Lif(NamedTuple):
    """`current` is (T, ...) or, with `repeats` = T, one step for all T; `subtract` is the reset."""

    current: Tensor
    repeats: int
    decay: float
    gain: float
    threshold: float
    subtract: bool


class LifPool(NamedTuple):
    """`current` is (T, B, C, H, W) or, with `repeats` = T, (B, C, H, W); bias (C,) is added to it."""

    current: Tensor
    bias: Tensor | None
    repeats: int
    decay: float
    gain: float
    threshold: float
    subtract: bool
    counts: bool


@op("lif", float32=("triton",))
def lif_op(given: Lif) -> Tensor:
    """Allocate the spikes (T, ...)."""
    return layout.spikes_buffer(given.current, given.repeats)[0]


@op("lif_pool", float32=("triton",))
def lif_pool_op(given: LifPool) -> Tensor:
    """Allocate (T, B, C, H//2, W//2)."""
    current, repeats = given.current, given.repeats
    dtype = torch.uint8 if given.counts else current.dtype
    return layout.pooled_buffer(current, layout.frames(current, repeats), repeats, dtype)[0]
