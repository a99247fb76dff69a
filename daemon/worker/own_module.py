"""A user's own module: the file or package that builds it, what it returns made ready, and each reason to refuse it."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from benchd.daemon import arguments
from benchd.daemon.errors import Unsupported, UsageError
from benchd.daemon.protocol import Job
from benchd.daemon.records import InputSpec


def build(job: Job) -> nn.Module:
    """Return what the job's `FILE.py:function` or `package.module:function` builds, as float32 in eval mode."""
    if job.case.variant.kernels == "custom":
        raise Unsupported("a module of your own has no custom kernels")
    where, _, name = str(job.module).rpartition(":")
    source = _imported(where, job.module_folder)
    if not hasattr(source, name):
        raise UsageError(f"--module {_called(job)}: {Path(where).name} has no {name!r}")
    module = _built(getattr(source, name), f"--module {_called(job)}")
    return _ready(module)


def inputs(job: Job, module: nn.Module) -> list[InputSpec]:
    """Return what the module reads: as the command line says, else as its attribute `inputs` or `input_shape` does."""
    attribute = getattr(module, "inputs", None)
    if job.inputs:
        return job.inputs
    if isinstance(attribute, list | tuple) and attribute and all(isinstance(text, str) for text in attribute):
        return arguments.inputs(attribute)
    shape = getattr(module, "input_shape", None)
    if shape is None:
        raise UsageError(
            f"--module {_called(job)}: give each input without the batch, as in --input 3x224x224 or --input "
            "ids=int64:16, or give the module an attribute input_shape"
        )
    return [InputSpec("", "float32", [int(size) for size in shape])]


class Named(nn.Module):
    """A module whose inputs have names, as a function of tensors one after the other: the last ones go by `names`."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self._names = module, tuple(names)

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the module does of its inputs by place and by name."""
        by_place = len(inputs) - len(self._names)
        return self.module(*inputs[:by_place], **dict(zip(self._names, inputs[by_place:], strict=True)))


def called_by_place(module: nn.Module, specs: Sequence[InputSpec]) -> nn.Module:
    """Return the module as one that takes its inputs one after the other."""
    names = [spec.name for spec in specs if spec.name]
    return Named(module, names) if names else module


def _called(job: Job) -> str:
    """Return what the user typed, as far as it is known: no message holds a folder."""
    return Path(str(job.module)).name


def _imported(where: str, folder: str) -> ModuleType:
    if folder:
        sys.path.insert(0, folder)
        return importlib.import_module(where)
    path = Path(where)
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--module {path.name}: not a Python file")
    source = importlib.util.module_from_spec(spec)
    sys.modules[name] = source  # before it runs: dataclasses and pickles look it up there
    spec.loader.exec_module(source)
    return source


def _built(function: Any, option: str) -> nn.Module:
    if isinstance(function, nn.Module):
        return function
    if not callable(function):
        raise UsageError(f"{option}: this is {type(function).__name__}, not a function that returns a torch.nn.Module")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(f"{option}: {error}; give a function that needs no arguments") from error
    built = function()
    if isinstance(built, ExportedProgram):
        built = built.module()
    if not isinstance(built, nn.Module):
        raise UsageError(f"{option}: it returned {type(built).__name__}, not torch.nn.Module")
    return built


def _ready(module: nn.Module) -> nn.Module:
    try:
        return module.float().eval()
    except NotImplementedError:  # an exported program is in eval mode already and refuses to be asked
        return module
