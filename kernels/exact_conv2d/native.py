"""The exact convolution in C on CPUs with byte multiplication: AMX, VNNI or Arm's dot product."""

import ctypes
import math
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from benchd.kernels import compiler
from benchd.kernels.exact_conv2d.whole import PackedDigits
from benchd.kernels.op import is_watched, op
from benchd.kernels.spike_conv2d.native import laid_out

# `path` in native.c by instruction set, fastest first
_PATHS = {"amx_int8": 1, "avx512_vnni": 2, "avx_vnni": 4, "dotprod": 8}
# maximum bytes of gathered codes, which fit in the second-level cache; a single image may need more
_GATHERED = 2**19
_DEPTH, _ROWS = 64, 16


def convolved(
    x: Tensor, bias: Tensor | None, packed: PackedDigits, scale: Tensor, largest: int, stride: int, padding: int
) -> Tensor | None:
    """Return y (N, O, H', W') in float32, channels last; None unless all of x are `scale` times integers.

    x (N, C, H, W) in float32 is fastest channels last, bias (O,), scale has one element, and `packed` is `pack` of a
    weight. Integers are at most `largest`, which is at most LARGEST_CODE and, times the window's size, MOST_PRODUCTS;
    this is not checked, because checks cost as much as a small layer. Inference only, on a CPU with one of `paths`.
    """
    if x.shape[1] * packed.window[1] * packed.window[2] != packed.depth:
        raise ValueError(f"exact_conv2d: a window of {packed.depth} numbers does not fit x {tuple(x.shape)}")
    tensors = x, packed.digits, packed.unit, compiler.in_dtype(scale), bias
    given = _Conv(*tensors, list(packed.window), packed.per_weight, stride, padding, largest)
    y = _op["native"](*given) if is_watched() else _convolved(given)
    return y if y.shape[0] == x.shape[0] else None


@cache
def paths() -> tuple[str, ...]:
    """Return the instruction sets that this CPU has and the system permits, fastest first."""
    return _named(_by_bits()[0])


@cache
def refused() -> tuple[str, ...]:
    """Return the instruction sets that this CPU has but the system denies to this process."""
    return _named(_by_bits()[1])


def _named(bits: int) -> tuple[str, ...]:
    return tuple(name for name, bit in _PATHS.items() if bits & bit)


@cache
def _by_bits() -> tuple[int, int]:
    supported, refused = ctypes.c_int64(), ctypes.c_int64()
    _library().exact_paths(ctypes.byref(supported), ctypes.byref(refused))
    return supported.value, refused.value


class _Problem(ctypes.Structure):
    """`problem` of native.c."""

    _fields_ = compiler.fields(
        "*x *scale *unit *bias *digits *y *codes *rows *used *sums",
        "images channels height width out_channels window_height window_width stride padding",
        "out_height out_width largest per_weight group path threads status",
    )


class _Plan(NamedTuple):
    """Shared by calls of the same sizes: the sizes in `problem`, the layout of y, and offsets in scratch memory."""

    problem: bytes
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    scratch: dict[str, int]
    scratch_bytes: int


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int, int, int], window: tuple[int, ...], per_weight: int, stride: int, padding: int, largest: int
) -> _Plan:
    images, channels, height, width = shape
    out_channels, window_height, window_width = window
    y_shape, strides = laid_out(shape, window, stride, padding)
    if min(y_shape[2:]) < 1:
        raise ValueError(f"exact_conv2d: a window {window[1:]} does not fit x {shape}")
    out_height, out_width = y_shape[2:]
    pixels, depth = out_height * out_width, -(-channels * window_height * window_width // _DEPTH) * _DEPTH
    group = max(1, min(images, _GATHERED // (pixels * depth)))
    rows = -(-group * pixels // _ROWS) * _ROWS
    sizes = {"codes": math.prod(shape), "rows": rows * depth, "sums": 4 * rows, "used": rows * depth // _DEPTH // _ROWS}
    *starts, end = accumulate((-(-size // _DEPTH) * _DEPTH for size in sizes.values()), initial=0)
    problem = _Problem(
        images=images, channels=channels, height=height, width=width, out_channels=out_channels,
        window_height=window_height, window_width=window_width, stride=stride, padding=padding, out_height=out_height,
        out_width=out_width, largest=largest, per_weight=per_weight, group=group,
    )  # fmt: skip
    return _Plan(bytes(problem), y_shape, strides, dict(zip(sizes, starts, strict=True)), end)


class _Conv(NamedTuple):
    x: Tensor
    digits: Tensor
    unit: Tensor
    scale: Tensor
    bias: Tensor | None
    window: list[int]
    per_weight: int
    stride: int
    padding: int
    largest: int


@op("exact_conv2d")
def _op(given: _Conv) -> Tensor:
    shape, strides = laid_out(given.x.shape, given.window, given.stride, given.padding)
    return torch.empty_strided(shape, strides, dtype=given.x.dtype, device=given.x.device)


@_op.computes("native")
def _convolved(given: _Conv) -> Tensor:
    x, digits, unit, scale, bias, window, per_weight, stride, padding, largest = given
    images = x.contiguous(memory_format=torch.channels_last)
    plan = _plan(x.shape, tuple(window), per_weight, stride, padding, largest)
    shift = None if bias is None else compiler.dense(bias)
    y = torch.empty_strided(plan.shape, plan.strides, dtype=x.dtype, device=x.device)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8)
    problem, start = _Problem.from_buffer_copy(plan.problem), scratch.data_ptr()
    problem.x, problem.scale, problem.unit = images.data_ptr(), scale.data_ptr(), unit.data_ptr()
    problem.bias = None if shift is None else shift.data_ptr()
    problem.digits, problem.y = digits.data_ptr(), y.data_ptr()
    for name, offset in plan.scratch.items():
        setattr(problem, name, start + offset)
    problem.path, problem.threads = _PATHS[paths()[0]], compiler.threads()
    _library().exact_conv2d(ctypes.byref(problem))
    # nothing rather than an incomplete image
    return y[:0] if problem.status else y


def is_sparse(x: Tensor, least_density: float) -> bool:
    """Return whether a smaller share of x than this is nonzero, judged by at most 64 sampled rows.

    x (N, C, H, W) is in float32, contiguous channels last.
    """
    images, channels, height, width = x.shape
    return bool(_library().exact_is_sparse(x.data_ptr(), images * height, width * channels, height, least_density))


@cache
def _library() -> ctypes.CDLL:
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library = compiler.functions(
        __file__,
        compiler.EXACT,
        exact_conv2d=[pointer],
        exact_paths=[pointer, pointer],
        exact_is_sparse=[pointer, *[size] * 3, number],
    )
    library.exact_is_sparse.restype = ctypes.c_int
    return library
