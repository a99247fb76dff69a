"""Speeds up depthwise convolutions in float64 on a CPU, where torch runs one matrix product per channel.

In a net for small devices, the reference spends most of its time there. Shifted products of whole images give the same
sums, up to 20 times as fast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Depthwise(TorchFunctionMode):
    """Computes each depthwise `torch.conv2d` in float64 on a CPU faster, and leaves everything else to torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        if func is not torch.conv2d:
            return func(*args, **kwargs or {})
        return conv2d(*args, **kwargs or {})


def conv2d(
    input: Tensor,  # noqa: A002 - as torch calls it
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Return the result of `torch.conv2d`: input (batch, channels, height, width), weight (channels, 1, h, w)."""
    is_depthwise = groups > 1 and weight.shape[:2] == (groups, 1) and input.dim() == 4
    if not is_depthwise or input.dtype != torch.float64 or input.device.type != "cpu" or isinstance(padding, str):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    (down, right), (top, left), (high, wide) = map(_pair, (stride, padding, dilation))
    padded = functional.pad(input, (left, left, top, top))
    rows, columns = weight.shape[2:]
    height = (padded.shape[2] - high * (rows - 1) - 1) // down + 1
    width = (padded.shape[3] - wide * (columns - 1) - 1) // right + 1
    total = input.new_zeros(len(input), groups, height, width)
    for row in range(rows):
        for column in range(columns):
            shifted = padded[:, :, high * row :: down, wide * column :: right][:, :, :height, :width]
            total.addcmul_(shifted, weight[:, 0, row, column].view(1, -1, 1, 1))
    return total if bias is None else total.add_(bias.view(1, -1, 1, 1))


def _pair(given: Any) -> tuple[int, int]:
    sizes = [given] if isinstance(given, int) else [*given]
    return sizes[0], sizes[-1]
