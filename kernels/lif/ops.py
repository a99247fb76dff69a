"""LIF as ops of torch for the kernels in C and in Triton; inference only."""

import torch

from benchd.kernels.dispatch import Kernel, refuse_float64, require_inference
from benchd.kernels.lif import layout
from benchd.kernels.op import op


@op("lif")
def lif_op(
    current: torch.Tensor, repeats: int, decay: float, gain: float, threshold: float, subtract: bool
) -> torch.Tensor:
    """Make the spikes (T, ...) of `current`, which is (T, ...) or, with `repeats` = T, one step for all T."""
    return layout.spikes_buffer(current, repeats)[0]


@op("lif_pool")
def lif_pool_op(
    current: torch.Tensor,
    bias: torch.Tensor | None,
    repeats: int,
    decay: float,
    gain: float,
    threshold: float,
    subtract: bool,
    counts: bool,
) -> torch.Tensor:
    """Make (T, B, C, H//2, W//2) for (T, B, C, H, W) or, with `repeats` = T, for one step (B, C, H, W) for all T.

    bias (C,) is added to the current.
    """
    dtype = torch.uint8 if counts else current.dtype
    return layout.pooled_buffer(current, layout.frames(current, repeats), repeats, dtype)[0]


def lif(
    kernel: Kernel, current: torch.Tensor, *, decay: float, gain: float, threshold: float, reset: str
) -> torch.Tensor:
    """Return the spikes of `current` (T, ...); Unavailable if `kernel` cannot take it or a gradient is wanted."""
    _check("lif", kernel, current)
    one, repeats = layout.one_of_equal_steps(current)
    return lif_op[kernel](one, repeats, decay, gain, threshold, reset == "subtract")


def lif_pool(
    kernel: Kernel,
    current: torch.Tensor,
    *,
    decay: float,
    gain: float,
    threshold: float,
    reset: str,
    bias: torch.Tensor | None,
    output: str,
) -> torch.Tensor:
    """Return pooled spikes or counts (T, B, C, H//2, W//2) of `current` (T, B, C, H, W); channels last stays so."""
    if output == "counts":  # these have no gradient in any implementation
        current, bias = current.detach(), None if bias is None else bias.detach()
    _check("lif_pool", kernel, current, bias)
    one, repeats = layout.one_of_equal_steps(current)
    subtract, counts = reset == "subtract", output == "counts"
    return lif_pool_op[kernel](one, bias, repeats, decay, gain, threshold, subtract, counts)


def _check(op: str, kernel: Kernel, current: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    require_inference(op, kernel, current, bias)
    if kernel == "triton":
        refuse_float64(op, kernel, current)
