"""Chooses the implementation of an op by name; each op's folder contains one module per implementation."""

import importlib.util
import os
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor

Kernel = Literal["native", "triton"]

IMPLEMENTATIONS = {"torch": "torch_impl", "triton": "triton_impl", "native": "native"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU, slowly

_WORDS = {"native": "native", "triton": "Triton"}
_REFUSED: dict[str, str] = {}  # reasons why modules cannot be imported


class Unavailable(RuntimeError):
    """A requested implementation does not exist or cannot run here; the message says why."""


def require_device(op: str, kernel: str, tensor: Tensor) -> None:
    """Raise Unavailable if `kernel` cannot read `tensor`: C is for the CPU, Triton for CUDA or its interpreter."""
    device = tensor.device
    if kernel == "native":
        if device.type != "cpu":
            raise Unavailable(f"{op}: the native kernel is for CPU tensors, not {device.type}")
    elif device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        where = "a CPU tensor needs TRITON_INTERPRET=1" if device.type == "cpu" else "it is for CUDA tensors"
        raise Unavailable(f"{op}: the Triton kernel cannot run on {device}: {where}")


def require_inference(op: str, kernel: str, *given: Any) -> None:
    """Raise Unavailable if any tensor of `given` needs a gradient, which `kernel` does not support."""
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in given):
        raise Unavailable(
            f"{op}: the {_WORDS[kernel]} kernel has no gradient; use implementation='torch', or torch.no_grad()"
        )


def refuse_float64(op: str, kernel: str, *tensors: Tensor | None) -> None:
    """Raise Unavailable if any tensor is float64, for a `kernel` whose sums are float32."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            raise Unavailable(
                f"{op}: the {_WORDS[kernel]} kernel computes in float32; use implementation='torch' for float64"
            )


def state_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of membranes and sums: float32 for half tensors, else the tensor's own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def require_floats(op: str, **tensors: Any) -> None:
    """Raise TypeError unless all tensors are floating point, ValueError unless they are on the first one's device."""
    first = next(iter(tensors))
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{op}: {name} must be floating point, not {tensor.dtype}")
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} must be on {device} as {first} is, not on {tensor.device}")


def require_convolution(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> None:
    """Raise ValueError unless weight (O, C, kh, kw) and bias (O,) fit x (N, C, H, W)."""
    if x.dim() != 4 or 0 in x.shape[1:]:
        raise ValueError(f"{op}: x must be (N, C, H, W) with nonempty images, not {tuple(x.shape)}")
    if weight.dim() != 4 or weight.shape[1] != x.shape[1] or 0 in weight.shape:
        raise ValueError(f"{op}: weight must be (O, {x.shape[1]}, kh, kw), not {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must be ({len(weight)},), not {tuple(bias.shape)}")
    if any(side + 2 * padding < taps for side, taps in zip(x.shape[2:], weight.shape[2:], strict=True)):
        raise ValueError(f"{op}: a window {tuple(weight.shape[2:])} does not fit in {tuple(x.shape[2:])}")


def chosen(implementation: str, device: torch.device) -> str:
    """Return the name of an implementation; "auto" stands for triton for CUDA tensors and native for CPU tensors.

    Raises ValueError for an unknown name.
    """
    if implementation == "auto":
        return "triton" if device.type == "cuda" else "native"
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join([*IMPLEMENTATIONS, "auto"])
        raise ValueError(f"unknown implementation {implementation!r}; choose one of {known}")
    return implementation


def load_all(package: str) -> None:
    """Import the implementations of the ops in `package`: torch.compile cannot trace an import by name.

    Triton's is included only if its kernels can run, so that a CPU-only machine need not wait for its import.
    """
    for implementation in ("torch", "native"):
        if importlib.util.find_spec(f"{package}.{IMPLEMENTATIONS[implementation]}"):  # some ops exist only for a GPU
            load(package, implementation)
    if torch.cuda.is_available() or INTERPRETED:
        with suppress(Unavailable):  # a missing implementation is reported when it is requested
            load(package, "triton")


def load(package: str, implementation: str) -> None:
    """Import the module that registers `implementation` with the ops of `package`; raise Unavailable if it fails."""
    name = f"{package}.{IMPLEMENTATIONS[implementation]}"
    if name not in _REFUSED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            # stored, because a second import after a partial failure raises a different error
            _REFUSED[name] = _why_not(name, error)
        else:
            return
    op = package.rpartition(".")[2]
    raise Unavailable(f"{op} has no {implementation!r} implementation here: {_REFUSED[name]}")


def _why_not(name: str, error: ImportError) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return f"it cannot be imported: {error}"
    return "this version has none" if error.name == name else f"the package {error.name!r} is not installed"
