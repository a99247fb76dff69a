"""A layer's convolution of spikes by the most suitable kernel: in integers, or over the nonzeros in float32."""

from collections import Counter
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels.compiler import in_dtype
from benchd.kernels.dispatch import Unavailable
from benchd.kernels.exact_conv2d import LARGEST_CODE, MOST_PRODUCTS, PackedDigits, native, pack
from benchd.kernels.exact_conv2d.whole import whole
from benchd.kernels.lif.layout import pooled_memory
from benchd.kernels.lif.native import lif_pool_periods
from benchd.kernels.op import op
from benchd.kernels.spike_conv2d import pack as pack_floats
from benchd.kernels.spike_conv2d import periods, skips_zeros_in
from benchd.kernels.spike_conv2d.native import convolved as convolved_floats
from benchd.kernels.spike_conv2d.native import laid_out
from benchd.kernels.spike_conv2d.packed_weights import PackedWeight

LEAST_DENSITY = {
    3: {"amx_int8": (0.0, 0.0), "avx512_vnni": (0.4, 0.15), "avx_vnni": (0.65, 0.2), "dotprod": (0.65, 0.2)},
    1: {"amx_int8": (0.0, 0.0), "avx512_vnni": (0.17, 0.0), "avx_vnni": (0.2, 0.0), "dotprod": (0.2, 0.0)},
}
"""The share of nonzeros above which integers are faster, by digits per weight and by instruction set; the second value
is for one-pixel images, where a layer waits for its weights, which take one byte per digit instead of four. Arm's value
is that of AVX-VNNI, which is equally wide."""

_ran: Counter[str] = Counter()


class Grid(NamedTuple):
    """A layer's inputs: `scale`, a tensor with one element, times integers up to `largest`."""

    scale: Tensor
    largest: int


