"""How a Triton kernel is launched, and the GPU that it is launched on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

# by kind of launch: what is compiled, and the constants that it takes behind the numbers
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def run(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...], **constants: Any
) -> None:
    """Launch `kernel` as `kernel[grid](*tensors, *numbers, **constants)` would, on the GPU of the first tensor.

    Triton looks at every argument of every launch to find the specialisation that it compiled, for most of the time
    that a launch takes: 44 of 56 us on the host of an H100. Here the first launch of its kind leaves it at hand. All
    that Triton tells specialisations apart by is in the key: types, values but those of floats, and whether an address
    is a multiple of 16. A kernel's numbers and constants have the same types and names in each launch. Settings of
    Triton that change what it compiles are those of a kind's first launch.
    """
    first = cast("Tensor", tensors[0])
    kinds = [
        None if each is None else each.dtype if each.data_ptr() % 16 == 0 else (each.dtype, "unaligned")
        for each in tensors
    ]
    sizes = [number for number in numbers if type(number) is not float]
    key = id(kernel), first.get_device(), *kinds, *sizes, *constants.values()
    with torch.cuda.device_of(first):
        if (launcher := _COMPILED.get(key)) is not None:
            compiled, rest = launcher
            compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *rest)
        elif (compiled := kernel[grid](*tensors, *numbers, **constants)) is not None:  # None by Triton's interpreter
            given = len(tensors) + len(numbers)
            _COMPILED[key] = compiled, tuple(constants[name] for name in kernel.arg_names[given:])


@functools.cache
def architecture(device: torch.device) -> int:
    """Return the compute capability of `device` as a number, 87 for 8.7; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
