"""Loads a user's own module: the file or package that builds it, its preparation, and any reason to reject it."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from benchd.daemon.errors import UnfitModel, Unsupported, UsageError
from benchd.daemon.measuring import user_inputs
from benchd.daemon.measuring.protocol import Job
from benchd.daemon.records import InputSpec, UserModule, UserNir
from benchd.daemon.runtimes import FILE_BACKENDS
from benchd.daemon.worker.structures import Batch, values
from benchd.exporters import doubled
from benchd.models import nir

_OF_COMPILE = "_torchdynamo_orig_callable"  # attribute that torch.compile leaves on the forward of a module or a class


def build(own: UserModule, job: Job) -> nn.Module:
    """Return the module that `FILE.py:function` or `package.module:function` builds, in float32 and eval mode.

    Raises UsageError for an error on the command line, and Unsupported for a kind of module that the case's variant
    cannot run.
    """
    if isinstance(own, UserNir):
        return nir.build(own.path, **job.options)
    if own.is_hub:
        from benchd.models import hub_net  # noqa: PLC0415 - only these nets need transformers

        net = hub_net.build(Path(own.folder))
        _refuse_kind(job, net)
        return net
    where, name = own.where, own.function
    option = f"--module {Path(where).name}:{name}"  # without the folder, which messages do not show
    source = imported(where, own.folder, option)
    if not hasattr(source, name):
        raise UsageError(f"{option}: {Path(where).name} has no {name!r}")
    module = _ready(_built(getattr(source, name), option))
    _refuse_kind(job, module)
    return module


def takes(module: nn.Module, specs: Sequence[InputSpec]) -> nn.Module:
    """Return the module with positional inputs, passing named ones by name; raise UsageError if they do not fit."""
    names = [spec.name for spec in specs if spec.name]
    by_place = [None] * (len(specs) - len(names))
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # some callables have no signature
        return NamedInputs(module, names) if names else module
    try:
        signature.bind(*by_place, **user_inputs.nested(dict.fromkeys(names)))
    except TypeError as error:
        given = " ".join(f"--input {spec}" for spec in specs)
        remedy = (
            "give each of its inputs, by name as in --input ids=int64:16, and the entries of a dict as in --input "
            "batch.ids=int64:16"
        )
        if specs and user_inputs.are_samples(specs[0].file):
            given = f"--inputs {specs[0].file} has {', '.join(names) or len(by_place)}"
            remedy = "name the arguments of forward, with the entries of a dict within: {'batch': {'ids': ...}}"
        raise UsageError(f"{given}: {type(module).__name__}.forward{signature}: {error}; {remedy}") from error
    # if the names are already in order, no wrapper is needed, which would cost a microsecond per run
    in_order = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return module if in_order[len(by_place) : len(specs)] == names else NamedInputs(module, names)


def settle(module: nn.Module, example: Batch) -> None:
    """Give a lazy module its sizes, and detach tensors that `build` derived from weights, so that it can be copied.

    Every variant runs a copy. Raises UnfitModel for a module that cannot be copied even then.
    """
    if any(is_lazy(value) for value in [*module.parameters(), *module.buffers()]):
        with torch.no_grad():
            module(*values(example))
    for part in module.modules():  # for example, torch's weight_norm and spectral_norm keep the weight of the last run
        for name, value in vars(part).items():
            if any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in tree_leaves(value)):
                vars(part)[name] = tree_map_only(Tensor, Tensor.detach, value)
    try:
        doubled.copied(module)
    except Exception as error:  # copying a lock, a file or a generator may raise anything
        raise UnfitModel(
            f"the module cannot be copied by copy.deepcopy ({type(error).__name__}: {error}), but every variant runs a "
            "copy: keep locks, open files and generators out of its attributes"
        ) from error


def file(own: UserModule) -> Path:
    """Return the module's Python file, after the module was built."""
    return Path(str(sys.modules[own.where].__file__)) if own.folder else Path(own.where)


