"""The microbenchmark: torch.square of a tensor, with a read, a write and one multiplication per element."""

import torch
from torch import nn

from benchd.kernels.dispatch import Unavailable
from benchd.models.catalog import Kernels


class Square(nn.Module):
    """Squares tensors (B, size, size) of any floating-point dtype; no weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.input_shape = (size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x * x in the shape of x."""
        return torch.square(x)


def build(*, name: str, kernels: Kernels, size: int) -> Square:
    """Return Square in eval mode; raise benchd.kernels.dispatch.Unavailable for `kernels` "custom"."""
    if kernels != "torch":
        raise Unavailable(f"{name} has no custom kernels: it is one elementwise operation")
    return Square(size).eval()
