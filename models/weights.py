"""Weights from files: safetensors, or torch files of tensors. No file format that runs code when read is accepted."""

import argparse
import contextlib
import copy
import importlib
import re
import warnings
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
    """Copy `state` into the module; raise WeightsError, changing nothing, unless keys and shapes match the module's.

    Keys that the module's own loading renames or adds for an older state are taken into account. A single number may
    have shape () or (1,). Also raises WeightsError for a tensor with NaN, and for integer or complex numbers where the
    module has real ones.
    """
    state = _upgraded(module, state)
    own = module.state_dict()
    single = {key for key in own.keys() & state.keys() if own[key].numel() == state[key].numel() == 1}
    state = {key: tensor.reshape(own[key].shape) if key in single else tensor for key, tensor in state.items()}
    reshaped = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    problems = {
        "missing": [key for key in own if key not in state],
        "unexpected": [key for key in state if key not in own],
        "of a different shape": reshaped,
        "of a different number type": [
            f"{key} {str(state[key].dtype).removeprefix('torch.')}"
            for key in own
            if key in state and _is_other(state[key], own[key])
        ],
        "with NaN in them": [key for key in own if key in state and _has_nan(state[key])],
    }
    misfits = [f"{len(keys)} {problem}: {_some(keys)}" for problem, keys in problems.items() if keys]
    if misfits:
        raise WeightsError("; ".join(misfits))
    own.update(state)  # keeps the module versions, which MNASNet requires: the state has been upgraded
    module.load_state_dict(own)


def _upgraded(module: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state upgraded by the module's own loading, without copying tensors.

    A state with the module's keys but no versions is assumed to be current.
    """
    own = module.state_dict()
    versions = getattr(own, "_metadata", None)
    if state.keys() == own.keys() and getattr(state, "_metadata", versions) == versions:
        return dict(state)
    upgraded: dict[str, torch.Tensor] = {}

    def take(owner: nn.Module, local: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        """Move everything that does not belong to a child of `owner` to the result: `owner` has already upgraded it."""
        below = tuple(f"{prefix}{name}." for name, child in owner._modules.items() if child is not None)
        upgraded.update({key: local.pop(key) for key in list(local) if not key.startswith(below)})

    with contextlib.ExitStack() as hooks:
        try:
            for submodule in module.modules():
                hooks.enter_context(submodule.register_load_state_dict_pre_hook(take))
            module.load_state_dict(state, strict=False)
        except (KeyError, RuntimeError, ValueError):  # `owner` rejects the state: comparing the keys will say why
            return dict(state)
    return upgraded


def _is_other(given: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether a copy into `own` would treat integers or complex numbers as real ones."""
    return own.is_floating_point() and not given.is_floating_point()


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.float().isnan().any())


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
