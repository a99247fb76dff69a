"""Weights from files: safetensors, or torch files of tensors. No file format that runs code when read is accepted."""

import argparse
import copy
import importlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from benchd.models import catalog

# keys under which training scripts store the state dict; the first match wins, so trained weights precede their average
_WRAPPINGS = ("model", "state_dict", "model_state_dict", "model_ema", "state_dict_ema")
_NAMED = 5
_LONGEST = 300  # characters of a line of torch's reasons, which names every key


class WeightsError(ValueError):
    """A weights file cannot be read or does not fit the module; the message contains the file or the keys."""


def read(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the state dict in the file, on the CPU, without wrapping and without a common `module.` prefix.

    A name ending in .safetensors is read as such, any other as a torch file of tensors and plain containers, with
    argparse.Namespace allowed, because the official checkpoints contain it. The module versions that torch saves with
    the tensors are kept. Raises WeightsError, with the file and the cause, if it is missing, truncated or contains any
    other class or anything except tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path}: no such file")
    _refuse_other_suffix(path)
    content = _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    return _without_prefix(_state_dict(path, content))


def _refuse_other_suffix(path: Path) -> None:
    """Raise WeightsError if the file's first bytes belong to the other format."""
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" and start.startswith(b"PK"):
        raise WeightsError(f"{path}: this is a torch file; rename it to end in .pth")
    if path.suffix != ".safetensors" and start[6:] == b"\0\0{":  # after the 64-bit length of the header
        raise WeightsError(f"{path}: this is a safetensors file; rename it to end in .safetensors")


def _safetensors(path: Path) -> Any:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a complete safetensors file: {error}") from error


def _torch_file(path: Path) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            # torch warns of an unusual pickle protocol before it reads or rejects the file
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its readers encounter in a damaged file
        raise WeightsError(f"{path}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Return why torch.load failed, without its advice to load the file unsafely."""
    refused = re.search(r"(?:GLOBAL|global) (\S+) was not an allowed", str(error))
    if refused:
        return f"it contains {refused[1]}, and only tensors are loaded"
    if "TorchScript" in str(error) or "locating file data.pkl" in str(error):
        return "a saved program (TorchScript or torch.export), not tensors; save its state_dict() with torch.save"
    detail = re.search(r"(?:WeightsUnpickler error:\s*|\A)(?!Weights only load failed)(.+)", str(error))
    return f"not a complete torch file of tensors: {detail[1] if detail else type(error).__name__}"


def _state_dict(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """Return the mapping from names to tensors in a file's content."""
    if isinstance(content, dict):
        content = next((content[key] for key in _WRAPPINGS if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict):
        raise WeightsError(f"{path}: contains a {type(content).__name__}, not a state dict")
    other = [
        str(key) for key, value in content.items() if not (isinstance(key, str) and isinstance(value, torch.Tensor))
    ]
    if other or (not content and path.suffix != ".safetensors"):  # the file of a model without weights is empty
        raise WeightsError(f"{path}: not a state dict: {_some(other) or 'nothing'} instead of tensors")
    return content


def _without_prefix(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "module."
    if all(key.startswith(prefix) for key in state):
        consume_prefix_in_state_dict_if_present(state, prefix)
    return state


def load(name: str, path: str | Path, **options: Any) -> nn.Module:
    """Return the catalogued model `name` on plain PyTorch kernels, in eval mode, with the weights in the file.

    Raises WeightsError if the file cannot be read or does not fit, and the errors of `catalog.build`.
    """
    state = read(path)
    try:
        return build(name, state, options)
    except WeightsError as error:
        raise WeightsError(f"{path} does not fit {name}: {error}") from error


def build(
    name: str,
    state: dict[str, torch.Tensor],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    kernels: catalog.Kernels = "torch",
) -> nn.Module:
    """Return the catalogued model `name` with these options, in eval mode, with the weights in `state`.

    Keys may also be the model's published names. For Vision Mamba and library models the state determines the number of
    classes. Raises WeightsError if it does not fit, and the errors of `catalog.build`.
    """
    model = catalog.entry(name)
    values = model.resolve(options)
    module_name, function = model.factory.split(":")
    source = importlib.import_module(module_name)
    state = _under_own_names(state, getattr(source, "PUBLISHED_NAMES", {}))
    shape = source.shape_from(state, {"name": name, **values}) if hasattr(source, "shape_from") else {}
    module: nn.Module = getattr(source, function)(name=name, kernels=kernels, **(values | shape))
    if state and not module.state_dict():
        raise WeightsError("the model has no weights")
    apply(module, state)
    return module.eval()


def _under_own_names(state: dict[str, torch.Tensor], published: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the state with matches of the `published` patterns replaced in each key, unless the new key exists."""
    renamed = copy.copy(state)  # the copy keeps the module versions
    for key in state:
        own = key
        for pattern, replacement in published.items():
            own = re.sub(pattern, replacement, own)
        if own not in state:
            renamed[own] = renamed.pop(key)
    return renamed


def apply(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy `state` into the module, which upgrades a state of its older version; raise WeightsError if it does not fit.

    A state with the module's keys but no versions is assumed to be current. A single number may have shape () or (1,).
    Also raises WeightsError for a tensor with NaN, and for integer or complex numbers where the module has real ones.
    """
    own = module.state_dict()
    given = OrderedDict(
        (key, tensor.reshape(own[key].shape) if key in own and own[key].numel() == tensor.numel() == 1 else tensor)
        for key, tensor in state.items()
    )
    current = getattr(own, "_metadata", None) if given.keys() == own.keys() else None
    setattr(given, "_metadata", getattr(state, "_metadata", current))  # noqa: B010 - torch's, unknown to mypy
    others = [f"{key} {str(given[key].dtype).removeprefix('torch.')}" for key in own if _is_other(given, own, key)]
    if others:
        raise WeightsError(f"{len(others)} of a different number type: {_some(others)}")
    if damaged := [key for key, tensor in given.items() if _has_nan(tensor)]:
        raise WeightsError(f"{len(damaged)} with NaN in them: {_some(damaged)}")
    try:
        module.load_state_dict(given)
    except (KeyError, RuntimeError, ValueError) as error:
        _, *misfits = str(error).splitlines()
        missing = [key for key in own if key not in given]
        shown = [line.strip()[:_LONGEST] for line in misfits] or [f"{len(missing)} missing: {_some(missing)}"]
        raise WeightsError("; ".join(shown[:_NAMED])) from error


def _is_other(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], key: str) -> bool:
    """Return whether a copy into the module would treat integers or complex numbers as real ones."""
    return key in state and own[key].is_floating_point() and not state[key].is_floating_point()


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.float().isnan().any())


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
