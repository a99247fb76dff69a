"""The GPU that a Triton kernel is launched on, and the specialisations of a kernel that we ship."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Turing, Ampere on the desktop, Orin, Ada, Hopper
ARCHITECTURES = (75, 86, 87, 89, 90)


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """One specialisation of a kernel as its launcher makes it: enough to compile it for a GPU that is not at hand.

    `name` is a row of docs/occupancy.md. `signature` gives each argument's Triton type ("*fp16", "i32", "constexpr"),
    `constants` the values of the constexpr ones, and `aligned` names the arguments that the launcher finds divisible
    by 16: without them Triton compiles another, slower kernel. `reason` says why it is right where it holds less than
    half of the warps of an sm_87.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    fp_fusion: bool
    architectures: tuple[int, ...] = field(default=ARCHITECTURES)
    reason: str = ""


def architecture(device: torch.device) -> int:
    """Return the compute capability of `device` as a number, 87 for 8.7; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
