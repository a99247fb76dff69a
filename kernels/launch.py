"""The GPU that a Triton kernel is launched on, and the specialisations of a kernel that we ship."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# Turing, Ampere on the desktop, Orin, Ada, Hopper
ARCHITECTURES = (75, 86, 87, 89, 90)
Cut = TypeVar("Cut")


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


def architecture(device: torch.device) -> int:
    """Return the compute capability of `device` as a number, 87 for 8.7; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
