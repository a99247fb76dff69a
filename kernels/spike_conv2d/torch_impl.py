"""The convolution of spikes in plain PyTorch: conv2d, which multiplies the zeros as well."""

from torch import Tensor
from torch.nn import functional


def spike_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, packed: Tensor | None
) -> Tensor:
    """Return y (N, O, H', W') in the dtype of x; nothing is read from `packed`."""
    return functional.conv2d(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), stride, padding)
