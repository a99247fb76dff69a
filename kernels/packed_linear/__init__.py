"""Products with a constant weight, packed once in the order in which the kernel reads it.

    y[g,i,n] = sum over k of weight[g,n,k] x[g,i,k]

The native kernel is for float32 and bfloat16. If a CPU multiplies bfloat16 in tiles (AMX), oneDNN is used, which also
packs the weight.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from benchd.kernels.dispatch import require_device
from benchd.kernels.packed_linear import native

__all__ = ["PackedLinear"]


class PackedLinear:
    """y = x W^T with a weight (outer, inner), or (groups, outer, inner), whose groups are also x's first axis.

    For inference only. y is in the dtype of the weight or of autocast.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()
        self._packed: dict[torch.dtype, Tensor] = {}
        self._tiles: tuple[int, list[Tensor]] = (0, [])

    def __call__(self, x: Tensor) -> Tensor:
        """Return y (..., outer) for x (..., inner); raise Unavailable if x is not on a CPU."""
        require_device("packed_linear", "native", x)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self._weight.dtype
        x = x.to(dtype)
        if not x.numel() or not self.suits(dtype):
            return torch.matmul(x, self._weight.to(dtype).mT)
        if _multiplies_in_tiles(dtype):
            return self._in_tiles(x)
        return native.linear_op["native"](x, self._for(dtype), self._weight.shape[-2])

    def suits(self, dtype: torch.dtype) -> bool:
        """Return whether the weight can be packed in `dtype`."""
        return dtype == torch.float32 or (dtype == torch.bfloat16 and self._weight.shape[-1] % 2 == 0)

    def call(self, x: Tensor, y: Tensor) -> Callable[[], object]:
        """Return the call that writes y; x has the dtype of y, which must be suitable, and both are contiguous."""
        if _multiplies_in_tiles(x.dtype):
            return lambda: y.copy_(self._in_tiles(x))
        return native.call(x, self._for(x.dtype), y)

    def _for(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._packed:
            self._packed[dtype] = native.pack(self._groups(dtype))
        return self._packed[dtype]

    def _in_tiles(self, x: Tensor) -> Tensor:
        groups = self._groups(x.dtype)
        rows = x.numel() // (len(groups) * x.shape[-1])
        if self._tiles[0] != rows:  # oneDNN chooses the layout by size
            self._tiles = rows, [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in groups]
        parts = x.reshape(len(groups), rows, -1)
        products = [
            torch.ops.mkldnn._linear_pointwise(part, weight, None, "none", [], "")
            for part, weight in zip(parts, self._tiles[1], strict=True)
        ]
        return torch.stack(products).view(*x.shape[:-1], -1)

    def _groups(self, dtype: torch.dtype) -> Tensor:
        return self._weight.to(dtype).reshape(-1, *self._weight.shape[-2:])


@cache
def _multiplies_in_tiles(dtype: torch.dtype) -> bool:
    """Return whether this CPU has AMX and oneDNN uses it."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return dtype == torch.bfloat16 and bool(has_amx()) and torch.backends.mkldnn.is_available()