def inputs(own: UserModule, job: Job, module: nn.Module, specs: list[InputSpec]) -> list[InputSpec]:
    """Return the module's inputs: those from --input, from the user's items (`specs`), or the module's own.

    Raises Unsupported for a type that the case's variant cannot read.
    """
    specs = specs if specs and not own.inputs else [user_inputs.described(spec) for spec in _inputs(own, module)]
    variant = job.case.variant
    by_numpy = variant.backend in FILE_BACKENDS or variant.precision == "int8"
    if by_numpy and any(spec.dtype == "bfloat16" for spec in specs):
        raise Unsupported(
            "files are compared and int8 is calibrated with NumPy, which lacks bfloat16: take the input in float32 and "
            "convert it in forward"
        )
    return specs


def _inputs(own: UserModule, module: nn.Module) -> list[InputSpec]:
    """Return the inputs from the command line, otherwise from the module's attribute `inputs` or `input_shape`."""
    attribute = getattr(module, "inputs", None)
    if own.inputs:
        return own.inputs
    if isinstance(attribute, list | tuple) and attribute and all(isinstance(text, str) for text in attribute):
        return user_inputs.of_module(user_inputs.inputs_of(attribute))
    shape = getattr(module, "input_shape", None)
    if shape is None:
        raise UsageError(
            f"give each input of the module without the batch axis, as in --input {user_inputs.EXAMPLES}, or a file or "
            "function of inputs with --inputs, or give the module an attribute input_shape"
        )
    return [InputSpec("", "float32", [int(size) for size in shape])]


class NamedInputs(nn.Module):
    """A module with named inputs, as a function of positional tensors; the last ones are passed by `names`.

    `batch.audio` is the entry `audio` of the dict passed as argument `batch`.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self._names = module, tuple(names)
        self._is_nested = any("." in name for name in names)

    def forward(self, *inputs: Tensor) -> Any:
        """Call the module with its positional and named inputs."""
        by_place = len(inputs) - len(self._names)
        named = dict(zip(self._names, inputs[by_place:], strict=True))
        return self.module(*inputs[:by_place], **(user_inputs.nested(named) if self._is_nested else named))


def imported(where: str, folder: str, option: str) -> ModuleType:
    """Return a Python file, or a package's module looked up from `folder`; raise UsageError if it is neither."""
    sys.path.insert(0, folder or str(Path(where).parent))
    if folder:
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if f"{where}.".startswith(f"{error.name}."):
                raise UsageError(f"{option}: no module {error.name!r} in this folder or environment") from error
            raise
    path = Path(where)
    name = path.stem if path.stem not in sys.modules else f"own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option}: {path.name} is not a .py file")
    source = importlib.util.module_from_spec(spec)
    sys.modules[name] = source  # registered before it runs, because dataclasses and pickles look it up there
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
    except NotImplementedError:  # an exported program is already in eval mode and cannot be switched
        return module


def _refuse_kind(job: Job, module: nn.Module) -> None:
    """Raise Unsupported for a compiled module, and for scripted or quantised ones where torch does not support them."""
    variant = job.case.variant
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    is_quantised = any(".quantized" in type(part).__module__ for part in module.modules())
    is_compiled = any(hasattr(getattr(part, "forward", None), _OF_COMPILE) for part in module.modules())
    exports = variant.backend in (*FILE_BACKENDS, "aoti")
    reasons = {
        "the module is already compiled, so no variant would run as its name says: build it without torch.compile, "
        "which the variant compile calls": is_compiled,
        "torch cannot compile or export a scripted module: return the nn.Module that it was scripted from": is_scripted
        and (exports or variant.backend == "compile" or variant.needs_torchao),
        "torch cannot export a quantised module: return the float one, or measure one with --onnx": is_quantised
        and exports,
        "a quantised module has its own number formats: leave fp16, bf16 and amp out": is_quantised
        and variant.precision != "fp32",
        "torch runs quantised modules only on the CPU: give --device cpu": is_quantised and job.device != "cpu",
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason:
        raise Unsupported(reason)
