"""Chooses the implementation of an op by name; each op's folder holds one module an implementation."""

import importlib
from types import ModuleType

import torch

IMPLEMENTATIONS = {"reference": "reference", "torch": "torch_impl", "triton": "triton_impl", "native": "native"}


class Unavailable(RuntimeError):
    """An implementation that was asked for by name does not exist or cannot run here; the message says why."""


def implementation_module(package: str, implementation: str, device: torch.device) -> ModuleType:
    """Return the module of `implementation` in `package`; "auto" is triton for CUDA and native for CPU tensors.

    Raises ValueError for an unknown name and Unavailable, with the reason, for one that cannot run here. There is no
    fallback: a kernel that quietly became another one would be timed under the wrong name.
    """
    if implementation == "auto":
        implementation = "triton" if device.type == "cuda" else "native"
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join([*IMPLEMENTATIONS, "auto"])
        raise ValueError(f"unknown implementation {implementation!r}; choose one of {known}")
    name = f"{package}.{IMPLEMENTATIONS[implementation]}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        op = package.rpartition(".")[2]
        missing = "this version has none" if error.name == name else f"the package {error.name!r} is not installed"
        raise Unavailable(f"{op} has no {implementation!r} implementation here: {missing}") from error
