"""How a Triton kernel is launched, the GPU that it is launched on, and the specialisations of a kernel that we ship."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

# Turing, Ampere on the desktop, Orin, Ada, Hopper
ARCHITECTURES = (75, 86, 87, 89, 90)
Cut = TypeVar("Cut")
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
        if (found := _COMPILED.get(key)) is not None:
            compiled, rest = found
            compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *rest)
        elif (compiled := kernel[grid](*tensors, *numbers, **constants)) is not None:  # None by Triton's interpreter
            given = len(tensors) + len(numbers)
            _COMPILED[key] = compiled, tuple(constants[name] for name in kernel.arg_names[given:])


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """One specialisation of a kernel as its launcher makes it: enough to compile it for a GPU that is not at hand.

    `name` is a row of docs/occupancy.md. `signature` gives each argument's Triton type ("*fp16", "i32", "constexpr"),
    `constants` the values of the constexpr ones, and `aligned` names the arguments that the launcher finds divisible
    by 16: without them Triton compiles another, slower kernel.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    fp_fusion: bool
    architectures: tuple[int, ...] = ARCHITECTURES


def shipped(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
    *,
    fp_fusion: bool,
    any_size: Collection[str] = (),
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> Shipped:
    """Return `kernel` as it is launched on tensors without gaps, all sizes but `any_size` divisible by 16.

    An argument that has neither one of `types` nor a constant value is a size.
    """
    given = dict.fromkeys(constants, "constexpr") | dict(types)
    signature = {argument: given.get(argument, "i32") for argument in kernel.arg_names}
    aligned = (argument for argument, kind in signature.items() if kind.startswith("*") or kind == "i32")
    return Shipped(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants,
        aligned=tuple(argument for argument in aligned if argument not in any_size),
        num_warps=warps,
        fp_fusion=fp_fusion,
        architectures=architectures,
    )


def by_architecture(cuts: Callable[[int], Iterable[Cut]]) -> Iterator[tuple[Cut, tuple[int, ...]]]:
    """Yield each of the `cuts` of an architecture with all architectures that use it."""
    used = {which: tuple(cuts(which)) for which in ARCHITECTURES}
    for cut in dict.fromkeys(cut for each in used.values() for cut in each):
        yield cut, tuple(which for which, each in used.items() if cut in each)


@functools.cache
def architecture(device: torch.device) -> int:
    """Return the compute capability of `device` as a number, 87 for 8.7; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
