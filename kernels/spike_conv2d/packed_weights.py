"""Support for layers that use spike kernels where possible: whether they can, and the weight, packed once."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from benchd.kernels.op import is_exported

Form = TypeVar("Form")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def skips_zeros_in(x: Tensor) -> bool:
    """Return whether the native kernel supports `x`: float32 or half precision on a CPU, without gradients."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or is_exported():
        return False
    return x.device.type == "cpu" and x.dtype in _DTYPES


class PackedWeight(Generic[Form]):
    """`pack` of a layer's weight, computed at first use and again after the weight was replaced or written to.

    A weight used in a different shape is packed in `shape`. Writes to an inference tensor, or through `.data`, go
    unnoticed.
    """

    def __init__(self, pack: Callable[[Tensor], Form], shape: tuple[int, ...] | None = None) -> None:
        self._pack, self._shape = pack, shape
        self._kept: tuple[Tensor, int, Tensor, Form] | None = None

    def __deepcopy__(self, _: object) -> "PackedWeight[Form]":
        return PackedWeight(self._pack, self._shape)

    def __call__(self, weight: Tensor) -> Form:
        """Return `pack` of `weight`."""
        version = -1 if weight.is_inference() else weight._version
        if self._kept is not None:
            source, source_version, values, packed = self._kept
            if source is weight and source_version == version and values.data_ptr() == weight.data_ptr():
                return packed
        # an ordinary tensor even in inference mode, because it may outlive that mode
        with torch.inference_mode(False), torch.no_grad():
            packed = self._pack(weight if self._shape is None else weight.view(self._shape))
        # weight and values are kept, because the id and the address of freed tensors may be reused
        self._kept = weight, version, weight.detach(), packed
        return packed