class SpikeConvolution:
    """A layer's convolution, which caches the packed weight; if `shape` is given, the weight is viewed in that shape.

    With 1 digit `per_weight`, weights are int8 in every kernel; with 3 they are as precise as float32. `made` is set if
    this process has such layers.
    """

    made = False

    def __init__(self, shape: tuple[int, ...] | None = None, per_weight: int = 3) -> None:
        self._shape, self._per_weight = shape, per_weight
        self._has_bf16 = _has_bf16()  # determined here, because compiled code cannot query it
        SpikeConvolution.made = True
        self._floats: PackedWeight[Tensor] = PackedWeight(_of_int8 if per_weight == 1 else pack_floats, shape)
        self._digits: PackedWeight[PackedDigits | None] = PackedWeight(partial(_digits, per_weight=per_weight), shape)

    def suits(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether our kernels should convolve `x`; raise Unavailable if they cannot but int8 weights require it.

        oneDNN's bfloat16 convolution is faster, but packs the weight in each call, which pays off only if the input is
        larger than the weight.
        """
        is_able = skips_zeros_in(x)
        if self._per_weight == 1 and not (is_able and x.dtype == torch.float32):
            raise Unavailable("int8 weights are for inference in float32 on a CPU, without autocast")
        if not is_able or x.dtype == torch.float32:
            return is_able
        is_fast = x.dtype == torch.bfloat16 and self._has_bf16
        return not is_fast or (weight.dim() == 4 and weight.numel() >= x.numel())

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int = 1,
        padding: int = 0,
        grid: Grid | None = None,
    ) -> Tensor:
        """Return y (N, O, H', W') for x (N, C, H, W) on a CPU; without a `grid` no input is assumed to be an integer.

        Computed in float32, from weights in their own dtype, and rounded to the dtype of x.
        """
        if torch.compiler.is_compiling():
            scale, largest = (None, 0) if grid is None else grid
            shape = list(weight.shape if self._shape is None else self._shape)
            return _op["native"](x, weight, bias, scale, largest, shape, self._per_weight, stride, padding)
        return self.convolved(x, weight, bias, stride, padding, grid)

    def convolved(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, grid: Grid | None
    ) -> Tensor:
        """Return the result of a call, using the kernel that suits these spikes."""
        spikes = in_dtype(x)
        y = self._in_integers(spikes, weight, bias, stride, padding, grid)
        if y is None:
            _ran["c"] += 1
            y = convolved_floats(spikes, self._shape or weight.shape, bias, stride, padding, self._floats(weight))
        return in_dtype(y, x.dtype)

    def by_period(
        self, first: Tensor, weight: Tensor, bias: Tensor, *, padding: int, grid: Grid, decay: float, threshold: float
    ) -> Tensor:
        """Return the pooled spikes of the neurons after the layer, (T, B, O, H'//2, W'//2), for float32 first spikes.

        first (T, B, C, H, W); `benchd.kernels.lif.native` describes such neurons.
        """
        if torch.compiler.is_compiling():
            return _periods_op["native"](
                first, weight, bias, grid.scale, grid.largest, self._per_weight, padding, decay, threshold
            )
        current = self._in_integers(first.flatten(0, 1), weight, None, 1, padding, grid)
        if current is not None:
            return lif_pool_periods(current.unflatten(0, first.shape[:2]), bias, decay=decay, threshold=threshold)
        _ran["c"] += 1
        packed, shape = self._floats(weight), list(weight.shape)
        return periods.convolved(first, packed, bias, shape, padding, decay=decay, threshold=threshold)

    def _in_integers(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, grid: Grid | None
    ) -> Tensor | None:
        """Return the layer's output if these spikes, in float32, suit an integer convolution, else None."""
        if grid is None or grid.largest > LARGEST_CODE or not native.paths():
            return None
        path = native.paths()[0]
        least = LEAST_DENSITY[self._per_weight][path][x.shape[2] * x.shape[3] == 1]
        spikes = x.contiguous(memory_format=torch.channels_last)
        # checked before anything is prepared, which takes longer; a fake tensor has no values
        if least > 0 and type(spikes) is Tensor and native.is_sparse(spikes, least):
            return None
        digits = self._digits(weight)
        if digits is None or grid.largest * digits.depth > MOST_PRODUCTS:
            return None
        y = native.convolved(spikes, bias, digits, grid.scale, grid.largest, stride, padding)
        if y is not None:
            _ran[path] += 1
        return y


class _Layer(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    largest: int
    shape: list[int]
    per_weight: int
    stride: int
    padding: int


@op("spike_layer")
def _op(given: _Layer) -> Tensor:
    x, (out_channels, _, *window) = given.x, given.shape
    sizes, strides = laid_out(x.shape, (out_channels, *window), given.stride, given.padding)
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)


@_op.computes("native")
def _convolved(given: _Layer) -> Tensor:
    """Compute a layer in compiled code, which cannot choose a kernel based on the spikes."""
    x, weight, bias, scale, largest, shape, per_weight, stride, padding = given
    grid = None if scale is None else Grid(scale, largest)
    return _layer_of(weight, shape, per_weight).convolved(x, weight, bias, stride, padding, grid)


class _LayerOfPeriods(NamedTuple):
    first: Tensor
    weight: Tensor
    bias: Tensor
    scale: Tensor
    largest: int
    per_weight: int
    padding: int
    decay: float
    threshold: float


@op("spike_layer_periods")
def _periods_op(given: _LayerOfPeriods) -> Tensor:
    first, neurons = given.first, periods.received_shape(given.first, list(given.weight.shape), given.padding)
    return pooled_memory(neurons, first.dtype, first.device, channels_last=True)


@_periods_op.computes("native")
def _by_period(given: _LayerOfPeriods) -> Tensor:
    """Compute a layer and its neurons in compiled code, like `_convolved` for a layer."""
    first, weight, bias, scale, largest, per_weight, padding, decay, threshold = given
    layer, grid = _layer_of(weight, list(weight.shape), per_weight), Grid(scale, largest)
    return layer.by_period(first, weight, bias, padding=padding, grid=grid, decay=decay, threshold=threshold)


def _layer_of(weight: Tensor, shape: list[int], per_weight: int) -> SpikeConvolution:
    """Return the layer cached with the weight, because compiled code has no reference to the traced one."""
    attributes, name = vars(weight), f"spike_layer_{per_weight}"
    if name not in attributes:
        attributes[name] = SpikeConvolution(tuple(shape), per_weight)
    return attributes[name]


@cache
def _has_bf16() -> bool:
    """Return whether oneDNN convolves in bfloat16 on this CPU; otherwise torch does, slowly."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def calls() -> Counter[str]:
    """Return how often each kernel has convolved in this process: "c" over the nonzeros, others in integers."""
    return _ran.copy()


def ran() -> str:
    """Return what computed this process's layers: "c", the instruction sets of the integer kernels, and any refusals.

    A process without such layers has run other C kernels; if torch computed all layers, that is reported.
    """
    if SpikeConvolution.made and not _ran:
        return "c, layers by torch"
    exact = sorted(set(_ran) - {"c"})
    share = f" in {sum(_ran[path] for path in exact) / _ran.total():.0%}" if exact and _ran["c"] else ""
    refusal = f" ({', '.join(native.refused())} refused)" if _ran and native.refused() else ""
    return ", ".join(["c", *exact]) + share + refusal


def require_integers(name: str, kernels: str) -> None:
    """Raise Unavailable with the model's name if its integer `kernels` cannot run on the default device."""
    device = torch.get_default_device().type
    if device != "cpu":
        raise Unavailable(f"{name} has {kernels} kernels for CPUs only, not for {device}")
    if not native.paths():
        raise Unavailable(f"{name}: the {kernels} kernels need a CPU with AMX, VNNI or Arm's dot product of bytes")


def _digits(weight: Tensor, per_weight: int) -> PackedDigits | None:
    """Return `pack` of `weight`, or None if it has no exact form."""
    return pack(weight, per_weight) if weight.isfinite().all() else None


def _of_int8(weight: Tensor) -> Tensor:
    numbers, unit = whole(weight, 1)
    return pack_floats(numbers * unit[:, None, None, None])
