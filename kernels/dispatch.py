"""Chooses the implementation of an op by name; each op's folder holds one module per implementation."""

import importlib
import os
from contextlib import suppress
from types import ModuleType
from typing import Any, Literal

import torch

Kernel = Literal["native", "triton"]

IMPLEMENTATIONS = {"reference": "reference", "torch": "torch_impl", "triton": "triton_impl", "native": "native"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU, slowly

_WORDS = {"native": "native", "triton": "Triton"}


class Unavailable(RuntimeError):
    """A requested implementation does not exist or cannot run here; the message says why."""


def require_device(op: str, kernel: Kernel, tensor: torch.Tensor) -> None:
    """Raise Unavailable if `kernel` cannot read `tensor`: C is for the CPU, Triton for CUDA or its interpreter."""
    device = tensor.device
    if kernel == "native":
        if device.type != "cpu":
            raise Unavailable(f"{op}: the native kernel is for CPU tensors, not {device.type}")
    elif device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        where = "a CPU tensor needs TRITON_INTERPRET=1" if device.type == "cpu" else "it is for CUDA tensors"
        raise Unavailable(f"{op}: the Triton kernel cannot run on {device}: {where}")


def require_inference(op: str, kernel: Kernel, first: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Raise Unavailable if `kernel`, which has no gradient, cannot read the first tensor or any tensor wants one."""
    require_device(op, kernel, first)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (first, *others)):
        raise Unavailable(
            f"{op}: the {_WORDS[kernel]} kernel has no gradient; use implementation='torch', or torch.no_grad()"
        )


def refuse_float64(op: str, kernel: Kernel, *tensors: torch.Tensor | None) -> None:
    """Raise Unavailable if any tensor is float64, for a `kernel` whose sums are float32."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        raise Unavailable(
            f"{op}: the {_WORDS[kernel]} kernel computes in float32; use implementation='torch' for float64"
        )


def state_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of membranes and sums: float32 for half tensors, else the tensor's own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def require_floats(op: str, **tensors: Any) -> None:
    """Raise TypeError unless all tensors are floating point, ValueError unless they are where the first one is."""
    first = next(iter(tensors))
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{op}: {name} must be floating point, not {tensor.dtype}")
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} must be on {device} as {first} is, not on {tensor.device}")


def require_convolution(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: int
) -> None:
    """Raise ValueError unless weight (O, C, kh, kw) and bias (O,) fit x (N, C, H, W)."""
    if x.dim() != 4 or 0 in x.shape[1:]:
        raise ValueError(f"{op}: x must be (N, C, H, W) with something in each image, not {tuple(x.shape)}")
    if weight.dim() != 4 or weight.shape[1] != x.shape[1] or 0 in weight.shape:
        raise ValueError(f"{op}: weight must be (O, {x.shape[1]}, kh, kw), not {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must be ({len(weight)},), not {tuple(bias.shape)}")
    if any(side + 2 * padding < taps for side, taps in zip(x.shape[2:], weight.shape[2:], strict=True)):
        raise ValueError(f"{op}: a window {tuple(weight.shape[2:])} does not fit in {tuple(x.shape[2:])}")


class Implementations:
    """The implementations of the op in `package`, imported with it: torch.compile cannot trace an import by name.

    Triton's is included only if its kernels can run, so that a CPU-only machine need not wait for its import.
    """

    def __init__(self, package: str, **modules: ModuleType) -> None:
        self._package, self._modules = package, modules
        self._refused: dict[str, str] = {}
        if torch.cuda.is_available() or INTERPRETED:
            with suppress(Unavailable):  # a missing one is reported when requested
                self._modules["triton"] = self._imported("triton")

    def __call__(self, implementation: str, device: torch.device) -> ModuleType:
        """Return the module of `implementation`; "auto" is triton for CUDA and native for CPU tensors.

        Raises ValueError for an unknown name and Unavailable, with the reason, for one that cannot run here. There is
        no fallback: a kernel that quietly became another one would be timed under the wrong name.
        """
        if implementation == "auto":
            implementation = "triton" if device.type == "cuda" else "native"
        if implementation not in IMPLEMENTATIONS:
            known = ", ".join([*IMPLEMENTATIONS, "auto"])
            raise ValueError(f"unknown implementation {implementation!r}; choose one of {known}")
        return self._modules.get(implementation) or self._imported(implementation)

    def _imported(self, implementation: str) -> ModuleType:
        if implementation not in self._refused:
            name = f"{self._package}.{IMPLEMENTATIONS[implementation]}"
            try:
                return importlib.import_module(name)
            except ImportError as error:
                # stored, because a second import after a partial failure raises a different error
                self._refused[implementation] = _why_not(name, error)
        op = self._package.rpartition(".")[2]
        raise Unavailable(f"{op} has no {implementation!r} implementation here: {self._refused[implementation]}")


def _why_not(name: str, error: ImportError) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return f"it cannot be imported: {error}"
    return "this version has none" if error.name == name else f"the package {error.name!r} is not installed"
